"""An ensemble divided into contiguous shares that take the same time, by what its trajectories cost in the last solve.

What a share costs: the steps of its trajectories, and its turns, of which there are as many as its longest trajectory has
steps. A turn has a price however few columns are left in it. So the longest trajectories belong together, and the share
that has them gets fewer of the others.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array, Comm
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized

# What a turn of the working set costs besides its columns, in numbers (columns times components), as measured for small f:
# 1,200 for states, and 1,500 with tangents, for which f is traced at each stage. A kernel's turn is that of its lanes,
# however few are busy.
_TURN, _TRACED_TURN, _LANES = 1200.0, 1500.0, 16.0
# What a trajectory costs besides its steps, in steps, to enter the working set and to leave it; and a lane of a kernel,
# which does that outside of its vector instructions. For f of few operations 7 to 12 are best, with tangents, of which a
# step costs more, 5 to 10.
_ENTRY, _LANE_ENTRY, _TRACED_LANE_ENTRY = 2.0, 9.0, 7.0
# Numbers that all ranks compute from all trajectories: in so many blocks a share misses its due by a thousandth at most.
_BLOCKS = 1024
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

    def bounds(self, count: int, size: int) -> Array:
        """Return where the shares of the ranks begin and end, from 0; the same on all ranks."""
        # Nothing is known of this ensemble yet: equal numbers of trajectories.
        if len(self._tries) != count or not count:
            return np.arange(size + 1) * count // size
        if self._bounds is None or len(self._bounds) != size + 1:
            self._bounds = _LoadBalance(self._tries, self._entry, self._turn, size).bounds()
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
        # Training loops solve alike again and again; the search for equal costs is made when costs have changed.
        if before[:2] != (self._entry, self._turn) or not np.array_equal(before[2], tries):
            self._bounds = None


class _LoadBalance:
    """What trajectories cost, in steps of a column.

    - `steps`, of shape (N,): of each.
    - `entry`: what each costs beside its steps.
    - `turn`: what a turn costs beside its columns.
    - `size`: the number of shares.
    """

    def __init__(self, steps: Array, entry: float, turn: float, size: int):
        count = len(steps)
        width = max(1, count // (_BLOCKS * size))
        starts = np.arange(0, count, width)
        self._edges = np.append(starts, count)
        self._costs = np.add.reduceat(steps, starts) + entry * np.diff(self._edges)
        self._longest = np.maximum.reduceat(steps, starts) + entry
        self._done = np.concatenate([[0.0], np.cumsum(self._costs)])
        self._turn, self._size = turn, size

    def bounds(self) -> Array:
        """Return where the shares begin and end, shape (size + 1,)."""
        own = np.zeros(self._size)
        best = shares = self._divided(own)
        shortest = self._slowest(best)
        for _ in range(_TRIES):
            # Half the way: a share that gives up its longest trajectory would get it back in the next try.
            before, own = shares, (own + self._turns(shares)) / 2
            shares = self._divided(own)
            if np.array_equal(shares, before):
                break
            slowest = self._slowest(shares)
            if slowest < shortest:
                best, shortest = shares, slowest
        return self._edges[best]

    def _divided(self, own: Array) -> Array:
        """Return shares, in blocks, that are equal with these costs of the shares' own."""
        done = self._done[1:]
        due = np.cumsum(np.maximum((done[-1] + own.sum()) / self._size - own, 0.0))[:-1]
        due = np.minimum(due, done[-1])  # clipped at zero, the dues may sum up to more than there is
        inner = np.searchsorted(done, due)
        # Before or after the block that crosses what is due, whichever is nearer.
        inner += done[inner] - due < due - (done[inner] - self._costs[inner])
        return np.concatenate([[0], np.maximum.accumulate(inner), [len(done)]])

    def _turns(self, shares: Array) -> Array:
        filled = np.diff(shares) > 0
        longest = np.zeros(self._size)
        # Empty shares have no place in reduceat, whose next group begins where they do.
        longest[filled] = np.maximum.reduceat(self._longest, shares[:-1][filled])
        return self._turn * longest

    def _slowest(self, shares: Array) -> float:
        return float((np.diff(self._done[shares]) + self._turns(shares)).max())
