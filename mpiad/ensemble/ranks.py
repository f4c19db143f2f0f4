"""An ensemble divided among the ranks: each solves a contiguous share, and what is asked for is gathered.

While the trajectories advance, nothing is communicated. Before, the ranks compare their arguments in one message; after,
they exchange how each trajectory went (`outcomes`: two messages, through which no derivative flows), and gather states by
`mpi_allgather`, whose adjoint returns each rank the cotangents of its own share. A mistake on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Comm
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.job_progress import JobProgress
from mpiad.ensemble.load_balance import LoadBalance
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.outputs import trees_of_all
from mpiad.ensemble.rank_outcomes import outcomes_of_all
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.sharded import gathered, sharded
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.transport import Channel
from mpiad.transport.agreement import raising_together

__all__ = ["EnsembleMPI", "Sharing", "over_ranks"]

# What a turn of the working set costs besides its columns, in numbers (columns times components), as measured for small f:
# 1,200 for states, and 1,500 with tangents, for which f is traced at each stage. A kernel's turn is that of its lanes,
# however few are busy.
_TURN, _TRACED_TURN, _LANES = 1200.0, 1500.0, 16.0
# What a trajectory costs besides its steps, in steps, to enter the working set and to leave it; and a lane of a kernel,
# which does that outside of its vector instructions. For f of few operations 7 to 12 are best, with tangents, of which a
# step costs more, 5 to 10.
_ENTRY, _LANE_ENTRY, _TRACED_LANE_ENTRY = 2.0, 9.0, 7.0


class EnsembleMPI(EnsembleAlgorithm):
    """A contiguous share of the trajectories for each rank, balanced by the steps that each took in the last solve.

    Parameters
    ----------
    inner : EnsembleAlgorithm
        How a rank runs its share; all together by default.
    gather : bool
        Whether every rank gets all N solutions. Otherwise it gets its share, with ``sol.indices``; mean, standard
        deviation, quantiles and summary are over all N all the same.
    comm : mpi4py intracommunicator, optional

    Raises
    ------
    TypeError
        Where `inner` is no way to run a share.

    Notes
    -----
    Keep it for the next solve of an ensemble of this size: it remembers how many steps each trajectory took.

    Examples
    --------
    >>> from mpiad.ensemble import RK45, EnsembleMPI, EnsembleProblem, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ensemble = EnsembleProblem(decay, p=np.array([[1.0], [2.0], [3.0]]))
    >>> share = solve(ensemble, RK45(), EnsembleMPI(gather=False))
    >>> print(mpiad.mpi_allreduce(len(share.indices)), share.mean().ravel().round(3))
    3 [1.    0.184]
    """

    def __init__(self, inner: EnsembleAlgorithm | None = None, gather: bool = True, comm: Comm = None):
        self.inner = EnsembleVectorized() if inner is None else inner
        if not isinstance(self.inner, EnsembleAlgorithm) or isinstance(self.inner, EnsembleMPI):
            raise TypeError(
                "EnsembleMPI: inner must be an EnsembleSerial, EnsembleVectorized, EnsembleThreads or EnsembleGPU, but got "
                f"{self.inner!r}."
            )
        self.gather, self.comm = bool(gather), comm
        self._tries, self._entry, self._turn = np.empty(0), _ENTRY, _TURN
        self._bounds: Array | None = None

    def __repr__(self) -> str:
        return f"EnsembleMPI({self.inner!r}, gather={self.gather})"

    @property
    def local(self) -> EnsembleAlgorithm:
        """How a rank runs its share."""
        return self.inner

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of this rank's share."""
        return self.inner.run(batch, settings)

    def bounds(self, count: int, size: int) -> Array:
        """Return where the shares of the ranks begin and end, from 0; the same on all ranks."""
        if len(self._tries) != count or not count:
            return np.arange(size + 1) * count // size
        if self._bounds is None or len(self._bounds) != size + 1:
            self._bounds = LoadBalance(self._tries, self._entry, self._turn, size).bounds()
        return self._bounds

    def remember(self, tries: Array, components: int, compiled: bool = False, traced: bool = False) -> None:
        """Take the numbers of tried steps of all trajectories as their costs.

        Parameters
        ----------
        tries : array of int, shape (N,)
        components : int
            Of a state.
        compiled, traced : bool
            Whether kernels took them, and whether derivatives were wanted.
        """
        before = self._entry, self._turn, self._tries
        lane = _TRACED_LANE_ENTRY if traced else _LANE_ENTRY
        self._tries, self._entry = tries, lane if compiled else _ENTRY
        self._turn = _LANES if compiled else (_TRACED_TURN if traced else _TURN) / max(1, components)
        if before[:2] != (self._entry, self._turn) or not np.array_equal(before[2], tries):
            self._bounds = None


class Sharing(NamedTuple):
    """What an ensemble needs to be solved over ranks.

    Parameters
    ----------
    count : int
        N
    local : callable
        ``local(numbers, shown)`` solves this rank's share, and tells `shown` how many more have ended.
    combine : callable or None
        What an `output_func` or a `reduction` have made on the ranks that had trajectories, from which it makes ``sol.u``.
    start : callable or None
        Returns the initial states of all trajectories, shape (d, N), where each rank knows them.
    evaluated : callable
        From the numbers of accepted and rejected steps to the calls of f.
    compiled : callable
        Tells, after the solve, whether kernels advanced this rank's trajectories.
    said : callable
        Returns, after the solve, what this rank has to say of f in the log.
    say : callable
        ``say(logs)`` ends the wait for who says it: this rank, or another one.
    timed : bool
        Whether events are looked for, through whose times derivatives flow.
    progress : bool
        Whether rank 0 writes a line that counts all N.
    """

    count: int
    local: Callable[[range, Callable[[int], None] | None], EnsembleSolution]
    combine: Callable[[list[Any]], Any] | None
    start: Callable[[], Array] | None
    evaluated: Callable[[Array, Array], Array]
    compiled: Callable[[], bool]
    said: Callable[[], str]
    say: Callable[[bool], None]
    timed: bool
    progress: bool


def over_ranks(mpi: EnsembleMPI, used: Channel, asked: Sharing) -> EnsembleSolution:
    """Solve an ensemble over the ranks of a communicator; all of them call it, with equal arguments.

    What was raised on one of them is raised on all.
    """
    bounds = mpi.bounds(asked.count, used.size)
    first, last = int(bounds[used.rank]), int(bounds[used.rank + 1])
    share = _share(used, asked, range(first + 1, last + 1))
    traced = not isinstance(share, Exception) and isbox(share.u_end)
    share, outcomes = outcomes_of_all(used, share, asked.compiled(), traced, asked.evaluated, asked.said())
    asked.say(outcomes.said.index(outcomes.said[used.rank]) == used.rank)
    # Of all trajectories, the same on all ranks: they divide by it the next time, without a message.
    mpi.remember(outcomes.tries, int(np.prod(share.u_end.shape[1:])), outcomes.compiled, outcomes.traced)
    if not mpi.gather:
        return sharded(share, outcomes, mpi.comm, np.arange(first, last), asked.combine is not None)
    if asked.combine is None:
        return gathered(used, share, outcomes, asked.start, asked.timed)
    trees = trees_of_all(used, mpi.comm, share.u)
    with raising_together(used, Exception):
        made = asked.combine([tree for tree, a, b in zip(trees, bounds, bounds[1:]) if a < b or asked.count == 0])
    return gathered(used, share, outcomes, asked.start, asked.timed, made)


def _share(used: Channel, asked: Sharing, numbers: range) -> EnsembleSolution | Exception:
    """Return what this rank has solved, or what was raised, of which the others must learn."""
    shown = JobProgress(used, asked.count) if asked.progress else None
    try:
        return asked.local(numbers, shown)
    except Exception as error:  # noqa: BLE001 raised on all ranks together
        return error
    finally:
        if shown is not None:
            shown.close()
