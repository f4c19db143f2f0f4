"""Solutions whose trajectories live on several ranks: gathered, or kept in shares with statistics over all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Comm
from mpiad.ensemble.dense_output import GatheredOutput, PickledCommunicator, present
from mpiad.ensemble.rank_outcomes import RankOutcomes
from mpiad.ensemble.reduction import widened
from mpiad.ensemble.solution import EnsembleSolution, at_ends
from mpiad.ensemble.statistics import quantile, root, squared_distance, summary
from mpiad.primitives import mpi_allgather, mpi_allreduce
from mpiad.primitives.allgather import gather_pieces
from mpiad.transport import Channel
from mpiad.transport.device_arrays import is_device_array


def gathered(
    used: Channel, share: EnsembleSolution, outcomes: RankOutcomes, start: Callable[[], Array] | None, timed: bool,
    made: object = None,
) -> EnsembleSolution:  # fmt: skip
    """Return the solution of all trajectories on every rank; all ranks call it.

    `start` returns the initial states of all trajectories, shape (d, N), where each rank knows them. `timed` says whether
    derivatives flow through the times at which trajectories ended: where events are looked for. `made` is its `u`, where
    that is made already.
    """
    later = {name: partial(getattr, outcomes, name) for name in ("retcode", "nf", "naccept", "nreject", "t_reached")}
    sol = EnsembleSolution.lazy(
        later, t=outcomes.t, u_end=_collected(used, share.u_end, outcomes),
        events=_gathered_events(share, outcomes, used.user), converged=outcomes.any("converged"), _codes=outcomes.codes,
        dense=share.dense and GatheredOutput(share.dense, len(share), used.user),
    )  # fmt: skip
    if timed:
        sol.t_reached = _collected(used, share.t_reached, outcomes)
    if made is not None:
        sol.u = made
        return sol
    if not outcomes.ends or share._start is None:
        sol.u = _collected(used, widened(share.u, outcomes.t.shape[-1]), outcomes)
        return sol
    # Now, as the problem's arrays may change before they are read.
    u0 = _collected(used, share._start(), outcomes, axis=1) if start is None else start()
    return at_ends(sol, lambda: u0, sol.u_end)


def _collected(used: Channel, x: Array, outcomes: RankOutcomes, axis: int = 0) -> Array:
    if is_device_array(getval(x)):
        return mpi_allgather(x, axis=axis, comm=used.user)
    return gather_pieces(x, axis, outcomes.counts, used)


def _gathered_events(share: EnsembleSolution, outcomes: RankOutcomes, comm: Comm) -> dict[int, list[tuple[int, Any]]]:
    """Return the events of all trajectories, with times through which derivatives flow."""
    if not outcomes.events:
        return {}
    # In the order of trajectories, by which the gathered times find their events on all ranks.
    mine = [time for i in sorted(share.events) for _, time in share.events[i]]
    everything = mpi_allgather(anp.array(mine) if mine else np.empty(0), axis=0, comm=comm)
    times = iter(everything if isbox(everything) else everything.tolist())
    return {i: [(event, next(times)) for event, _ in outcomes.events[i]] for i in sorted(outcomes.events)}


@dataclass
class ShardedSolution(EnsembleSolution):
    """A rank's share of the solutions; statistics are over all ranks' trajectories.

    Attributes
    ----------
    indices : array of int
        Which of the N trajectories these are, from 0.
    outcomes : RankOutcomes
        How all N went.
    comm : mpi4py intracommunicator or None
        One of the user's own isn't pickled with the solution: it is set anew after reading, before statistics are taken.

    Notes
    -----
    All ranks call mean, std, quantile, summary and plot together.
    """

    indices: Array = dataclasses.field(default_factory=lambda: np.empty(0, int))
    outcomes: Any = None
    comm: Comm = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "comm": PickledCommunicator(self.comm)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, comm=state["comm"].comm)

    @property
    def _over(self) -> Comm:
        return present(self.comm, "EnsembleSolution", "Set sol.comm to one of the same ranks, on all of them.")

    def _mean_of(self, values: Array) -> Array:
        there = ~np.isnan(getval(values))
        # Sums and counts, and no mean of means: ranks have different numbers of survivors.
        total = mpi_allreduce(anp.sum(anp.where(there, values, 0.0), axis=0), comm=self._over)
        # Counted by entry: trajectories that failed, and times that weren't reached, weigh nothing on any rank.
        count = mpi_allreduce(there.sum(axis=0), comm=self._over)
        with np.errstate(invalid="ignore"):  # where nobody came, it is NaN
            return total / count

    def mean(self) -> Array:
        """Return the mean over all ranks' survivors at each saved time, shape (n_saved, d)."""
        return self._mean_of(self._surviving())

    def std(self) -> Array:
        """Return the standard deviation over all ranks' survivors, shape (n_saved, d)."""
        return root(self._mean_of(squared_distance(self._surviving(), self.mean())))

    def quantile(self, q: float | list[float]) -> Array:
        """Return quantiles over all ranks' survivors, which are gathered; see `EnsembleSolution.quantile`."""
        return quantile(mpi_allgather(self._surviving(), axis=0, comm=self._over), q)

    def summary(self) -> str:
        """Return a text about all ranks' trajectories; see `EnsembleSolution.summary`."""
        ends = mpi_allgather(self.u_end, axis=0, comm=self._over)
        f = self.outcomes
        return summary(EnsembleSolution(ends, f.t, ends, f.retcode, f.nf, f.naccept, f.nreject, f.nf))


def sharded(
    share: EnsembleSolution, outcomes: RankOutcomes, comm: Comm, indices: Array, made: bool = False
) -> ShardedSolution:
    """Return this rank's share; `made` says that its u was made by an `output_func` or a `reduction`."""
    sol = object.__new__(ShardedSolution)
    # As it is: what nobody has read yet isn't made.
    sol.__dict__.update(share.__dict__, _later=dict(share._later), indices=indices, outcomes=outcomes, comm=comm)
    if not made:
        # Statistics over the ranks need one width, also of ranks without trajectories or with fewer steps.
        if not outcomes.ends:
            sol.u = widened(share.u, outcomes.t.shape[-1])
        sol.t = outcomes.t if outcomes.t.ndim == 1 else outcomes.t[indices]
    return sol
