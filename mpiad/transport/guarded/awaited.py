"""What a rank waits for: all ranks in a collective, or one rank at the other end of a message."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpiad._typing import Comm
from mpiad.transport.guarded.descriptions import Description, caller, shown_arguments, where
from mpiad.transport.guarded.timed_waits import Departure


class _Wait:
    def __init__(self, comm: Comm):
        self.comm = comm
        self.name, site, call = caller()
        self.arguments, self.place = shown_arguments(call, comm.label), where(call, site)

    def give_up(self, reason: str) -> None:
        """Refuse the further use of the communicator."""
        self.comm.give_up(reason)


class Gathering(_Wait):
    """A wait inside a collective.

    `key`: of what the ranks count together: a communicator, or the agreement of its ranks. `number`: of the collective,
    by that count: who hasn't come so far is missing.
    """

    def __init__(self, comm: Comm, key: str, number: int, description: Description | None = None):
        super().__init__(comm)
        self.key, self.number = key, number
        if description is not None:
            self.name, self.arguments, self.place = description.operation, description.arguments(), description.place

    def in_vain(self, gone: dict[int, Departure], before: float) -> bool:
        """Tell whether a member left the program without coming to this collective."""
        return any(
            # Who has been here before leaving isn't what this wait lacks.
            rank in gone and gone[rank].heard < before and gone[rank].counts.get(self.key, 0) < self.number
            for rank in self.comm.members
        )

    def report(self) -> dict[str, Any]:
        """Return what a table of waits shows."""
        return {
            "call": self.name, "arguments": self.arguments, "place": self.place, "key": self.key, "number": self.number,
            "members": self.comm.members, "hint": "",
        }  # fmt: skip


class Letter(_Wait):
    """A wait at one end of a message.

    `peer`, `tag`: as MPI counts in `comm`; may be any.
    """

    def __init__(self, comm: Comm, sends: bool, peer: int, tag: int):
        super().__init__(comm)
        self.sends, self.peer, self.tag = sends, peer, tag

    def in_vain(self, gone: dict[int, Departure], before: float) -> bool:
        """Tell whether the other end has left the program, and sends nothing any more."""
        peers = self._peers()
        return bool(peers) and all(
            # A long message of a rank that has left may still be on its way; who has left receives nothing.
            rank in gone and gone[rank].heard < before and (self.sends or not gone[rank].sends)
            for rank in peers
        )

    def _peers(self) -> list[int]:
        members = self.comm.members
        anyone = [rank for rank in members if rank != members[self.comm.rank]]
        return anyone if self.peer < 0 else [members[self.peer]]

    def report(self) -> dict[str, Any]:
        """Return what a table of waits shows."""
        partner = "any rank" if self.peer < 0 else f"rank {self.peer}"
        # The tag of an adjoint's message is made of several things.
        tag = "" if self.comm.reverse else " with any tag" if self.tag < 0 else f" with tag {self.tag}"
        direction = "to" if self.sends else "from"
        arguments = ", ".join(filter(None, [f"{direction} {partner}{tag}", self.arguments]))
        return {
            "call": self.name, "arguments": arguments, "place": self.place, "peers": self._peers(), "hint": self._hint(),
        }  # fmt: skip

    def _hint(self) -> str:
        """Say which message is there instead of the one that is awaited."""
        if self.sends or self.comm.reverse:
            return ""
        status = MPI.Status()
        for source, tag in ((self.peer, MPI.ANY_TAG), (MPI.ANY_SOURCE, self.tag), (MPI.ANY_SOURCE, MPI.ANY_TAG)):
            if self.comm.bare.Iprobe(source, tag, status):
                size = status.Get_count(MPI.BYTE)
                return f"a message from rank {status.source} with tag {status.tag} ({size} bytes) is there instead"
        return ""
