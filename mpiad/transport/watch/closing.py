"""The end of the program under the watch: ranks reach it at different times, and in debug mode nothing may be left over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from mpi4py import MPI

from mpiad.errors import CommunicationMismatchError
from mpiad.transport.core import channels, lookup
from mpiad.transport.core.fault_tolerance import flush_streams
from mpiad.transport.exits.departure import await_others
from mpiad.transport.exits.uncaught import end_by
from mpiad.transport.watch import message_counts, switch, watch_settings
from mpiad.transport.watch.timed_waits import deadline_lifted

_KILLED_WITHIN, _GRACE = 3.0, 5.0  # seconds


def close(close_world: Callable[[], None]) -> None:
    """Close the world when all ranks have reached the end.

    In debug mode raises a CommunicationMismatchError on all ranks if messages or requests are left over.
    """
    if not watch_settings.present().watches:
        await_others()
        close_world()
        return
    # Ranks that wait for this one learn at once that it won't come.
    switch.announce()
    # This rank may be done long before the others, so only after an error its wait has a limit.
    faulted = any(channel.fault is not None for channel in channels.live_channels())
    given_up = await_others((watch_settings.present().timeout or _GRACE) if faulted else None)
    left_over = []
    if given_up:
        # After communication was given up, ranks aren't synchronized, and only MPI's end remains, which may wait forever
        # for abandoned communication. So SIGALRM ends the process, unless the program handles this signal itself.
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, _GRACE)
    else:
        with deadline_lifted():
            left_over = _left_over()
            close_world()
    switch.stop_answering(all_have_left=not given_up)
    if left_over:
        raise CommunicationMismatchError(
            "the program ended with communication left over. Receive what is sent, with its tag and from its sender, and "
            "wait for each request.\n" + "\n".join(left_over)
        )


def close_at_exit(close_world: Callable[[], None]) -> None:
    """Close the world at the end of this process; end the job if something is left over."""
    if not watch_settings.present().watches:
        close(close_world)
        return
    try:
        close(close_world)
    except Exception as error:  # noqa: BLE001 - no caller is left to catch it
        _end_job(error)


def _left_over() -> list[str]:
    """Return sentences about unreceived messages and pending requests; collective over the world in debug mode."""
    if not watch_settings.debug():
        return []
    # Communication left pending by a caught exception was reported by the exception.
    faulted = {channel.label for channel in channels.live_channels() if channel.fault is not None}
    every = lookup.open_world().reverse.allgather((message_counts.summary(), faulted))
    known = set().union(*[labels for _, labels in every])
    summaries = [message_counts.without(found, known) for found, _ in every]
    requests = [
        f"Rank {rank} started {call} at {place} and never waited for it."
        for rank, found in enumerate(summaries)
        for _, call, place in found[2]
    ]
    return message_counts.unreceived(summaries) + requests


def _end_job(error: Exception) -> None:
    # One rank shows the error, which is the same on all.
    if MPI.COMM_WORLD.rank == 0 or not isinstance(error, CommunicationMismatchError):
        end_by(error)
    else:
        time.sleep(_KILLED_WITHIN)
    flush_streams()
    os._exit(1)
