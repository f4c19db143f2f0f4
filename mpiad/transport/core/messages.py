"""Point-to-point messages, whose buffers are held until MPI has finished with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Buffer, Comm, Rank, Request, Status
from mpiad.compiling.arguments import address_of
from mpiad.errors import DeadlockError, MessageMismatchError
from mpiad.transport.core.buffers import private_copy
from mpiad.transport.core.channels import ABANDONED, Channel, on_any_rank
from mpiad.transport.core.linked_calls import LinkedCall, Operand, Tag
from mpiad.transport.devices import device_messages
from mpiad.transport.devices.device_arrays import Spec, result
from mpiad.transport.devices.device_messages import DESCRIPTOR_BYTES, MessageBuffer
from mpiad.transport.devices.transfers import communicate, incoming_transfer, outgoing_transfer

Slices: TypeAlias = Mapping[Rank, slice]  # the parts of an array for messages to or from ranks

# MPI matches forward messages, which have the user's tags, in the order of their start. Messages of adjoints may be started
# in another order on either side, since requests may be waited for in any order. Therefore their tags are computed from the
# user's tag t and the message's number k, as t·s + k modulo N. N is the number of MPI's tags (2·10⁸ with MPICH, more with
# Open MPI), and s is 0.618 N (golden section). Two messages in flight between the same ranks have different tags if the
# differences of their t and k satisfy |Δt| · |Δk| < 0.38 N.


class Envelope:
    """The address of one point-to-point message, as seen from this rank.

    - `outgoing`: whether this rank sends it to `peer`, or receives it from there.
    - `number`: its index among the messages with this peer, tag and direction, by default the next one. None for a receive
      with wildcards (negative `peer` or `tag`) until the message has arrived.
    - `answers`: for the message of an adjoint (`reverse`), the envelope of the forward message with the same number.
    - `asked`: peer and tag as passed by the caller, possibly wildcards.
    """

    __slots__ = ("answers", "asked", "channel", "number", "outgoing", "peer", "reverse", "tag")

    def __init__(self, channel: Channel, peer: int, tag: int, outgoing: bool, answers: Envelope | None = None):
        self.channel, self.peer, self.tag, self.outgoing = channel, peer, tag, outgoing
        self.answers, self.reverse, self.asked = answers, answers is not None, (peer, tag)
        self.number: int | None = None if peer < 0 or tag < 0 else self._next() if answers is None else answers.number

    def _next(self) -> int:
        counts = self.channel.sent if self.outgoing else self.channel.received
        key = (self.peer, self.tag)
        number = counts.get(key, 0)
        counts[key] = number + 1
        return number

    def give_back(self) -> None:
        """Undo the count of a message that isn't communicated: the numbers of later ones must agree on both sides."""
        if not self.reverse and self.number is not None:
            counts = self.channel.sent if self.outgoing else self.channel.received
            counts[self.peer, self.tag] -= 1

    def renew(self) -> None:
        """Take the next number, or the number of the forward message, for another run of a compiled program."""
        self.number = self._next() if self.answers is None else self.answers.number

    @property
    def mpi_tag(self) -> int:
        """The tag of the message in MPI."""
        if not self.reverse:
            return self.tag
        return (self.tag * self.channel.tag_stride + (self.number or 0)) % self.channel.tag_limit

    @property
    def is_fixed(self) -> bool:
        """Whether peer and tag are the same in each run of a compiled program, since the caller passed no wildcards."""
        return min((self.answers or self).asked) >= 0

    @property
    def comm(self) -> Comm:
        """The duplicate on which the message is communicated."""
        return self.channel.reverse if self.reverse else self.channel.data

    def answered_from(self, peer: int, tag: int) -> None:
        """Set the sender and tag of a received message, which were wildcards."""
        self.peer, self.tag = peer, tag
        self.number = self._next()

    def back(self) -> Envelope:
        """Return the envelope of the message with the cotangent, in the opposite direction."""
        return Envelope(self.channel, self.peer, self.tag, not self.outgoing, self.answers or self)

    def along(self) -> Envelope:
        """Return the envelope of the message with the tangent, which follows this one."""
        if self.reverse:
            return self
        # Tangents are sent among the forward messages, so it has the next number.
        return Envelope(self.channel, self.peer, self.tag, self.outgoing)


# Open MPI 5 writes beyond the end of the buffer before it reports that a message is too long, and if a rank sends it to
# itself, reports nothing.
_PROBES_FIRST = MPI.get_vendor()[0] == "Open MPI"


def as_message(array: np.ndarray) -> Buffer:
    """Return the buffer of a contiguous host array with its MPI datatype, whose lookup takes as long as MPI's call."""
    return [array, array.size, MPI.Datatype.fromcode(array.dtype.char)]


def as_bytes(array: Array) -> Buffer:
    """Return the buffer of a contiguous array for a message, whose receiver compares the number of bytes."""
    # MPICH ends the job if a message isn't a whole number of the receiver's entries. Before MPI 4, counts are C's ints.
    count = array.nbytes
    return [array, count, MPI.BYTE] if count < 2**31 else as_message(array)


class Receipt:
    """A pending receive. `memory`: where MPI writes an array, or its descriptor (see `device_messages`)."""

    __slots__ = ("envelope", "is_described", "memory", "nbytes", "requests", "spec", "transfer")

    def __init__(self, spec: Spec, envelope: Envelope, kind: str = "receive"):
        self.spec, self.envelope = spec, envelope
        # In place of an array on a device, a descriptor may arrive, for which no page-locked memory is necessary.
        self.is_described = spec.arrays is not None and _expects_descriptor(envelope)
        self.transfer = incoming_transfer(spec._replace(arrays=None) if self.is_described else spec)
        self.memory: Buffer = self.transfer.buffer
        self.nbytes: int = self.memory.nbytes
        if self.nbytes < DESCRIPTOR_BYTES and type(self.memory) is np.ndarray:
            landing = device_messages.landing(spec)
            self.memory = self.memory if landing is None else landing
        kept, call = (self.memory, self.transfer), envelope.comm.Irecv
        message = as_bytes(self.memory)
        self.requests = envelope.channel.begin(kind, kept, call, (message,), (envelope.peer,), (envelope.mpi_tag,))


def post_send(array: Array, envelope: Envelope, kind: str = "send") -> list[Request]:
    """Start a send, and return MPI's request; a host array mustn't be changed before `Channel.leave`."""
    described = None
    if type(array) is not np.ndarray:
        described = device_messages.as_descriptor(array, envelope.peer, envelope.channel)
    array = outgoing_transfer(array, copies=True).buffer if described is None else described
    message, call = as_bytes(array), envelope.comm.Isend
    return envelope.channel.begin(kind, array, call, (message,), (envelope.peer,), (envelope.mpi_tag,))


def send(array: Array, envelope: Envelope) -> None:
    """Send without waiting for the receiver; a host array must be a private copy, which the user can't change."""
    envelope.channel.leave(post_send(array, envelope, "blocking send"))


def finish_receive(receipt: Receipt, call: str, out: Array = None) -> Array:
    """Wait for a receive and return its array, or `out`; raise a ValueError if the message has another number of bytes."""
    status, envelope, spec = MPI.Status(), receipt.envelope, receipt.spec
    try:
        receipt.requests[0].Wait(status)
    # After another exception, such as an interrupt, MPI may still write to the buffer, which therefore isn't released.
    except (MPI.Exception, DeadlockError, MessageMismatchError) as error:
        envelope.channel.release(receipt.requests)
        _answered(envelope, status)
        device_messages.discard(receipt.memory)
        if isinstance(error, MPI.Exception):
            raise _receive_error(error, spec, envelope.peer, envelope.tag, call) from None
        raise
    envelope.channel.release(receipt.requests)
    _answered(envelope, status)
    got = status.Get_count(MPI.BYTE)
    if got == DESCRIPTOR_BYTES and (found := device_messages.descriptor_in(receipt.memory)) is not None:
        return _pulled(found, spec, envelope, call, out)
    # MPI reports an error if a message is too long, but not if it is too short.
    if got != receipt.nbytes:
        raise _mismatch(spec, f"{got} bytes", envelope.peer, envelope.tag, call)
    if type(receipt.memory) is MessageBuffer:
        _copy_bytes(receipt.memory, receipt.transfer.buffer)
    array = receipt.transfer.received()
    if spec.arrays is not None:
        device_messages.introduce(spec, envelope.channel, (envelope.peer,))
        array = spec.arrays.to_device(np.asarray(array)) if receipt.is_described else array
    if out is None:
        return array
    out[...] = array
    return out


def _pulled(found: np.ndarray, spec: Spec, envelope: Envelope, call: str, out: Array = None) -> Array:
    """Return the array of a descriptor, or `out`; raise a ValueError if it has another number of bytes."""
    array = device_messages.pull(found, spec, envelope.channel, out)
    if array is None:
        raise _mismatch(spec, f"{found['nbytes']} bytes", envelope.peer, envelope.tag, call)
    return result(array)


def _copy_bytes(source: np.ndarray, destination: np.ndarray) -> None:
    destination.reshape(-1).view(np.uint8)[...] = source[: destination.nbytes]


def receive(spec: Spec, envelope: Envelope, call: str) -> Array:
    """Receive an array. For wildcards, the envelope gets the sender and tag."""
    # MPICH 5 over UCX loses messages from other nodes to receives from any rank, but finds them by probing.
    is_probed = _PROBES_FIRST or envelope.peer == MPI.ANY_SOURCE
    if is_probed or spec.arrays is not None and _expects_descriptor(envelope):
        return _matched(spec, envelope, call)
    return finish_receive(Receipt(spec, envelope, "blocking receive"), call)


def _answered(envelope: Envelope, status: Status) -> None:
    # A message of another size than expected is counted here, too, since its sender has counted it.
    if envelope.number is None and status.source >= 0:
        envelope.answered_from(status.source, status.tag)


def _expects_descriptor(envelope: Envelope) -> bool:
    """Return whether the sender may send a descriptor."""
    return device_messages.receives_descriptors(envelope.channel, (envelope.peer,))


def _matched(spec: Spec, envelope: Envelope, call: str) -> Array:
    """Receive a message after checking its size; a message of another size is received and discarded."""
    status = MPI.Status()
    message = envelope.comm.Mprobe(envelope.peer, envelope.mpi_tag, status)
    got = status.Get_count(MPI.BYTE)
    _answered(envelope, status)
    if got == spec.nbytes != DESCRIPTOR_BYTES or device_messages.present() is None and got == spec.nbytes:
        transfer = incoming_transfer(spec)
        message.Recv(transfer.buffer)
        if spec.arrays is not None:
            device_messages.introduce(spec, envelope.channel, (envelope.peer,))
        return transfer.received()
    dropped = np.empty(got, dtype=np.uint8)
    if isinstance(message, MPI.Message):
        message.Recv(dropped)
    else:  # in debug mode the header is compared
        try:
            message.receive_and_compare(dropped, spec)
        except MessageMismatchError:
            device_messages.discard(dropped)
            raise
    if (found := device_messages.descriptor_in(dropped)) is not None and got == DESCRIPTOR_BYTES:
        return _pulled(found, spec, envelope, call)
    if got == spec.nbytes:
        transfer = incoming_transfer(spec)
        _copy_bytes(dropped, transfer.buffer)
        return transfer.received()
    raise _mismatch(spec, f"{got} bytes", envelope.peer, envelope.tag, call)


def swap(array: Array, there: Envelope, spec: Spec, back: Envelope, call: str) -> Array:
    """Send to one rank and receive from another, and wait for both; a reversed swap waits for the received array only."""
    if there.reverse:
        # The forward receive didn't depend on this rank's send, whose receiver may still be in the adjoint of a later call.
        send(private_copy(array, array), there)
        return receive(spec, back, call)
    is_probed = _PROBES_FIRST or spec.arrays is not None and _expects_descriptor(back)
    receipt = None if is_probed else Receipt(spec, back, "blocking receive")
    sending = post_send(array, there, "blocking send")
    try:
        value = _matched(spec, back, call) if receipt is None else finish_receive(receipt, call)
    except BaseException:
        there.channel.leave(sending)  # it may still be in flight
        raise
    sending[0].Wait()
    there.channel.release(sending)
    return value


def exchange(channel: Channel, tag: int, array: Array, sent: Slices, spec: Spec, received: Slices, call: str) -> Array:
    """Send slices of an array to ranks, and return the array of the slices that they send; all messages at once."""
    if device_messages.receives_descriptors(channel, received) or device_messages.sends_descriptors(array, channel, sent):
        return _exchange_parts(channel, tag, array, sent, spec, received, call)

    def swap(source: Buffer, target: Buffer) -> None:
        parts = {rank: target[part] for rank, part in received.items()}
        messages = Messages(channel, tag, {rank: source[part] for rank, part in sent.items()}, parts)
        messages.start()
        messages.finish(call)

    # Both sides know the sizes of the messages, so device arrays are staged as a whole.
    out = communicate(swap, array, spec)
    if type(array) is not np.ndarray:
        device_messages.introduce(Spec.of(array), channel, (*sent, *received))
    return out


def _exchange_parts(
    channel: Channel, tag: int, array: Array, sent: Slices, spec: Spec, received: Slices, call: str
) -> Array:
    """Implement `exchange` by a message for each slice, each in device memory or staged."""
    out = spec.empty()
    receipts = {}
    for rank, part in received.items():
        receipts[rank] = Receipt(Spec.of(out[part]), Envelope(channel, rank, tag, False), "blocking receive")
    sends = [post_send(array[part], Envelope(channel, rank, tag, True), "blocking send") for rank, part in sent.items()]
    for rank, receipt in receipts.items():
        finish_receive(receipt, call, out[received[rank]])
    for requests in sends:
        requests[0].Wait()
        channel.release(requests)
    return out


class Messages:
    """Messages to and from several ranks, in flight at once: from the contiguous arrays `sent` into `received`."""

    def __init__(self, channel: Channel, tag: int, sent: Mapping[Rank, Array], received: Mapping[Rank, Array]):
        self._channel, self._tag, self._received = channel, tag, received
        targets: Mapping[Rank, Array] = received
        if device_messages.receives_descriptors(channel, received):
            landings = {rank: device_messages.landing(Spec.of(x)) for rank, x in received.items()}
            targets = {rank: x if landings[rank] is None else landings[rank] for rank, x in received.items()}
        self._targets = targets
        self._buffers = [{rank: as_bytes(x) for rank, x in arrays.items()} for arrays in (sent, targets)]

    def start(self) -> None:
        """Start all messages; until `finish`, arrays to send mustn't be changed, and the others mustn't be read."""
        channel, tag, (sent, received) = self._channel, self._tag, self._buffers
        for counts, ranks in ((channel.received, received), (channel.sent, sent)):
            for rank in ranks:
                counts[rank, tag] = counts.get((rank, tag), 0) + 1
        # Receives first, so that MPI needn't buffer messages.
        targets, sources = list(received.values()), list(sent.values())
        self._receives = channel.begin("blocking receive", targets, channel.data.Irecv, targets, received, repeat(tag))
        self._sends = channel.begin("blocking send", sources, channel.data.Isend, sources, sent, repeat(tag))

    def finish(self, call: str) -> None:
        """Wait for all messages; raise a ValueError if one has another number of bytes than its array."""
        status = MPI.Status()
        for request, (peer, array) in zip(self._receives, self._received.items()):
            try:
                request.Wait(status)
            except MPI.Exception as error:
                raise _receive_error(error, array, peer, self._tag, call) from None
            got, target = status.Get_count(MPI.BYTE), self._targets[peer]
            found = device_messages.descriptor_in(target) if got == DESCRIPTOR_BYTES else None
            if found is not None:
                got = int(found["nbytes"])
                device_messages.pull(found, Spec.of(array), self._channel, array)
            if got != array.nbytes:
                raise _mismatch(array, f"{got} bytes", peer, self._tag, call)
            if target is not array and found is None:
                _copy_bytes(target, array)
        for request in self._sends:
            request.Wait()
        self._channel.release(self._receives)
        self._channel.release(self._sends)


def _receive_error(error: MPI.Exception, like: Array | Spec, peer: Rank, tag: int, call: str) -> Exception:
    """Return a ValueError if MPI's error in a receive means that the message was too long, otherwise MPI's error itself."""
    if error.Get_error_class() != MPI.ERR_TRUNCATE:
        return error
    return _mismatch(like, "more bytes", peer, tag, call)


def _error_of(code: int, got: int, like: Array, peer: Rank, tag: int, call: str) -> Exception:
    """Return the error of a receive that has failed with MPI's error code, or if that is 0, has got other bytes."""
    if code:
        return _receive_error(MPI.Exception(code), like, peer, tag, call)
    return _mismatch(like, f"{got} bytes", peer, tag, call)


def _mismatch(like: Array | Spec, got: str, peer: Rank, tag: int, call: str) -> ValueError:
    return ValueError(
        f"{call}: rank {peer} sent {got} with tag {tag}, but the array it is received into has "
        f"shape {like.shape} and dtype {like.dtype}: {like.nbytes} bytes. "
        "Receive with the shape and dtype of what is sent; a template (`like`), in calls that have one, gives them."
    )


# Repeated communication of the same arrays.


class Prepared(NamedTuple):
    """A communication of fixed arrays: a function without arguments, and the same call for machine code, if there is one.

    The envelopes of its messages get new numbers before each call.
    """

    call: Callable[[], object]
    linked: LinkedCall | None = None


def prepared_sum(channel: Channel, array: np.ndarray, out: np.ndarray) -> Prepared:
    """Return the sum of the ranks' small arrays in `out`, on all ranks."""
    sent, received = as_message(array), as_message(out)
    arguments = "x", "out", *received[1:], MPI.SUM, "comm"
    linked = LinkedCall("Allreduce", arguments, channel, False, 0, _fail)
    if device_messages.may_share(channel, out.nbytes):
        linked = None

    def allreduce() -> None:
        _refuse_to_share(channel, out)
        channel.data.Allreduce(sent, received)

    return Prepared(allreduce, linked)


def _refuse_to_share(channel: Channel, array: np.ndarray) -> None:
    """Answer ranks that ask whether the array of a collective is in device memory (see `collectives`)."""
    if device_messages.may_share(channel, array.nbytes) and getattr(channel.data, "agreement", None) is None:
        on_any_rank(channel.data, True)


def prepared_bcast(channel: Channel, array: np.ndarray, out: np.ndarray, root: int) -> Prepared:
    """Return the copy of the root's array in `out`, on all ranks."""
    message = as_message(out)

    def bcast() -> None:
        _refuse_to_share(channel, out)
        if channel.rank == root:
            out[...] = array
        channel.data.Bcast(message, root)

    return Prepared(bcast)


def prepared_gather(channel: Channel, array: np.ndarray, out: np.ndarray, counts: list[int]) -> Prepared:
    """Return the ranks' small arrays, of these sizes, one after the other in `out`, on all ranks."""
    sent, (_, _, datatype) = as_message(array), as_message(out)
    received = [out, counts, list(accumulate(counts[:-1], initial=0)), datatype]

    def gather() -> None:
        _refuse_to_share(channel, out)
        channel.data.Allgatherv(sent, received)

    return Prepared(gather)


# Messages that MPI buffers at once, so that a send doesn't wait for its receiver: Open MPI's limit on a node is 4 KiB with
# the header.
_BUFFERED = 4000


def prepared_send(array: np.ndarray, there: Envelope) -> Prepared | None:
    """Return the send of an array, or None: the receiver must be fixed, and MPI must buffer the message."""
    if not there.is_fixed or array.nbytes > _BUFFERED or there.peer == there.channel.rank:
        return None
    message, dest = as_bytes(array), there.peer
    arguments = "x", *message[1:], dest, Tag(there), "comm"
    linked = LinkedCall("Send", arguments, there.channel, there.reverse, 0, _fail)
    return Prepared(lambda: there.comm.Send(message, dest, there.mpi_tag), linked)


def prepared_receive(destination: np.ndarray, back: Envelope, call: str) -> Prepared:
    """Return the receive of an array."""
    spec = Spec(destination.shape, destination.dtype)

    def receive_after_probe() -> None:
        destination[...] = _matched(spec, back, call)

    if _PROBES_FIRST or not device_messages.declines_descriptors(back.channel, (back.peer,)):
        return Prepared(receive_after_probe)
    message, source = as_bytes(destination), back.peer
    arguments = "out", *message[1:], source, Tag(back), "comm", "status"
    return _receiving(
        lambda status: back.comm.Recv(message, source, back.mpi_tag, status), (message,), back, call, "Recv", arguments
    )


def prepared_swap(
    array: np.ndarray, there: Envelope, destination: np.ndarray, back: Envelope, call: str
) -> Prepared | None:
    """Return the send of one array and the receive of another.

    None for a reversed swap that MPI wouldn't buffer: unlike `swap`, it waits for its receiver.
    """
    if there.reverse and array.nbytes > _BUFFERED:
        return None
    sent, received, dest, source = as_bytes(array), as_bytes(destination), there.peer, back.peer

    if not device_messages.declines_descriptors(back.channel, (back.peer,)):
        spec = Spec.of(destination)
        return Prepared(lambda: np.copyto(destination, swap(array, there, spec, back, call)))

    def sendrecv(status: Status) -> None:
        there.comm.Sendrecv(sent, dest, there.mpi_tag, received, source, back.mpi_tag, status)

    arguments = "x", *sent[1:], dest, Tag(there), "out", *received[1:], source, Tag(back), "comm", "status"
    return _receiving(sendrecv, (received, sent), back, call, "Sendrecv", arguments)


def _receiving(
    communicate: Callable[[Status], object], messages: tuple[Buffer, ...], back: Envelope, call: str, name: str,
    arguments: Sequence[Operand],
) -> Prepared:  # fmt: skip
    """Return a call that receives into the first of the messages, and checks the number of bytes."""
    destination, status, byte = messages[0][0], MPI.Status(), MPI.BYTE
    size = destination.nbytes

    def fail(code: int, got: int) -> None:
        if code:
            ABANDONED.append(messages)  # MPI may still use them
        raise _error_of(code, got, destination, back.peer, back.tag, call) from None

    def receive() -> None:
        try:
            communicate(status)
        except MPI.Exception as error:
            fail(error.Get_error_code(), 0)
        if (got := status.Get_count(byte)) != size:
            fail(0, got)

    return Prepared(receive, LinkedCall(name, arguments, back.channel, back.reverse, size, fail))


def _fail(code: int, got: int) -> None:
    raise MPI.Exception(code)


class PreparedMessages(Messages):
    """Messages from and into fixed host arrays."""

    def linked(self, call: str) -> tuple[list[LinkedCall], list[LinkedCall]] | None:
        """Return the calls of MPI that `start` and `finish` the messages, if they suffice; see `finish` for `call`."""
        if not device_messages.declines_descriptors(self._channel, self._received):
            return None
        channel, tag, (sent, received) = self._channel, self._tag, self._buffers
        n, width, statuses = (
            len(received),
            MPI._sizeof(MPI.Request),
            np.empty(len(sent) * MPI._sizeof(MPI.Status), np.uint8),
        )
        requests = np.empty((n + len(sent)) * width, np.uint8)
        places = [address_of(requests) + k * width for k in range(n + len(sent))]  # receives first

        def fail(peer: Rank, array: Array | None, code: int, got: int) -> None:
            ABANDONED.append((self._buffers, requests, statuses))
            try:
                raise MPI.Exception(code) if array is None else _error_of(code, got, array, peer, tag, call)
            except Exception as error:
                self.abandon(error)
                raise

        def start(name: str, counts: str, peer: Rank, message: Buffer, place: int) -> LinkedCall:
            arguments = address_of(message[0]), *message[1:], peer, tag, "comm", place
            return LinkedCall(name, arguments, channel, False, 0, partial(fail, peer, None), (counts, (peer, tag)))

        started = [start("Irecv", "received", *x, place) for x, place in zip(received.items(), places)]
        started += [start("Isend", "sent", *x, place) for x, place in zip(sent.items(), places[n:])]
        ended = [
            LinkedCall("Wait", (place, "status"), channel, False, x.nbytes, partial(fail, peer, x))
            for place, (peer, x) in zip(places, self._received.items())
        ]
        sends = len(sent), address_of(requests) + n * width, address_of(statuses)
        return started, [*ended, LinkedCall("Waitall", sends, channel, False, 0, partial(fail, -1, None))]

    def abandon(self, error: BaseException) -> None:
        """Mark the channel after an exception while messages are in flight: MPI may still write to the arrays."""
        # A GeneratorExit means that the compiled program was discarded.
        name = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
        self._channel.mark(f"{name} left a compiled program in which messages were under way.")
