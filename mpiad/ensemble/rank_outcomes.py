"""The outcomes of the trajectories of all ranks, and their untraced results, in two messages.

The first has a fixed length: a few numbers per rank, among them the numbers that determine the layout of the second, which
has one record per trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.ensemble.events import NO_EVENTS, EventRows
from mpiad.ensemble.outcome import ReturnCode
from mpiad.ensemble.reduction import check_alike, joined_times
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.transport import Channel
from mpiad.transport.core.agreement import FAILURES, agreed, fingerprint, raise_first
from mpiad.transport.core.collectives import gather_in_place
from mpiad.transport.devices.device_arrays import is_device_array


class RankReport(NamedTuple):
    """What ranks must know about each other's solves, besides the outcomes."""

    compiled: bool
    warnings: str  # about f, for the log
    digest: int  # of the arguments
    not_finite: dict[int, str]  # for some trajectories that failed at the start: see `not_finite_entry`


class _Header(NamedTuple):
    """The numbers that a rank sends first; all zero but `failed` if its solve raised an exception."""

    failed: int = 0
    digest: int = 0
    kind: int = 0  # a fingerprint of the shape and dtype of a state
    times: int = 0  # a fingerprint of the saved times if they are the same for all trajectories, else 0
    width: int = 0  # the number of saved times
    count: int = 0  # of trajectories
    tries: int = 0  # the largest number of steps of a trajectory
    event_rows: int = 0  # the number of events that occurred
    ends: int = 0  # whether only initial and final states are saved
    converged: int = 0  # whether a reduction ended the solve
    compiled: int = 0
    traced: int = 0
    timed: int = 0  # whether the times of events have derivatives
    on_device: int = 0
    has_texts: int = 0  # whether there are warnings, or texts about failures


_HEADER = np.dtype([(name, np.int64) for name in _Header._fields])


class _Headers(NamedTuple):
    """The headers of all ranks."""

    rows: np.ndarray  # one `_Header` per rank
    combined: _Header  # the numbers of all ranks combined by a bitwise or: zero if they are zero on all ranks
    differing: _Header  # for each number whether it isn't the same on all ranks

    @property
    def ends(self) -> bool:
        """Whether all ranks save only initial and final states."""
        return bool(self.combined.ends and not self.differing.ends)

    @property
    def counts(self) -> list[int]:
        """The number of trajectories per rank."""
        return self.rows["count"].tolist()


_EVENTS = np.dtype([("ids", int), ("events", int), ("times", float)])


class RankOutcomes(EnsembleSolution):
    """The outcomes of the trajectories of all ranks, the same on all ranks: a solution without states.

    Its `t` are the saved times, shape (n_saved,) or (N, n_saved). Its events have untraced times, and are empty if the
    states of all ranks aren't requested.
    """

    headers: _Headers
    # Shape (N,): the return code, the numbers of accepted and rejected steps, and the final time; the number of calls of f
    # if events occurred, after which f is called again; if requested, untraced and on the host, `u_end` and saved states.
    records: np.ndarray
    warnings: list[str]  # of all ranks
    not_finite: dict[int, str]


def outcomes_of_all(
    channel: Channel,
    share: EnsembleSolution | BaseException,
    calls: Callable[[Array, Array], Array],
    report: RankReport,
    compared: Callable[[], dict[str, list[object]]],
    times: Array | None,
    states: tuple[str, ...],
) -> tuple[EnsembleSolution, RankOutcomes]:
    """Return this rank's solution and all outcomes, or raise any rank's exception on all ranks; collective.

    ``compared()`` returns the arguments of the digest, by name.
    `times`: the saved times of all trajectories, shape (N, n_saved), if they are known.
    `states`: the names of the solution's states that all ranks request.
    """
    # All ranks also raise an error if their states differ in shape or dtype, or the digests of their arguments differ.
    # One digest is sent; those of the single arguments are sent if it differs.
    header = _Header(failed=1)
    if not isinstance(share, BaseException):
        try:
            header = _header_of(share, report)  # some results are computed now
        except FAILURES as error:
            share = error
    rows = np.empty((channel.size, len(header)), np.int64)
    channel.data.Allgather(np.array(header, np.int64), rows)
    combined, differing = (_Header(*np.bitwise_or.reduce(bits).tolist()) for bits in (rows, rows ^ rows[0]))
    if isinstance(share, BaseException) or combined.failed:
        raise_first(channel, share if isinstance(share, BaseException) else None)
    headers = _Headers(rows.view(_HEADER)[:, 0], combined, differing)
    if differing.kind:
        check_alike(channel.data.allgather((share.u_end.shape[1:], share.u_end.dtype)), "ranks")
    if differing.digest:
        rank = int(np.argmax(headers.rows["digest"] != headers.rows["digest"][0]))
        digests = channel.data.allgather({name: fingerprint(*parts) for name, parts in compared().items()})
        names = [name for name, digest in digests[rank].items() if digest != digests[0].get(name)]
        text = f"all ranks must give the same arguments, but rank {rank} has other {', '.join(names)} than rank 0"
        advice = "Draw random numbers with one seed, or broadcast them."
        raise agreed(channel, ValueError(f"solve: {text}, or its functions read other values. {advice}"))
    warnings, not_finite = [""] * channel.size, {}
    if combined.has_texts:
        texts = channel.data.allgather((report.warnings, report.not_finite))
        warnings, not_finite = [text for text, _ in texts], {k: text for _, one in texts for k, text in one.items()}
    records, events = _records(channel, share, headers, states), NO_EVENTS
    if states and combined.event_rows:
        events = _events(channel, share, headers)
    if times is None:
        times = share.t if header.times and not differing.times else _times(channel, share, headers)
    naccept, nreject = (records[name].astype(np.int64) for name in ("naccept", "nreject"))
    later: dict[str, Callable[[], object]] = {
        "retcode": lambda: ReturnCode.names_of(records["code"]),
        "t_reached": records["t_reached"].copy,
        "nf": records["nf"].copy if combined.event_rows else lambda: calls(naccept, nreject),
    }
    fields = {"t": times, "u": None, "u_end": None, "naccept": naccept, "nreject": nreject, "_event_rows": events}
    fields |= {"headers": headers, "records": records, "warnings": warnings, "not_finite": not_finite}
    return share, RankOutcomes.lazy(later, **fields, _codes=records["code"].copy())


def _header_of(share: EnsembleSolution, report: RankReport) -> _Header:
    return _Header(
        digest=report.digest,
        kind=_kind_of(share.u_end.shape[1:], share.u_end.dtype.str),
        times=fingerprint(share.t) if share.t.ndim == 1 else 0,
        width=share.t.shape[-1],
        count=len(share),
        tries=max(share.naccept.max(initial=0), share.nreject.max(initial=0)),
        event_rows=len(share._event_rows.ids),
        ends=share._start is not None,
        converged=share.converged,
        compiled=report.compiled,
        traced=isbox(share.u_end),
        timed=isbox(share.t_reached),
        on_device=is_device_array(getval(share.u_end)),
        has_texts=bool(report.warnings or report.not_finite),
    )


_kind_of = lru_cache(64)(fingerprint)


def _records(channel: Channel, share: EnsembleSolution, headers: _Headers, states: tuple[str, ...]) -> np.ndarray:
    """Return the records of all trajectories; collective."""
    combined = headers.combined
    shape, steps = share.u_end.shape[1:], np.min_scalar_type(combined.tries)  # has as many bits as the maximum
    fields: list[Any] = [("t_reached", float)]
    # Traced states, and those on devices, are gathered by operations that have derivatives, or copy between devices.
    if not (combined.traced or combined.on_device):
        width = int(headers.rows["width"].max()) if headers.differing.width else combined.width
        shapes, ends = {"u_end": shape, "u": (width, *shape)}, headers.ends  # then no message with saved states is needed
        fields += [(name, share.u_end.dtype, shapes[name]) for name in states if name == "u_end" or not ends]
    if combined.event_rows:
        fields.append(("nf", np.int64))
    fields += [("naccept", steps), ("nreject", steps), ("code", np.int8)]
    values = {name: getval(getattr(share, "codes" if name == "code" else name)) for name, *_ in fields}
    return _gathered(channel, _layout(tuple(fields)), headers.counts, values)


@lru_cache(64)
def _layout(fields: tuple[Any, ...]) -> np.dtype:
    return np.dtype(list(fields), align=True)


def _events(channel: Channel, share: EnsembleSolution, headers: _Headers) -> EventRows:
    """Return the events of all trajectories, with untraced times; collective."""
    ids, events, times = share._event_rows
    first = sum(headers.counts[: channel.rank])
    values = {"ids": ids + first, "events": events, "times": getval(times)}
    rows = _gathered(channel, _EVENTS, headers.rows["event_rows"].tolist(), values)
    return EventRows(*(rows[name] for name in _EVENTS.names or ()))


def _gathered(channel: Channel, kind: np.dtype, counts: list[int], values: dict[str, Array]) -> np.ndarray:
    """Return the records of all ranks, given the fields of this rank's records; collective."""
    records, first = np.empty(sum(counts), kind), sum(counts[: channel.rank])
    mine = records[first : first + counts[channel.rank]]
    for name, value in values.items():
        field = mine[name]
        if field.shape != value.shape:  # other ranks have more saved times
            field[...] = np.nan
            field = field[:, : value.shape[1]]
        field[...] = value
    gather_in_place(channel, records, counts)
    return records


def _times(channel: Channel, share: EnsembleSolution, headers: _Headers) -> Array:
    # The times of ranks without trajectories are ignored.
    times = list(zip(channel.data.allgather(share.t), headers.counts))
    busy = [pair for pair in times if pair[1]] or times[:1]
    return joined_times([t for t, _ in busy], [count for _, count in busy], max(t.shape[-1] for t, _ in busy))
