"""`report`: what was communicated where in the program, how long the ranks waited for each other, and how unevenly."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import IO, NamedTuple

import numpy as np

from mpiad.debug.recording import Recording, latest
from mpiad.debug.waits import wait_times
from mpiad.primitives.operation import suspended
from mpiad.transport import channel

__all__ = ["Report", "Row", "report"]

_NOTHING = "nothing was recorded. Run it under MPIAD_TRACE=file.json, or put it into `with mpiad.debug.recorded():`."


class Row(NamedTuple):
    """What one operation at one line of the program did; arrays have an entry for each rank.

    Attributes
    ----------
    operation : str
        As ``"mpi_bcast"``, ``"adjoint of mpi_bcast"``.
    site : str
        The line of the forward call.
    calls : array of int, shape (P,)
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
        return _imbalance(self.waited)


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

    def __str__(self) -> str:
        return _text(self) if self.rows else f"mpiad: {_NOTHING}"


def report(file: IO[str] | None = None) -> Report:
    """Print what was communicated, by operation and line of the program and by rank.

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
    with suspended():
        found = Report([], np.zeros(0), 0) if recording is None else _collected(recording)
    if rank == 0:
        out = sys.stdout if file is None else file
        out.write(f"{found}\n")
        out.flush()
    return found


_COLUMNS = 5


def _collected(recording: Recording) -> Report:
    recorder = recording.recorder
    # An adjoint is made of operations: counted with them, its time would count twice.
    events = [event for event in recorder.events if event.innermost]
    with recording.compared() as (comm, clock):
        waits = wait_times(events, clock, comm)
        mine: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * _COLUMNS)
        for event, waited in zip(events, waits):
            # What a wait completes was counted at its start.
            nbytes = 0 if event.operation in ("mpi_wait", "mpi_waitall") else event.arguments.nbytes
            row = mine[event.name, event.forward_site or event.site]
            for column, value in enumerate((1, len(event.messages), nbytes, event.ended - event.began, waited)):
                row[column] += value
        every = comm.allgather((dict(mine), recorder.elapsed, recorder.dropped))
    keys = dict.fromkeys(key for rows, _, _ in every for key in rows)
    rows = [_row(key, np.array([part.get(key, [0.0] * _COLUMNS) for part, _, _ in every])) for key in keys]
    rows.sort(key=lambda row: (-row.waited.sum(), -row.seconds.sum()))
    return Report(rows, np.array([elapsed for _, elapsed, _ in every]), sum(dropped for _, _, dropped in every))


def _row(key: tuple[str, str], columns: np.ndarray) -> Row:
    calls, messages, nbytes = columns[:, :3].astype(np.int64).T
    return Row(*key, calls, messages, nbytes, columns[:, 3], columns[:, 4])


def _imbalance(values: np.ndarray) -> float:
    mean = values.mean() if values.size else 0.0
    return float(values.max() / mean) if mean > 0 else 0.0


def _text(found: Report) -> str:
    ranks = len(found.elapsed)
    columns = zip(*[(row.calls, row.messages, row.nbytes, row.seconds, row.waited) for row in found.rows])
    totals = [np.sum(column, axis=0) for column in columns]
    lines = [f"communication of {ranks} rank{'s' * (ranks > 1)} in {found.elapsed.max():.3g} s"]
    lines[0] += f" ({found.dropped} more calls were too many to be recorded)" if found.dropped else ""
    by_row = [("operation", "line", "calls", "messages", "bytes", "time", "wait", "longest wait", "max/mean")]
    for row in found.rows:
        longest = f"{_time(row.waited.max())} (rank {row.waited.argmax()})" if row.waited.any() else "-"
        by_row.append((
            row.operation, row.site, str(row.calls.sum()), _or_dash(row.messages.sum()), _bytes(row.nbytes.sum()),
            _time(row.seconds.mean()), _time(row.waited.mean()), longest, f"{row.imbalance:.2f}" if row.imbalance else "-",
        ))  # fmt: skip
    by_rank = [("rank", "calls", "messages", "bytes", "communicating", "of it waiting", "computing")]
    for rank in range(ranks):
        calls, messages, nbytes, seconds, waited = (total[rank] for total in totals)
        by_rank.append((
            str(rank), str(calls), _or_dash(messages), _bytes(nbytes), _time(seconds), _time(waited),
            _time(found.elapsed[rank] - seconds),
        ))  # fmt: skip
    computing = found.elapsed - totals[3]
    uneven = f"max/mean: computing {_imbalance(computing):.2f}, waiting {_imbalance(totals[4]):.2f}"
    return "\n".join([*lines, "", *_table(by_row, 2), "", *_table(by_rank, 0), uneven])


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
