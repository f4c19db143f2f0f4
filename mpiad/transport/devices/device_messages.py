"""Messages in device memory between the ranks of a node, for an MPI that can't access this memory.

Each rank has an *arena*: blocks of device memory that the other ranks of the node open by handles (CUDA IPC). The sender's
device copies an array into a slot of the arena, and MPI carries a descriptor of 64 bytes in place of the array. So the
order of messages, tags and wildcards remain MPI's. The receiver's device waits for the flag `packed`, copies the array out
of the slot, and writes the flag `pulled`; hosts don't wait for devices (see `node_memory`). The sender uses a slot again
after it has been pulled. A send never waits for its receiver: without a free slot the arena grows, and without memory the
array is staged.

A rank can't know whether a receiver is able to open its blocks. So the first arrays are staged. When the receiver of one of
them sees that the sender has an arena, it opens the first block, compares a pattern there, and answers on the sender's
board. After this answer, the sender sends descriptors to this rank. Receivers recognize descriptors by their length and by
a random number of the job. All receives of a rank accept descriptors in place of arrays.

After the first large array of a size, its receiver offers a slot of its own arena to the sender, which stores the next
array of this size there; it never waits for an offer. This array is the result of the receive, and its slot is used again
when the program has dropped it. So ranks that repeat an exchange copy once per message instead of twice.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array, Comm, Rank
from mpiad.errors import UnfinishedMessagesError
from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_arrays import ArrayModule, DeviceMemory, Spec, arrays_of, memory_of
from mpiad.transport.devices.node_memory import BLOCKS, FLAGS, POISON, Markable, NodeMemory, Wait, shared_by
from mpiad.transport.devices.staging import takes_directly

DESCRIPTOR_BYTES = 64
_INTEGERS = ("block", "start", "nbytes", "number", "sender")
_DESCRIPTOR = np.dtype([("cookie", "u1", (16,)), ("owner", "<i4"), ("flag", "<i4"), *[(name, "<i8") for name in _INTEGERS]])
_LEAST_BLOCK, _LARGEST_STEP, _ALIGNMENT = 2 << 20, 256 << 20, 512  # bytes
_LEAST_OFFERED = 1 << 15  # bytes; the copy of a smaller array takes less time than the look for an offer
LEAST_SHARED = 1 << 20  # bytes of a collective, in which ranks ask each other first
_YES, _NO = 1, -1  # answers

_log = logging.getLogger("mpiad")


class MessageBuffer(np.ndarray):
    """Host memory of a message whose receiver gets an array of another `form`."""

    form: Spec


Extent: TypeAlias = "tuple[int, int]"  # start and end, in bytes


class Block:
    """A block of device memory, and its unused extents in increasing order."""

    def __init__(self, address: int, nbytes: int):
        self.address, self.nbytes = address, nbytes
        self.unused: list[Extent] = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Return the start of an extent that is used from now on; None if none is large enough."""
        for k, (start, end) in enumerate(self.unused):
            if end - start >= nbytes:
                self.unused[k : k + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        """Make an extent unused."""
        k = next((k for k, other in enumerate(self.unused) if other[0] > start), len(self.unused))
        before, after = self.unused[k - 1] if k else (-1, -1), self.unused[k] if k < len(self.unused) else (-1, -1)
        first, last = k - (before[1] == start), k + (after[0] == end)
        self.unused[first:last] = [(min(start, before[0]) if first < k else start, after[1] if last > k else end)]


class Arena:
    """The blocks of this rank, in which its messages wait for their receivers."""

    def __init__(self, arrays: ArrayModule, memory: DeviceMemory, node: NodeMemory):
        self.arrays, self.memory, self.node, self.board = arrays, memory, node, node.boards[node.rank]
        self.blocks: list[Block] = []
        self._numbers = np.zeros(FLAGS, np.int64)  # of the messages, by flag; 0 if the flag is unused
        self._slots: dict[int, tuple[Block, Extent]] = {}  # by flag
        self._flags = list(range(FLAGS))
        self._count, self._is_full = 0, False
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return the descriptor of a new slot; None without device memory."""
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            found = self._found(size)
            if found is None:
                self._reclaim()
                found = self._found(size) or (self._found(size) if self._grow(size) else None)
            if found is None:
                return None
            block, start = found
            flag = self._flags.pop()
            self._slots[flag] = self.blocks[block], (start, start + size)
            self._count += 1
            self._numbers[flag] = self._count
            made = np.zeros((), _DESCRIPTOR)
            made["cookie"] = self.node.cookie
            for name, value in (("owner", self.node.rank), ("flag", flag), ("block", block), ("start", start)):
                made[name] = value
            made["nbytes"], made["number"], made["sender"] = nbytes, self._count, self.node.rank
            return made

    def _found(self, size: int) -> tuple[int, int] | None:
        if not self._flags:
            return None
        for k, block in enumerate(self.blocks):
            if (start := block.take(size)) is not None:
                return k, start
        return None

    def _reclaim(self) -> None:
        """Make the slots unused whose messages have been pulled."""
        node, numbers = self.node, self._numbers
        # A wait that was given up lets the receiver pull a message before it is packed.
        pulled = (numbers > 0) & (node.pulled[node.rank] == numbers) & (node.packed[node.rank] == numbers)
        for flag in np.flatnonzero(pulled).tolist():
            block, extent = self._slots.pop(flag)
            block.give_back(*extent)
            numbers[flag] = 0
            self._flags.append(flag)

    def block_of(self, flag: int) -> Block:
        """Return the block of a slot in use."""
        return self._slots[flag][0]

    def slots(self) -> int:
        """Return the number of slots in use, those that are offered included."""
        with self._lock:
            self._reclaim()
            return len(self._slots)

    def _grow(self, size: int) -> bool:
        """Allocate another block; return whether there was memory for it."""
        if not self._flags or len(self.blocks) == BLOCKS:
            return False
        least = -(-size // _LEAST_BLOCK) * _LEAST_BLOCK
        wanted = max(least, min(sum(block.nbytes for block in self.blocks), _LARGEST_STEP))
        for nbytes in (wanted, least):
            try:
                address = self.memory.allocate(nbytes)
            except MemoryError:
                self.memory.release_unused()
                continue
            self.board["handles"][len(self.blocks)] = np.frombuffer(self.memory.handle(address), np.uint8)
            self.blocks.append(Block(address, nbytes))
            # The first block begins with the pattern that receivers compare.
            if len(self.blocks) == 1:
                self.blocks[0].take(_ALIGNMENT)
                self.memory.store(address, self.node.cookie)
                self.arrays.synchronize()
            self.board["blocks"] = len(self.blocks)
            return True
        if not self._is_full:
            _log.warning("the device has no %d bytes for messages between ranks of this node: arrays are staged.", least)
        self._is_full = True
        return False


class DeviceMessages:
    """The messages in device memory of this process: its arena, and the blocks of other ranks that it has opened."""

    def __init__(self, node: NodeMemory):
        self.node = node
        self.arena: Arena | None = None
        self.flags = 0  # the address on the device of the memory of the node
        self.has_flags = False  # whether the device writes flags and waits for them
        self._opened: dict[tuple[Rank, int], int] = {}  # by owner and block: the address
        self.obstacles: dict[Rank, str] = {}  # by local rank: why its device memory can't be accessed
        self._stored: dict[tuple[Rank, int], int] = {}  # by owner and index: the number of the latest offer that was used
        self.offered: dict[int, tuple[Rank, int]] = {}  # by flag: the rank to which a slot is offered, and the index
        self.results: set[int] = set()  # flags of slots that are arrays of the program
        self._lock = threading.RLock()

    def introduce(self, arrays: ArrayModule, peers: Iterable[Rank]) -> None:
        """Make the arena, and answer the peers (ranks of the world) that have one; `arrays`: those of a staged message."""
        memory = memory_of(arrays)
        if memory is None or takes_directly(arrays) or not any(peer in self.node.local for peer in peers):
            return
        with self._lock:
            if self.arena is None:
                self.arena = Arena(arrays, memory, self.node)
                try:
                    self.flags = memory.register(self.node.memory)
                    self._try_flags()
                    self.arena._grow(_ALIGNMENT)
                except Exception as error:  # noqa: BLE001 - of the driver; arrays are staged
                    self._refuse(self.node.rank, error)
            for peer in peers:
                owner = self.node.local.get(peer, self.node.rank)
                board = self.node.boards[owner]
                if owner != self.node.rank and board["blocks"] and not board["answers"][self.node.rank]:
                    board["answers"][self.node.rank] = _YES if self._can_pull(owner) else _NO

    def _try_flags(self) -> None:
        """Raise an error if the device doesn't write flags, or doesn't wait for them: not all drivers support this."""
        memory, own = self.arena.memory, self.node.rank  # type: ignore[union-attr]
        flag = self.flags + self.node.offset("packed", own, 0)
        memory.write(flag, POISON)
        memory.wait(flag, POISON)
        self.arena.arrays.synchronize()  # type: ignore[union-attr]
        if self.node.packed[own, 0] != POISON:
            raise OSError("the device doesn't write into host memory")
        self.node.packed[own, 0] = 0
        self.has_flags = True

    def _can_pull(self, owner: Rank) -> bool:
        """Return whether this process can read a rank's arena."""
        if self.arena is None or not self.has_flags:
            return False
        pattern = np.zeros_like(self.node.cookie)
        try:
            self.arena.memory.load(pattern, self._address(owner, 0))
            self.arena.arrays.synchronize()
        except Exception as error:  # noqa: BLE001 - of the driver; arrays are staged
            return self._refuse(owner, error)
        return np.array_equal(pattern, self.node.cookie) or self._refuse(owner, ValueError("it contains other numbers"))

    def _refuse(self, owner: Rank, error: Exception) -> bool:
        reason = f"{type(error).__name__}: {error}"
        if self.arena is not None and (obstacle := self.arena.memory.obstacle()):
            reason += f"; {obstacle}"
        self.obstacles[owner] = reason
        ranks = self.node.world[self.node.rank], self.node.world[owner]
        text = "rank %d can't read the device memory of rank %d (%s). Arrays between them are copied to the host."
        _log.warning(text, *ranks, reason)
        return False

    def _address(self, owner: Rank, block: int) -> int:
        with self._lock:
            key = owner, block
            if key not in self._opened:
                handle = self.node.boards[owner]["handles"][block].tobytes()
                self._opened[key] = self.arena.memory.open(handle)  # type: ignore[union-attr]
            return self._opened[key]

    def pack(self, array: Array, peer: Rank) -> np.ndarray | None:
        """Return the descriptor of a C-contiguous array for a rank of the world; None if it can't get one."""
        arena, receiver = self.arena, self.node.local.get(peer, self.node.rank)
        if arena is None or not array.nbytes or arrays_of(array) != arena.arrays:
            return None
        if arena.board["answers"][receiver] != _YES:
            return None
        found = self._offer_of(receiver, array.nbytes)
        if found is not None:
            block = self._address(receiver, int(found["block"]))
        else:
            found = arena.take(array.nbytes)
            if found is None:
                return None
            block = arena.blocks[found["block"]].address
        arena.memory.store(block + int(found["start"]), array)
        arena.memory.write(self._flag("packed", found), int(found["number"]))
        return _buffer(Spec.of(array), found.tobytes())

    def _offer_of(self, receiver: Rank, nbytes: int) -> np.ndarray | None:
        """Return the descriptor of a slot that the receiver offers for an array of this size."""
        if nbytes < _LEAST_OFFERED:
            return None
        with self._lock:
            offers = self.node.boards[receiver]["offers"][self.node.rank]
            for k in np.flatnonzero(offers["nbytes"] == nbytes).tolist():
                number = int(offers[k]["number"])  # it is written last
                if number and self._stored.get((receiver, k)) != number:
                    self._stored[receiver, k] = number
                    made = np.zeros((), _DESCRIPTOR)
                    made["cookie"], made["owner"], made["sender"] = self.node.cookie, receiver, self.node.rank
                    for name in ("number", "nbytes", "block", "start", "flag"):
                        made[name] = offers[k][name]
                    return made
        return None

    def _offer(self, sender: Rank, nbytes: int) -> None:
        """Offer a slot for another array of this size, if the sender can write there."""
        arena, board = self.arena, self.node.boards[self.node.rank]
        if arena is None or nbytes < _LEAST_OFFERED or board["answers"][sender] != _YES:
            return
        with self._lock:
            offers = board["offers"][sender]
            free = np.flatnonzero(offers["number"] == 0)
            found = arena.take(nbytes) if free.size else None
            if found is not None:
                for name in ("nbytes", "block", "start", "flag", "number"):
                    offers[free[0]][name] = found[name]
                self.offered[int(found["flag"])] = sender, int(free[0])

    def withdraw(self, flag: int) -> None:
        """Remove the offer of a slot that the sender has used."""
        with self._lock:
            if flag in self.offered:
                sender, k = self.offered.pop(flag)
                self.node.boards[self.node.rank]["offers"][sender][k]["number"] = 0

    def _flag(self, flags: str, found: np.ndarray) -> int:
        return self.flags + self.node.offset(flags, int(found["owner"]), int(found["flag"]))

    def pull(self, found: np.ndarray, spec: Spec, out: Array, channel: Markable) -> Array:
        """Return a new array, or `out`, with the array of a descriptor."""
        arena: Arena = self.arena  # type: ignore[assignment]  # this rank has answered the sender
        node = self.node
        if spec.arrays is not None and spec.arrays != arena.arrays:  # on another device of this process
            return spec.arrays.to_device(self.pull(found, spec._replace(arrays=None), None, channel))
        owner, flag, number, sender = (int(found[name]) for name in ("owner", "flag", "number", "sender"))
        if node.packed[owner, flag] != number:
            arena.memory.wait(self._flag("packed", found), number)
            node.note(Wait(sender, owner, flag, number, time.monotonic(), channel))
        block, is_own = int(found["block"]), owner == node.rank
        address = (arena.blocks[block].address if is_own else self._address(owner, block)) + int(found["start"])
        if is_own:
            self.withdraw(flag)
        if spec.arrays is not None:
            self._offer(sender, spec.nbytes)
        if is_own and spec.arrays is not None and out is None:
            return arena.memory.array(address, spec.shape, spec.dtype, Result(self, found.copy()))
        x = spec.empty() if out is None else out
        arena.memory.load(x, address)
        arena.memory.write(self._flag("pulled", found), number)
        if spec.arrays is None:
            arena.arrays.synchronize()
            if node.packed[owner, flag] == POISON:
                raise UnfinishedMessagesError(f"rank {node.world[owner]} has ended before its device had sent an array.")
        return x

    def close(self) -> None:
        """Free the device memory; collective over the node. Blocks are freed after all ranks have closed them."""
        arena = self.arena
        if arena is not None:
            arena.arrays.synchronize()
        self.node.comm.Barrier()  # no device reads a block
        if arena is not None:
            for address in self._opened.values():
                arena.memory.close(address)
        self.node.comm.Barrier()
        if arena is not None:
            kept = {id(arena.block_of(flag)) for flag in self.results}  # their memory is the program's until its end
            for block in arena.blocks:
                if id(block) not in kept:
                    arena.memory.free(block.address)
            self.arena = None
            if self.flags:
                arena.memory.unregister(self.node.memory)
        self.node.close()
        self.node.comm.Free()


class Result:
    """The owner of a slot of this rank that is an array of the program."""

    def __init__(self, messages: DeviceMessages, found: np.ndarray):
        self._messages, self._found = messages, found
        messages.results.add(int(found["flag"]))

    def __del__(self) -> None:
        # In the order of the stream, after the last operation that reads the array.
        messages, arena = self._messages, self._messages.arena
        messages.results.discard(int(self._found["flag"]))
        if arena is not None and not sys.is_finalizing():
            arena.memory.write(messages._flag("pulled", self._found), int(self._found["number"]))


_present: DeviceMessages | None = None
_reason = "the library hasn't started"  # if there are none


def present() -> DeviceMessages | None:
    """Return the messages in device memory of this process, None if there are none."""
    return _present


def _forget_in_child() -> None:
    global _present
    if _present is not None:
        _present.arena = _present = None  # a fork can't use its parent's device


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def start(node: Comm, world: list[Rank], may_bring_arrays: bool) -> None:
    """Prepare messages between the ranks of a node, if any may have device arrays; collective over `node`.

    `world`: the ranks of `node` in the world.
    """
    global _present, _reason
    if not device_settings.present().ipc:
        _reason = "MPIAD_CUDA_IPC=0"
    elif node.size == 1:
        _reason = "no other rank is on this node"
    elif not node.allreduce(may_bring_arrays, MPI.LOR):
        _reason = "no GPU"
    else:
        comm = node.Dup()
        found = shared_by(comm, world)
        if isinstance(found, str):
            comm.Free()
            _reason = found
            _log.warning("device arrays are copied through the host between ranks of this node, since %s.", found)
        else:
            _present = DeviceMessages(found)


def close() -> None:
    """Return all device memory; collective over the ranks that have called `start`."""
    global _present, _reason
    found, _present, _reason = _present, None, "the library has ended"
    if found is not None:
        found.close()


def release_waits() -> None:
    """End the waits of devices, before this rank ends the job."""
    if _present is not None:
        _present.node.release()


def as_descriptor(array: Array, peer: Rank, channel: Markable) -> np.ndarray | None:
    """Return the message to a rank of a channel in place of a device array; None if MPI sends the array."""
    if _present is None or peer < 0:
        return None
    world = channel.members[peer]
    packed = _present.pack(array, world) if device_settings.present().ipc else None
    if packed is None and (arrays := arrays_of(array)) is not None and device_settings.present().ipc:
        _present.introduce(arrays, [world])
    return packed


def receives_descriptors(channel: Markable, peers: Iterable[Rank]) -> bool:
    """Return whether any of the ranks of a channel may send descriptors to this rank."""
    if _present is None:
        return False
    node = _present.node
    local = [node.local.get(channel.members[peer], -1) if peer >= 0 else -1 for peer in peers]
    return any(k >= 0 and node.boards[k]["answers"][node.rank] == _YES for k in local)


def way_to(channel: Markable, peer: Rank, arrays: ArrayModule) -> tuple[bool, str]:
    """Return whether a rank of a channel is on this rank's node, and as text the way of device arrays to it."""
    if takes_directly(arrays):
        return _present is not None and channel.members[peer] in _present.node.local, "CUDA-aware MPI"
    if _present is None:
        return True, f"staged ({_reason})"
    receiver = _present.node.local.get(channel.members[peer])
    if receiver is None:
        return False, "staged"
    if _present.arena is not None and _present.arena.board["answers"][receiver] == _YES:
        return True, "CUDA IPC"
    reasons = [*_present.obstacles.values(), "the receiver can't read this rank's device memory"]
    return True, f"staged ({reasons[0]})"


def sends_descriptors(array: Array, channel: Markable, peers: Iterable[Rank]) -> bool:
    """Return whether any of the ranks of a channel gets the descriptor of an array."""
    if _present is None or _present.arena is None or not device_settings.present().ipc:
        return False
    local, answers = _present.node.local, _present.arena.board["answers"]
    known = [local.get(channel.members[peer], -1) for peer in peers]
    return arrays_of(array) == _present.arena.arrays and any(k >= 0 and answers[k] == _YES for k in known)


def declines_descriptors(channel: Markable, peers: Iterable[Rank]) -> bool:
    """Return whether none of the ranks of a channel sends descriptors to this rank, and let none send them from now on.

    Receives of compiled programs call it, since they receive nothing but their own number of bytes.
    """
    if _present is None:
        return True
    node = _present.node
    for owner in [node.local.get(channel.members[peer], node.rank) for peer in peers if peer >= 0]:
        if owner != node.rank and not node.boards[owner]["answers"][node.rank]:
            node.boards[owner]["answers"][node.rank] = _NO
            _present.obstacles[owner] = "a compiled function on the host receives from it"
    return not receives_descriptors(channel, peers)


def may_share(channel: Markable, nbytes: int) -> bool:
    """Return whether the ranks of a channel ask each other if a collective of this size is in device memory on all."""
    return (
        _present is not None
        and nbytes >= LEAST_SHARED
        and device_settings.present().ipc
        and all(rank in _present.node.local for rank in channel.members)
    )


def shares(arrays: ArrayModule | None, channel: Markable) -> bool:
    """Return whether arrays can be sent to all other ranks of a channel, and from them, in device memory."""
    if _present is None or _present.arena is None or arrays != _present.arena.arrays:
        return False
    node = _present.node
    others = [node.local[rank] for rank in channel.members if node.local[rank] != node.rank]
    answers = node.boards["answers"]
    return bool((answers[node.rank, others] == _YES).all() and (answers[others, node.rank] == _YES).all())


def introduce(spec: Spec, channel: Markable, peers: Iterable[Rank]) -> None:
    """Answer the ranks of a channel from which staged arrays have arrived on a device."""
    if _present is not None and spec.arrays is not None and device_settings.present().ipc:
        _present.introduce(spec.arrays, [channel.members[peer] for peer in peers])


def landing(spec: Spec) -> MessageBuffer | None:
    """Return memory for a message that may be an array or its descriptor; None if the array itself has space for both."""
    return None if _present is None or spec.nbytes >= DESCRIPTOR_BYTES else _buffer(spec, bytes(DESCRIPTOR_BYTES))


def _buffer(form: Spec, content: bytes) -> MessageBuffer:
    made = np.frombuffer(bytearray(content), np.uint8).view(MessageBuffer)
    made.form = form
    return made


def descriptor_in(memory: Array) -> np.ndarray | None:
    """Return the descriptor that a message of 64 bytes consists of; None if it consists of something else."""
    if _present is None or not isinstance(memory, np.ndarray) or memory.nbytes < DESCRIPTOR_BYTES:
        return None
    found = memory.reshape(-1).view(np.uint8)[:DESCRIPTOR_BYTES].view(np.ndarray).view(_DESCRIPTOR).reshape(())
    return found if np.array_equal(found["cookie"], _present.node.cookie) else None


def pull(found: np.ndarray, spec: Spec, channel: Markable, out: Array = None) -> Array | None:
    """Return the array of a descriptor, new or `out`; None if it has another size than `spec`, and drop it then."""
    if found["nbytes"] != spec.nbytes:
        _drop(found)
        return None
    return _present.pull(found, spec, out, channel)  # type: ignore[union-attr]


def discard(memory: np.ndarray) -> None:
    """Let the sender use the memory of a message again that this rank has received and drops."""
    if (found := descriptor_in(memory)) is not None:
        _drop(found)


def _drop(found: np.ndarray) -> None:
    if found["owner"] == _present.node.rank:  # type: ignore[union-attr]
        _present.withdraw(int(found["flag"]))  # type: ignore[union-attr]
    _present.node.pulled[found["owner"], found["flag"]] = found["number"]  # type: ignore[union-attr]
