"""After an exception on one rank, bring all ranks of a collective call together, even out of a communication.

This needs an MPI that can revoke a communicator (`fault_tolerance`); elsewhere nothing here is ever called, and a
composite is the bare function. With it a composite ends by an agreement on its channel, which works on revoked
communicators too: either all ranks report success, or none leaves it. A rank that fails goes there at once. If
the others don't come within a moment, it revokes the duplicates of the channel and of all channels among its ranks, so
that ranks waiting in one are interrupted, and come too. Then the ranks exchange their exceptions, and renew
the duplicates. Those that failed raise their own exception, and the others a `RemoteError`.

In nested composites the outermost one recovers: messages around the inner one would be lost with its duplicates.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpiad._typing import Comm, Request
from mpiad.errors import RemoteError
from mpiad.transport.agreement import Failure, Failures, agreed_among, error_of
from mpiad.transport.channels import Channel, live_channels, world_ranks
from mpiad.transport.fault_tolerance import FAULT_TOLERANT, is_interruption, is_revoked
from mpiad.transport.lookup import channel
from mpiad.transport.polling import Backoff
from mpiad.transport.uncaught import end_by

F = TypeVar("F", bound=Callable[..., Any])
_BY_KEYWORD: Any = object()
_UNTIL_REVOKED = 0.05  # seconds in which ranks that fail alike come by themselves
_UNTIL_NOTICED = 0.05  # revocations of several communicators come one after the other
_UNTIL_LOGGED = 1.0
_DEATH_WITHIN = 2.0
_log = logging.getLogger("mpiad")


Verdict = Callable[[Failures], BaseException]


class _Current(threading.local):
    """The channel whose composite would recover; None outside of all."""

    place: Channel | None = None


_current = _Current()


def recoverable(call: str, comm: Comm = _BY_KEYWORD, verdict: Verdict | None = None) -> Callable[[F], F]:
    """Make the decorator of a collective composite, which all ranks of a communicator call; `call` is its public name.

    The communicator is by default the composite's keyword argument `comm`. ``verdict(failures)`` returns the exception that
    all ranks raise; the composite then recovers inside of others too. By default ranks that failed raise their own error,
    and the others a RemoteError. If the MPI can't revoke, the decorator returns the function itself.
    """

    def decorate(fun: F) -> F:
        if not FAULT_TOLERANT:
            return fun

        @functools.wraps(fun)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer = _current.place
            # An inner composite leaves recovery to the outermost one, whose ranks include all that may wait.
            if outer is not None and verdict is None:
                return fun(*args, **kwargs)
            _current.place = used = channel(kwargs.get("comm") if comm is _BY_KEYWORD else comm, call)
            try:
                result = fun(*args, **kwargs)
            except (Exception, SystemExit) as error:
                recover(used, error, call, verdict)
                raise
            finally:
                _current.place = outer
            conclude(used, call, verdict)
            return result

        return run  # type: ignore[return-value]

    return decorate


def recovers() -> bool:
    """Return whether an exception that leaves this rank's composite brings all its ranks together."""
    return FAULT_TOLERANT and _current.place is not None


def interruptible(name: str, forward: F) -> F:
    """Return a communication that recovers if it is interrupted outside of all composites; `forward` without ULFM."""
    if not FAULT_TOLERANT:
        return forward

    @functools.wraps(forward)
    def run(*args: Any) -> Any:
        try:
            return forward(*args)
        except MPI.Exception as error:
            if _current.place is None:
                recover(None, error, name)
            raise

    return run  # type: ignore[return-value]


def conclude(used: Channel, call: str, verdict: Verdict | None = None) -> None:
    """Leave a composite together with all its ranks; if it failed on another, raise a RemoteError or the `verdict`'s."""
    place = None if used.size == 1 else _trouble(used)
    if place is None:
        return
    if place is not used:
        _assemble(place, None, call)
    _raise_verdict(used, place, _renewed(place, None), None, call, verdict)


def recover(used: Channel | None, error: BaseException, call: str, verdict: Verdict | None = None) -> None:
    """Meet the other ranks after an exception; return if this rank is to raise its own.

    `used` is the channel of the composite, None outside of all; `verdict` as in `recoverable`, and its result is raised. A
    RemoteError is raised if another rank has failed and this one was interrupted, or if one has died. All
    ranks of the channel come here or to `conclude`, each with its own exception or with MPI's interruption.
    """
    interrupted = is_interruption(error)
    # If all ranks of the channel raise the same by agreement, none waits, and nothing is under way.
    if used is not None and (used.size == 1 or not interrupted and set(used.members) <= agreed_among(error)):
        return
    place = _meeting_place(used, interrupted)
    if place is None:
        return
    mine = None if interrupted else error
    _assemble(place, mine, call)
    failures = _renewed(place, None if mine is None else Failure.of(mine))
    _raise_verdict(used, place, failures, error, call, verdict)


def _raise_verdict(
    used: Channel | None, place: Channel, found: Failures, error: BaseException | None, call: str, verdict: Verdict | None
) -> None:
    if place.lost:
        lost = ", ".join(map(str, place.lost))
        raise RemoteError(f"{call}: the process of rank {lost} of {place.size} has died.", place.lost[0]) from error
    mine = error is not None and not is_interruption(error)
    if verdict is not None and place is used and found:
        raise verdict(found) from (error if mine else None)
    if found and not mine:
        # The interruption's traceback shows this rank's place in the program.
        raise error_of(found, call, RemoteError) from error


def _meeting_place(used: Channel | None, interrupted: bool) -> Channel | None:
    """Return the largest channel around this one that was revoked, else this one; any, outside of all composites."""
    patience = Backoff()
    while True:
        revoked = [found for found in _around(used) if _is_given_up(found)]
        if not interrupted or patience.seconds > _UNTIL_NOTICED:
            # The largest: its ranks include those of all others, and each of them comes there.
            return max(revoked, key=lambda found: found.size, default=used)
        if revoked and max(found.size for found in revoked) == MPI.COMM_WORLD.size:
            return max(revoked, key=lambda found: found.size)
        patience.pause()


def _around(used: Channel | None) -> list[Channel]:
    mine = set() if used is None else set(used.members)
    return [found for found in live_channels() if mine <= set(found.members)]


def _is_given_up(found: Channel) -> bool:
    return any(map(is_revoked, found.duplicates()))


def _trouble(used: Channel) -> Channel | None:
    """Wait for all ranks of the channel; return the channel to meet on if one has failed, in it or around it."""
    flag = np.ones(1, np.int32)
    request, patience = used.data.Iagree(flag), Backoff()
    while not _is_complete(request, flag):
        if patience.seconds > _UNTIL_REVOKED and _larger_is_given_up(used):
            return _meeting_place(used, True)
        patience.pause()
    return None if flag[0] else used


def _assemble(place: Channel, mine: BaseException | None, call: str) -> None:
    """Wait until all ranks of the channel have come, interrupting them if necessary; `mine` is this rank's exception."""
    flag = np.zeros(1, np.int32)
    request, patience = place.data.Iagree(flag), Backoff()
    revoked = logged = False
    while not _is_complete(request, flag):
        # An interrupted rank passes it on at once: ranks may wait in communicators that no other rank revokes.
        if not revoked and (mine is None or patience.seconds > _UNTIL_REVOKED):
            for comm in [comm for found in _within(place) for comm in found.duplicates()]:
                if not is_revoked(comm):
                    comm.Revoke()
            revoked = True
        if not logged and mine is not None and patience.seconds > _UNTIL_LOGGED:
            _log.warning("%s: this rank raised, and waits for the others:\n%s", call, Failure.of(mine).trace.rstrip())
            logged = True
        if _larger_is_given_up(place):
            _end_job(mine, call)
        patience.pause()


def _larger_is_given_up(place: Channel) -> bool:
    return any(found.size > place.size and _is_given_up(found) for found in _around(place))


def _is_complete(request: Request, flag: np.ndarray) -> bool:
    try:
        return request.Test()
    except MPI.Exception:  # a rank has died; the others have come
        flag[0] = 0
        return True


def _within(place: Channel) -> list[Channel]:
    """Return the channel and, in the order in which they were made, those among its ranks."""
    members = set(place.members)
    return [place, *(found for found in live_channels() if found is not place and members >= set(found.members))]


def _renewed(place: Channel, mine: Failure | None) -> Failures:
    """Renew the duplicates of the channel and of those among its ranks; return the failures by rank."""
    fresh = place.data.Shrink()
    ranks = ranks_within(place, fresh)
    told = fresh.allgather(mine)
    # In the same order on all ranks, so that no two wait for each other in different channels.
    for found in _within(place):
        data = fresh if found is place else found.data.Shrink()
        lost = sorted(set(range(found.size)) - set(ranks_within(found, data)))
        if lost:
            found.lose(lost)
        else:
            found.reopen(data)
    return {rank: failure for rank, failure in zip(ranks, told) if failure is not None}


def ranks_within(place: Channel, comm: Comm) -> list[int]:
    """Return the ranks in a channel of a communicator's members."""
    return [place.members.index(rank) for rank in world_ranks(comm)]


def _end_job(mine: BaseException | None, call: str) -> None:
    error = RemoteError(f"{call} can't recover: meanwhile a call of more ranks has failed as well.")
    error.__cause__ = mine
    end_by(error)
    time.sleep(_DEATH_WITHIN)
    raise error
