"""Who sends to whom, under which tag and number: the address of a message and of the adjoint's answer to it.

Forward messages carry the user's tag, and MPI matches them in the order of their start. The messages of adjoints may be
started in another order on either side (requests are waited for in any order), so their tag is made of the user's tag
and the message's number: multiples of the golden section of the tags there are, plus the number. Two messages that are
under way between the same ranks at the same time then differ in their tag, as long as the product of their distance in
user tags and in number is below 0.38 times the number of tags (half of MPI's: 10⁸ with MPICH and more with Open MPI).

A large array on a device travels in pieces behind a short message that says so (`announced`). The pieces have tags of the
same kind in the other half, a quarter for each direction, so they are never taken for another message.
"""

from __future__ import annotations

from mpiad._typing import Comm
from mpiad.transport.channels import Channel


class Envelope:
    """Address of one point-to-point message, seen from this rank.

    - `peer`: the other rank.
    - `tag`: the user's tag.
    - `outgoing`: whether this rank sends it.
    - `number`: its place among the messages of that peer, tag and direction; the next one where it isn't given, and
      unknown until it has come where it may come from any rank (negative `peer` or `tag`).
    - `reverse`: whether it is the message of an adjoint.
    - `answers`: the one whose number it has, which took that.
    - `asked`, (int, int): peer and tag as they were given, which may be any.
    """

    __slots__ = ("answers", "asked", "channel", "number", "outgoing", "peer", "reverse", "tag")

    def __init__(
        self, channel: Channel, peer: int, tag: int, outgoing: bool, number: int | None = None, reverse: bool = False,
        answers: Envelope | None = None,
    ):  # fmt: skip
        self.channel, self.peer, self.tag, self.outgoing, self.reverse = channel, peer, tag, outgoing, reverse
        self.answers, self.asked = answers, (peer, tag)
        self.number = number if number is not None or peer < 0 or tag < 0 else self._next()

    def _next(self) -> int:
        counts = self.channel.sent if self.outgoing else self.channel.received
        key = (self.peer, self.tag)
        number = counts.get(key, 0)
        counts[key] = number + 1
        return number

    def give_back(self) -> None:
        """Give the number back that it took, where nothing is sent or received."""
        if self.answers is None and not self.reverse and self.number is not None:
            counts = self.channel.sent if self.outgoing else self.channel.received
            # Else the partner's next message would have another number than ours, and its adjoint another tag.
            counts[self.peer, self.tag] -= 1

    def renew(self) -> None:
        """Take the next number, or that of the message which this one answers: for a program that runs once more."""
        self.number = self._next() if self.answers is None else self.answers.number

    @property
    def mpi_tag(self) -> int:
        """Tag that the message has for MPI."""
        if not self.reverse:
            return self.tag
        return self._spread(2)

    @property
    def tag_of_pieces(self) -> int:
        """Tag that the pieces of the message have for MPI, on the channel's duplicate for adjoints."""
        quarter = self.channel.tag_limit // 4
        return (3 if self.reverse else 2) * quarter + 1 + self._spread(4)

    def _spread(self, parts: int) -> int:
        """Return a tag of the message's own in one part of MPI's tags."""
        number = 0 if self.number is None else self.number
        return (self.tag * (self.channel.tag_stride // parts) + number) % (self.channel.tag_limit // parts)

    @property
    def comm(self) -> Comm:
        """Duplicate that the message travels on."""
        return self.channel.reverse if self.reverse else self.channel.data

    def answered_from(self, peer: int, tag: int) -> None:
        """Put in the sender and tag of a message that was received from any."""
        self.peer, self.tag = peer, tag
        self.number = self._next()

    def back(self) -> Envelope:
        """Return the address of the message that carries the cotangent back."""
        # With the number of the forward message: both sides know it, in whatever order their adjoints run.
        return Envelope(self.channel, self.peer, self.tag, not self.outgoing, self.number, True, self.answers or self)

    def along(self) -> Envelope:
        """Return the address of the message that carries the tangent, right after this one."""
        if self.reverse:
            return self
        # A number of its own: tangents travel among forward messages, in the order of the program.
        return Envelope(self.channel, self.peer, self.tag, self.outgoing)
