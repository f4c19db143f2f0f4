"""An ensemble divided among the ranks: each solves a contiguous share, and what is asked for is gathered.

While the trajectories advance, nothing is communicated. Before, the ranks agree on the division; after, they exchange how
each trajectory went (small, and no derivative flows through it), and gather states by `mpi_allgather`, whose adjoint
returns each rank the cotangents of its own share. A mistake on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpiad._typing import Array, Comm
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.job_progress import JobProgress
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.outputs import trees_of_all
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.sharded import Facts, gathered, sharded
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import raise_together, require_same

__all__ = ["EnsembleMPI", "agreed", "over_ranks"]

# What a turn of the working set costs besides its columns, in numbers (columns times components): 1,500 to 3,000 were
# measured for small f, for states and gradients alike. A kernel's turn is that of its lanes, however few are busy.
_TURN, _LANES = 2400.0, 16.0
_TRIES = 8


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
    """

    def __init__(self, inner: EnsembleAlgorithm | None = None, gather: bool = True, comm: Comm = None):
        self.inner = EnsembleVectorized() if inner is None else inner
        if not isinstance(self.inner, EnsembleAlgorithm) or isinstance(self.inner, EnsembleMPI):
            raise TypeError(
                "EnsembleMPI: inner must be an EnsembleSerial, EnsembleVectorized, EnsembleThreads or EnsembleGPU, but got "
                f"{self.inner!r}."
            )
        self.gather, self.comm = bool(gather), comm
        self._costs, self._done, self._turn = np.empty(0), np.zeros(1), _TURN

    def __repr__(self) -> str:
        return f"EnsembleMPI({self.inner!r}, gather={self.gather})"

    def run(self, batch: Batch, settings: Settings) -> Outcome:
        """Solve all trajectories of this rank's share."""
        return self.inner.run(batch, settings)

    def bounds(self, count: int, size: int) -> Array:
        """Return where the shares of the ranks begin and end, from 0; the same on all ranks."""
        if len(self._costs) != count or not count:
            return np.arange(size + 1) * count // size
        own = np.zeros(size)
        best = shares = self._divided(own)
        shortest = self._longest(best)
        for _ in range(_TRIES):
            # Half the way: a share that gives up its longest trajectory would get it back in the next try.
            own = (own + self._turns(shares)) / 2
            shares = self._divided(own)
            longest = self._longest(shares)
            if longest < shortest:
                best, shortest = shares, longest
        return best

    def _divided(self, own: Array) -> Array:
        """Return shares that are equal with these costs of the ranks' own."""
        done, size = self._done[1:], len(own)
        due = np.cumsum(np.maximum((done[-1] + own.sum()) / size - own, 0.0))[:-1]
        due = np.minimum(due, done[-1])
        inner = np.searchsorted(done, due)
        # Before or after the trajectory that crosses what is due, whichever is nearer.
        inner += done[inner] - due < due - (done[inner] - self._costs[inner])
        return np.concatenate([[0], np.maximum.accumulate(inner), [len(done)]])

    def _turns(self, shares: Array) -> Array:
        """Return what a rank pays for its turns, of which its longest trajectory takes the most, in columns' steps."""
        longest = np.maximum.reduceat(np.append(self._costs, 0.0), shares[:-1])
        return self._turn * longest * (np.diff(shares) > 0)

    def _longest(self, shares: Array) -> float:
        return float((np.diff(self._done[shares]) + self._turns(shares)).max())

    def remember(self, tries: Array, components: int, compiled: bool = False) -> None:
        """Take the numbers of tried steps of all trajectories, whose states have so many components, as their costs."""
        # Entering the working set and leaving it costs about two steps.
        self._costs, self._turn = tries + 2.0, _LANES if compiled else _TURN / max(1, components)
        self._done = np.concatenate([[0.0], np.cumsum(self._costs)])


def over_ranks(
    mpi: EnsembleMPI,
    count: int,
    described: str,
    local: Callable[[range, Callable[[int], None] | None], EnsembleSolution],
    combine: Callable[[list[Any]], Any] | None,
    progress: bool = False,
    compiled: Callable[[], bool] = bool,
) -> EnsembleSolution:
    """Solve an ensemble over the ranks.

    Parameters
    ----------
    mpi : EnsembleMPI
    count : int
        N
    described : str
        The arguments that must be the same on all ranks.
    local : callable
        ``local(numbers, shown)`` solves this rank's share, and tells `shown` how many more have ended.
    combine : callable or None
        What an `output_func` or a `reduction` have made on the ranks that had trajectories, from which it makes ``sol.u``.
    progress : bool
        Whether rank 0 writes a line that counts all N.
    compiled : callable
        Tells, after the solve, whether kernels advanced this rank's trajectories.

    Returns
    -------
    EnsembleSolution

    Raises
    ------
    Exception
        On all ranks, what was raised on one of them.

    Ranks
    -----
    All ranks of the communicator call it.
    """
    used = channel(mpi.comm, "ensemble.solve")
    require_same(used, described, "solve")
    bounds = mpi.bounds(count, used.size)
    first, last = int(bounds[used.rank]), int(bounds[used.rank + 1])
    shown = JobProgress(used, count) if progress else None
    with agreed(used):
        try:
            share = local(range(first + 1, last + 1), shown)
        finally:
            if shown is not None:
                shown.close()
    facts = Facts.of_all(used, share, compiled())
    mpi.remember(facts.naccept + facts.nreject, int(np.prod(share.u_end.shape[1:])), facts.compiled)
    if not mpi.gather:
        return sharded(share, facts, mpi.comm, np.arange(first, last), combine is not None)
    if combine is None:
        return gathered(share, facts, mpi.comm)
    trees = trees_of_all(used, mpi.comm, share.u)
    with agreed(used):
        made = combine([tree for tree, a, b in zip(trees, bounds, bounds[1:]) if a < b or count == 0])
    return gathered(share, facts, mpi.comm, made)


@contextmanager
def agreed(used: Channel) -> Iterator[None]:
    """Raise on all ranks what is raised inside on one of them."""
    try:
        yield
    except Exception as error:
        raise_together(used, error)
        raise
    raise_together(used, None)
