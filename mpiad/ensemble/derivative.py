"""The user's f, called with columns: the first call is checked, later ones aren't.

f gets read-only arrays, so an f that writes into its arguments raises. The result of f is copied, so f may return the same
array each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.device.assembly import array, concatenate
from mpiad.transport.devices.device_arrays import is_device_array

COUPLED = (
    "f is called with columns, u of shape (d, n) and t of shape (n,). Write sums and products over the components as "
    "np.sum(u, axis=0) instead of np.sum(u) or np.dot(u, u), and give constant arrays an axis for the trajectories. If t "
    "or p is one number per trajectory, write t and p, since t[0] and p[0] are those of the first trajectory."
)


def locked(array: Array) -> Array:
    """Return a read-only view; arrays on a device are returned unchanged."""
    if type(array) is not np.ndarray:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def refuse_traced(what: str, parts: Iterable[object]) -> None:
    """Raise a NotImplementedError if a user's function, which `what` names, has returned traced values."""
    if any(map(isbox, parts)):
        text = f"{what} closes over a traced value, with respect to which it isn't differentiated. Pass it as p."
        raise NotImplementedError(text)


class Derivative:
    """f of a problem, as a function of columns."""

    def __init__(self, f: Function, shape: Shape):
        self.f, self.shape = f, shape

    def write(self, out: Array, u: Array, p: Tree, t: Array) -> None:
        """Write the derivative of each column of u, shape (d, n), into `out`, which has the same shape."""
        value = self.f(u, p, t)
        kind = type(value)
        if kind is np.ndarray or (kind is not list and is_device_array(value)):
            if value.shape != out.shape:
                raise ValueError(self._mismatch(value.shape, out.shape))
            # Raises if f returns complex numbers for real states.
            np.copyto(out, value, casting="same_kind")
        else:
            for i, component in enumerate(value):
                out[i] = component

    def check(self, u: Array, p: Tree, t: Array) -> None:
        """Call f once; raise an error if f can't be called with columns, or `write` can't use its value."""
        try:
            value = self.f(u, p, t)
        except (TypeError, ValueError) as error:
            explained = self._explained(type(error), str(error).strip(), u.shape)
            if explained is None:
                raise
            raise explained from error
        self._check_value(value, u)

    def _explained(self, kind: type[Exception], text: str, shape: Shape) -> Exception | None:
        """Return an error with advice, given the type and text of an exception in f; None if the cause is unknown."""
        if kind is TypeError and "Python scalars" in text:
            return TypeError(
                f"solve: f uses an array as a number ({text}). f is called with columns, here with u of shape {shape}: "
                "write np.sin(u[0]) instead of math.sin(u[0])."
            )
        if kind is TypeError:
            return None
        if "read-only" in text:
            return TypeError(
                "solve: f writes into its arguments, which are read-only. Return the derivative: a list of its "
                "components, or a new array."
            )
        explanations = {
            "inhomogeneous": "f makes an array of components of different shapes: constants have no axis of trajectories. "
            "Return a list of the components, or write a constant as 0 * u[0] + c.",
            "broadcast": f"f can't compute with columns ({text}): u has shape {shape} here, one column per trajectory. "
            f"Give constants an axis for trajectories: c[:, None] * u instead of c * u, for c of shape {self.shape}.",
            "truth value": f"f uses an array as a condition ({text}). f is called with columns, here with u of shape "
            f"{shape}: write np.where(u[0] > 0, ...) instead of if u[0] > 0.",
        }
        return next((ValueError(f"solve: {advice}") for part, advice in explanations.items() if part in text), None)

    def _check_value(self, value: Array, u: Array) -> None:
        parts = value if isinstance(value, (list, tuple)) else [value]
        refuse_traced("solve: f", parts)
        shape = (len(value), *u.shape[1:]) if isinstance(value, (list, tuple)) else np.shape(value)
        if shape != u.shape:
            raise ValueError(self._mismatch(shape, u.shape))
        for part in parts:
            if isinstance(value, (list, tuple)) and np.shape(part) not in ((), u.shape[1:]):
                raise ValueError(self._mismatch(np.shape(part), u.shape[1:], "each component must be a number or "))
            dtype = part.dtype if is_device_array(part) else np.asarray(part).dtype
            if not np.can_cast(dtype, u.dtype, casting="same_kind"):
                raise TypeError(f"solve: f returned {dtype} for u of {u.dtype}. Give u0 the dtype of the derivative.")

    def _mismatch(self, got: Shape, expected: Shape, prefix: str = "") -> str:
        return f"solve: f returned shape {got}, but {prefix}of shape {expected} was expected. {COUPLED}"


def of_each(f: Function, shape: Shape, u: Array, p: Tree, t: Array) -> Array:
    """Return the derivatives of flattened states, shape (d, n), by one call of f per state; arguments may be traced."""
    columns: list[Any] = []
    comparable = type(u) is type(t) is np.ndarray and not isinstance(p, Columns)
    for j in range(u.shape[1]):
        # The working set has at least two columns: a single state is duplicated, and the copy needs no call of f.
        if j and comparable and t[j] == t[0] and (u[:, j] == u[:, 0]).all():
            columns.append(columns[0])
            continue
        state = locked(anp.reshape(np.ascontiguousarray(u[:, j]) if type(u) is np.ndarray else u[:, j], shape))
        value: Any = f(state, p.column(j) if isinstance(p, Columns) else p, t[j])
        value = array(value) if isinstance(value, (list, tuple)) else value
        if np.shape(value) != shape:
            raise ValueError(f"solve: f returned shape {np.shape(value)} for u of shape {shape}; they must be equal.")
        columns.append(anp.reshape(value, (-1, 1)))
    return concatenate(columns, axis=1)


class Columns:
    """The parameters of several trajectories, for an f that is called with one trajectory at a time."""

    def __init__(self, leaves: Sequence[Any], varies: list[bool], build: Function):
        self.leaves, self._varies, self._build = leaves, varies, build

    def column(self, j: int) -> Tree:
        """Return the parameters of column j."""
        return self._build([leaf[..., j] if varies else leaf for leaf, varies in zip(self.leaves, self._varies)])


def derivative_of(f: Function, shape: Shape) -> Derivative:
    """Return the `Derivative` for states of a shape; if a state is one number, f is called with u of shape (n,)."""
    if len(shape) > 1:
        return Derivative(partial(of_each, f, shape), shape)
    return Derivative(f if shape else lambda u, p, t: [f(u[0], p, t)], shape)
