"""Turning the watch on and off: wrappers replace the communicators of all channels, including later ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import inf

from mpi4py import MPI

from mpiad import environment_variables
from mpiad._typing import Comm
from mpiad.transport.core import calls, channels
from mpiad.transport.core.channels import Channel, Watch, drain, make_communicator
from mpiad.transport.devices.device_settings import minima_over_ranks
from mpiad.transport.watch import program_calls, watch_settings
from mpiad.transport.watch.call_agreement import Agreement, DroppedResults
from mpiad.transport.watch.communicator import Guarded
from mpiad.transport.watch.message_headers import HeadedMessages
from mpiad.transport.watch.status import Responder
from mpiad.transport.watch.timed_waits import cancel_receives
from mpiad.transport.watch.watch_settings import Settings

_OWNER = "guard"
_agreements: dict[tuple[int, ...], Agreement] = {}
_responder: Responder | None = None
_world: Guarded | None = None


def start() -> None:
    """Turn on the watch if the environment of any rank requests it; collective over the world."""

    def read() -> Settings:
        environment_variables.check()
        return watch_settings.from_environment()

    # A request on one rank applies to all, since a rank without the watch wouldn't answer the others. So the minimum of
    # `not debug` is 0 if any rank requests debug mode, and the minimum of the limits applies.
    not_debug, call_sites, limit = minima_over_ranks(
        channels.base(),
        read,
        lambda wanted: [not wanted.debug, wanted.call_sites, inf if wanted.timeout is None else wanted.timeout],
        "an environment variable of mpiad",
    )
    found = Settings(not not_debug, None if limit == inf else limit, bool(call_sites))
    if found.watches:
        apply(found)


def apply(wanted: Settings) -> None:
    """Put settings into effect; collective over the world."""
    global _responder, _world
    before = watch_settings.put(wanted)
    if _responder is None:
        # Created once and kept: `restore` can neither create nor free communicators.
        comm = channels.base().Dup()
        _responder, _world = Responder(comm), Guarded(comm, "world, to meet", tuple(range(comm.size)))
        # If the user calls MPI.Finalize, MPI first deletes this attribute, which ends the thread.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: stop_answering()), None)
        calls.observers.append(DroppedResults())
    elif not before.watches:
        _responder.start()
    calls.note(_OWNER)
    live = _in_common_order()
    channels.set_watch(Watch(_duplicate, _put_on, _restart))
    if wanted.debug != before.debug or not before.watches:
        # An exception may have interrupted an agreement before.
        for agreement in _agreements.values():
            agreement.renew()
        for channel in live:
            _unwrap(channel)
            _put_on(channel)
            if isinstance(channel.data, HeadedMessages):
                channel.data.skip(channel.sent, channel.received)


def watch_program(comm: Comm, end_job: Callable[[str], None]) -> Comm:
    """Return a communicator whose calls are watched; `end_job`: see `Responder`; collective over the world."""
    present = watch_settings.present()
    if not present.watches:
        apply(present._replace(timeout=watch_settings.DEBUG_TIMEOUT))
    _responder.watch_program(end_job)  # type: ignore[union-attr]
    return program_calls.watch_program(comm)


def restore(before: Settings) -> None:
    """Restore the settings before `apply`; not collective, since an exception may have kept other ranks from this call.

    Therefore no communicator is created. None is necessary: if the watch stays on and debug mode changes, debug mode ends,
    so messages have no headers; and each channel already has an agreement, which stays closed if a reset has failed.
    """
    now = watch_settings.put(before)
    if not before.watches:
        channels.set_watch(None)
        calls.forget(_OWNER)
        stop_answering()
    if now.debug != before.debug or not before.watches:
        for channel in channels.live_channels():
            _unwrap(channel)
            if before.watches:
                _guard(channel, _agreements[_ranks(channel)])


def stop_answering(all_have_left: bool = False) -> None:
    """End the thread that answers other ranks, before MPI ends."""
    if _responder is not None:
        _responder.stop()
        if all_have_left:
            _responder.receive_departures()


def announce(how: str, place: str) -> None:
    """Notify all ranks that this one has left the program, by the call `how`."""
    if _responder is not None:
        _responder.announce(how, place, any(channel.has_pending_sends() for channel in channels.live_channels()))


def _in_common_order() -> list[Channel]:
    """Return this rank's channels in an order that all ranks share; collective."""
    mine = {(channel.members, channel.number): channel for channel in channels.live_channels()}
    every = _world.allgather(list(mine))  # type: ignore[union-attr]
    return [mine[key] for key in sorted({key for found in every for key in found}) if key in mine]


def _put_on(channel: Channel) -> None:
    agreement = _agreement(channel)
    if not watch_settings.debug():
        _guard(channel, agreement)
        return
    if channel.headers is None:
        channel.headers = make_communicator(channel.data.Dup)
    else:
        drain(channel.headers, channel.tag_limit)  # of messages that were received after an earlier debug mode
    _guard(channel, agreement, channel.headers)


def _guard(channel: Channel, agreement: Agreement, headers: Comm = None) -> None:
    common = (channel.label, channel.members, agreement, channel, channel.number)
    channel.data = Guarded(channel.data, *common) if headers is None else HeadedMessages(channel.data, headers, *common)
    channel.reverse = Guarded(channel.reverse, f"{channel.label}, backwards", *common[1:], reverse=True)


def _unwrap(channel: Channel) -> None:
    for name in ("data", "reverse", "_backwards"):
        comm = getattr(channel, name)
        if isinstance(comm, Guarded):
            setattr(channel, name, comm.bare)


def _agreement(channel: Channel) -> Agreement:
    key = _ranks(channel)
    found = _agreements.get(key)
    if found is None:
        label = f"agreement of {len(key)} ranks, {hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()}"
        found = _agreements[key] = Agreement(make_communicator(channel.data.Dup), channel.members, label)
    found.open()
    return found


def _ranks(channel: Channel) -> tuple[int, ...]:
    """Return the key of a channel's agreement: its sorted ranks, since channels may order them differently."""
    return tuple(sorted(channel.members))


def _duplicate(channel: Channel) -> Comm:
    # MPI's call is blocking, so the guarded communicator first waits for all ranks.
    return Guarded(getattr(channel.user, "bare", channel.user), f"{channel.label}, prepared", channel.members).Dup().bare


def _restart(channel: Channel) -> None:
    for comm in (channel.data, channel.reverse):
        cancel_receives(comm)
    agreement = _agreements.get(_ranks(channel))
    if agreement is not None:
        agreement.renew()
