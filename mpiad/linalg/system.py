"""A linear system while it is being solved: the user's operator on plain blocks, checked, and sums over all ranks.

What is wrong on one rank (an operator that returns another shape, NaN) makes that rank's next sum NaN, and so the sum on
all ranks: they agree on it without a message of its own, and only then say to each other what happened.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Comm, Function, LocalArray
from mpiad.errors import ConvergenceError
from mpiad.primitives import mpi_allreduce
from mpiad.transport import channel
from mpiad.transport.agreement import agreed, raise_together

__all__ = ["Settings", "System"]

_MOST_ITERATIONS = 10_000


class Settings(NamedTuple):
    """How to solve; the same on all ranks.

    Parameters
    ----------
    method : str
    rtol, atol : float
        The residual's norm is to fall to ``max(rtol * norm(b), atol)``.
    maxiter : int or None
    comm : mpi4py intracommunicator or None
    callback : callable or None
    """

    method: str
    rtol: float
    atol: float
    maxiter: int | None
    comm: Comm
    callback: Callable[[float], Any] | None


class System:
    """The operator and the preconditioner of one solve, with its parameters put in.

    Parameters
    ----------
    matvec : callable
        ``matvec(u, *params)``
    preconditioner : callable or None
        ``preconditioner(r, *params)`` or ``preconditioner(r)``
    params : sequence
        Plain values.
    like : array
        Has the shape and dtype of this rank's block.
    settings : Settings
    """

    def __init__(
        self, matvec: Function, preconditioner: Function | None, params: Any, like: LocalArray, settings: Settings
    ):
        self.settings = settings
        self.history: list[float] = []
        self._matvec, self._preconditioner, self._params = matvec, preconditioner, params
        self._rest = params if preconditioner is not None and _takes(preconditioner, len(params)) else ()
        self._shape: tuple[int, ...] = like.shape
        self._problem: Exception | None = None

    def apply(self, u: LocalArray) -> LocalArray:
        """Return the operator's product with this rank's block; NaN where it can't be used."""
        return self._checked(self._matvec(u, *self._params), "matvec")

    def precondition(self, r: LocalArray) -> LocalArray:
        """Return the preconditioned residual, `r` itself where there is no preconditioner."""
        if self._preconditioner is None:
            return r
        return self._checked(self._preconditioner(r, *self._rest), "preconditioner")

    def _checked(self, out: Any, name: str) -> LocalArray:
        if isinstance(out, np.ndarray) and out.shape == self._shape and out.dtype.kind == "f":
            return out
        if self._problem is None:
            self._problem = _problem_with(out, name, self._shape)
        return np.full(self._shape, np.nan) if self._shape else np.array(np.nan)

    def dots(self, *pairs: tuple[LocalArray, LocalArray]) -> list[float]:
        """Return the inner products of pairs of vectors over all ranks, by one reduction.

        Raises
        ------
        TypeError, ValueError
            On all ranks, where `matvec` or `preconditioner` returned what can't be used on one of them.
        """
        local = np.array([np.vdot(x, y) for x, y in pairs], dtype=np.float64)
        if self._problem is not None:
            local[:] = np.nan
        sums = mpi_allreduce(local, comm=self.settings.comm).tolist()
        if not all(map(math.isfinite, sums)):
            raise_together(channel(self.settings.comm, "linalg.solve"), self._problem)
        return sums

    def start(self, b: LocalArray) -> tuple[float, int]:
        """Return the norm that the residual is to fall to, 0 where `b` is zero, and the number of iterations allowed.

        Raises
        ------
        ValueError
            On all ranks, where `b` isn't finite.
        """
        square, unknowns = self.dots((b, b), (np.array([b.size], float), np.ones(1)))
        self.require_finite(square, b, "the right-hand side (b, or a cotangent)")
        settings = self.settings
        limit = min(10 * int(unknowns), _MOST_ITERATIONS) if settings.maxiter is None else settings.maxiter
        return (max(settings.rtol * math.sqrt(square), settings.atol) if square else 0.0), limit

    def note(self, norm: float) -> float:
        """Add the residual's norm to the history, call the user's callback, and return the norm."""
        self.history.append(norm)
        if self.settings.callback is not None and len(self.history) > 1:
            self.settings.callback(norm)
        return norm

    def require_finite(self, value: float, array: LocalArray, name: str) -> None:
        """Raise on all ranks where a sum over an array isn't finite, saying on which rank the array isn't."""
        if math.isfinite(value):
            return
        used = channel(self.settings.comm, "linalg.solve")
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
        text = f"linalg.solve: {name} is not finite: {bad} of {array.size} entries on rank {used.rank} are NaN or infinite."
        raise_together(used, ValueError(text) if bad else None)
        self.fail(f"a sum over {name} overflows")

    def fail(self, what: str) -> NoReturn:
        """Raise a ConvergenceError with the residuals so far; called on all ranks alike."""
        start = f"{self.history[0]:.3e}" if self.history else "unknown"
        last = f"{self.history[-1]:.3e}" if self.history else "unknown"
        error = ConvergenceError(
            f"linalg.solve: {self.settings.method}: {what}. After {max(0, len(self.history) - 1)} iterations the norm of "
            f"the residual is {last}, from {start} at the start (the history of this error has them all).",
            self.history,
        )
        raise agreed(channel(self.settings.comm, "linalg.solve"), error)


def _takes(fun: Function, extra: int) -> bool:
    try:
        kinds = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return False  # some built-in functions don't say
    if any(p.kind is p.VAR_POSITIONAL for p in kinds):
        return True
    required = [p for p in kinds if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]
    return len(required) == 1 + extra


def _problem_with(out: Any, name: str, shape: tuple[int, ...]) -> Exception:
    if isbox(out):
        return TypeError(
            f"linalg.solve: {name} uses a traced variable from outside itself (it returned a {type(out).__name__}), "
            "through which no derivative can flow. Pass it to solve among the params, and take it as an argument; "
            "mpiad.stop(x) gives its plain value where no derivative is wanted."
        )
    if not isinstance(out, np.ndarray):
        return TypeError(f"linalg.solve: {name} must return an array, but returned {type(out).__name__}.")
    if out.shape != shape:
        return ValueError(
            f"linalg.solve: {name} must return an array of the shape of b, {shape} on this rank, but returned {out.shape}."
        )
    return TypeError(f"linalg.solve: {name} must return real floats, but returned dtype {out.dtype}.")
