"""``python -m mpiad``: one report for all ranks, within a time limit, with the same exit code everywhere."""

from __future__ import annotations

import os
import sys
import threading

from mpiad.debug.environment import examine
from mpiad.transport import channel
from mpiad.transport.launcher import launcher

__all__ = ["main"]

_LIMIT = 30.0  # seconds; it takes about two


class _Watch:
    """Ends the process where a stage takes too long: a rank that doesn't answer would be waited for for ever."""

    def __init__(self, limit: float):
        self._limit, self._stage = limit, ""
        self._timer = threading.Timer(limit, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def enter(self, stage: str) -> None:
        self._stage = stage

    def _give_up(self) -> None:
        sys.stderr.write(
            f"mpiad: no end after {self._limit:g} s: process {launcher().rank} of {launcher().size} waits for others while "
            f"{self._stage}. They run another program, or their messages don't arrive (a firewall, another network "
            "interface on each node).\n"
        )
        sys.stderr.flush()
        # From a thread sys.exit would end that thread alone, and MPI's own end would wait for the others.
        os._exit(1)

    def end(self) -> None:
        self._timer.cancel()


def main(limit: float = _LIMIT) -> int:
    """Examine the environment, report on one process, and return the exit code of all."""
    watch = _Watch(limit)
    found = examine(channel(None, "python -m mpiad"), watch.enter)
    watch.end()
    # In separate worlds each process is rank 0 of its own; the launcher's number tells them apart.
    if found.places[0].rank == 0 and launcher().rank == 0:
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
    return 0 if found.ok else 1
