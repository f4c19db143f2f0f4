"""Recovery of a collective call after an exception on one rank, with an MPI that can revoke communicators (ULFM).

A *composite* is a public function that all ranks of a communicator call and that communicates many times. At its end the
ranks agree, by MPI's `Iagree`, whether all of them succeeded; this also works on revoked communicators. A rank that raises
starts the agreement at once. If the other ranks don't follow soon, it revokes the duplicates of the channel, and those of
all channels whose ranks belong to this one. MPI then interrupts waiting ranks, and they start the agreement, too. After it
the ranks exchange their exceptions and renew the duplicates. Failed ranks raise their own exceptions, the others a
`RemoteError`.

In nested composites, only the outermost one and those with `make_error` (see `recoverable`) recover: renewed duplicates
lose pending messages, also those of enclosing composites.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Request
from mpiad.errors import RemoteError
from mpiad.transport.core.agreement import FAILURES, Failure, Failures, agreed_among, error_of
from mpiad.transport.core.channels import Channel, base, live_channels, world_ranks
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, is_interruption, is_revoked
from mpiad.transport.core.lookup import channel
from mpiad.transport.core.polling import Backoff
from mpiad.transport.exits.abort import end_by

F = TypeVar("F", bound=Callable[..., Any])
_BY_KEYWORD: Comm = object()
_UNTIL_REVOKED = 0.05  # seconds before a failed rank revokes, since the other ranks may fail in the same way
_UNTIL_NOTICED = 0.05  # seconds for which an interrupted rank looks for revoked larger communicators
_UNTIL_LOGGED = 1.0  # seconds after which a failed rank that waits logs its exception
_log = logging.getLogger("mpiad")
MakeError = Callable[[Failures], BaseException] | None


class _Current(threading.local):
    outermost: Channel | None = None  # of this thread's outermost composite


_current = _Current()


def recoverable(call: str, comm: Comm = _BY_KEYWORD, make_error: MakeError = None) -> Callable[[F], F]:
    """Return a decorator for composites, which without ULFM changes nothing; `comm`: by default the call's `comm`."""
    # All ranks raise ``make_error(failures)``. A composite with `make_error` recovers even inside another composite.

    def decorate(fun: F) -> F:
        if not FAULT_TOLERANT:
            return fun

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> object:
            outer = _current.outermost
            # All ranks that may wait for this one take part in the outermost composite, whose recovery suffices.
            if outer is not None and make_error is None:
                return fun(*args, **kwargs)
            _current.outermost = used = channel(kwargs.get("comm") if comm is _BY_KEYWORD else comm, call)
            try:
                result = fun(*args, **kwargs)
            except FAILURES as error:
                recover(used, error, call, make_error)
                raise
            finally:
                _current.outermost = outer
            finish_composite(used, call, make_error)
            return result

        return run  # type: ignore[return-value]

    return decorate


def recovers() -> bool:
    """Return whether a composite of this thread recovers from an exception."""
    return FAULT_TOLERANT and _current.outermost is not None


def interruptible(name: str, forward: F) -> F:
    """Return the communication `forward` with recovery from interruptions outside composites; unchanged without ULFM."""
    if not FAULT_TOLERANT:
        return forward

    @functools.wraps(forward)
    def run(*args: Any) -> object:
        try:
            return forward(*args)
        except MPI.Exception as error:
            if _current.outermost is None:
                recover(None, error, name)
            raise

    return run  # type: ignore[return-value]


def finish_composite(channel: Channel, call: str, make_error: MakeError) -> None:
    """End a composite that has succeeded on this rank; if another rank failed, raise a RemoteError or the common error."""
    group = None if channel.size == 1 else _recovery_channel(channel)
    if group is None:
        return
    if group is not channel:
        _await_all(group, None, call)
    _raise_common_error(channel, group, _renew_duplicates(group, None), None, call, make_error)


def recover(channel: Channel | None, error: BaseException, call: str, make_error: MakeError = None) -> None:
    """Synchronize the ranks after an exception; return if this rank must raise its own exception."""
    # Otherwise raise a RemoteError, or the exception of `make_error`, since another rank failed or a process has died. All
    # ranks of the channel call this function or `finish_composite`. `channel`: None outside composites.
    interrupted = is_interruption(error)
    # If all ranks of the channel raise the exception together, none of them waits.
    if channel is not None and (channel.size == 1 or not interrupted and set(channel.members) <= agreed_among(error)):
        return
    group = _agreement_channel(channel, interrupted)
    if group is None:
        return
    mine = None if interrupted else error
    _await_all(group, mine, call)
    failures = _renew_duplicates(group, None if mine is None else Failure.of(mine))
    _raise_common_error(channel, group, failures, error, call, make_error)


def _raise_common_error(
    channel: Channel | None, group: Channel, failures: Failures, error: BaseException | None, call: str, make: MakeError
) -> None:
    if group.lost:
        lost = ", ".join(map(str, group.lost))
        raise RemoteError(f"{call}: the process of rank {lost} of {group.size} has died.", group.lost[0]) from error
    mine = error is not None and not is_interruption(error)
    if make is not None and group is channel and failures:
        raise make(failures) from (error if mine else None)
    if failures and not mine:
        raise error_of(failures, call, RemoteError) from error


def _agreement_channel(channel: Channel | None, interrupted: bool) -> Channel | None:
    """Return the channel for the agreement: the largest revoked one with all ranks of `channel`, else `channel`."""
    patience = Backoff()
    while True:
        revoked = [each for each in _channels_including(channel) if _has_revoked_duplicate(each)]
        if not interrupted or patience.seconds > _UNTIL_NOTICED:
            # The ranks of the smaller channels choose the largest one, too.
            return max(revoked, key=lambda each: each.size, default=channel)
        if revoked and max(each.size for each in revoked) == base().size:
            return max(revoked, key=lambda each: each.size)
        patience.pause()


def _channels_including(channel: Channel | None) -> list[Channel]:
    mine = set() if channel is None else set(channel.members)
    return [each for each in live_channels() if mine <= set(each.members)]


def _has_revoked_duplicate(channel: Channel) -> bool:
    return any(map(is_revoked, channel.duplicates()))


def _recovery_channel(channel: Channel) -> Channel | None:
    """Agree with the ranks of the channel; return None if all succeeded, otherwise the channel on which to recover."""
    flag = np.ones(1, np.int32)
    request, patience = channel.data.Iagree(flag), Backoff()
    while not _is_complete(request, flag):
        if patience.seconds > _UNTIL_REVOKED and _larger_is_revoked(channel):
            return _agreement_channel(channel, True)
        patience.pause()
    return None if flag[0] else channel


def _await_all(group: Channel, mine: BaseException | None, call: str) -> None:
    """Agree with all ranks of the channel, interrupting them if necessary; `mine`: this rank's exception."""
    flag = np.zeros(1, np.int32)
    request, patience = group.data.Iagree(flag), Backoff()
    revoked = logged = False
    while not _is_complete(request, flag):
        # An interrupted rank revokes at once: others may wait on communicators that the failed rank isn't a member of.
        if not revoked and (mine is None or patience.seconds > _UNTIL_REVOKED):
            for comm in [comm for found in _channels_among(group) for comm in found.duplicates()]:
                if not is_revoked(comm):
                    comm.Revoke()
            revoked = True
        if not logged and mine is not None and patience.seconds > _UNTIL_LOGGED:
            _log.warning("%s: this rank raised, and waits for the others:\n%s", call, Failure.of(mine).trace.rstrip())
            logged = True
        if _larger_is_revoked(group):
            _end_job(mine, call)
        patience.pause()


def _larger_is_revoked(group: Channel) -> bool:
    return any(found.size > group.size and _has_revoked_duplicate(found) for found in _channels_including(group))


def _is_complete(request: Request, flag: np.ndarray) -> bool:
    try:
        return request.Test()
    except MPI.Exception:  # a rank has died, and the agreement of the others has ended
        flag[0] = 0
        return True


def _channels_among(group: Channel) -> list[Channel]:
    """Return the channel, and in the order of their creation all other channels whose ranks belong to it."""
    members = set(group.members)
    return [group, *(found for found in live_channels() if found is not group and members >= set(found.members))]


def _renew_duplicates(group: Channel, mine: Failure | None) -> Failures:
    """Renew the duplicates of the channel and of all channels whose ranks belong to it; return the failures by rank."""
    fresh = group.data.Shrink()
    ranks = ranks_within(group, fresh)
    by_rank = fresh.allgather(mine)
    for found in _channels_among(group):
        data = fresh if found is group else found.data.Shrink()
        lost = sorted(set(range(found.size)) - set(ranks_within(found, data)))
        if lost:
            found.lose(lost)
        else:
            found.reopen(data)
    return {rank: failure for rank, failure in zip(ranks, by_rank) if failure is not None}


def ranks_within(group: Channel, comm: Comm) -> list[int]:
    """Return the members of a communicator, by their ranks in a channel."""
    return [group.members.index(rank) for rank in world_ranks(comm)]


def _end_job(mine: BaseException | None, call: str) -> None:
    error = RemoteError(f"{call} can't recover: in the meantime a call on a larger communicator has failed, too.")
    error.__cause__ = mine
    end_by(error)
    raise error
