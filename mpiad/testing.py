"""Checks of derivatives for users, and for our own tests: collective, and independent of what they check.

`check_grads` is a Taylor test. With the right gradient the remainder J(x + hv) − J(x) − h g·v shrinks like h², with a
wrong one like h, whatever the scale of the problem: so it passes on the measured rate, not on a tolerance.
`check_adjoint` is the dot-product test Σ⟨A x, y⟩ = Σ⟨x, Aᵀ y⟩ over all ranks. `describe_objective` says how a program's
results lie on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Comm, Function, Rank
from mpiad.differentiation import grad, hvp, jvp, make_vjp, value_and_grad
from mpiad.differentiation.trees import flatten, is_variable
from mpiad.primitives.cotangents import spec_like
from mpiad.transport import channel

__all__ = ["AdjointError", "GradientError", "ObjectiveReport", "check_adjoint", "check_grads", "describe_objective"]

_HALVINGS = 12
_MISSING_RATE = 0.2  # how far below the full rate a measured one may lie


class GradientError(AssertionError):
    """Report a derivative whose Taylor remainder shrinks too slowly."""


class AdjointError(AssertionError):
    """Report an adjoint that isn't the transpose."""


class _Line:
    """The objective along a random direction through the arguments, the same point on all ranks."""

    def __init__(self, fun: Function, args: tuple, argnum: Any, shared: bool, comm: Comm, seed: int, options: dict[str, Any]):
        self.used, self.comm, self.shared = channel(comm, "check_grads"), comm, shared
        self.args, self.argnum = args, argnum
        self.x = args[argnum] if isinstance(argnum, int) else tuple([args[i] for i in argnum])
        options = {**options, "shared": shared, "comm": comm}
        self.gradient = value_and_grad(self._of_one(fun), **options)
        self.product = hvp(self._of_one(fun), **options)
        self.slope = grad(self._of_one(fun), **options)
        self.v = self._direction(seed)

    def _of_one(self, fun: Function) -> Function:
        def of_one(x: Any) -> Any:
            new = list(self.args)
            for i, value in ((self.argnum, x),) if isinstance(self.argnum, int) else zip(self.argnum, x):
                new[i] = value
            return fun(*new)

        return of_one

    def _direction(self, seed: int) -> Any:
        rng = np.random.default_rng((seed, 0 if self.shared else self.used.rank))
        leaves, build = flatten(self.x)
        return build([_noise(leaf, rng) if is_variable(leaf) else leaf for leaf in leaves])

    def at(self, h: float) -> Any:
        """Return the point at distance h."""
        return _combined(self.x, self.v, lambda x, v: x + np.asarray(h, dtype=spec_like(v).dtype)[()] * v)

    def along(self, g: Any) -> float:
        """Return the derivative along the line of a gradient, over all ranks."""
        pairs = zip(flatten(g)[0], flatten(self.v)[0], flatten(self.x)[0])
        mine = sum(np.real(np.sum(a * b)) for a, b, x in pairs if is_variable(x))
        return float(mine) if self.shared else float(self.used.data.allreduce(float(mine)))


def _noise(leaf: Any, rng: np.random.Generator) -> Any:
    spec = spec_like(leaf)
    noise = rng.standard_normal(spec.shape)
    if spec.dtype.kind == "c":
        noise = noise + 1j * rng.standard_normal(spec.shape)
    return np.asarray(noise, dtype=spec.dtype)[()]


def _combined(x: Any, v: Any, act: Callable) -> Any:
    leaves, build = flatten(x)
    return build([act(a, b) if is_variable(a) else a for a, b in zip(leaves, flatten(v)[0])])


def check_grads(
    fun: Function,
    *args: Any,
    order: int = 2,
    modes: Sequence[str] = ("rev", "fwd"),
    argnum: int | tuple[int, ...] = 0,
    objective: str = "root",
    shared: bool = False,
    root: Rank = 0,
    comm: Comm = None,
    step: float = 0.1,
    seed: int = 0,
) -> dict[str, float]:
    """Measure the rate at which the Taylor remainders of the objective shrink, and raise where it is too low.

    Parameters
    ----------
    fun : callable
        As for `value_and_grad`: returns this rank's real number.
    *args : object
        This rank's arguments.
    order : {1, 2}
        2 checks second derivatives too.
    modes : sequence of {"rev", "fwd"}
        Reverse mode (and reverse over reverse), forward mode (and forward over reverse).
    argnum, objective, shared, root, comm
        As for `value_and_grad`.
    step : float
        Longest step along the random direction; it is halved repeatedly.
    seed : int
        Of the direction, which differs on every rank (not with `shared`).

    Returns
    -------
    dict
        The measured rate of each check: about 2 for first derivatives, 3 for second, infinite where nothing remains.

    Raises
    ------
    GradientError
        On all ranks, where a rate is lower.
    ValueError
        Where there is no such order or mode.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    Not differentiable.

    References
    ----------
    P. E. Farrell, D. A. Ham, S. W. Funke, M. E. Rognes, "Automated derivation of the adjoint of high-level transient
    finite element programs", SIAM J. Sci. Comput. 35 (2013), section 5.
    """
    if order not in (1, 2) or not modes or any(mode not in ("rev", "fwd") for mode in modes):
        raise ValueError(f"check_grads: order must be 1 or 2 and modes of 'rev', 'fwd', but got {order!r}, {modes!r}.")
    line = _Line(fun, args, argnum, shared, comm, seed, {"objective": objective, "root": root})
    value, gradient = line.gradient(line.x)
    steps = [step / 2**k for k in range(_HALVINGS)]
    values = [line.gradient(line.at(h))[0] for h in steps]
    rates: dict[str, float] = {}
    for mode in modes:
        first = _first(line, gradient, mode)
        remainders = [abs(there - value - h * first) for h, there in zip(steps, values)]
        rates[f"{mode} 1"] = _rate(remainders, values, line, 1, mode)
        if order == 2:
            second = _second(line, mode)
            remainders = [abs(there - value - h * first - h * h / 2 * second) for h, there in zip(steps, values)]
            rates[f"{mode} 2"] = _rate(remainders, values, line, 2, mode)
    return rates


def _first(line: _Line, gradient: Any, mode: str) -> float:
    if mode == "rev":
        return line.along(gradient)
    return float(jvp(lambda x: line.gradient(x)[0], line.x, line.v)[1])


def _second(line: _Line, mode: str) -> float:
    if mode == "fwd":
        return line.along(line.product(line.x, line.v))
    # Reverse over reverse: the gradient of g·v, each rank's own term. A shared g is the same on all ranks already.
    weight = 1.0 / line.used.size if line.shared else 1.0

    def slope(x: Any) -> Any:
        parts = zip(flatten(line.slope(x))[0], flatten(line.v)[0])
        return sum(anp.sum(anp.real(g * v)) for g, v in parts if is_variable(v)) * weight

    return line.along(grad(slope, objective="sum", shared=line.shared, comm=line.comm)(line.x))


def _rate(remainders: list[float], values: list[float], line: _Line, order: int, mode: str) -> float:
    leaves = [leaf for leaf in flatten(line.x)[0] if is_variable(leaf)]
    eps = max(line.used.data.allgather(max(float(np.finfo(spec_like(leaf).dtype).eps) for leaf in leaves)))
    floor = 200 * eps * max(max(map(abs, values)), np.finfo(float).tiny)
    rates = [
        math.log2(coarse / fine) for coarse, fine in zip(remainders, remainders[1:]) if coarse > floor and fine > floor
    ]
    if not all(map(math.isfinite, values)):
        raise GradientError(f"check_grads: the objective isn't finite along the direction: {values}.")
    if not rates:
        return math.inf
    # The last steps above rounding are the asymptotic ones.
    rate = float(np.median(rates[-3:]))
    if rate < order + 1 - _MISSING_RATE:
        listed = ", ".join(f"{remainder:.2e}" for remainder in remainders)
        raise GradientError(
            f"check_grads: the remainder of order {order} in mode {mode!r} shrinks at rate {rate:.2f}, but a right "
            f"derivative gives {order + 1}. Remainders at each halving of the step: {listed}."
        )
    return rate


def check_adjoint(
    linear_map: Function, x: Any, *, adjoint: Function | None = None, comm: Comm = None, ulps: float = 16.0, seed: int = 0
) -> float:
    """Test over all ranks that the adjoint of a linear map is its transpose.

    Parameters
    ----------
    linear_map : callable
        ``A(x)``, a map of one array.
    x : array
        This rank's argument, whose shape and dtype count; values are drawn.
    adjoint : callable, optional
        ``Aᵀ(y)``; by default what reverse mode gives.
    comm : mpi4py intracommunicator, optional
    ulps : float
        How many roundings of the sum of absolute products the two sides may differ by.
    seed : int

    Returns
    -------
    float
        By how many roundings they differ.

    Raises
    ------
    AdjointError
        On all ranks, where they differ by more, or the map isn't linear.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    Not differentiable.
    """
    used = channel(comm, "check_adjoint")
    rng = np.random.default_rng((seed, used.rank, 1))
    x = _noise(x, rng)
    vjp, y = make_vjp(linear_map)(x)
    twice = linear_map(x + x)
    y_bar = _noise(y, rng)
    x_bar = vjp(y_bar) if adjoint is None else adjoint(y_bar)
    sides, sizes, bends = _products(used, (y, y_bar), (x, x_bar), np.max(np.abs(twice - y - y), initial=0.0))
    eps = max(used.data.allgather(float(np.finfo(spec_like(x).dtype).eps)))
    scale = eps * max(sizes, np.finfo(float).tiny)
    if bends > 1e3 * eps * max(1.0, sizes):
        raise AdjointError(f"check_adjoint: the map isn't linear: A(2x) − 2 A(x) reaches {bends:.3e}.")
    error = abs(sides[0] - sides[1]) / scale
    if error > ulps:
        raise AdjointError(
            f"check_adjoint: Σ⟨A x, y⟩ = {sides[0]!r}, but Σ⟨x, Aᵀ y⟩ = {sides[1]!r} over {used.size} ranks: "
            f"{error:.3g} roundings apart, {ulps:g} are allowed. The adjoint isn't the transpose."
        )
    return float(error)


def _products(used: Any, left: tuple, right: tuple, bend: float) -> tuple[list[complex], float, float]:
    """Return both inner products over all ranks, exactly rounded, and the sum of absolute products."""
    terms = [np.ravel(np.asarray(a) * np.asarray(b)) for a, b in (left, right)]
    every = used.data.allgather((terms, bend))
    flat = [np.concatenate([pair[0][side] for pair in every]) for side in (0, 1)]
    sides = [complex(math.fsum(np.real(part)), math.fsum(np.imag(part))) for part in flat]
    return sides, max(float(np.sum(np.abs(part))) for part in flat), max(pair[1] for pair in every)


class ObjectiveReport(NamedTuple):
    """How a program's results lie on the ranks, and which objective fits.

    Attributes
    ----------
    kind : {"same", "root", "share"}
        The same on all ranks; on the root only; a share on each.
    objective : str
        The objective that fits.
    values : list
        What each rank returned.
    factors : dict
        By what each objective would multiply the gradient that fits; NaN where it isn't a factor.
    text : str
        The same in words.
    """

    kind: str
    objective: str
    values: list
    factors: dict
    text: str

    def __str__(self) -> str:
        return self.text


def describe_objective(fun: Function, *args: Any, root: Rank = 0, comm: Comm = None) -> ObjectiveReport:
    """Run a function and say which objective fits what its ranks return.

    Parameters
    ----------
    fun : callable
        As for `value_and_grad`.
    *args : object
        This rank's arguments.
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    ObjectiveReport
        Equal on all ranks. It goes by values: shares that happen to be equal look like copies.

    Raises
    ------
    TypeError
        On all ranks, where one returns anything but a real number or None.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    Not differentiable.
    """
    used = channel(comm, "describe_objective")
    found = fun(*args)
    scalar = found is None or (np.ndim(found) == 0 and np.isrealobj(found) and not isinstance(found, str))
    values = used.data.allgather(None if found is None else float(found) if scalar else repr(found)[:60])
    wrong = [f"rank {rank}: {value}" for rank, value in enumerate(values) if isinstance(value, str)]
    if wrong:
        raise TypeError(f"describe_objective: every rank must return one real number or None, but got {'; '.join(wrong)}.")
    return _report(values, root)


def _report(values: list, root: int) -> ObjectiveReport:
    size = len(values)
    others = [value for rank, value in enumerate(values) if rank != root]
    if all(value is None or value == 0.0 for value in others) and others:
        factors = {"root": 1.0, "sum": 1.0, "mean": 1.0 / size}
        said = f"only the root (rank {root}) holds the result. objective='root' fits; 'mean' would divide by {size}"
        return ObjectiveReport("root", "root", values, factors, f"{said} the gradient.")
    if all(value == values[root] for value in others):
        factors = {"root": 1.0, "sum": float(size), "mean": 1.0}
        said = f"all ranks return the same value. objective='root' fits; 'sum' would multiply the gradient by {size}."
        return ObjectiveReport("same", "root", values, factors, said)
    factors = {"root": math.nan, "sum": 1.0, "mean": 1.0 / size}
    said = (
        "each rank returns a share of its own. objective='sum' fits (or 'mean' for the mean of losses, "
        f"1/{size} of that gradient); 'root' would leave out all shares but that of rank {root}."
    )
    return ObjectiveReport("share", "sum", values, factors, said)
