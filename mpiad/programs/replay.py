"""A scheduled program, run: kernels that are compiled once, and buffers that are allocated once per replay."""

from __future__ import annotations

from typing import Any

from mpiad.compiling.cache import Kernel, kernel_of
from mpiad.programs.array_program import described
from mpiad.programs.loops import NAME, LoopText, text_of
from mpiad.programs.memory_plan import Scratch, homes_of, spans_of, written_over
from mpiad.programs.overlap import is_divided
from mpiad.programs.replay_writer import ReplayWriter, is_looked_at
from mpiad.programs.schedule import Loop, Schedule
from mpiad.transport import calls
from mpiad.transport.channels import is_watched
from mpiad.transport.fault_tolerance import FAULT_TOLERANT

# Products that are added may be rounded once, and a quotient may become a product with the reciprocal.
_FAST = "contract arcp"


class Replays:
    """A program ready to run, by several replays at a time, each with buffers of its own.

    - `texts`: those of the steps, None for calls.
    - `results`: the buffers that each call returns.
    - `uses`: the steps that use each buffer.
    - `logged`: the number of parts whose communications are logged.
    - `read_later`: the inputs that are read after the first part.
    - `last_look`: the last step whose result may differ from the trace, so that the program can't continue; -1 for none.
    - `free`: unused replays, by whether their communications are prepared.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        texts = [
            text_of(schedule, at, is_divided(schedule, at)) if isinstance(step, Loop) else None
            for at, step in enumerate(schedule.steps)
        ]
        self.texts: list[LoopText | None] = written_over(schedule, texts)
        self.kernels = list(map(self._kernel, schedule.steps, self.texts))
        self.homes = homes_of(schedule, self.texts)
        self.scratch = Scratch(self.homes)
        self.results: dict[int, list[int]] = {}
        for b, found in enumerate(schedule.buffers):
            if found.kind == "result":
                node = schedule.program.nodes[found.data]
                self.results.setdefault(node.inputs[0] if node.kind == "item" else found.data, []).append(b)
        self.uses = spans_of(schedule, self.texts)
        last = {schedule.buffers[b].data: at[-1] for b, at in self.uses.items() if schedule.buffers[b].kind == "input"}
        self.read_later = {place for place, at in last.items() if schedule.part(at) > 0}
        self.logged = schedule.program.logged
        self.last_look = max((at for at in range(len(schedule.steps)) if is_looked_at(schedule, at)), default=-1)
        self.free: dict[bool, list[Replay]] = {False: [], True: []}

    def _kernel(self, step: Any, text: LoopText | None) -> Kernel | None:
        try:
            return None if text is None else kernel_of(text.text, NAME, text.signature, _FAST)
        except NotImplementedError as error:  # whose message refers to the kernel's text
            nodes = [self.schedule.program.nodes[item.node] for item in step.items]
            said = ", ".join(dict.fromkeys(map(described, nodes)))
            raise NotImplementedError(f"no kernel can compute {said}") from error

    def take(self) -> Replay:
        """Return an unused replay."""
        # Prepared communications aren't logged, recorded, observed or interrupted.
        prepared = self.last_look < 0 and not (calls.is_noting() or is_watched() or FAULT_TOLERANT)
        try:
            return self.free[prepared].pop()
        except IndexError:
            return Replay(self, prepared)

    def give_back(self, replay: Replay) -> None:
        """Mark a replay as unused."""
        self.free[replay.prepared].append(replay)


class Replay:
    """A program with its buffers: ``first(*inputs)`` runs its first part, ``later[k](*inputs)`` the others."""

    def __init__(self, replays: Replays, prepared: bool):
        self.prepared = prepared
        writer = ReplayWriter(replays, prepared)
        self.first, *self.later = writer.functions()
        self.log: list[Any] = writer.names["log"]
