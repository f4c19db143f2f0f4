"""Complex states as real ones with twice as many components, for methods whose stages solve linear systems.

f of a complex state needn't have a complex derivative (`abs`, `conj`), but its real and imaginary parts have derivatives by
those of the state. So such a method solves for the parts, one behind the other, and the solution gets its complex states
back; both ways are traced arithmetic, which hands on the derivatives.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.compiling.arguments import is_complex
from mpiad.device.numpy import stack
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.event import Event
from mpiad.ensemble.solution import EnsembleSolution

if TYPE_CHECKING:
    from mpiad.ensemble.solve_options import SolveOptions


def needs_parts(options: SolveOptions, given: Batch) -> bool:
    """Tell whether a batch, which may be traced, is to be solved for the parts of its states."""
    return options.alg.tableau.implicit and is_complex(getval(given.u0))


def of_parts(options: SolveOptions, given: Batch) -> tuple[SolveOptions, Batch]:
    """Return the same for the parts of the states; a NotImplementedError for dense output."""
    if options.dense_output:
        raise NotImplementedError(
            f"solve: {type(options.alg).__name__} has no dense_output=True for complex states, but u0 is "
            f"{getval(given.u0).dtype}. Ask for the times by saveat, or give real and imaginary parts as components."
        )
    shape, u0 = given.shape, given.u0
    both = anp.reshape(stack([anp.real(u0), anp.imag(u0)], axis=1), (2 * u0.shape[0], u0.shape[1]))
    batch = given._replace(f=_OfParts(given.f, shape), shape=_real_shape(shape), u0=both)
    atol, mass = options.atol, options.mass
    if np.shape(atol) == shape and shape:
        atol = np.repeat(np.asarray(atol), 2).reshape(batch.shape)
    return options._replace(
        atol=atol, mass=None if mass is None else np.kron(mass, np.eye(2)),
        events=tuple(_event(event, shape) for event in options.events),
    ), batch  # fmt: skip


def complex_solution(sol: EnsembleSolution, shape: Shape) -> EnsembleSolution:
    """Return a solution with complex states of a shape in the place of their parts."""
    u, u_end = (_joined(x, shape, -1) for x in (sol.u, sol.u_end))
    return dataclasses.replace(sol, u=u, u_end=u_end, _start=None)


def _real_shape(shape: Shape) -> Shape:
    # Columns of a vector's parts stay columns; f takes matrices one by one.
    return (2 * shape[0],) if len(shape) == 1 else (*shape, 2)


def _joined(x: Array, shape: Shape, axis: int) -> Array:
    """Return the complex states whose parts lie along an axis, one behind the other."""
    step: Any = slice(None, None, 2), slice(1, None, 2)
    real, imag = step if len(shape) == 1 else (0, 1)
    before = (Ellipsis,) if axis else ()
    return x[(*before, real)] + 1j * x[(*before, imag)]


def _parted(value: Any, shape: Shape) -> Any:
    """Return the parts of what a function of states returns: components, or a matrix."""
    if len(shape) > 1:
        return stack([anp.real(value), anp.imag(value)], axis=-1)
    if shape and len(value) != shape[0]:
        raise ValueError(f"solve: f or an affect returned {len(value)} components, but states have {shape[0]}.")
    return [part(component) for component in (value if shape else [value]) for part in (anp.real, anp.imag)]


def _event(event: Event, shape: Shape) -> Event:
    condition = None if event.condition is None else _OfParts(event.condition, shape, is_state=False)
    affect = None if event.affect is None else _OfParts(event.affect, shape)
    return dataclasses.replace(event, condition=condition, affect=affect)


@dataclass(frozen=True)
class _OfParts:
    """A function of states' parts, by one of complex states."""

    written: Function
    shape: Shape
    is_state: bool = True  # whether it returns a state, too

    @property
    def __wrapped__(self) -> Function:
        # By it functions are told apart, in what is said of them and in what is remembered.
        return self.written

    def __call__(self, u: Array, p: Tree, t: Array) -> Any:
        """Return what the function does, a state as its parts."""
        value = self.written(_joined(u, self.shape, -1 if len(self.shape) > 1 else 0), p, t)
        return _parted(value, self.shape) if self.is_state else value
