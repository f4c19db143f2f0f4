"""Agreement of the ranks on an exception: all ranks raise an error that occurred on one of them."""

from __future__ import annotations

import builtins
import hashlib
import itertools
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np

from mpiad._typing import Comm
from mpiad.errors import ConvergenceError, NotFiniteError, RemoteError
from mpiad.transport.core.channels import Channel, Used, note_use, on_any_rank
from mpiad.transport.core.tracing import checked_on_replay

T = TypeVar("T")
# The text of an argument, or a function that returns it.
Description: TypeAlias = "str | Callable[[], str]"

# Exceptions that other ranks can construct from their name and one text.
_BUILTIN_NAMES = """TypeError ValueError RuntimeError NotImplementedError ArithmeticError FloatingPointError OverflowError
    ZeroDivisionError LookupError IndexError KeyError AssertionError AttributeError NameError MemoryError OSError""".split()
KINDS: dict[str, type[Exception]] = {name: getattr(builtins, name) for name in _BUILTIN_NAMES}
KINDS |= {kind.__name__: kind for kind in (ConvergenceError, NotFiniteError)}

moments = itertools.count()
"""Numbers that agreements take, in their order."""

# The exceptions of one rank that all ranks raise: a rank that left alone by `sys.exit` would leave the others waiting.
FAILURES = Exception, SystemExit


def exit_code(code: object) -> int:
    """Return the exit code of a process that ends by SystemExit with this `code`."""
    if code is None:
        return 0
    # The system keeps eight bits. Python prints anything but an integer, and ends with 1.
    return code & 0xFF if isinstance(code, int) else 1


def code_of(error: BaseException) -> int:
    """Return the exit code of a job that an exception ends: never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT, as shells report it
    return exit_code(error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 1)) or 1


class Failure(NamedTuple):
    """A rank's exception as it is sent to the others."""

    kind: str  # name of its class
    text: str  # its message
    summary: str  # the last lines of its traceback
    trace: str  # its traceback
    exit_code: int = 1  # of a program that ends by the exception
    builtin: str = "RuntimeError"  # name of its nearest base class that other ranks can construct

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        names = [kind.__name__ for kind in type(error).__mro__]
        builtin = next((name for name in names if name in KINDS), RuntimeError.__name__)
        text = str(error) if isinstance(error, Exception) else summary  # "SystemExit: 0" instead of "0"
        return cls(type(error).__name__, text, summary, trace, code_of(error), builtin)


Failures = dict[int, Failure]


def first_of(failures: Failures) -> tuple[int, str]:
    """Return the first failed rank, and a text with the number of others."""
    return min(failures), f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""


def error_of(failures: Failures, call: str, kind: type[RemoteError]) -> RemoteError:
    """Return an exception that describes the first failure, with the traceback of its rank."""
    rank, others = first_of(failures)
    failure = failures[rank]
    return kind(f"{call}: rank {rank}{others} raised {failure.summary}", rank, failure.trace, exit_code=failure.exit_code)


def failures_among(comm: Comm, error: BaseException | None) -> Failures:
    """Return the failed ranks, all with the failure of the first of them; collective."""
    # One traceback is enough.
    failed = [rank for rank, has in enumerate(comm.allgather(error is not None)) if has]
    first: Failure = comm.bcast(None if error is None else Failure.of(error), failed[0])  # type: ignore[assignment]
    return dict.fromkeys(failed, first)


class Group(Protocol):
    """A group of ranks, such as a channel."""

    members: tuple[int, ...]


def agreed(group: Group, error: Exception) -> Exception:
    """Return the exception, marked as one that all ranks of a group raise, so that no rank waits for another."""
    error.__dict__["_agreed_among"] = frozenset(group.members), next(moments)
    return error


def agreed_among(error: BaseException, since: int = 0) -> frozenset[int]:
    """Return the world's ranks that all raise this exception or an equivalent one; empty if it isn't marked.

    `since`: a number of `moments`. A mark from before doesn't count: the program may have kept the object, and one rank may
    raise it again.
    """
    members, moment = getattr(error, "_agreed_among", (frozenset(), 0))
    return members if moment >= since else frozenset()


def mark_left(channels: Iterable[Used], error: BaseException, what: str) -> None:
    """Mark channels as unusable if communication on them may be pending after an exception; `what` was interrupted."""
    agreed = agreed_among(error)
    # If all ranks of a channel raise the exception, no collective is pending, but messages may be.
    for channel, messages in channels:
        if messages or channel.size > 1 and not agreed.issuperset(channel.members):
            channel.mark(f"{type(error).__name__} left {what} in which messages were under way.", messages)


def forget_agreement(error: BaseException) -> None:
    """Remove the mark of `agreed`."""
    error.__dict__.pop("_agreed_among", None)


def raise_together(channel: Channel, error: BaseException | None) -> None:
    """Raise an exception on all ranks if any rank has one; collective. Each rank passes its own error, or None."""
    # Other ranks raise the first class in the error's MRO that is in `KINDS`: so `except ValueError` catches one error on
    # all ranks or on none.
    checked_on_replay(_raised_together, channel, error)


def _raised_together(channel: Channel, error: BaseException | None) -> None:
    note_use(channel)
    if on_any_rank(channel.data, error is not None):
        raise_first(channel, error)


@contextmanager
def raising_together(
    channel: Channel, kinds: type[Exception] | tuple[type[Exception], ...] = (TypeError, ValueError)
) -> Iterator[None]:
    """Return a context that raises an exception of these types on all ranks if any rank raises it inside; collective."""
    error = None
    try:
        yield
    except BaseException as found:
        if not isinstance(found, (kinds, SystemExit)):
            raise
        error = found
    raise_together(channel, error)


def raise_first(channel: Channel, error: BaseException | None) -> NoReturn:
    """Raise on each rank its own error, or, if it has none, the error of the first rank that has one; collective."""
    failures = failures_among(channel.data, error)
    if isinstance(error, Exception):
        raise agreed(channel, error)  # with its own traceback
    rank, failure = next(iter(failures.items()))
    found = KINDS[failure.builtin](f"{failure.text} (raised on rank {rank})")
    found.__dict__["exit_code"] = failure.exit_code
    raise agreed(channel, found) from error


def require_same(channel: Channel, described: str, call: str) -> None:
    """Raise a ValueError on all ranks if their arguments, `described` as text, differ; collective."""
    require_alike(channel, None, call, described)


def fingerprint(*parts: object) -> int:
    """Return a hash of texts and arrays as a signed 64-bit integer; it is the same on all ranks."""
    # Python's hash of texts differs between processes.
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def abridged(array: np.ndarray) -> object:
    """Return an array, or of more than 2 KiB its checksum, for a fingerprint in each call: it takes a fifth of the time."""
    return array if array.nbytes <= 2048 else zlib.crc32(np.ascontiguousarray(array).data)


def require_alike(
    channel: Channel, error: BaseException | None, call: str, described: Description, *compared: object
) -> None:
    """Combine `raise_together(error)` and `require_same` of texts and arrays (`compared`) in one message; collective.

    `described`: the text of the message, or a function that returns it and is called only if the ranks differ.
    """
    checked_on_replay(_required_alike, channel, error, fingerprint(*(compared or [described])), described, call)


def alike_on_all(channel: Channel, make: Callable[[], T], describe: Callable[[T], Sequence[Any]], call: str) -> T:
    """Return ``make()``; raise on all ranks if it raises on any, or if the results as `describe`d differ; collective."""
    error, made, described = None, None, [""]
    try:
        made = make()
        described = list(describe(made))
    except FAILURES as found:  # the other ranks mustn't wait
        error = found
    require_alike(channel, error, call, *described)
    return made  # type: ignore[return-value]  without a result all ranks have raised


def _required_alike(
    channel: Channel, error: BaseException | None, fingerprint: int, described: Description, call: str
) -> None:
    note_use(channel)
    every = np.empty((channel.size, 2), np.int64)
    channel.data.Allgather(np.array([error is not None, fingerprint], np.int64), every)
    failed, fingerprints = every.T.tolist()
    if any(failed):
        raise_first(channel, error)
    if fingerprints.count(fingerprint) < channel.size:
        texts = channel.data.allgather(described() if callable(described) else described)
        # The texts may be shortened, so they may be equal although the fingerprints differ.
        difference = f"they differ in parts that aren't shown here: {texts[0]}"
        other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if other is not None:
            difference = f"rank 0 gave {texts[0]} and rank {other} gave {texts[other]}"
        raise agreed(channel, ValueError(f"{call}: all ranks must give the same arguments, but {difference}."))
