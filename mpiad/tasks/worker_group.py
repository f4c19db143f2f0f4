"""The ranks of one map: a communicator of their own, and which of them are left.

It is a duplicate of the library's. Where a process has died, and the MPI survives it, it is made of the ranks that are
left, and at the end they agree on who they still are.
"""

from __future__ import annotations

import logging

from mpiad._typing import Comm, Rank
from mpiad.errors import RemoteError
from mpiad.transport import Channel
from mpiad.transport.fault_tolerance import FAULT_TOLERANT, lost_ranks
from mpiad.transport.object_messages import Line
from mpiad.transport.recovery import ranks_within, recoverable

_log = logging.getLogger("mpiad")


class WorkerGroup:
    """Those who take part; made and closed by all of them.

    `used`: the user's communicator. `names`: ranks in the user's communicator, by rank in `comm`.
    """

    def __init__(self, used: Channel):
        self._used = used
        self._survives = FAULT_TOLERANT and used.size > 1
        self.comm = self._assembled()
        self.names = ranks_within(used, self.comm)
        self.line = Line(self.comm)
        self._known: set[Rank] = set()

    def _assembled(self) -> Comm:
        # Recovery is for the first loss of a process; once some are known to be lost, those that are left simply shrink.
        used = self._used
        if self._survives and not used.lost:
            try:
                # All ranks come, or all learn why not.
                return recoverable("mpi_map", used.user)(used.derive)()
            except RemoteError:
                if not used.lost:
                    raise
        return used.derive(survivors=bool(used.lost))

    def place_of(self, root: Rank) -> Rank:
        """Return the rank in `comm` of a rank of the user's; a RemoteError where its process has died."""
        if root not in self.names:
            raise RemoteError(f"mpi_map: the process of the root, rank {root}, has died.", root)
        return self.names.index(root)

    def newly_lost(self) -> list[Rank]:
        """Return the ranks in `comm` that have died since the last call, and say so in the log."""
        if not self._survives:
            return []
        found = [rank for rank in lost_ranks(self.comm) if rank not in self._known]
        if found:
            self._known.update(found)
            # Else a receive from any rank would fail again and again for the same loss.
            self.comm.Ack_failed()
        for rank in found:
            _log.warning("mpi_map: the process of rank %d has died; other ranks take its items.", self.names[rank])
        return found

    def close(self) -> None:
        """End the map; on all ranks that are left."""
        if not self._survives:
            self._used.drop(self.comm)
            return
        # A barrier would fail where a process has died; this succeeds, and all that are left learn the same ranks.
        left = self.comm.Shrink()
        alive = ranks_within(self._used, left)
        left.Free()
        self._used.drop(self.comm)
        if len(alive) < self._used.size:
            self._used.lose(sorted(set(range(self._used.size)) - set(alive)))
