"""Exceptions raised on all ranks: an error found or raised on one rank is sent to the others."""

from __future__ import annotations

import builtins
import hashlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np

from mpiad._typing import Comm
from mpiad.errors import ConvergenceError, NotFiniteError, RemoteError
from mpiad.transport.channels import Channel, Used, note_use, on_any_rank
from mpiad.transport.exit_codes import code_of
from mpiad.transport.tracing import settled

T = TypeVar("T")

# Exceptions that can be constructed on another rank from a name and one text.
_PYTHONS = """TypeError ValueError RuntimeError NotImplementedError ArithmeticError FloatingPointError OverflowError
    ZeroDivisionError LookupError IndexError KeyError AssertionError AttributeError NameError MemoryError OSError""".split()
_KINDS: dict[str, type[Exception]] = {name: getattr(builtins, name) for name in _PYTHONS}
_KINDS |= {kind.__name__: kind for kind in (ConvergenceError, NotFiniteError)}


class Failure(NamedTuple):
    """A rank's exception as it is sent to the others."""

    # `kind`, `text`: name of its class, and its message.
    kind: str
    text: str
    # `summary`, `trace`: as Python shows it at the end of a traceback, and with all of it.
    summary: str
    trace: str
    exit_code: int = 1  # with which it would end a program
    # Name of the nearest class of Python's own, or of our solvers', that other ranks can construct.
    builtin: str = "RuntimeError"

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        names = [kind.__name__ for kind in type(error).__mro__]
        builtin = next((name for name in names if name in _KINDS), RuntimeError.__name__)
        return cls(type(error).__name__, str(error), summary, trace, code_of(error), builtin)


Failures = dict[int, Failure]


def first_of(failures: Failures) -> tuple[int, str]:
    """Return the first rank that failed, and a text for the number of others."""
    others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return min(failures), others


def error_of(failures: Failures, call: str, kind: type[RemoteError]) -> RemoteError:
    """Return the exception for ranks that haven't failed, or for all: the first failure, with its rank's traceback."""
    rank, others = first_of(failures)
    failure = failures[rank]
    text = f"{call}: rank {rank}{others} raised {failure.summary}"
    return kind(text, rank, failure.trace, exit_code=failure.exit_code)


def failures_among(comm: Comm, error: BaseException | None) -> Failures:
    """Return the ranks on which something was raised, each with the first one's failure; all ranks of `comm` call it."""
    # Flags first: only one traceback travels, and only once something has failed.
    failed = [rank for rank, has in enumerate(comm.allgather(error is not None)) if has]
    first: Failure = comm.bcast(None if error is None else Failure.of(error), failed[0])  # type: ignore[assignment]
    return dict.fromkeys(failed, first)


class Group(Protocol):
    """Ranks that can agree, such as a channel."""

    members: tuple[int, ...]


def agreed(group: Group, error: Exception) -> Exception:
    """Return an exception that all ranks of a group raise, so that none waits for another: noted as such."""
    error.__dict__["_agreed_among"] = frozenset(group.members)
    return error


def agreed_among(error: BaseException) -> frozenset[int]:
    """Return the ranks of the world that raise this exception, or one like it, by agreement; none for others."""
    return getattr(error, "_agreed_among", frozenset())


def mark_left(used: Iterable[Used], error: BaseException, what: str) -> None:
    """Refuse the further use of channels on which an exception may have left ranks at different communications.

    If all ranks of a channel raise it by agreement, collectives have ended, and only messages may be left.
    """
    agreed = agreed_among(error)
    for channel, messages in used:
        if messages or channel.size > 1 and not agreed.issuperset(channel.members):
            channel.mark(f"{type(error).__name__} left {what} in which messages were under way.", messages)


def forget_agreement(error: BaseException) -> None:
    """Undo the effect of `agreed`."""
    error.__dict__.pop("_agreed_among", None)


def raise_together(channel: Channel, error: Exception | None) -> None:
    """Raise on all ranks if one has an error: its own exception there, one of the same kind and text elsewhere.

    For a kind other than Python's own and our solvers', the nearest base class that is one of these, so that `except
    ValueError` catches it on all ranks or none; else a RuntimeError. All ranks of the channel call it, each with its own
    error, or None.
    """
    settled(_raised_together, channel, error)


def _raised_together(channel: Channel, error: Exception | None) -> None:
    note_use(channel)
    # Always one number; texts are pickled, and sent only if there is an error.
    if on_any_rank(channel.data, error is not None):
        raise_first(channel, error)


@contextmanager
def raising_together(
    channel: Channel, kinds: type[Exception] | tuple[type[Exception], ...] = (TypeError, ValueError)
) -> Iterator[None]:
    """Raise on all ranks an exception of these kinds raised inside on one: see `raise_together`. All ranks enter it."""
    error = None
    try:
        yield
    except kinds as found:
        error = found
    raise_together(channel, error)


def raise_first(channel: Channel, error: Exception | None) -> NoReturn:
    """Raise on all ranks the error of the first rank that has one; its own on each rank that has one. All ranks call it."""
    failures = failures_among(channel.data, error)
    if error is not None:
        raise agreed(channel, error)  # with its own traceback
    rank, failure = next(iter(failures.items()))
    raise agreed(channel, _KINDS[failure.builtin](f"{failure.text} (raised on rank {rank})"))


def require_same(channel: Channel, described: str, call: str) -> None:
    """Raise on all ranks if they were called with different arguments, which the error shows as `described`.

    All ranks of the channel call it; the ValueError has the first two that differ.
    """
    settled(_required_same, channel, described, call)


def _differing(channel: Channel, call: str, difference: str) -> Exception:
    return agreed(channel, ValueError(f"{call}: all ranks must give the same arguments, but {difference}."))


def _required_same(channel: Channel, described: str, call: str) -> None:
    note_use(channel)
    # The texts themselves, and no hash: arguments are short, and the error shows them.
    found = channel.data.allgather(described)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise _differing(channel, call, f"rank 0 gave {found[0]} and rank {rank} gave {other}")


def fingerprint(*parts: Any) -> int:
    """Return a number, in 64 bits with a sign, that is the same on all ranks for the same texts and arrays."""
    # Python's own hash of texts differs from process to process.
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.tobytes() if isinstance(part, np.ndarray) else str(part).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)


def require_alike(channel: Channel, error: Exception | None, call: str, described: str, *compared: Any) -> None:
    """Do in one message what `raise_together` and `require_same` do in three, if there is no error; all ranks call it.

    Errors show the arguments as `described`; texts and arrays to compare follow, if they differ from that text.
    """
    settled(_required_alike, channel, error, fingerprint(*(compared or [described])), described, call)


def alike_on_all(channel: Channel, make: Callable[[], T], describe: Callable[[T], Sequence[Any]], call: str) -> T:
    """Return the result of `make`; raise on all ranks if it raises on one, or if the ranks' results differ.

    `describe` returns a text for the result, and the values to compare, as `require_alike` takes them. All ranks call it.
    """
    error, made, described = None, None, [""]
    try:
        made = make()
        described = list(describe(made))
    except Exception as found:  # noqa: BLE001 whatever it is, the other ranks must not wait on
        error = found
    require_alike(channel, error, call, *described)
    return made  # type: ignore[return-value]  without one, all have raised


def _required_alike(channel: Channel, error: Exception | None, fingerprint: int, described: str, call: str) -> None:
    note_use(channel)
    every = np.empty((channel.size, 2), np.int64)
    channel.data.Allgather(np.array([error is not None, fingerprint], np.int64), every)
    if every[:, 0].any():
        raise_first(channel, error)
    if (every[:, 1] != every[0, 1]).any():
        # The texts are more detailed than the fingerprints, but may be shortened: they can be equal nevertheless.
        _required_same(channel, described, call)
        raise _differing(channel, call, f"they differ in parts that aren't shown here: {described}")
