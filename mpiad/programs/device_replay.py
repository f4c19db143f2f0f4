"""Replays of programs for device arrays: kernels on a device, and Python's calls between them.

The schedule is that of the host (see `fusion`), with other loops (see `device_loops`). All kernels between two calls of
Python are queued together, on the device as one graph. They read the addresses of arrays, and numbers among the arguments,
from `words` on the device, which are copied there if they have changed since the last run. Nothing else is copied.

While an exchange of halos is in progress, the interior of the next loop runs. The interior is queued first, on the current
stream; then the exchange packs, sends, receives and unpacks on a side stream, which waits for what has been queued before
the interior. The edges of the loop are queued on the current stream after it has waited for the side stream. So the host
waits for packed faces only, and the faces of a later axis don't wait for the interior either.

A replay belongs to the stream on which it was first used, so that two streams never share its buffers. Results are new
arrays; scratch memory is taken from the device's pool in each run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.compiling.strided_updates import StridedUpdate
from mpiad.programs.array_program import COMPUTED, ArrayProgram, Node, Slot, described
from mpiad.programs.device_loops import THREADS, DeviceLoop, LoopKernel, compiled, kernels_of_updates
from mpiad.programs.device_words import Words
from mpiad.programs.fusion import Loop, Run, Schedule, root_of
from mpiad.programs.interpretation import logged
from mpiad.programs.memory_plan import SMALL, Scratch
from mpiad.programs.message_numbers import MessageNumbers, Numbers, is_numbered
from mpiad.programs.overlap import interior
from mpiad.programs.replay import Changed, Replays, call_at, is_checked
from mpiad.programs.traced_array import Step, mapped
from mpiad.transport.devices.device_arrays import ArrayModule, DeviceKernel, Launch, copied, is_device_array, launcher_of

_log = logging.getLogger("mpiad")

_PARTIAL, _BETWEEN = -1, -2  # in place of a buffer: the partial results of sums; what kernels of a loop store
# Minimum number of entries of a loop that is divided to overlap with messages. A smaller one takes less time than the
# host needs for another kernel and two events.
_LARGE = 1 << 20


class DeviceReplays(Replays):
    """The replays of a program for device arrays, by stream."""

    def __init__(self, schedule: Schedule, device: ArrayModule):
        self.device, self.launcher = device, launcher_of(device)
        self._constants: dict[int, Array] = {}
        super().__init__(schedule)

    def _text(self, at: int) -> DeviceLoop:
        return DeviceLoop(self.schedule, at)

    def compile(self) -> None:
        """Divide the loops after exchanges, and compile the kernels."""
        for at, text in enumerate(self.texts[1:]):
            if text is not None and prod(text.loop.shape) >= _LARGE:
                text.interior = interior(self.schedule, at, text, sets_constants=False)
        launches = self._compiled(range(len(self.texts)))
        self.launches = [launches[at] for at in range(len(self.texts))]
        between = max([text.between for text in self.texts if text is not None], default=0)
        # The memory of what kernels of a loop store for each other begins here.
        self.scratch_end = self.scratch.size + -self.scratch.size % 8
        self.scratch = Scratch(self.scratch_end + between) if between else self.scratch

    def _compiled(self, steps: Iterable[int]) -> dict[int, list[tuple[DeviceKernel, LoopKernel]]]:
        """Return the kernels of steps; if those of a loop spill, the loop is divided again."""
        of_steps = {at: self._kernels_of(at) for at in steps}
        made = iter(compiled([kernel for kernels in of_steps.values() for kernel in kernels], self.launcher))
        found = {at: [(next(made), one) for one in each] for at, each in of_steps.items()}
        revised = {at: self.texts[at].revise([one for one, _ in each]) for at, each in found.items() if self.texts[at]}
        spilled = {at: nbytes for at, nbytes in revised.items() if nbytes}
        if spilled:
            item = self.texts[min(spilled)].loop.items[-1]
            _log.info(
                "jit: kernels need up to %s bytes per thread beyond their registers; %s loops are divided among more "
                "kernels, such as that for %s",
                *(max(spilled.values()), len(spilled), described(self.schedule.nodes[item.node])),
            )
        again = [at for at, nbytes in revised.items() if nbytes is not None]
        return found | (self._compiled(again) if again else {})

    def _kernels_of(self, at: int) -> list[LoopKernel]:
        """Return the kernels of a step; none for a call of Python."""
        if (text := self.texts[at]) is not None:
            return text.kernels(self.allocations)
        if not self.schedule.steps[at].in_place:
            return []
        root = root_of(self.schedule.buffers, self.schedule.steps[at].inputs[0])
        found, allocation = self.schedule.buffers[root], self.allocations[root]
        memory = np.empty(prod(found.shape[:-1]) * allocation.pitch * found.dtype.itemsize, np.uint8)
        call: Step = self.schedule.nodes[self.schedule.steps[at].node].data
        array = allocation._replace(start=0).array(memory, found.shape, found.dtype)
        steps = getattr(call.fun.in_place.prepared(array, *call.args[1:]), "linked", None) or ()
        is_local = all(isinstance(step, StridedUpdate) for step in steps)
        return kernels_of_updates(steps, memory) if is_local else []

    def take(self) -> DeviceReplay:
        """Return an unused replay for the current stream."""
        stream = self.device.stream()
        try:
            return self.free.setdefault(stream, []).pop()
        except IndexError:
            return DeviceReplay(self, stream)

    def lease(self) -> DeviceLease:
        """Take a replay, which is given back when nothing refers to the lease any more."""
        return DeviceLease(self.take())

    def give_back(self, replay: Any) -> None:
        """Mark a replay as unused."""
        self.free[replay.stream].append(replay)

    def empty(self, what: str, shape: Shape, dtype: DTypeLike = np.uint8) -> Array:
        """Return a new array on the device."""
        try:
            return self.device.empty(shape, dtype)
        except MemoryError as error:
            nbytes = prod(shape) * np.dtype(dtype).itemsize
            raise MemoryError(
                f"jit: a program needs {nbytes:,} bytes on {self.device.name} device {self.device.device} for {what}: "
                f"{self.launcher.free_bytes():,} are free. Use smaller blocks, or for a loop in time scan with checkpoints."
            ) from error

    def scratch_memory(self) -> Array:
        """Return new scratch memory for a run."""
        return self.empty("arrays that it computes", (self.scratch.size,))

    def constant(self, place: int) -> Array:
        """Return a constant of the program; one from the host is copied to the device once."""
        found = self.schedule.program.constants[place]
        if is_device_array(found):
            return found
        if place not in self._constants:
            self._constants[place] = self.device.to_device(np.ascontiguousarray(found))
        return self._constants[place]


def replays_of(program: ArrayProgram) -> Replays:
    """Return the replays of a program for arrays on the host or on a device."""
    schedule = Schedule(program)
    return Replays(schedule) if program.device is None else DeviceReplays(schedule, program.device)


@dataclass(eq=False)
class _Fixed:
    """Memory at the same addresses in all runs of a replay, so that no words are copied to the device between them."""

    results: Sequence[Array]  # the outputs
    scratch: Array
    _stored: dict[int, Array] = field(default_factory=dict)  # small results of calls

    def stored(self, b: int, value: Array) -> Array:
        """Return a result of a call; if it is small, in the place of this result in earlier runs."""
        if value.nbytes > SMALL or not value.size:
            return value
        if b in self._stored:
            self._stored[b][...] = value
        else:
            self._stored[b] = copied(value)
        return self._stored[b]


class DeviceCycle:
    """Runs of a program whose outputs are the first inputs of the next run, without copies between host and device.

    The outputs replace the inputs: two replays write to two sets of arrays in turn.
    """

    def __init__(self, replays: DeviceReplays, params: Sequence[Array], state: Sequence[Array], constants: Sequence[Array]):
        device = replays.device
        self.state = [device.copy(x) for x in state]
        self._params, self._rest = (
            [device.contiguous(x) if is_device_array(x) else x for x in xs] for xs in (params, constants)
        )
        scratch = replays.scratch_memory()
        self._next = [device.empty(x.shape, x.dtype) for x in state]
        self._replays = [replays.take(), replays.take()]
        for replay, results in zip(self._replays, (self._next, self.state)):
            replay.fixed = _Fixed(results, scratch)

    def run(self, numbers: Numbers) -> None:
        """Replace the state by the outputs; `numbers`: see `MessageNumbers`."""
        replay = self._replays[0]
        replay.numbers.known = numbers
        made = replay.first(*self._params, *self.state, *self._rest)
        for value, place in zip(made, self._next):
            if value is not place:
                place[...] = value
        self.state, self._next = self._next, self.state
        self._replays.reverse()

    def close(self) -> None:
        """Give back the replays, after the last run."""
        for replay in self._replays:
            replay.fixed = None
            replay.replays.give_back(replay)


class DeviceLease:
    """Gives back a replay when nothing refers to it any more."""

    def __init__(self, replay: DeviceReplay):
        self.replay = replay

    def __del__(self) -> None:
        self.replay.replays.give_back(self.replay)


class _Part(NamedTuple):
    """What a run of a part of a program does: it binds the buffers `touched`, runs the steps, and returns the `outputs`."""

    number: int
    touched: list[int]
    steps: list[Callable[[], object]]
    outputs: range
    later: set[int]  # the buffers that later parts read


class DeviceReplay:
    """A program with its buffers: ``first(*inputs)`` runs its first part, and ``later[k](*inputs)`` part k + 1."""

    def __init__(self, replays: DeviceReplays, stream: Hashable):
        self.replays, self.schedule, self.stream = replays, replays.schedule, stream
        self._device, self._buffers = replays.device, replays.schedule.buffers
        self.nodes: list[Node] = self.schedule.program.nodes
        self.numbers, self.log = MessageNumbers(), list[object]()
        self._values: dict[int, Array] = {}  # by root buffer: arrays, numbers on the host, and requests
        loops = {at: self._in_kernels(at) for at in range(len(self.schedule.steps)) if replays.launches[at]}
        read = dict.fromkeys(b for buffers in loops.values() for b in buffers if b >= 0)
        numbers = [b for b in read if not self._buffers[b].shape and self._buffers[b].kind in ("input", "result")]
        self._words = Words(self._device, loops, numbers)
        self._memory = replays.empty("arrays that it computes", (replays.own_bytes,))
        for b, allocation in replays.allocations.items():
            if not allocation.is_scratch:
                self._words.store(b, self._device.pointer(self._memory) + allocation.start)
        count = max([text.partial for text in replays.texts if text is not None], default=0)
        self._partial = replays.empty("sums", (count,), float)
        self._words.store(_PARTIAL, self._device.pointer(self._partial))
        self._scratch: Array = None
        self.fixed: _Fixed | None = None
        self._scratched = [b for b, allocation in replays.allocations.items() if allocation.is_scratch]
        self.is_numbered = any(map(self._is_numbered, self.schedule.steps))
        ends = pairwise([0, *self.schedule.program.ends, len(self.schedule.outputs)])
        self.first, *self.later = [partial(self._run, self._part(part, *places)) for part, places in enumerate(ends)]

    def _in_kernels(self, at: int) -> list[int]:
        """Return the buffers whose addresses the kernels of a step read, in their order."""
        text, step = self.replays.texts[at], self.schedule.steps[at]
        buffers = [root_of(self._buffers, b) for b in (step.inputs if text is None else text.buffers)]
        if text is None:
            return buffers
        return [*buffers, *[_PARTIAL] * bool(text.folds), *[_BETWEEN] * bool(text.between)]

    def _bind(self, b: int, value: Array) -> None:
        """Bind a buffer to an array, a number or a request of this run."""
        found = self._buffers[b]
        if found.dtype != object and is_device_array(value):
            value = self._device.contiguous(value if value.dtype == found.dtype else value.astype(found.dtype))
            if value.shape != found.shape:
                raise ValueError(f"jit: an array of shape {value.shape} has had shape {found.shape} when it was compiled.")
            self._words.store(b, self._device.pointer(value))
        elif b in self._words and not self._words.store_number(b, value, found.dtype):
            value = self._device.to_device(np.ascontiguousarray(value, found.dtype))
            self._words.store(b, self._device.pointer(value))
        self._values[b] = value

    def _array(self, b: int) -> Array:
        """Return the array of a buffer, in the shape of the buffer."""
        root, shape = root_of(self._buffers, b), self._buffers[b].shape
        if self._buffers[b].dtype == object:  # an object of an opaque call, which may be an array
            return self._values[root]
        allocation = self.replays.allocations.get(root)
        if allocation is not None:
            memory, found = self._scratch if allocation.is_scratch else self._memory, self._buffers[root]
            value = allocation.array(memory, found.shape, found.dtype)
        else:
            value = self._values[root]
        return value.reshape(shape) if is_device_array(value) and value.shape != shape else value

    # ---- runs

    def _part(self, number: int, start: int, end: int) -> _Part:
        """Return what a run of a part of the program does, whose outputs are those from `start` to `end`."""
        schedule, uses = self.schedule, self.replays.uses
        roots = [root_of(self._buffers, b) for b in schedule.outputs]
        used = {b for b, found in uses.items() if number in map(schedule.part, found)}
        later = {b for b, found in uses.items() if schedule.part(found[-1]) > number} | {*roots[end:]}
        return _Part(number, sorted(used | {*roots[start:end]}), self._steps(number), range(start, end), later)

    def _steps(self, part: int) -> list[Callable[[], object]]:
        """Return functions that queue kernels, or make a call of Python."""
        steps, launches = list[Callable[[], object]](), list[Launch]()

        def queue() -> None:
            if launches:
                steps.extend([self._words.upload, self.replays.launcher.sequence([*launches])])
                launches.clear()

        for at, step in enumerate(self.schedule.steps):
            if self.schedule.part(at) != part:
                continue
            found = self._launches(at)
            if isinstance(step, Loop) or found:
                launches += found[self._is_divided(at) :]
                continue
            queue()
            run = self._in_place(at, step) if step.in_place else self._call(at, step)
            steps.append(self._overlapped(run, at + 1) if self._is_divided(at + 1) else run)
        queue()
        return steps

    def _launches(self, at: int) -> list[Launch]:
        """Return the launches of the kernels of a step."""
        words = (self._words.of_loop(at),) if self.replays.launches[at] else ()
        return [(kernel, -(-one.threads // THREADS), THREADS, words) for kernel, one in self.replays.launches[at]]

    def _is_divided(self, at: int) -> bool:
        """Return whether the interior of a loop runs during the step before it."""
        text = self.replays.texts[at] if at < len(self.replays.texts) else None
        return text is not None and text.interior is not None

    def _overlapped(self, exchange: Callable[[], object], at: int) -> Callable[[], None]:
        """Return the function that queues the interior of a loop, and runs the exchange before the loop meanwhile."""
        queue_interior = self.replays.launcher.sequence(self._launches(at)[:1])

        def run() -> None:
            self._words.upload()
            ready = self._device.record()
            queue_interior()
            with self._device.side_stream(ready):
                exchange()

        return run

    def _run(self, part: _Part, *inputs: Array) -> list[Array]:
        if not part.number:
            self.log.clear()
            if self.is_numbered:
                self.numbers.begin()
        if self.replays.scratch.size:
            self._scratch = self.replays.scratch_memory() if self.fixed is None else self.fixed.scratch
            base = self._device.pointer(self._scratch)
            for b in self._scratched:
                self._words.store(b, base + self.replays.allocations[b].start)
            self._words.store(_BETWEEN, base + self.replays.scratch_end)
        for b in part.touched:
            kind, shape, dtype, data, _ = self._buffers[b]
            if kind == "input":
                self._bind(b, inputs[data])
            elif kind == "constant":
                self._bind(b, self.replays.constant(data))
            elif kind == "output":
                made = None if self.fixed is None else self.fixed.results[data]
                self._bind(b, self.replays.empty("its results", shape, dtype) if made is None else made)
        for step in part.steps:
            step()
        made = [self._result(place) for place in part.outputs]
        self._values = {b: x for b, x in self._values.items() if b in part.later}
        self._scratch = None
        return made

    def _result(self, place: int) -> Array:
        """Return an output: a new array, or a number on the host."""
        b, program = self.schedule.outputs[place], self.schedule.program
        value, found = self._array(b), self._buffers[b]
        if not is_device_array(value):
            return value if found.dtype == object else np.array(value, found.dtype)[()]
        if program.outputs[place] in program.on_host:
            return self._device.to_host(value)[()]
        is_own = found.kind == "output" or found.kind == "result" and found.dtype in COMPUTED
        return value if is_own else self._device.copy(value)

    # ---- calls

    def _is_numbered(self, step: Loop | Run) -> bool:
        call = None if isinstance(step, Loop) else self.nodes[step.node].data
        return isinstance(call, Step) and call.kind == "communicate" and is_numbered(call.args[1])

    def _call(self, at: int, step: Run) -> Callable[[], None]:
        """Return the function that makes a call, and binds its results."""
        node = self.nodes[step.node]
        call: Step = node.data
        parts = {"call": (call.args, call.kwargs), "communicate": call.args, "operate": (call.args, call.kwargs)}
        given, has_number = parts.get(call.kind, (call.args,)), self._is_numbered(step)
        function = call_at(node.site, call.kind, call.rule) if node.kind == "communicate" else _called
        arguments = [b for b, n in zip(step.inputs, node.inputs) if self.nodes[n].dtype != object]

        def run() -> None:
            passed = [self._argument(step, part) for part in given]
            if has_number:
                passed[1] = self.numbers.addressed(passed[1])
            made = function(call.fun, *passed)
            if call.kind != "settle":
                made = self._own(made, [self._array(b) for b in arguments])
            if node.kind == "communicate":
                self._checked(at, node, made, passed[1] if has_number else None)
            for b in step.results:
                of = self.nodes[self._buffers[b].data]
                self._receive(b, made[of.data] if of.kind == "item" else made, node)

        return run

    def _receive(self, b: int, value: Array, node: Node) -> None:
        """Bind the result of a call, which must be as in the trace."""
        found = self._buffers[b]
        if node.kind == "call" and is_device_array(value) and (value.shape, value.dtype) != (found.shape, found.dtype):
            communicates = any(other.kind == "communicate" for other in self.nodes)
            raise Changed(value, node, None if communicates else self.log)
        self._bind(b, value if self.fixed is None or not is_device_array(value) else self.fixed.stored(b, value))

    def _in_place(self, at: int, step: Run) -> Callable[[], object]:
        """Return the function that runs an operator in its buffer."""
        node, b = self.nodes[step.node], step.inputs[0]
        call: Step = node.data
        function, is_logged = call_at(node.site, "in place", call.rule), at <= self.replays.last_check
        starts = call.fun.in_place.result(*call.args[1:])
        ends = node.shape[len(node.shape) - len(starts) :]
        result = (..., *[slice(start, start + n) for start, n in zip(starts, ends)])

        def run() -> None:
            buffer = self._array(b)
            function(call.fun, buffer, *call.args[1:])
            if is_logged:
                self.log.append(logged(buffer[result]))

        return run

    def _checked(self, at: int, node: Node, made: Array, params: object) -> None:
        """Log the result of a communication, and raise `Changed` if it differs from the trace (see `is_checked`)."""
        last, call = self.replays.last_check, node.data
        if at <= last:
            self.log.append(made if call.kind == "communicate" and params is None else logged(made, params))
        if is_checked(self.schedule, at):
            if call.kind in ("settle", "opaque"):
                found = made if call.kind == "settle" else [(x.shape, x.dtype) for x in made[:-1]]
                differs = found != call.kwargs["expected"]
            else:
                differs = made.shape != node.shape or made.dtype != node.dtype
            if differs:
                raise Changed(made, node, self.log)
        if at == last:
            self.log.clear()

    def _own(self, result: Tree, arguments: Sequence[Array]) -> Tree:
        """Return the results of a call, copied if they share memory with the arguments, which is used again."""
        if type(result) in (list, tuple):
            return type(result)([self._own(x, arguments) for x in result])
        if not is_device_array(result) or not result.size:
            return result
        first = self._device.pointer(result)
        spans = [(self._device.pointer(x), x.nbytes) for x in arguments if is_device_array(x)]
        return self._device.copy(result) if any(0 <= first - start < nbytes for start, nbytes in spans) else result

    def _argument(self, step: Run, x: Tree) -> Tree:
        """Return a part of the arguments of a call, with arrays and numbers in place of slots."""
        inputs, program = self.nodes[step.node].inputs, self.schedule.program

        def leaf(x: object) -> Array:
            if not isinstance(x, Slot):
                return x
            n, value = inputs[x.place], self._array(step.inputs[x.place])
            if n in program.on_host and is_device_array(value):  # a loop has computed it
                value = self._device.to_host(value)[()]
            return value.item() if n in program.weak and isinstance(value, np.generic) else value

        return mapped(x, leaf)


def _called(function: Function, args: Sequence[Array], kwargs: dict[str, Array]) -> Tree:
    return function(*args, **kwargs)
