"""A replay whose arguments and results stay at the same addresses, so that commands can run it without Python."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import address_of
from mpiad.compiling.commands import Commands
from mpiad.programs.fusion import Run, root_of
from mpiad.programs.memory_plan import SMALL
from mpiad.programs.replay import Replay, Replays
from mpiad.transport import Channel, Envelope


class Unsuitable(Exception):
    """Raised if commands can't run a program: it has calls of Python, or results that aren't contiguous."""


class MessageCounts:
    """The counts of messages on channels, which commands advance together, before they run."""

    def __init__(self) -> None:
        self._totals: dict[tuple[Channel, str, tuple[int, int]], int] = {}
        self._bases: dict[tuple[Channel, str, tuple[int, int]], Array] = {}

    def advance(self, channel: Channel, name: str, key: tuple[int, int], by: int = 1) -> tuple[Array, int]:
        """Count messages; return an array that will contain the count before the commands, and the number since then."""
        place = channel, name, key
        before = self._totals.get(place, 0)
        self._totals[place] = before + by
        return self._bases.setdefault(place, np.zeros(1, np.int64)), before

    def begin(self) -> None:
        """Add all messages to the counts of their channels."""
        for place, total in self._totals.items():
            channel, name, key = place
            counts = getattr(channel, name)
            self._bases[place][0] = counts.get(key, 0)
            counts[key] = counts.get(key, 0) + total


class FixedReplay:
    """A replay that nothing but commands runs.

    Parameters
    ----------
    arguments : dict
        The arrays that it reads, by place, of the arguments of all parts; it allocates the missing ones. They are added.
    scratch : array
        Memory that replays may use one after another.
    """

    def __init__(self, replays: Replays, arguments: Mapping[int, Array], scratch: Array):
        self._replay = replay = Replay(replays, prepared=True)
        if not replay.is_linked or replays.schedule.program.kept:
            raise Unsuitable
        self._steps_of_numbers()
        self.arguments = dict(arguments)
        self._renewed: dict[Envelope, tuple[Array, int]] = {}  # see `MessageCounts.advance`
        self._channels = list(replay.blocks.channels().values())
        self._comms = [call.comm for call in self._channels]
        buffers, names = replays.schedule.buffers, replay.names
        if replays.scratch.size:
            names["take"](scratch)
        texts = [[replay.place_of(b) for b in part] for part in replays.schedule.outputs_of_parts()]
        self._places = places = {**names}
        for b in {root_of(buffers, b) for b in (*replays.uses, *replays.schedule.outputs)}:
            found = buffers[b]
            if found.kind not in ("input", "output"):
                continue
            array = np.zeros(found.shape, found.dtype)
            if found.kind == "input":
                array = self.arguments.setdefault(found.data, array)
            if (array.shape, array.dtype) != (found.shape, found.dtype):
                raise Unsuitable
            replay.blocks.bind(b, address_of(array))
            places[replay.name_of(b)] = array
        try:
            self.results = [[eval(text, places) for text in part] for part in texts]
        except NameError:  # the result of a call of Python
            raise Unsuitable from None
        if not all(type(x) is np.ndarray and x.flags.c_contiguous for part in self.results for x in part):
            raise Unsuitable
        if any(buffers[root_of(buffers, b)].kind == "input" for b in replays.schedule.outputs):  # changed by the next call
            raise Unsuitable

    def _steps_of_numbers(self) -> None:
        """Raise an exception unless the results of all calls of Python depend on the first argument, a number, alone."""
        schedule = self._replay.schedule
        buffers = schedule.buffers
        known = {
            b for b, found in enumerate(buffers) if found.kind == "constant" or (found.kind, found.data) == ("input", 0)
        }
        for at, _ in self._replay.by_python:
            step = schedule.steps[at]
            is_call = isinstance(step, Run) and not step.in_place and schedule.nodes[step.node].kind == "call"
            if not is_call or not known.issuperset(root_of(buffers, b) for b in step.inputs):
                raise Unsuitable
            if any(buffers[b].nbytes > SMALL for b in step.results):
                raise Unsuitable
            known.update(step.results)

    def append_call(self, commands: Commands, counts: MessageCounts, part: int, number: int) -> None:
        """Append the call of a part; `number`: the first argument, with which the calls of Python are made now."""
        replay, schedule = self._replay, self._replay.schedule
        if 0 in self.arguments:
            if self.arguments[0].dtype != np.int64:
                raise Unsuitable
            self.arguments[0][...] = number
            commands.copy(self.arguments[0], self.arguments[0].copy())
        for at, lines in replay.by_python:
            if schedule.part(at) == part:
                exec("\n".join(lines), self._places)
                for array in [self._places[f"b{b}"] for b in schedule.steps[at].results if f"b{b}" in self._places]:
                    commands.copy(array, array.copy())
        for envelope in replay.renewed.get(part, ()):
            if envelope.answers is not None:
                self._renewed[envelope] = self._renewed[envelope.answers]
            elif envelope.is_fixed:
                name = "sent" if envelope.outgoing else "received"
                self._renewed[envelope] = counts.advance(envelope.channel, name, (envelope.peer, envelope.tag))
            else:
                raise Unsuitable
        for word, envelope in replay.tagged.get(part, ()):
            (base, number), channel = self._renewed[envelope], envelope.channel
            offset = envelope.tag * channel.tag_stride + number
            commands.number(replay.blocks.address_of(word), base, offset, channel.tag_limit)
        for (channel, (name, key)), number in replay.blocks.counts(part).items():
            counts.advance(channel, name, key, number)
        for function, block in replay.heads.get(part, ()):
            commands.call(function, block, replay.blocks.address_of(0))

    def begin(self) -> None:
        """Store the handles of the communicators of channels that have been renewed."""
        comms = [call.comm for call in self._channels]
        if any(comm is not before for comm, before in zip(comms, self._comms)):
            self._comms = comms
            self._replay.blocks.bind_communicators()

    def fail(self) -> None:
        """Raise the error with which a call has ended."""
        self._replay.fail(self._replay.blocks.words[0])
