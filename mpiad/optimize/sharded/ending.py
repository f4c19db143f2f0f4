"""Why a solve ends, in SciPy's numbers where it has them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ABNORMAL", "EVALUATIONS", "GRADIENT", "INTERRUPTED", "ITERATIONS", "NOT_FINITE", "REDUCTION", "STOPPED", "Ending",
]


class Ending(NamedTuple):
    """Status and what it means; zero is success."""

    status: int
    message: str


GRADIENT = Ending(0, "CONVERGENCE: the largest entry of the projected gradient is at most gtol.")
REDUCTION = Ending(0, "CONVERGENCE: the relative decrease of the objective is at most ftol.")
ITERATIONS = Ending(1, "STOP: the limit of iterations is reached. Raise maxiter, or accept the best point so far.")
EVALUATIONS = Ending(1, "STOP: the limit of evaluations is reached. Raise maxfun, or accept the best point so far.")
ABNORMAL = Ending(
    2,
    "ABNORMAL: no step along the steepest descent lowers the objective. Check the gradient (mpiad.testing.check_grads), "
    "or ask for less than rounding allows.",
)
NOT_FINITE = Ending(3, "ABNORMAL: the objective or its gradient isn't finite at x0. Start where both are.")
STOPPED = Ending(99, "`callback` raised `StopIteration`.")
INTERRUPTED = Ending(
    143,
    "INTERRUPTED: a rank was told to end by SIGTERM, and the state is written. Make the same call again to go on.",
)
