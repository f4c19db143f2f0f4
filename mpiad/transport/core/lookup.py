"""Lookup of channels: a user's communicator has its channel as an MPI attribute, and the two are freed together."""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple, NoReturn

from mpi4py import MPI

from mpiad._typing import Comm, Rank
from mpiad.errors import CommunicatorError, UnfinishedMessagesError
from mpiad.transport.core.channels import FORKED, Channel, base, is_fork, set_base, world_ranks
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT, is_revoked
from mpiad.transport.core.tracing import once, tracing

_world: Channel | None = None
_default: Comm = MPI.COMM_WORLD  # the program's communicator of the world
_finalized = False


def start_world(call: str) -> None:
    """Start the library; the module `world`, which imports this file, assigns its function `start` to this name."""


# MPI calls this in comm.Free(), which is collective, as `close` must be.
def _freed(comm: Comm, key: int, owned: Channel) -> None:
    owned.close()


@cache
def _key() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_freed)


def set_world(comm: Comm, private: Comm) -> None:
    """Set the communicator that ``comm=None`` means, and the library's own communicator of the same ranks."""
    global _default
    _default = comm
    set_base(private)


def open_world() -> Channel:
    """Make the duplicates of the world; collective over its ranks."""
    global _world, _finalized
    if _world is None:
        _world = Channel(base())
        _finalized = False
    return _world


def world_is_given_up() -> bool:
    """Return whether another rank has revoked the world's channel, and waits until this one learns of a failure."""
    return FAULT_TOLERANT and _world is not None and is_revoked(_world.data)


def close_world() -> None:
    """Complete pending sends and free the duplicates of the world; collective over all ranks."""
    global _world, _finalized
    if _world is not None:
        _world.close()
    # `_finalized` is set even if the world wasn't open, for the error of later calls.
    _world, _finalized = None, True


def channel(comm: Comm, call: str, collective: bool = True, survivors: bool = False) -> Channel:
    """Return the channel of a communicator, made at its first collective use; `call`: the public function, for errors.

    `collective`: whether all ranks of `comm` make this call, so that duplicates can be made. `survivors`: whether a channel
    that has lost processes is accepted. Raises a CommunicatorError if `comm` is freed, null, an intercommunicator or not
    prepared, or after the end of MPI; an UnfinishedMessagesError if an exception has left messages in flight.
    """
    if tracing.recorder is not None:
        tracing.recorder.looked_up(call)
    found = _started(call) if comm is None else prepare(comm, call, collective)
    if found.fault is not None and not (survivors and found.lost):
        _refuse(found, call)
    return found


def _started(call: str) -> Channel:
    """Return the world's channel; start the library if it isn't started."""
    return once(_start, call) if _world is None or MPI.Is_finalized() else _world


def _start(call: str) -> Channel:
    refuse_fork(call)
    _require_mpi(call)
    start_world(call)
    return _world or open_world()


def refuse_fork(call: str) -> None:
    """Raise a CommunicatorError if this process was forked from a rank."""
    if is_fork():
        raise CommunicatorError(f"{call}: {FORKED}")


def _require_mpi(call: str) -> None:
    if _finalized or MPI.Is_finalized():
        raise CommunicatorError(
            f"{call}: called after mpi_finalize. No communication is possible any more; move this call before it."
        )
    if not MPI.Is_initialized():
        raise CommunicatorError(f"{call}: MPI is not initialized. Call mpiad.mpi_init() on all ranks first.")


def _refuse(channel: Channel, call: str) -> NoReturn:
    if channel.alone:
        raise CommunicatorError(f"{call}: {channel.fault}, so this call would wait for them forever.")
    if channel.lost:
        raise CommunicatorError(f"{call}: {channel.fault} The other ranks can continue with comm.Shrink().")
    raise UnfinishedMessagesError(
        f"{call}: {channel.fault} Call mpiad.reset(comm) on all ranks of this communicator before its next use: "
        "otherwise an old message could be received in place of a new one."
    )


def member(comm: Comm, call: str) -> Comm:
    """Return a communicator whose rank and size may be read: the world for None.

    Raises a CommunicatorError if it is freed, null or an intercommunicator, before the start and after the end of MPI.
    """
    _require_mpi(call)
    if comm is None:
        comm = base() if _default == MPI.COMM_NULL else _default  # the program may have freed its communicator
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"{call}: comm must be an mpi4py intracommunicator or None, but got {type(comm).__name__}.")
    if comm == MPI.COMM_NULL:
        raise CommunicatorError(
            f"{call}: comm is the null communicator: it was freed, or this rank isn't a member of it. "
            "Call this on its members only, before comm.Free()."
        )
    if comm.Is_inter():
        raise CommunicatorError(
            f"{call}: comm is an intercommunicator (with {comm.size} ranks on this side), "
            "but an intracommunicator is expected. Merge it first: comm.Merge()."
        )
    return comm


class Edge(NamedTuple):
    """A neighbor in a process topology, and the direction on a grid in which the message travels; 0 in graphs."""

    peer: Rank
    direction: int


class Edges(NamedTuple):
    """The neighbors that send to this rank, and those that receive from it, in MPI's order."""

    sources: list[Edge]
    destinations: list[Edge]


def edges_of(comm: Comm, call: str) -> Edges:
    """Return the edges of a communicator's topology; raise a CommunicatorError if it has none."""
    group = member(comm, call)
    if not isinstance(group, MPI.Topocomm):
        raise CommunicatorError(
            f"{call}: comm must have a process topology, but got {type(group).__name__}. Pass comm=, a communicator of "
            "comm.Create_cart, comm.Create_dist_graph or comm.Create_dist_graph_adjacent."
        )
    on_grid = isinstance(group, MPI.Cartcomm)
    sources, destinations = group.inoutedges
    # A message from the neighbor in direction k travels in the opposite direction, k ^ 1. On periodic axes of one or two
    # ranks, both neighbors are the same rank, and only the direction tells their messages apart.
    return Edges(
        [Edge(peer, k ^ 1 if on_grid else 0) for k, peer in enumerate(sources)],
        [Edge(peer, k if on_grid else 0) for k, peer in enumerate(destinations)],
    )


def prepare(comm: Comm, call: str, collective: bool = True) -> Channel:
    """Return the channel of a communicator. If `collective`, make its duplicates if there are none."""
    comm = member(comm, call)
    world = _started(call)
    if comm in (_default, world.user):
        return world
    found = comm.Get_attr(_key())
    if found is None:
        # Making duplicates is collective, but only two ranks take part in a message.
        if not collective:
            raise CommunicatorError(
                f"{call}: this communicator of {comm.size} ranks was never prepared, and a point-to-point call can't "
                "prepare it, since not all its ranks take part. Call mpiad.mpi_init(comm) on all its ranks first."
            )
        if _default != MPI.COMM_WORLD and min(world_ranks(comm)) < 0:
            raise CommunicatorError(
                f"{call}: some of the {comm.size} ranks of comm don't belong to the world of {world.size} ranks, which was "
                "passed to mpi_init(world=...). Communicate with other ranks by mpi4py."
            )
        found = once(Channel, comm)
        comm.Set_attr(_key(), found)
    return found


def renew(comm: Comm, call: str) -> None:
    """Renew the duplicates of a communicator; collective over its ranks."""
    # Not by `channel`, which raises an error for the marked channels that are renewed here.
    found = prepare(comm, call)
    if found.lost:
        _refuse(found, call)
    found.renew()
    for division in found.divisions:
        if division != MPI.COMM_NULL:  # unless it has been freed
            prepare(division, call).renew()


def _forget_world() -> None:
    global _world
    _world = None  # so that each lookup of a channel ends in `refuse_fork`


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_world)
