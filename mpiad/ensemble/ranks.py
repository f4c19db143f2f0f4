"""`EnsembleMPI`: the division of an ensemble into contiguous shares of equal cost, and the gathering of solutions.

The cost of a share is estimated from the numbers of steps in the last solve, as the sum of two terms. One is proportional
to the number of steps of all its trajectories, the other to the number of steps of its longest trajectory, that is, the
number of iterations of the step loop.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Tree
from mpiad.differentiation.concatenation import Concatenation
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleVectorized
from mpiad.ensemble.dense_output import GatheredOutput, PickledCommunicator, present
from mpiad.ensemble.rank_outcomes import RankOutcomes
from mpiad.ensemble.reduction import widened
from mpiad.ensemble.solution import EnsembleSolution, at_ends, quantile
from mpiad.primitives import mpi_allgather, mpi_allreduce
from mpiad.primitives.allgather import gather_pieces
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Channel, Spec
from mpiad.transport.core.agreement import FAILURES, raise_first
from mpiad.transport.devices.device_arrays import is_device_array


def gathered(
    channel: Channel,
    comm: Comm,
    share: EnsembleSolution,
    outcomes: RankOutcomes,
    start: Callable[[], Array] | None,
    u: object,
) -> EnsembleSolution:
    """Return the solution of all trajectories on every rank; collective. `u`: the results of a reduction, or None."""
    # `comm`: the user's communicator of the channel, or None, as pickles contain it.
    # `start` returns all initial states, shape (d, N).
    deferred = {name: partial(getattr, outcomes, name) for name in ("retcode", "nf", "t_reached")}
    headers, events = outcomes.headers, outcomes._event_rows
    fields: dict[str, Any] = {"t": outcomes.t, "u_end": _collected(channel, share, "u_end", outcomes)}
    if len(events.ids) and headers.combined.timed:
        counts = headers.rows["event_rows"].tolist()
        events = events._replace(times=gather_pieces(share._event_rows.times, 0, counts, channel))
    fields |= {"naccept": outcomes.naccept, "nreject": outcomes.nreject}
    fields |= {"_event_rows": events, "converged": bool(headers.combined.converged)}
    dense = share.dense and GatheredOutput(share.dense, len(share), comm)
    sol = EnsembleSolution.lazy(deferred, **fields, _codes=outcomes.codes, dense=dense)
    if headers.combined.timed:
        sol.t_reached = gather_pieces(share.t_reached, 0, headers.counts, channel)
    if u is not None:
        sol.u = u
        return sol
    if not headers.ends or share._start is None:
        sol.u = _collected(channel, share, "u", outcomes)
        return sol
    # u0 is computed now, since a program may change the problem's arrays before it reads sol.u.
    u0 = _pieces(channel, share._start(), outcomes, 1) if start is None else start()
    return at_ends(sol, lambda: u0, sol.u_end)


def _collected(channel: Channel, share: EnsembleSolution, name: str, outcomes: RankOutcomes) -> Array:
    """Return the states `name` of all trajectories; collective unless they came with the outcomes."""
    if name in (outcomes.records.dtype.names or ()):
        return outcomes.records[name]
    states = getattr(share, name)
    return _pieces(channel, widened(states, outcomes.t.shape[-1]) if name == "u" else states, outcomes, 0)


def _pieces(channel: Channel, x: Array, outcomes: RankOutcomes, axis: int) -> Array:
    if is_device_array(getval(x)):
        return mpi_allgather(x, axis=axis, comm=channel.user)
    return gather_pieces(x, axis, outcomes.headers.counts, channel)


class _Placeholder:
    """Placeholder for a numeric leaf; the numbers of all leaves are sent in one array."""

    def __init__(self, leaf: Array):
        self.spec = Spec(*spec_like(leaf)[:2])


def trees_of_all(channel: Channel, comm: Comm, tree: Tree) -> list[Tree]:
    """Return the pytrees of all ranks; collective, and differentiable with respect to their numbers."""
    leaves, build = flatten(tree)
    numbers = [leaf for leaf in leaves if is_variable(leaf)]
    places = [_Placeholder(leaf) if is_variable(leaf) else leaf for leaf in leaves]
    # The pytree with placeholders is pickled first, so that all ranks can raise an error.
    try:
        pickled, error = pickle.dumps(build(places), pickle.HIGHEST_PROTOCOL), None
    except FAILURES as failure:  # raised on all ranks together
        text = f"the results of output_func or reduction are sent to all ranks, but can't be pickled ({failure})"
        advice = "Return numbers, arrays or texts of a solution, or pass EnsembleMPI(gather=False)."
        pickled, error = b"", TypeError(f"solve: {text}. {advice}")
    pickles = channel.data.allgather(pickled)
    if not all(pickles):
        raise_first(channel, error)
    flat = [flatten(pickle.loads(text)) for text in pickles]
    everything = Concatenation([part.spec for parts, _ in flat for part in parts if isinstance(part, _Placeholder)])
    vector = Concatenation([spec_like(number) for number in numbers]).vector(numbers).astype(everything.dtype)
    values = iter(everything.parts(mpi_allgather(vector, axis=0, comm=comm)))
    return [make([next(values)[()] if isinstance(part, _Placeholder) else part for part in parts]) for parts, make in flat]


@dataclass
class ShardedSolution(EnsembleSolution):
    """A rank's share of the solutions; statistics are computed over the trajectories of all ranks.

    Attributes
    ----------
    indices : array of int
        The numbers of these trajectories among all N, from 0.
    outcomes : RankOutcomes
        The outcomes of all N trajectories.
    comm : mpi4py intracommunicator or None
        A communicator created by the user isn't pickled. Set it after unpickling, before computing statistics.

    Ranks
    -----
    All ranks call mean, std, quantile, summary and plot together.
    """

    indices: Array = dataclasses.field(default_factory=lambda: np.empty(0, int))
    outcomes: Any = None
    comm: Comm = None

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "comm": PickledCommunicator(self.comm)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, comm=state["comm"].comm)

    @property
    def _present_comm(self) -> Comm:
        return present(self.comm, "EnsembleSolution", "Set sol.comm to a communicator of the same ranks, on all of them.")

    def _sum(self, values: Array) -> Array:
        return mpi_allreduce(super()._sum(values), comm=self._present_comm)

    def quantile(self, q: float | list[float]) -> Array:
        """Return quantiles over the survivors of all ranks; see `EnsembleSolution.quantile`."""
        return quantile(mpi_allgather(self._surviving(), axis=0, comm=self._present_comm), q)

    def summary(self) -> str:
        """Return a text about the trajectories of all ranks; see `EnsembleSolution.summary`."""
        ends = mpi_allgather(self.u_end, axis=0, comm=self._present_comm)
        f = self.outcomes
        return EnsembleSolution(ends, f.t, ends, f.retcode, f.nf, f.naccept, f.nreject, f.nf).summary()


def sharded(
    share: EnsembleSolution, outcomes: RankOutcomes, comm: Comm, indices: Array, has_outputs: bool = False
) -> ShardedSolution:
    """Return this rank's share; `has_outputs`: whether its u is the result of an `output_func` or a `reduction`."""
    sol = object.__new__(ShardedSolution)
    # A copy of `__dict__`, since passing the deferred attributes to the constructor would compute them.
    sol.__dict__.update(share.__dict__, _later=dict(share._later), indices=indices, outcomes=outcomes, comm=comm)
    if not has_outputs:
        # Statistics require the same number of saved times on all ranks.
        if not outcomes.headers.ends:
            sol.u = widened(share.u, outcomes.t.shape[-1])
        sol.t = outcomes.t if outcomes.t.ndim == 1 else outcomes.t[indices]
    return sol


# The measured overhead of an iteration of the step loop for an inexpensive f, without and with tangents, in units of the
# cost of one component of one column. In kernels the overhead is the cost of as many steps as there are lanes.
_ITERATION, _TRACED_ITERATION, _LANES = 1200.0, 1500.0, 16.0
# The measured cost of entering and leaving the working set or a kernel's lane, per trajectory, in units of the cost of a
# step: without kernels, with kernels, and with tangents in kernels.
_ENTRY, _LANE_ENTRY, _TRACED_LANE_ENTRY = 2.0, 9.0, 7.0
# Number of blocks per share. Shares consist of whole blocks, so their boundaries are rounded to 0.1 % of the mean size.
_BLOCKS = 1024
_MOST_DIVISIONS = 8


class EnsembleMPI(EnsembleAlgorithm):
    """Backend that solves a contiguous share of the trajectories per rank, balanced by the last solve's numbers of steps.

    Parameters
    ----------
    inner : EnsembleAlgorithm
        The algorithm by which a rank solves its share; `EnsembleVectorized` by default.
    gather : bool
        Whether every rank gets all N solutions. Otherwise a rank gets its share, the trajectories ``sol.indices``; mean,
        standard deviation, quantiles and summary are still over all N. Every rank gets the solution of a single ODEProblem.
    comm : mpi4py intracommunicator, optional

    Raises
    ------
    TypeError
        If `inner` isn't an ensemble algorithm, or is an `EnsembleMPI`.

    Notes
    -----
    Reuse the object for the next solve of an ensemble of this size: it computes new shares from the number of steps of each
    trajectory. With ``gather=False`` select each rank's data by the ``sol.indices`` of that solve. In residuals for
    `least_squares` create a new object per solve, since the number of a rank's residuals must not change.

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
        self._tries, self._entry, self._iteration = np.empty(0), _ENTRY, _ITERATION
        self._bounds: Array = None  # for these costs, if they have been computed

    def __repr__(self) -> str:
        return f"EnsembleMPI({self.inner!r}, gather={self.gather})"

    def bounds(self, count: int, size: int) -> Array:
        """Return the first indices of the ranks' shares and, last, the number of trajectories; the same on all ranks."""
        # If no costs are known yet, shares have equal numbers of trajectories.
        if len(self._tries) != count or not count:
            return np.arange(size + 1) * count // size
        if self._bounds is None or len(self._bounds) != size + 1:
            self._bounds = _balanced(self._tries, self._entry, self._iteration, size)
        return self._bounds

    def remember(self, tries: Array, components: int, compiled: bool = False, traced: bool = False) -> None:
        """Store the numbers of tried steps, shape (N,), as costs; `components`: the number of components of a state."""
        lane = _TRACED_LANE_ENTRY if traced else _LANE_ENTRY
        entry = lane if compiled else _ENTRY
        iteration = _LANES if compiled else (_TRACED_ITERATION if traced else _ITERATION) / max(1, components)
        if (entry, iteration) != (self._entry, self._iteration) or tries.tobytes() != self._tries.tobytes():
            self._tries, self._entry, self._iteration, self._bounds = tries, entry, iteration, None


def _balanced(steps: Array, entry: float, iteration: float, size: int) -> Array:
    """Return the first indices of `size` shares, and the number of trajectories; the unit of costs is a step."""
    starts = np.arange(0, len(steps), max(1, len(steps) // (_BLOCKS * size)))
    edges = np.append(starts, len(steps))
    costs, longest = np.add.reduceat(steps, starts) + entry * np.diff(edges), np.maximum.reduceat(steps, starts) + entry
    done = np.cumsum(costs)

    def divided(extra: Array) -> Array:
        """Return the boundaries of shares, as indices of blocks, for which the costs plus the `extra` costs are equal."""
        targets = np.cumsum(np.maximum((done[-1] + extra.sum()) / size - extra, 0.0))[:-1]
        targets = np.minimum(targets, done[-1])  # targets are clipped at zero, so their sum may exceed the total
        inner = np.searchsorted(done, targets)
        # Choose the boundary of the block that is closer to the target.
        inner += done[inner] - targets < targets - (done[inner] - costs[inner])
        return np.concatenate([[0], np.maximum.accumulate(inner), [len(done)]])

    def iterations(shares: Array) -> Array:
        """Return the costs of the iterations of each share."""
        filled, longest_of_shares = np.diff(shares) > 0, np.zeros(size)
        # reduceat has no empty groups.
        longest_of_shares[filled] = np.maximum.reduceat(longest, shares[:-1][filled])
        return iteration * longest_of_shares

    def slowest(shares: Array) -> float:
        return float((np.diff(np.append(0.0, done)[shares]) + iterations(shares)).max())

    extra = np.zeros(size)
    best = shares = divided(extra)
    for _ in range(_MOST_DIVISIONS):
        # Damping keeps the longest trajectory from moving back and forth between two shares.
        before, extra = shares, (extra + iterations(shares)) / 2
        shares = divided(extra)
        if np.array_equal(shares, before):
            break
        best = min(best, shares, key=slowest)
    return edges[best]
