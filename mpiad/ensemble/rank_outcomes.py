"""The outcomes of the trajectories of all ranks, which exchange a few bytes per trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Shape
from mpiad.ensemble.batch import same_for_all
from mpiad.ensemble.events import NO_EVENTS, EventRows
from mpiad.ensemble.outcome import ReturnCode, came_through
from mpiad.ensemble.reduction import check_alike, joined_times
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.transport import Channel
from mpiad.transport.core.agreement import agreed, fingerprint, raise_first


class RankReport(NamedTuple):
    """What ranks must know about each other's solves, besides the outcomes."""

    compiled: bool
    traced: bool
    warnings: str  # about f, for the log
    digest: int  # of the arguments
    not_finite: dict[int, str]  # for some trajectories that failed at the start: see `not_finite_entry`


class _Share(NamedTuple):
    """The data that a rank sends about its trajectories."""

    count: int
    kind: tuple[Shape, np.dtype]  # shape and dtype of a state
    times: int  # a fingerprint of the saved times if they are the same for all trajectories, else 0
    accepted: Array  # numbers of steps, in as few bytes as possible
    rejected: Array
    calls: Array | None  # numbers of calls of f, sent if events occurred, after which f is called again
    codes: Array  # return codes; a single number if all are Success
    reached: Array  # final times; a single number if all are equal
    events: EventRows  # with untraced times
    converged: bool  # whether a reduction ended the solve
    ends: bool  # whether only initial and final states are saved
    report: RankReport


def _joined(name: str, dtype: type) -> cached_property[Array]:
    """Return an attribute, computed on first access: the attribute `name` of all trajectories, shape (N,)."""

    def joined(self: RankOutcomes) -> Array:
        return np.concatenate([np.broadcast_to(getattr(share, name), share.count) for share in self.shares], dtype=dtype)

    return cached_property(joined)


@dataclass(frozen=True)
class RankOutcomes:
    """The outcomes of the trajectories of all ranks: the same on all ranks."""

    shares: list[_Share]
    t: Array  # the saved times, shape (n_saved,) or (N, n_saved)
    calls: Callable[[Array, Array], Array]  # returns the numbers of calls of f, given `naccept` and `nreject`

    codes = _joined("codes", np.int8)  # the numbers of the return codes
    t_reached = _joined("reached", float)  # the final times
    naccept = _joined("accepted", np.int64)  # the numbers of accepted steps
    nreject = _joined("rejected", np.int64)  # the numbers of rejected steps

    @property
    def reports(self) -> list[RankReport]:
        """The reports of all ranks."""
        return [share.report for share in self.shares]

    @property
    def converged(self) -> bool:
        """Whether a reduction ended the solve of any rank."""
        return any(share.converged for share in self.shares)

    @property
    def counts(self) -> list[int]:
        """The number of trajectories per rank."""
        return [share.count for share in self.shares]

    @property
    def ends(self) -> bool:
        """Whether only initial and final states are saved."""
        return all(share.ends for share in self.shares)

    @property
    def events(self) -> EventRows:
        """The events of all trajectories, with untraced times."""
        groups = [share.events for share in self.shares]
        return EventRows.joined(groups, self.counts) if any(len(group.ids) for group in groups) else NO_EVENTS

    @property
    def nf(self) -> Array:
        """Numbers of calls of f, shape (N,)."""
        computed = np.split(self.calls(self.naccept, self.nreject), np.cumsum(self.counts)[:-1])
        calls_of_ranks = [share.calls if share.calls is not None else calls for share, calls in zip(self.shares, computed)]
        return np.concatenate(calls_of_ranks)

    @property
    def survivors(self) -> Array:
        """A mask of the trajectories that didn't fail, shape (N,)."""
        return came_through(self.codes)

    @property
    def retcode(self) -> Array:
        """The names of the return codes, shape (N,)."""
        return ReturnCode.names_of(self.codes)


def outcomes_of_all(
    channel: Channel,
    share: EnsembleSolution | BaseException,
    calls: Callable[[Array, Array], Array],
    report: RankReport,
    compared: Callable[[], dict[str, list[object]]],
    times: Array | None = None,
) -> tuple[EnsembleSolution, RankOutcomes]:
    """Return this rank's solution and all outcomes, or raise any rank's exception on all ranks; collective.

    ``compared()`` returns the arguments of the digest, by name.
    `times`: the saved times of all trajectories, shape (N, n_saved), if they are known.
    """
    # All ranks also raise an error if their states differ in shape or dtype, or the digests of their arguments differ.
    # One digest is sent; those of the single arguments are sent if it differs.
    if isinstance(share, BaseException):
        channel.data.allgather(None)
        raise_first(channel, share)
    shares = channel.data.allgather(_share_of(share, report))
    if any(other is None for other in shares):
        raise_first(channel, None)
    check_alike([other.kind for other in shares], "ranks")
    rank = next((rank for rank, other in enumerate(shares) if other.report.digest != shares[0].report.digest), 0)
    if rank:
        digests = channel.data.allgather({name: fingerprint(*parts) for name, parts in compared().items()})
        names = [name for name, digest in digests[rank].items() if digest != digests[0].get(name)]
        text = f"all ranks must give the same arguments, but rank {rank} has other {', '.join(names)} than rank 0"
        advice = "Draw random numbers with one seed, or broadcast them."
        raise agreed(channel, ValueError(f"solve: {text}, or its functions read other values. {advice}"))
    return share, RankOutcomes(shares, _times(channel, share, shares) if times is None else times, calls)


def _share_of(share: EnsembleSolution, report: RankReport) -> _Share:
    codes, reached = share.codes, getval(share.t_reached)
    return _Share(
        len(share),
        (share.u_end.shape[1:], share.u_end.dtype),
        times=fingerprint(share.t) if share.t.ndim == 1 else 0,
        accepted=_in_few_bytes(share.naccept),
        rejected=_in_few_bytes(share.nreject),
        calls=share.nf if len(share._event_rows.ids) else None,
        codes=np.asarray(codes, np.int8) if codes.any() else np.int8(0),
        reached=reached[0] if len(reached) and same_for_all(reached) else reached,
        events=share._event_rows._replace(times=getval(share._event_rows.times)),
        converged=share.converged,
        ends=share._start is not None,
        report=report,
    )


def _in_few_bytes(counts: Array) -> Array:
    return counts.astype(np.min_scalar_type(counts.max(initial=0)))


def _times(channel: Channel, share: EnsembleSolution, shares: list[_Share]) -> Array:
    if shares[0].times and all(other.times == shares[0].times for other in shares):
        return share.t
    # The times of ranks without trajectories are ignored.
    times = [(t, other.count) for t, other in zip(channel.data.allgather(share.t), shares)]
    busy = [pair for pair in times if pair[1]] or times[:1]
    return joined_times([t for t, _ in busy], [count for _, count in busy], max(t.shape[-1] for t, _ in busy))
