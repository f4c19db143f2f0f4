"""`report`: communication, computation and waits of the ranks, by line of the program, with advice."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import IO, NamedTuple, TypeVar

import numpy as np

from mpiad._typing import Comm, Rank
from mpiad.debug.recording import WAITS, Clock, Computation, Event, Message, Place, Recording, computed, latest
from mpiad.primitives.operation import suspended
from mpiad.transport import channel
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.watch.call_agreement import FROM_ROOT, STARTS, TO_ROOT, aligned

K = TypeVar("K")

# The time that a rank waits in each communication for other ranks to begin the communication.
#
# MPI doesn't report how long a call waits, but the time at which each rank began the call is known. A receiver waits until
# its sender begins to send. A rank that receives data from all ranks waits until the last rank begins, and a rank that
# receives data from the root waits until the root begins. The wait lasts from the start of the rank's own call until then,
# but at most as long as the call; the rest of the call counts as transfer. Sends and the starts of nonblocking operations
# don't wait. The completion of a nonblocking send or reduction counts entirely as wait, since the rank does no other work.
#
# The times of different ranks are converted to one clock, with an error of a few microseconds.


class _Arrival(NamedTuple):
    """The start of a collective on one rank; the first three fields are the same on all ranks of the call."""

    communicator: str
    operation: str
    number: int  # the number of earlier calls of this operation on this communicator
    rank: Rank  # in the world
    began: float
    root: Rank | None  # in the world; None if the collective has no root


def wait_times(events: Sequence[Event], clock: Clock, comm: Comm) -> list[float]:
    """Return this rank's wait in seconds in each of these innermost communications; collective over the world."""
    sent, waits = _sends(events, clock, comm), []
    arrivals = _arrivals(events, clock, comm.rank)
    # The first rank of each communicator compares the arrivals, so that no rank stores the arrivals of all communicators.
    latest_starts = _latest(arrivals, {k: events[k].arguments.members[0] for k in arrivals}, comm)
    for k, event in enumerate(events):
        duration = event.ended - event.began
        awaited = [sent[message] for message in event.messages if message in sent]
        awaited += [latest_starts[k]] if k in latest_starts else []
        if awaited:
            waits.append(min(max(max(awaited) - clock(event.began), 0.0), duration))
        else:
            waits.append(duration if event.operation in WAITS and not event.messages else 0.0)
    return waits


def _sends(events: Sequence[Event], clock: Clock, comm: Comm) -> dict[Message, float]:
    """Return the sending times of the messages that this rank received."""
    outgoing: list[list[tuple[Message, float]]] = [[] for _ in range(comm.size)]
    for event in events:
        for message in event.messages:
            if message.outgoing:
                outgoing[message.dest].append((message._replace(outgoing=False), clock(event.began)))
    return dict(pair for pairs in comm.alltoall(outgoing) for pair in pairs)


def _arrivals(events: Sequence[Event], clock: Clock, rank: Rank) -> dict[int, _Arrival]:
    """Return this rank's arrivals at collectives, by the indices of their events."""
    counts: Counter[tuple[str, str]] = Counter()
    arrivals = {}
    for k, event in enumerate(events):
        arguments, name = event.arguments, event.operation
        if not arguments.members or event.messages or name in STARTS or name in WAITS or arguments.peer is not None:
            continue
        kind = (arguments.communicator or "", name)
        root = None if arguments.root is None else arguments.members[arguments.root]
        # All ranks of a communicator call its collectives in the same order, so equal counts identify the same call.
        arrivals[k] = _Arrival(*kind, counts[kind], rank, clock(event.began), root)
        counts[kind] += 1
    return arrivals


def _latest(arrivals: dict[int, _Arrival], owners: dict[int, Rank], comm: Comm) -> dict[int, float]:
    """Return, by event index, the latest start among the ranks that this rank waits for; `owners[k]` compares event k."""
    indices: list[list[int]] = [[] for _ in range(comm.size)]
    for k, owner in owners.items():
        indices[owner].append(k)
    received = comm.alltoall([[arrivals[k] for k in chosen] for chosen in indices])
    began: dict[tuple, dict[Rank, float]] = defaultdict(dict)
    for arrival in (arrival for part in received for arrival in part):
        began[arrival[:3]][arrival.rank] = arrival.began
    replies = comm.alltoall([[_awaited(arrival, began[arrival[:3]]) for arrival in part] for part in received])
    return {k: time for chosen, times in zip(indices, replies) for k, time in zip(chosen, times)}


def _awaited(arrival: _Arrival, began: dict[Rank, float]) -> float:
    name, root = arrival.operation, arrival.root
    if root is not None and name in FROM_ROOT:
        return began.get(root, arrival.began)
    if root is not None and name in TO_ROOT and arrival.rank != root:
        # A rank other than the root only sends, without waiting.
        return arrival.began
    return max(began.values())


# Thresholds for advice: fractions of the time, and ratios.
_WAITING, _TRANSFER, _COMPUTING, _UNEVEN, _BACKWARD = 0.1, 0.2, 0.5, 1.2, 5.0
_SMALL_MESSAGE = 10_000  # bytes; smaller messages take about as long as empty messages


def advice(result: Report) -> list[str]:
    """Return advice on the largest costs, or one line if no cost is large."""
    communicating, waiting = _spent(result)
    computing = result.elapsed - communicating
    lines = [
        *_waits(result, waiting, computing),
        *_transfer(result, communicating - waiting),
        *_computing(result, computing),
    ]
    if result.dropped:
        lines.append(f"{result.dropped} calls or phases weren't recorded: the recording was full. Record fewer iterations.")
    return lines or ["nothing stands out: the ranks compute for equal times, and neither wait nor communicate for long."]


def _spent(result: Report) -> np.ndarray:
    """Return the seconds of each rank in communications, and the part in which it waited, shape (2, P)."""
    return np.sum([(row.seconds, row.waited) for row in result.rows], axis=0)


def _waits(result: Report, waiting: np.ndarray, computing: np.ndarray) -> Iterator[str]:
    share = _share(waiting, result)
    if share < _WAITING:
        return
    slow, ratio = int(computing.argmax()), over_mean(computing)
    if ratio < _UNEVEN:
        yield (
            f"the ranks wait {share:.0%} of the time, most of it in {_line(result.rows[0])}, though all compute for "
            "about equal times: the late rank varies. Bind each rank to a separate core (check with "
            "`python -m mpiad`)."
        )
        return
    worst = max(result.computing, key=lambda each: each.seconds[slow] - each.seconds.mean(), default=None)
    part = "" if worst is None else f", above all {_site(worst)}"
    yield (
        f"load imbalance: rank {slow} computes {ratio:.1f} times as long as the mean{part}, and the ranks wait "
        f"{share:.0%} of the time. Divide the work differently."
    )


def _transfer(result: Report, transferring: np.ndarray) -> Iterator[str]:
    share, busiest = _share(transferring, result), max(result.rows, key=lambda row: (row.seconds - row.waited).sum())
    calls = int(busiest.calls.sum())
    if share < _TRANSFER or not calls:
        return
    size = busiest.nbytes.sum() / calls
    remedy = "Bandwidth: send less, or let it overlap with computing (`begin_exchange`, `mpi_isend`, `mpi_iallreduce`)"
    if size < _SMALL_MESSAGE:
        remedy = "Latency: send several arrays in one message, and less often (wider halos, a vector instead of numbers)"
    yield (
        f"communication without waits takes {share:.0%} of the time, most of it in {_line(busiest)}: {calls} "
        f"calls of {size:.0f} bytes. {remedy}."
    )


def _computing(result: Report, computing: np.ndarray) -> Iterator[str]:
    computations, whole = result.computing, result.elapsed.mean()
    forward, backward = (
        sum(each.seconds.mean() for each in computations if each.place.phase == phase) for phase in ("forward", "backward")
    )
    share = _share(computing, result)
    if share >= _COMPUTING and computations:
        longest = max(computations, key=lambda each: each.seconds.mean())
        part = longest.seconds.mean() / whole
        yield f"computing takes {share:.0%} of the time, {part:.0%} {_site(longest)}. If it isn't compiled: `mpiad.jit`."
    if backward > _BACKWARD * forward and backward > 0.1 * whole:
        yield (
            f"the backward pass computes {backward / forward if forward else np.inf:.0f} times as long as the forward one: "
            "use more checkpoints in `scan`, use `scan(jit(step))`, or replace iterations by one of the library's solvers."
        )


def _line(row: Row) -> str:
    return f"{row.operation} at {row.site}"


def _site(computation: Computation) -> str:
    phase, after, until = computation.place
    place = after if after.startswith("inside") else f"in the loop around {after}" if after == until else ""
    return f"{place or f'from {after} to {until}'} ({phase})"


def _share(seconds: np.ndarray, result: Report) -> float:
    whole = result.elapsed.mean()
    return float(seconds.mean() / whole) if whole > 0 else 0.0


def over_mean(values: np.ndarray) -> float:
    """Return the largest value divided by the mean; 0 if the mean isn't positive."""
    mean = values.mean() if values.size else 0.0
    return float(values.max() / mean) if mean > 0 else 0.0


_NO_RECORDING = (
    "nothing was recorded. Run the program with MPIAD_TRACE=file.json, or a part of it in `with mpiad.debug.recorded():`."
)


class Row(NamedTuple):
    """The communication in all calls of one function at one line of the program; arrays have an entry per rank.

    Attributes
    ----------
    operation : str
        The library function that the program calls, for example ``"mpi_bcast"``, ``"exchange"``, ``"adjoint of exchange"``.
    site : str
        The line of the forward call.
    calls : array of int, shape (P,)
        The number of calls of the function; several independent communications in one call are counted separately.
    messages : array of int, shape (P,)
        The number of point-to-point messages that these calls sent and received.
    nbytes : array of int, shape (P,)
        The number of bytes of the arrays that were passed to or received in these calls.
    seconds : array, shape (P,)
        The time of the communication in the calls, without computation between several communications in one call.
    waited : array, shape (P,)
        The part of `seconds` in which the rank waited: for other ranks to begin their calls, or for the end of a
        nonblocking send or reduction.

    Examples
    --------
    >>> import io
    >>> rank = mpiad.mpi_rank()
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
        """The longest wait of a rank divided by the mean wait: 1 if all ranks wait equally long, 0 if none waits."""
        return over_mean(self.waited)


class Report(NamedTuple):
    """The communication of all ranks; ``str(report)`` is the printed text.

    Attributes
    ----------
    rows : list of Row
        The rows in descending order of the total wait.
    elapsed : array, shape (P,)
        The duration of the recording on each rank, in seconds.
    dropped : int
        The number of communications and phases beyond the maximum, which weren't recorded.
    computing : list of Computation
        The computations between two successive communications, in descending order of the total time. Attributes: `place`
        (`phase`, and the lines of the communications, `after` and `until`), and `seconds`, an array with an entry per rank.

    Examples
    --------
    >>> import io
    >>> size = mpiad.mpi_size()
    >>> with mpiad.debug.recorded():
    ...     _ = mpiad.grad(lambda x: mpiad.mpi_allreduce(x**2))(1.0)
    >>> found = mpiad.debug.report(file=io.StringIO())
    >>> print(sorted(row.operation for row in found.rows), found.elapsed.shape == (size,), found.dropped)
    ['adjoint of mpi_allreduce', 'mpi_allreduce', 'value_and_grad'] True 0
    """

    rows: list[Row]
    elapsed: np.ndarray
    dropped: int
    computing: list[Computation]

    @property
    def advice(self) -> list[str]:
        """Advice on the largest costs, one or two sentences each."""
        return advice(self) if self.rows else []

    def __str__(self) -> str:
        return _text(self) if self.rows else f"mpiad: {_NO_RECORDING}"


def report(file: IO[str] | None = None) -> Report:
    """Print the communication and computation, by line of the program and by rank, with advice.

    Parameters
    ----------
    file : file, optional
        The output file on rank 0, which prints the report; standard output by default.

    Returns
    -------
    Report
        The report, the same on all ranks.

    Ranks
    -----
    All ranks of the world call it.

    Notes
    -----
    The report covers the active recording (of ``MPIAD_TRACE``, `recorded` or `traced`), or otherwise the last recording.

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
        result = Report([], np.zeros(0), 0, []) if recording is None else _gathered(recording)
    if rank == 0:
        out = sys.stdout if file is None else file
        out.write(f"{result}\n")
        out.flush()
    return result


_COLUMNS = 5


def _gathered(recording: Recording) -> Report:
    recorder, recorded = recording.recorder, recording.recorder.events
    # Only innermost communications are timed, since the time of an adjoint includes the operations in it.
    events = [event for event in recorded if event.innermost]
    with recording.exchange() as (comm, clock):
        local_rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * _COLUMNS)
        for event in recorded:
            if event.outermost and event.direction != "phase":
                local_rows[_key(event)][0] += 1
        for event, waited in zip(events, wait_times(events, clock, comm)):
            # The bytes of a request are counted at its start.
            nbytes = 0 if event.operation in WAITS else event.arguments.nbytes
            row = local_rows[_key(event)]
            for column, value in enumerate((len(event.messages), nbytes, event.ended - event.began, waited), 1):
                row[column] += value
        # Each rank first sums over its events, so that it sends a few hundred rows instead of all events.
        from_all = comm.allgather((dict(local_rows), computed(recorder, recorded), recorder.elapsed, recorder.dropped))
    by_rank = _by_rank([part[0] for part in from_all], [0.0] * _COLUMNS)
    rows = [Row(*key, *columns.T[:3].astype(np.int64), *columns.T[3:]) for key, columns in by_rank]
    # Sorted by the wait, since waits can be avoided, but transfers may be necessary.
    rows.sort(key=lambda row: (-row.waited.sum(), -row.seconds.sum()))
    computing = [Computation(Place(*place), seconds) for place, seconds in _by_rank([part[1] for part in from_all], 0.0)]
    computing.sort(key=lambda each: -each.seconds.sum())
    _, _, elapsed, dropped = zip(*from_all)
    return Report(rows, np.array(elapsed), sum(dropped), computing)


def _key(event: Event) -> tuple[str, str]:
    return event.called, event.forward_site or event.site


def _by_rank(parts: list[dict[K, float | list[float]]], default: object) -> list[tuple[K, np.ndarray]]:
    """Return an array with an entry per rank for each key that any rank has; `default` for ranks without the key."""
    # A dict, because the order of a set differs between ranks.
    keys = dict.fromkeys(key for part in parts for key in part)
    return [(key, np.array([part.get(key, default) for part in parts])) for key in keys]


def _text(result: Report) -> str:
    (communicating, waiting), ranks = _spent(result), len(result.elapsed)
    head = f"communication of {ranks} rank{'s' * (ranks > 1)} in {result.elapsed.max():.3g} s"
    ratio = f"max/mean: computing {over_mean(result.elapsed - communicating):.2f}, waiting {over_mean(waiting):.2f}"
    advice_lines = [fill(line, 120, initial_indent="- ", subsequent_indent="  ") for line in result.advice]
    parts = [aligned(_communication(result.rows), 2), [*aligned(_ranks(result), 0), ratio]]
    lines, shown = [("computing", "after line", "until line", "time", "longest", "max/mean")], result.computing[:_MAX_ROWS]
    if rest := result.computing[_MAX_ROWS:]:
        shown.append(Computation(Place(f"{len(rest)} others", "", ""), np.sum([each.seconds for each in rest], axis=0)))
    for (phase, after, until), seconds in shown:
        lines.append((phase, after, until, _time(seconds.mean()), _longest(seconds), f"{over_mean(seconds):.2f}"))
    parts += [aligned(lines, 3), advice_lines]
    return "\n\n".join([head, *map("\n".join, parts)])


def _communication(rows: list[Row]) -> list[tuple[str, ...]]:
    lines = [("operation", "line", "calls", "messages", "bytes", "time", "wait", "longest wait", "max/mean")]
    for row in rows:
        counts = str(row.calls.sum()), str(row.messages.sum() or "-"), _bytes(row.nbytes.sum())
        times = _time(row.seconds.mean()), _time(row.waited.mean()), _longest(row.waited)
        lines.append((row.operation, row.site, *counts, *times, f"{row.imbalance:.2f}" if row.imbalance else "-"))
    return lines


def _ranks(result: Report) -> list[tuple[str, ...]]:
    counts = np.sum([(row.calls, row.messages, row.nbytes) for row in result.rows], axis=0)
    lines = [("rank", "calls", "messages", "bytes", "communicating", "incl. waiting", "computing")]
    for rank, (elapsed, seconds, waited) in enumerate(zip(result.elapsed, *_spent(result))):
        calls, messages, nbytes = counts[:, rank]
        times = _time(seconds), _time(waited), _time(elapsed - seconds)
        lines.append((str(rank), str(calls), str(messages or "-"), _bytes(nbytes), *times))
    return lines


_MAX_ROWS = 8  # rows of computation; the remaining rows are summed in one row


def _longest(seconds: np.ndarray) -> str:
    return f"{_time(seconds.max())} (rank {seconds.argmax()})" if seconds.any() else "-"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.3f} s"


def _bytes(count: float) -> str:
    power = min(int(np.log10(max(count, 1))) // 3, 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
