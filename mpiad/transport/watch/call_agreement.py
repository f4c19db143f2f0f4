"""Comparison of the ranks' next calls: their descriptions, and an agreement on a separate communicator.

A hash identifies the properties of a call that must be equal on all ranks: shapes and dtypes are compared if MPI requires
equal ones. In debug mode lines are compared, too, except for calls with a root, which are often written as ``if rank ==
root: ... else: ...``, and a few others (`_ROOTED`).

In log2(P) rounds of one small message per rank, all ranks compute the minimum and maximum of the hashes. If these differ,
the ranks exchange descriptions of the calls, and the error contains a table of the calls, the differences and advice.
Channels with the same ranks share one communicator for this, so calls on different channels are compared, too.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Op
from mpiad.errors import CommunicationMismatchError
from mpiad.transport.core import calls
from mpiad.transport.core.agreement import Group, agreed
from mpiad.transport.core.agreement import fingerprint as hash_of
from mpiad.transport.core.calls import Call, Site
from mpiad.transport.core.channels import ABANDONED, make_communicator
from mpiad.transport.core.collectives import name_of
from mpiad.transport.core.tracing import tracing
from mpiad.transport.watch import watch_settings
from mpiad.transport.watch.timed_waits import Awaited, GuardedRequest, cancel_receives, poll_for

_SHOWN = 8
_log = logging.getLogger("mpiad")


def rank_ranges(ranks: Sequence[int]) -> str:
    """Return sorted ranks as "0-6, 8"; for many ranges only the first ones and the number of ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = f", ... ({len(ranks)} ranks)" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


_EACH = 16  # maximum number of ranks with separate lines
Row = tuple[str, ...]


def table_of_ranks(head: Row, rows: list[Row]) -> str:
    """Return a table whose first column is the rank; in long tables ranks with equal entries share a line."""
    if len(rows) > _EACH:
        alike: dict[Row, list[int]] = {}
        for rank, *rest in rows:
            alike.setdefault(tuple(rest), []).append(int(rank))
        rows = [(rank_ranges(ranks), *rest) for rest, ranks in alike.items()]
    return "\n".join(f"  {line}".rstrip() for line in aligned([("rank", *head), *rows]))


def aligned(rows: list[Row], left: int = sys.maxsize) -> list[str]:
    """Return lines of aligned columns, the first `left` of them left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(width) if k < left else cell.rjust(width) for k, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]


TO_ROOT, FROM_ROOT = {"mpi_sum", "mpi_reduce", "mpi_gather"}, {"mpi_bcast", "mpi_scatter"}
# Calls that don't wait for other ranks; what they receive is returned by a wait.
STARTS = {"mpi_send", "mpi_isend", "mpi_irecv", "mpi_iallreduce"}
# Calls whose lines may differ between ranks: those with a root, at the start or end of the program, and after an exception.
_ROOTED = {*TO_ROOT, *FROM_ROOT, "mpi_print", "minimize", "mpi_init", "reset", "the end of the program", "comm.Free"}


def _receives(call: Call) -> bool:
    """Return whether the result of a forward call contains data of other ranks on this rank."""
    given, params, name = call.arguments, call._params, call.name
    if params is None:  # an operator, such as a halo exchange
        return True
    if len(given.members) < 2 or name in STARTS or name == "mpi_barrier":
        return False
    if name in TO_ROOT or name in FROM_ROOT:
        return (params.channel.rank == given.root) == (name in TO_ROOT)  # type: ignore[attr-defined]
    if name in ("mpi_recv", "mpi_exchange", "mpi_sendrecv"):
        return getattr(params, "source", None) is not None
    return getattr(params, "call", "") != "mpi_isend"  # of a request


class DroppedResults:
    """An observer that logs, in debug mode and once per line, a call whose result is dropped on a rank that receives."""

    def began(self, call: Call) -> None:
        """Log the call if its line drops the result."""
        site = call.site
        if site.drops_result and call.direction == "forward" and watch_settings.debug() and _receives(call):
            site.drops_result = False
            _log.warning(
                f"rank {MPI.COMM_WORLD.rank}: the result of {call.called} at {site} is dropped, but it contains what this "
                "rank receives. Functions of mpiad don't write into their arguments: assign the result, for example "
                f"x = {call.called}(...)."
            )

    def ended(self, call: Call) -> None:
        """Do nothing."""


class Description(NamedTuple):
    """One rank's call, as text: first the compared fields, then `details` and `place`, which are only shown."""

    operation: str
    communicator: str
    root: int | None
    reduction: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    line: str | None
    step: str
    details: str
    place: str

    @property
    def compared(self) -> tuple:
        """The fields that must be equal on all ranks."""
        return self[: len(_NAMES)]

    def arguments(self, sums: bool = False) -> str:
        """Return the arguments as text; sums are named if other ranks use another reduction."""
        root = None if self.root is None else f"root={self.root}"
        op = f"op={self.reduction}" if self.reduction is not None and (sums or self.reduction != "SUM") else None
        return ", ".join(filter(None, (root, op, self.details)))


_NAMES = ("operation", "communicator", "root", "reduction", "shape", "dtype", "call site", "step")  # of the compared fields


def caller() -> tuple[str, Site, Call | None]:
    """Return name, line and record of the current call."""
    call = calls.current()
    if call is not None:
        return call.described, call.forward_site or call.site, call
    # For communication outside of a recorded call, the public function is found on the stack.
    site = calls.site_of(sys._getframe(1))
    return site.entry or "the end of the program", site, None


def name_and_place() -> tuple[str, str]:
    """Return name and line of the current call as text."""
    name, site, call = caller()
    return name, where(call, site)


def describe(label: str, step: str, array: np.ndarray | None, op: Op | None, root: int | None) -> Description:
    """Return the description of the current call; `step`: the name of MPI's function."""
    name, site, call = caller()
    rooted = (call.forward_name or call.name if call is not None else name) in _ROOTED
    reduction = None if op is None else name_of(op) or "user-defined"
    shape, dtype = (None, None) if array is None else (array.shape, str(array.dtype))
    line = None if rooted or not watch_settings.present().compares_lines or site.line == 0 else site.text
    details = shown_arguments(call, label)
    return Description(name, label, root, reduction, shape, dtype, line, step, details, where(call, site))


def shown_arguments(call: Call | None, label: str) -> str:
    """Return the shape of the user's array, and the communicator, as text."""
    parts = []
    if call is not None and call.arguments.shape is not None:
        given = call.arguments
        parts.append(f"shape {given.shape}, {given.dtype}{', on a device' if call.on_device else ''}")
    if label != "world":
        parts.append(f"on {label}")
    return ", ".join(parts)


def where(call: Call | None, site: Site) -> str:
    """Return the line as text."""
    if call is None or call.direction == "forward" or call.site is site:
        return site.text
    return f"{site.text} (run by {call.site.text})"


_known: dict[tuple, int] = {}
_MOST = 20000


def fingerprint(label: str, step: str, array: np.ndarray | None, op: Op | None, root: int | None) -> int:
    """Return a hash of the compared properties of a call."""
    name, site, _ = caller()
    handle = None if op is None else op.handle
    form = None if array is None else (array.shape, array.dtype.num)
    key = (label, step, form, handle, root, watch_settings.present().compares_lines, name, site)
    found = _known.get(key)
    if found is None:
        # Cleared completely, since a record of the order of use would slow down each call.
        if len(_known) > _MOST:
            _known.clear()
        compared = describe(label, step, array, op, root).compared
        found = _known[key] = hash_of(compared) >> 2  # `Agreement.agree` adds a number of calls, without overflow
    return found


_REDUCTIONS = "number of mpi_iallreduce calls before"
_ADVICE = {
    "operation": "All ranks must make the same calls in the same order: look for a branch that some ranks don't take, an "
    "early return or exit, or a loop of different length.",
    "communicator": "Pass the same communicator on all ranks.",
    "root": "Pass the same root on all ranks.",
    "reduction": "Pass the same op on all ranks.",
    "shape": "Pass arrays of the same shape on all ranks; pieces of different lengths belong in mpi_gather or "
    "mpi_allgather with axis=.",
    "dtype": "Convert x to the same dtype on all ranks (1 is an integer, 1.0 is not).",
    "call site": "If different lines are meant to meet here, allow it with mpiad.debug.checked(call_sites=False) or "
    "MPIAD_DEBUG_SITES=0.",
    "step": "This is a mistake in the library unless one rank's call differs from the others' in the table.",
    _REDUCTIONS: "Start nonblocking reductions at the same place among the other calls on all ranks.",
}


def raise_mismatch(described: list[tuple[Description, int]], group: Group) -> NoReturn:
    """Raise the error for different descriptions, on all ranks of a group."""
    rows = sorted(zip(group.members, described))
    compared = zip(*(description.compared for _, (description, _) in rows))
    different = [name for name, values in zip(_NAMES, compared) if len(set(values)) > 1]
    if len({starts for _, (_, starts) in rows}) > 1:
        different.append(_REDUCTIONS)
    table = table_of_ranks(
        ("operation", "arguments", "where"),
        [(str(rank), d.operation, _arguments(d, starts, different), d.place) for rank, (d, starts) in rows],
    )
    # If the operations differ, other differences don't help.
    name = different[0] if different else "step"
    advice = _ADVICE[name]
    if name in ("root", "reduction", "shape", "dtype") and len({d.place for _, (d, _) in rows}) > 1:
        # Mostly a branch that some ranks don't take: then the arguments differ by chance.
        advice = f"{_ADVICE['operation']} If these lines are meant to meet: {advice[0].lower()}{advice[1:]}"
        name, different = "call site", ["call site", *[each for each in different if each != "call site"]]
    others = f" ({', '.join(different[1:])} too)" if len(different) > 1 and name != "operation" else ""
    error = CommunicationMismatchError(
        f"the ranks were about to communicate in different calls: the {name} differs{others}. {advice}\n{table}",
        table,
        tuple(sorted(group.members)),
    )
    raise agreed(group, error)


def _arguments(description: Description, starts: int, different: list[str]) -> str:
    shown = description.arguments(sums="reduction" in different and "operation" not in different)
    after = f"after {starts} mpi_iallreduce" if _REDUCTIONS in different else ""
    return ", ".join(filter(None, (shown, after))) or "-"


_LANES = 256  # number of independent sequences of agreements: one for the main thread, the others for other threads


class Agreement:
    """The agreements of one group: `members` in the world, restarts (`epoch`), and nonblocking `starts` by lane."""

    def __init__(self, comm: Comm, members: tuple[int, ...], label: str):
        self.comm, self.members, self.label = comm, members, label
        # Tags differ between epochs, so messages of an earlier epoch aren't received. MPI limits the number of tags.
        self._epochs = min(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767), 2**31 - 1) // (2 * _LANES)
        self.epoch = 0
        # Numbers of agreements begun, by lane; deadlock reports find missing ranks by them.
        self._numbers: Counter[int] = Counter()
        self.starts: Counter[int] = Counter()
        self.later: Comm = None  # for comparisons of the main thread's nonblocking calls
        self._is_open = False
        self.begun_later = self.ended_later = 0  # numbers of comparisons of nonblocking calls

    def open(self) -> None:
        """Begin a new epoch after `renew`, the latest of any rank; collective."""
        if self._is_open:
            return
        mine = np.array([-self.epoch, self.begun_later, -self.begun_later, self.ended_later])
        least = np.empty_like(mine)
        self.comm.Allreduce(mine, least, MPI.MIN)
        self.epoch = -int(least[0])
        if self.later is None or not least[1] == -least[2] == least[3]:
            # Not freed: a rank may have begun an operation there that others haven't, and the context may be reused.
            ABANDONED.append((self.later,))
            self.later, self.begun_later, self.ended_later = make_communicator(self.comm.Dup), 0, 0
        self._is_open = True

    def begun(self, lane: int) -> tuple[str, int]:
        """Return the key under which the agreements of a lane are counted, and their number."""
        return self._key(lane), self._numbers[lane]

    def counts(self) -> dict[str, int]:
        """Return the numbers of agreements that this rank has begun."""
        return {self._key(lane): number for lane, number in self._numbers.copy().items()}

    def _key(self, lane: int) -> str:
        return f"{self.label}, lane {lane}" if lane else self.label

    def agree(self, mine: int, lane: int, make: Callable[[], Awaited]) -> bool:
        """Return whether `mine`, a hash of the call, is the same on all ranks; waits with a deadline."""
        self._numbers[lane] += 1
        # `mine` is small enough for the sum to be below 2⁶³.
        least = greatest = mine + self.starts[lane]
        # Dissemination algorithm: the distance doubles in each round. It works for any number of ranks, since minimum and
        # maximum don't change if a number arrives twice.
        comm, tag, distance = self.comm, self._tag(lane), 1
        while distance < comm.size:
            out, into = np.array([least, greatest], np.int64), np.empty(2, np.int64)
            source, dest = (comm.rank - distance) % comm.size, (comm.rank + distance) % comm.size
            receive = GuardedRequest(self, make, comm.Irecv, into, source, tag, receives=True)
            send = GuardedRequest(self, make, comm.Isend, out, dest, tag)
            receive.Wait()
            send.Wait()
            low, high = into.tolist()
            least, greatest = min(least, low), max(greatest, high)
            distance *= 2
        return least == greatest

    def descriptions(self, mine: Array, lane: int, make: Callable[[], Awaited]) -> list[tuple[Description, int]]:
        """Return each rank's description; all ranks call this after a disagreement."""
        tag = self._tag(lane) + _LANES * self._epochs
        buffer = np.frombuffer(pickle.dumps(mine), dtype=np.uint8)
        sends = [GuardedRequest(self, make, self.comm.Isend, buffer, rank, tag) for rank in range(self.comm.size)]
        found = [poll_for(partial(self.comm.improbe, rank, tag), make).recv() for rank in range(self.comm.size)]
        for send in sends:
            send.Wait()
        return found

    def renew(self) -> None:
        """Abandon pending agreements, and restart the counts with other tags; all ranks call this, and then `open`."""
        self.epoch += 1
        self._is_open = False
        self._numbers.clear()
        self.starts.clear()
        cancel_receives(self)  # so that they don't receive later messages

    def _tag(self, lane: int) -> int:
        return self.epoch % self._epochs * _LANES + lane


_MAIN = threading.main_thread().ident


def lane_of(channel_number: int) -> int:
    """Return this thread's lane: 0 for the main thread or one in its place, otherwise one that depends on the channel."""
    return 0 if tracing.for_main or threading.get_ident() == _MAIN else channel_number % (_LANES - 1) + 1
