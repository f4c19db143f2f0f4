"""Solutions whose trajectories live on several ranks: gathered, or kept in shares with statistics over all."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Comm
from mpiad.ensemble.dense_parts import GatheredOutput
from mpiad.ensemble.retcodes import codes_of, names_of
from mpiad.ensemble.solution import EnsembleSolution, check_alike, joined_times, widened
from mpiad.ensemble.statistics import quantile, root, squared_distance, summary
from mpiad.primitives import mpi_allgather, mpi_allreduce
from mpiad.transport import Channel

__all__ = ["Facts", "ShardedSolution", "gathered", "sharded"]

_COUNTS = ("retcode", "t_reached", "naccept", "nreject", "nf")


class Facts(NamedTuple):
    """How the trajectories of all ranks went: the same on all ranks.

    Parameters
    ----------
    retcode, t_reached, naccept, nreject, nf : array, shape (N,)
    events : dict
        From trajectories to their events.
    t : array, shape (n_saved,) or (N, n_saved)
    width : int
        n_saved
    converged : bool
    compiled : bool
        Whether kernels advanced them.
    """

    retcode: Array
    t_reached: Array
    naccept: Array
    nreject: Array
    nf: Array
    events: dict
    t: Array
    width: int
    converged: bool
    compiled: bool

    @classmethod
    def of_all(cls, used: Channel, sol: EnsembleSolution, compiled: bool) -> Facts:
        """Exchange what the ranks know; all ranks call it, and all raise where their states aren't of one kind."""
        mine = {name: getattr(sol, name) for name in (*_COUNTS, "events", "t", "converged")}
        # Names of 13 letters would be three quarters of what is sent.
        mine["retcode"] = codes_of(sol.retcode)
        mine["compiled"] = compiled
        mine["kind"] = sol.u_end.shape[1:], sol.u_end.dtype
        # Times of events may be traced.
        mine["t_reached"] = getval(sol.t_reached)
        mine["events"] = {i: [(event, getval(time)) for event, time in found] for i, found in sol.events.items()}
        found = used.data.allgather(mine)
        check_alike([one["kind"] for one in found], "ranks")
        events, offset = {}, 0
        for one in found:
            events.update({i + offset: what for i, what in one["events"].items()})
            offset += len(one["nf"])
        busy = [one for one in found if len(one["nf"])] or found[:1]
        times = [one["t"] for one in busy]
        width = max(t.shape[-1] for t in times)
        counts: Any = {name: np.concatenate([one[name] for one in found]) for name in _COUNTS}
        counts["retcode"] = names_of(counts["retcode"])
        t = joined_times(times, [len(one["nf"]) for one in busy], width)
        flags = {name: any(one[name] for one in found) for name in ("converged", "compiled")}
        return cls(events=events, t=t, width=width, **flags, **counts)


def gathered(share: EnsembleSolution, facts: Facts, comm: Comm, made: Any = None) -> EnsembleSolution:
    """Return the solution of all trajectories on every rank, with `made` for its u if not None; all ranks call it."""
    u = mpi_allgather(widened(share.u, facts.width), axis=0, comm=comm) if made is None else made
    return EnsembleSolution(
        u, facts.t, mpi_allgather(share.u_end, axis=0, comm=comm), facts.retcode,
        mpi_allgather(share.t_reached, axis=0, comm=comm), facts.naccept, facts.nreject, facts.nf,
        _gathered_events(share, facts, comm), facts.converged,
        dense=share.dense and GatheredOutput(share.dense, len(share), comm),
    )  # fmt: skip


def _gathered_events(share: EnsembleSolution, facts: Facts, comm: Comm) -> dict[int, list[tuple[int, Any]]]:
    """Return the events of all trajectories, with times through which derivatives flow."""
    if not facts.events:
        return {}
    mine = [time for i in sorted(share.events) for _, time in share.events[i]]
    everything = mpi_allgather(anp.array(mine) if mine else np.empty(0), axis=0, comm=comm)
    times = iter(everything if isbox(everything) else everything.tolist())
    return {i: [(event, next(times)) for event, _ in facts.events[i]] for i in sorted(facts.events)}


@dataclass
class ShardedSolution(EnsembleSolution):
    """A rank's share of the solutions; statistics are over all ranks' trajectories.

    Attributes
    ----------
    indices : array of int
        Which of the N trajectories these are, from 0.
    facts : Facts
        How all N went.
    comm : mpi4py intracommunicator or None

    Notes
    -----
    All ranks call mean, std, quantile, summary and plot together.
    """

    indices: Array = dataclasses.field(default_factory=lambda: np.empty(0, int))
    facts: Any = None
    comm: Comm = None

    def _mean_of(self, values: Array) -> Array:
        there = ~np.isnan(getval(values))
        total = mpi_allreduce(anp.sum(anp.where(there, values, 0.0), axis=0), comm=self.comm)
        count = mpi_allreduce(there.sum(axis=0), comm=self.comm)
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
        return quantile(mpi_allgather(self._surviving(), axis=0, comm=self.comm), q)

    def summary(self) -> str:
        """Return a text about all ranks' trajectories; see `EnsembleSolution.summary`."""
        ends = mpi_allgather(self.u_end, axis=0, comm=self.comm)
        f = self.facts
        return summary(EnsembleSolution(ends, f.t, ends, f.retcode, f.nf, f.naccept, f.nreject, f.nf))


def sharded(share: EnsembleSolution, facts: Facts, comm: Comm, indices: Array, made: bool = False) -> ShardedSolution:
    """Return this rank's share; `made` says that its u was made by an `output_func` or a `reduction`."""
    values = {field.name: getattr(share, field.name) for field in dataclasses.fields(EnsembleSolution)}
    if not made:
        # Statistics over the ranks need one width, also of ranks without trajectories or with fewer steps.
        values["u"] = widened(share.u, facts.width)
        values["t"] = facts.t if facts.t.ndim == 1 else facts.t[indices]
    return ShardedSolution(**values, indices=indices, facts=facts, comm=comm)
