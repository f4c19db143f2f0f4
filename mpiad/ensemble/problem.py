"""The problem to be solved: one ODE, or an ensemble of variants of one ODE."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, TypeVar

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, Rng, Tree
from mpiad.compiling.function_fingerprint import text_of
from mpiad.pytrees import flatten
from mpiad.transport.core.agreement import abridged, fingerprint
from mpiad.transport.devices.device_arrays import is_device_array

P = TypeVar("P", bound="KernelSources")


class KernelSources:
    """Base class of problems; the problem of a solution contains the sources of the compiled kernels."""

    _kernels: ClassVar[Mapping[str, object]] = {}  # their texts, or objects whose `str` is the text

    def kernel_source(self, name: str = "forward") -> str:
        """Return the source of a kernel that a solve compiled; call it as ``sol.problem.kernel_source()``.

        Parameters
        ----------
        name : {"forward", "reverse"}
            The kernel of the solve, or the kernel of the backward sweep over the steps, which an adjoint gradient compiles.

        Raises
        ------
        ValueError
            If there is no such kernel.
        """
        kernels = self._kernels
        if name not in kernels:
            raise ValueError(
                f"kernel_source: this problem has no kernel {name!r}, only {sorted(kernels)}. Call it for the problem of a "
                "solution: solve(problem, compile=True).problem.kernel_source()."
            )
        return str(kernels[name])

    def with_kernels(self: P, kernels: Mapping[str, object]) -> P:
        """Return a copy of the problem, for a solution, with the sources of its kernels."""
        problem = object.__new__(type(self))
        problem.__dict__.update(self.__dict__, _kernels=kernels)
        return problem


@dataclass(frozen=True)
class ODEProblem(KernelSources):
    """The initial value problem u' = f(u, p, t), u(t₀) = u0, from t₀ to t₁.

    Parameters
    ----------
    f : callable
        ``f(u, p, t)`` returns the derivative: a list or tuple of its components, or an array. It is written for one
        trajectory (``u[0] * u[1]``), but called with n trajectories: u has shape (d, n), t has shape (n,), and p has shape
        (m, n), or its given shape if all trajectories have the same p. It must not write into its arguments.
    u0 : array or number
        Initial state of shape (d,). A matrix is the state of one trajectory, with one step size; f is called with u of the
        shape of this matrix, and with a number t. Integers become float64. float32 and complex numbers keep their dtype.
    tspan : tuple of two float
        Start and end times; the end may lie before the start.
    p : pytree of arrays, optional
        Parameters of f. A list of numbers becomes an array, as in `u0`. f gets arrays of less precision than `u0`, such as
        float32 for float64, in the precision of `u0`.
    mass_matrix : array, shape (d, d), optional
        The matrix M of M u' = f(u, p, t), constant and the same for all trajectories; the identity by default. If M is
        singular, this is a differential-algebraic system of index 1. Newton's method then moves u0 along the null space of
        M until the algebraic equations hold. Only `Rodas5P` supports mass matrices.
    jac_sparsity : array or SciPy sparse matrix, shape (d, d), optional
        The pattern of ∂f/∂u for stiff methods: its nonzero entries are those of the Jacobian that may be nonzero, at all
        states; a matrix as a state is flattened. It is needed only if f can't be traced, otherwise it is compared with the
        pattern of the traced f.

    Raises
    ------
    TypeError
        If `f` isn't a function of three arguments, or time is its first argument, as in ``f(t, y, args)``.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, solve
    >>> oscillator = ODEProblem(lambda u, p, t: [u[1], -p[0] * u[0]], [1.0, 0.0], (0.0, np.pi), p=[4.0])
    >>> print(np.abs(solve(oscillator, rtol=1e-8, atol=1e-10).u_end.round(6)))
    [1. 0.]
    """

    f: Function
    u0: Array
    tspan: tuple[Any, Any]
    p: Tree = None
    mass_matrix: Array = None
    jac_sparsity: Any = None

    def __post_init__(self) -> None:
        self._convert(("f", "u0", "p"))

    def _convert(self, changed: Iterable[str]) -> None:
        if "f" in changed:
            _check_derivative(self.f)
        for name in ("u0", "p"):
            value = getattr(self, name)
            # Lists become arrays, so that prob_func can compute with them: 0.5 + prob.u0.
            if type(value) is list and value and all(map(_is_number, value)):
                # autograd's `array` takes eight times as long as NumPy's.
                object.__setattr__(self, name, (anp if any(map(isbox, value)) else np).array(value))

    def changed(self, changes: Mapping[str, object]) -> ODEProblem:
        """Return the problem with some fields changed; other fields aren't checked again."""
        problem = object.__new__(type(self))
        problem.__dict__.update(self.__dict__, **changes)
        problem._convert(changes)
        return problem


@dataclass(frozen=True)
class EnsembleProblem(KernelSources):
    """An ensemble of trajectories, each the solution of a variant of one problem.

    Parameters
    ----------
    problem : ODEProblem
    prob_func : callable, optional
        ``prob_func(problem, i, repeat)`` returns the problem of trajectory i, counted from 1; `repeat` is 1 for the first
        solve of the trajectory. A parameter named ``rng`` receives this trajectory's own random generator.
    output_func : callable, optional
        ``output_func(sol, i)`` returns the output of a trajectory, and whether to solve it again (with `repeat` increased
        by 1).
    reduction : callable or BatchSum, optional
        ``reduction(u, batch, I)`` adds the outputs `batch` of the trajectories I to the accumulated value u, and returns
        the new value and whether to stop early. Initially u is `u_init`, or an empty list. A `BatchSum` sums a function of
        the solutions of whole batches, and keeps nothing else.
    rng : Generator, SeedSequence or int, optional
        The source of a key, drawn once per solve, from which the generators of all trajectories are derived, independently
        of the backend and of the number of ranks.
    u0 : array, shape (N, d), optional
        Initial states of the trajectories, instead of a `prob_func`.
    p : array, shape (N, m), or pytree of arrays with N rows, optional
        Parameters of the trajectories, instead of a `prob_func`.
    tspan : array, shape (N, 2), optional
        Start and end times of the trajectories, instead of a `prob_func`.
    u_init : object, optional
        Initial value of `reduction`.

    Examples
    --------
    >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, remake, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> rows = EnsembleProblem(decay, p=np.array([[1.0], [2.0]]))
    >>> print(solve(rows).u_end.ravel().round(3))
    [0.368 0.135]
    >>> drawn = EnsembleProblem(decay, prob_func=lambda prob, i, repeat: remake(prob, p=[float(i)]))
    >>> print(solve(drawn, trajectories=2).u_end.ravel().round(3))
    [0.368 0.135]
    >>> print(solve(EnsembleProblem(decay, tspan=np.array([[0.0, 1.0], [0.5, 2.5]]))).u_end.ravel().round(3))
    [0.368 0.135]
    """

    problem: ODEProblem
    prob_func: Function | None = None
    output_func: Function | None = None
    reduction: Function | None = None
    rng: Rng = None
    u0: Array = None
    p: Array = None
    u_init: Any = None
    tspan: Array = None

    def __post_init__(self) -> None:
        if not isinstance(self.problem, ODEProblem):
            raise TypeError(
                f"EnsembleProblem: problem must be an ODEProblem, but got {type(self.problem).__name__} {self.problem!r}."
            )
        for name in ("prob_func", "output_func", "reduction"):
            fun = getattr(self, name)
            if fun is not None and not callable(fun):
                raise TypeError(f"EnsembleProblem: {name} must be a function, but got {type(fun).__name__} {fun!r}.")
        if self.prob_func is not None and (arrays := arrays_of_rows(self)):
            arguments = f"prob_func={self.prob_func!r:.60} and {' and '.join(arrays)}"
            text = f"give either prob_func, or arrays u0, p and tspan, not both; but got {arguments}"
            raise ValueError(f"EnsembleProblem: {text}.")


def arrays_of_rows(problem: EnsembleProblem) -> dict[str, Array]:
    """Return the arrays with one row per trajectory, by the names of the fields."""
    return {name: rows for name in ("u0", "p", "tspan") if (rows := getattr(problem, name)) is not None}


def _compared(problem: ODEProblem | EnsembleProblem, events: Sequence[Any]) -> dict[str, object]:
    ode = problem.problem if isinstance(problem, EnsembleProblem) else problem
    parts = {"f": ode.f, "u0 of the problem": ode.u0, "tspan of the problem": ode.tspan, "p of the problem": ode.p}
    if ode is not problem:
        parts |= {name: getattr(problem, name) for name in ("prob_func", "u0", "p", "tspan")}
    if events:
        # All fields, so that a further one is compared, too.
        parts["events"] = [part for event in events for part in {**vars(event), "condition": event.written}.values()]
    return parts


def compared_parts(problem: ODEProblem | EnsembleProblem, events: Sequence[Any] = ()) -> dict[str, list[object]]:
    """Return what ranks compare, by name: code, values it reads, and arrays (on a device only shape and dtype)."""
    return {name: _comparable([part]) for name, part in _compared(problem, events).items()}


def digest_of(problem: ODEProblem | EnsembleProblem, events: Sequence[Any] = ()) -> int:
    """Return one digest of all `compared_parts`."""
    return fingerprint(*_comparable(_compared(problem, events).values()))


# These leaves are the most frequent ones: the numbers are compared as texts.
_NUMBERS = frozenset({float, int, type(None)})
_SINGLE_LEAVES = _NUMBERS | {np.ndarray, FunctionType}


def _comparable(parts: Iterable[object]) -> list[object]:
    """Return a list of texts and numbers, and arrays, that represent the leaves of arguments."""
    texts: list[object] = []
    arrays: list[object] = []
    for part in parts:
        for leaf in (part,) if type(part) in _SINGLE_LEAVES else flatten(part)[0]:
            value: Any = leaf if type(leaf) in _SINGLE_LEAVES else getval(leaf)
            if type(value) in _NUMBERS:
                texts.append(value)
            elif type(value) is not np.ndarray and callable(value):
                texts.append(text_of(value))
            elif is_device_array(value):
                texts += value.shape, str(value.dtype)
            else:
                array = np.asarray(value)
                texts += array.shape, array.dtype.str
                if array.dtype.kind in "biufc":
                    arrays.append(abridged(array))
    return [texts, *arrays]


def remake(problem: ODEProblem | EnsembleProblem, /, **changes: Any) -> Any:
    """Return a problem with some of its fields changed.

    Parameters
    ----------
    problem : ODEProblem or EnsembleProblem
    **changes
        Fields and their new values, for example ``u0=``.

    Returns
    -------
    ODEProblem or EnsembleProblem

    Raises
    ------
    TypeError
        If there is no such field.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, remake
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> print(remake(decay, u0=[2.0]).u0, decay.u0)
    [2.] [1.]
    """
    unknown = [name for name in changes if name not in problem.__dataclass_fields__]
    if unknown:
        names = problem.__dataclass_fields__
        raise TypeError(f"remake: {type(problem).__name__} has no field {unknown[0]!r}; it has {', '.join(names)}.")
    if isinstance(problem, ODEProblem):
        return problem.changed(changes)
    return dataclasses.replace(problem, **changes)


def _check_derivative(f: object) -> None:
    if not callable(f):
        raise TypeError(f"ODEProblem: f must be a function f(u, p, t), but got {type(f).__name__} {f!r}.")
    check_order("ODEProblem: f", f)
    names = _required(f)
    if names is not None and len(names) == 4:
        raise TypeError(
            f"ODEProblem: f must be f(u, p, t) and return the derivative, but {f!r:.60} takes four arguments. Instead of "
            "writing into du, as in f(du, u, p, t), return a list of the components."
        )


def check_order(what: str, fun: Function | None) -> None:
    """Raise a TypeError if the first argument of a function is time, according to its name."""
    names = _required(fun) if fun is not None else None
    if names and names[0] == "t" and "t" not in names[1:]:
        raise TypeError(
            f"{what} must be a function of (u, p, t), but {fun!r:.60} takes ({', '.join(names)}), the order of SciPy and "
            f"diffrax. Give lambda u, p, t: {getattr(fun, '__name__', 'fun').replace('<lambda>', 'fun')}(t, u"
            f"{', p' * (len(names) > 2)})."
        )


def _is_number(part: object) -> bool:
    plain = getval(part)
    if type(part) is list or np.ndim(plain):
        return False
    return (plain if is_device_array(plain) else np.asarray(plain)).dtype.kind in "biufc"


def _required(fun: Function) -> tuple[str, ...] | None:
    """Return the names of the positional arguments without defaults; None if they can't be determined."""
    if type(fun) is FunctionType and not fun.__dict__:
        # `inspect` is slow, and training loops create a problem in each step.
        return fun.__code__.co_varnames[: fun.__code__.co_argcount - len(fun.__defaults__ or ())]
    try:
        kinds = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return None  # some built-in functions have no signature
    positional = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(p.name for p in positional if p.default is p.empty)
