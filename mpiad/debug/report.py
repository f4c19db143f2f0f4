"""`report`: what was communicated and computed where in the program, how long the ranks waited, and what to do."""

from __future__ import annotations

import sys
from collections import defaultdict
from textwrap import fill
from typing import IO, Any, NamedTuple

import numpy as np

from mpiad.debug.advice import Totals, advice, over_mean
from mpiad.debug.computing import Place, Stretch, computed
from mpiad.debug.recorder import Event
from mpiad.debug.recording import Recording, latest
from mpiad.debug.waits import wait_times
from mpiad.primitives.operation import suspended
from mpiad.transport import channel
from mpiad.transport.tracing import restoring_state

_NOTHING = "nothing was recorded. Run it under MPIAD_TRACE=file.json, or put it into `with mpiad.debug.recorded():`."


class Row(NamedTuple):
    """What one call at one line of the program communicated; arrays have an entry for each rank.

    Attributes
    ----------
    operation : str
        The library's function that the program calls there: ``"mpi_bcast"``, ``"exchange"``, ``"adjoint of exchange"``.
    site : str
        The line of the forward call.
    calls : array of int, shape (P,)
        Of that function, or of the communications that it makes where these are no single operation.
    messages : array of int, shape (P,)
        Between two ranks; those that left and those that came.
    nbytes : array of int, shape (P,)
        Of the arrays that it was called with (of a receive, the one received).
    seconds : array, shape (P,)
        Inside the calls.
    waited : array, shape (P,)
        Of these, until those it depends on had begun.

    Examples
    --------
    >>> import io
    >>> with mpiad.debug.recorded():
    ...     for k in range(3):
    ...         total = mpiad.mpi_allreduce(1.0)
    >>> (row,) = mpiad.debug.report(file=io.StringIO()).rows
    >>> print(row.operation, row.calls[rank])
    mpi_allreduce 3
    """

    operation: str
    site: str
    calls: np.ndarray
    messages: np.ndarray
    nbytes: np.ndarray
    seconds: np.ndarray
    waited: np.ndarray

    @property
    def imbalance(self) -> float:
        """The largest wait of a rank over the mean; 1 where all wait alike, 0 where nobody does."""
        return over_mean(self.waited)


class Report(NamedTuple):
    """What all ranks communicated; `str` of it is the table.

    Attributes
    ----------
    rows : list of Row
        Those that were waited in longest first.
    elapsed : array, shape (P,)
        Seconds that each rank recorded.
    dropped : int
        Communications that were too many to be recorded.
    computing : list of Stretch
        What was computed between which lines: a `place` (`phase`, `after`, `until`) and the ranks' `seconds`, the longest
        first.

    Examples
    --------
    >>> import io
    >>> with mpiad.debug.recorded():
    ...     _ = mpiad.grad(lambda x: mpiad.mpi_allreduce(x**2))(1.0)
    >>> found = mpiad.debug.report(file=io.StringIO())
    >>> print(sorted(row.operation for row in found.rows), found.elapsed.shape == (size,), found.dropped)
    ['adjoint of mpi_allreduce', 'mpi_allreduce', 'value_and_grad'] True 0
    """

    rows: list[Row]
    elapsed: np.ndarray
    dropped: int
    computing: list[Stretch]

    @property
    def advice(self) -> list[str]:
        """What to do about what takes the time, one sentence or two for each."""
        return advice(_totals(self), self.computing) if self.rows else []

    def __str__(self) -> str:
        return _text(self) if self.rows else f"mpiad: {_NOTHING}"


def report(file: IO[str] | None = None) -> Report:
    """Print what was communicated and computed, by line of the program and by rank, and what to do about it.

    Parameters
    ----------
    file : file, optional
        Of rank 0, which prints; standard output by default.

    Returns
    -------
    Report
        The same on all ranks.

    Ranks
    -----
    All ranks of the world call it.

    Notes
    -----
    Of what is recorded now (``MPIAD_TRACE``, or inside `recorded` or `traced`), else of the block that
    was recorded last.

    Examples
    --------
    >>> import io
    >>> with mpiad.debug.recorded():
    ...     total = mpiad.mpi_allreduce(np.ones(4))
    >>> found = mpiad.debug.report(file=io.StringIO())
    >>> print([(row.operation, int(row.nbytes[0])) for row in found.rows])
    [('mpi_allreduce', 32)]
    """
    recording, rank = latest(), channel(None, "report").rank
    with restoring_state(), suspended():
        found = Report([], np.zeros(0), 0, []) if recording is None else _collected(recording)
    if rank == 0:
        out = sys.stdout if file is None else file
        out.write(f"{found}\n")
        out.flush()
    return found


_COLUMNS = 5


def _collected(recording: Recording) -> Report:
    recorder, recorded = recording.recorder, recording.recorder.events
    # An adjoint is made of operations: counted with them, its time would count twice.
    events = [event for event in recorded if event.innermost]
    with recording.compared() as (comm, clock):
        mine: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * _COLUMNS)
        for event in recorded:
            if event.outermost and event.direction != "phase":
                mine[_key(event)][0] += 1
        for event, waited in zip(events, wait_times(events, clock, comm)):
            # What a wait completes was counted at its start.
            nbytes = 0 if event.operation in ("mpi_wait", "mpi_waitall") else event.arguments.nbytes
            row = mine[_key(event)]
            for column, value in enumerate((len(event.messages), nbytes, event.ended - event.began, waited), 1):
                row[column] += value
        # Summed up on each rank: some hundred lines travel, and not every event.
        every = comm.allgather((dict(mine), computed(recorder, recorded), recorder.elapsed, recorder.dropped))
    rows = [_row(key, columns) for key, columns in _by_rank([part[0] for part in every], [0.0] * _COLUMNS)]
    # The longest wait first: it is what can be gained, where time spent in messages may be their size.
    rows.sort(key=lambda row: (-row.waited.sum(), -row.seconds.sum()))
    computing = [Stretch(Place(*place), seconds) for place, seconds in _by_rank([part[1] for part in every], 0.0)]
    computing.sort(key=lambda each: -each.seconds.sum())
    _, _, elapsed, dropped = zip(*every)
    return Report(rows, np.array(elapsed), sum(dropped), computing)


def _key(event: Event) -> tuple[str, str]:
    return event.called, event.forward_site or event.site


def _by_rank(parts: list[dict], nothing: object) -> list[tuple[Any, np.ndarray]]:
    """Return the ranks' values of each key that any of them has."""
    # In the order of ranks, and not as a set, so that all ranks have the same rows.
    keys = dict.fromkeys(key for part in parts for key in part)
    return [(key, np.array([part.get(key, nothing) for part in parts])) for key in keys]


def _row(key: tuple[str, str], columns: np.ndarray) -> Row:
    calls, messages, nbytes = columns[:, :3].astype(np.int64).T
    return Row(*key, calls, messages, nbytes, columns[:, 3], columns[:, 4])


def _totals(found: Report) -> Totals:
    communicating, waiting = (sum(each) for each in zip(*[(row.seconds, row.waited) for row in found.rows]))
    busiest = max(found.rows, key=lambda row: (row.seconds - row.waited).sum())
    where = [f"{row.operation} at {row.site}" for row in (busiest, found.rows[0])]
    return Totals(
        found.elapsed, np.asarray(communicating), np.asarray(waiting), where[0], where[1], int(busiest.calls.sum()),
        int(busiest.nbytes.sum()), found.dropped,
    )  # fmt: skip


def _text(found: Report) -> str:
    totals, ranks = _totals(found), len(found.elapsed)
    head = f"communication of {ranks} rank{'s' * (ranks > 1)} in {found.elapsed.max():.3g} s"
    computing = totals.elapsed - totals.communicating
    uneven = f"max/mean: computing {over_mean(computing):.2f}, waiting {over_mean(totals.waiting):.2f}"
    said = [fill(line, 120, initial_indent="- ", subsequent_indent="  ") for line in found.advice]
    return "\n".join([
        head, "", *_table(_communication(found.rows), 2), "", *_table(_ranks(found, totals), 0), uneven, "",
        *_table(_computation(found), 3), "", *said,
    ])  # fmt: skip


def _communication(rows: list[Row]) -> list[tuple[str, ...]]:
    lines = [("operation", "line", "calls", "messages", "bytes", "time", "wait", "longest wait", "max/mean")]
    for row in rows:
        lines.append((
            row.operation, row.site, str(row.calls.sum()), _or_dash(row.messages.sum()), _bytes(row.nbytes.sum()),
            _time(row.seconds.mean()), _time(row.waited.mean()), _longest(row.waited),
            f"{row.imbalance:.2f}" if row.imbalance else "-",
        ))  # fmt: skip
    return lines


def _ranks(found: Report, totals: Totals) -> list[tuple[str, ...]]:
    counts = np.sum([(row.calls, row.messages, row.nbytes) for row in found.rows], axis=0)
    lines = [("rank", "calls", "messages", "bytes", "communicating", "of it waiting", "computing")]
    for rank, (elapsed, seconds, waited) in enumerate(zip(found.elapsed, totals.communicating, totals.waiting)):
        calls, messages, nbytes = counts[:, rank]
        lines.append((
            str(rank), str(calls), _or_dash(messages), _bytes(nbytes), _time(seconds), _time(waited),
            _time(elapsed - seconds),
        ))  # fmt: skip
    return lines


_SHOWN = 8  # places; the rest is one line


def _computation(found: Report) -> list[tuple[str, ...]]:
    lines, shown = [("computing", "after line", "until line", "time", "longest", "max/mean")], found.computing[:_SHOWN]
    if rest := found.computing[_SHOWN:]:
        shown.append(Stretch(Place(f"{len(rest)} others", "", ""), np.sum([each.seconds for each in rest], axis=0)))
    for (phase, after, until), seconds in shown:
        lines.append((phase, after, until, _time(seconds.mean()), _longest(seconds), f"{over_mean(seconds):.2f}"))
    return lines


def _longest(seconds: np.ndarray) -> str:
    return f"{_time(seconds.max())} (rank {seconds.argmax()})" if seconds.any() else "-"


def _table(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """Return aligned lines, with so many columns flush left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) if k < left else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]


def _or_dash(count: int) -> str:
    return str(count) if count else "-"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"


def _bytes(count: float) -> str:
    power = min(int(np.log10(max(count, 1))) // 3, 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
