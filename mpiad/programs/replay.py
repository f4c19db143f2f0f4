"""A scheduled program, run: buffers that are made once, kernels, and the calls between them.

The replay of a program is a function of Python's, one line for each step, written for it: what a step needs is bound to
names beforehand, so that a step costs its call. Small arguments and results are copied into and out of buffers, which is
cheaper than to look up where they lie; large ones are used where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.cache import kernel_of
from mpiad.primitives.operation import Operation
from mpiad.programs.array_program import Call, Node, Slot
from mpiad.programs.call_sites import called_at
from mpiad.programs.loops import NAME, LoopText, text_of
from mpiad.programs.message_numbers import MessageNumbers, is_numbered
from mpiad.programs.playback import logged
from mpiad.programs.schedule import Loop, Run, Schedule, root_of

__all__ = ["Changed", "Replay", "Replays"]

_SMALL = 4096  # bytes that are copied sooner than their address is found
# Products that are added may be rounded once, and a quotient be a product with the reciprocal.
_FAST = "contract arcp"


class Replays:
    """A program ready to be run, by several at a time: each has buffers of its own.

    Parameters
    ----------
    schedule : Schedule

    Attributes
    ----------
    texts : list of LoopText or None
        Of each step, None for calls.
    last_look : int
        The last step that may give something else than in the trace, so that the program can't go on; -1 for none.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.texts: list[LoopText | None] = [
            text_of(schedule, at) if isinstance(step, Loop) else None for at, step in enumerate(schedule.steps)
        ]
        self.kernels = [
            None if text is None else kernel_of(text.text, NAME, text.signature, _FAST, True) for text in self.texts
        ]
        self.homes = _homes(schedule, self.texts)
        # The buffers that each call returns.
        self.results: dict[int, list[int]] = {}
        for b, found in enumerate(schedule.buffers):
            if found.kind == "result":
                node = schedule.program.nodes[found.data]
                self.results.setdefault(node.inputs[0] if node.kind == "item" else found.data, []).append(b)
        self.last_look = max((at for at in range(len(schedule.steps)) if _is_looked_at(schedule, at)), default=-1)
        self._free: list[Replay] = []

    def take(self) -> Replay:
        """Return one that nobody uses."""
        try:
            return self._free.pop()
        except IndexError:
            return Replay(self)

    def give_back(self, replay: Replay) -> None:
        """Take one back."""
        self._free.append(replay)


class Replay:
    """A program with its buffers: ``first(*inputs)`` runs it up to its cut, ``rest(*inputs)`` what comes after it."""

    def __init__(self, replays: Replays):
        writer = _Writer(replays)
        self.first, self.rest = writer.functions()


class _Home(NamedTuple):
    """Which memory a temporary buffer is in."""

    memory: int
    nbytes: int


def _homes(schedule: Schedule, texts: Sequence[LoopText | None]) -> dict[int, _Home]:
    """Return the memory of temporary buffers: what one needs no more is another one's."""
    spans: dict[int, list[int]] = {}
    for at, (step, text) in enumerate(zip(schedule.steps, texts)):
        used = step.inputs if isinstance(step, Run) else text.buffers  # type: ignore[union-attr]
        for buffer in used:
            spans.setdefault(root_of(schedule.buffers, buffer), []).append(at)
    last = len(schedule.steps)
    free: list[tuple[int, int, int]] = []  # (bytes, memory, from which step on)
    homes: dict[int, _Home] = {}
    memories = 0
    ends: list[tuple[int, int, int]] = []
    for buffer in sorted((b for b in spans if schedule.buffers[b].kind == "temporary"), key=lambda b: spans[b][0]):
        found = schedule.buffers[buffer]
        nbytes = max(math.prod(found.shape), 1) * found.dtype.itemsize
        start, end = spans[buffer][0], spans[buffer][-1]
        # What the later part reads of the first is there for as long as that may be run again.
        if start < schedule.cut <= end:
            end = last
        ready = [entry for entry in ends if entry[0] < start]
        for entry in ready:
            ends.remove(entry)
            free.append(entry)
        fitting = [entry for entry in free if nbytes <= entry[1] <= 2 * nbytes]
        if fitting:
            # The one that was used last is the likeliest to be in a cache.
            entry = max(fitting, key=lambda entry: (entry[1] == nbytes, entry[0]))
            free.remove(entry)
            size, memory = entry[1], entry[2]
        else:
            size, memory = nbytes, memories
            memories += 1
        homes[buffer] = _Home(memory, size)
        ends.append((end, size, memory))
    return homes


class _Writer:
    """Writes the functions of a replay, and makes what they name."""

    def __init__(self, replays: Replays):
        self.replays, self.schedule = replays, replays.schedule
        self.nodes: list[Node] = self.schedule.program.nodes
        numbers = MessageNumbers()
        self.names: dict[str, Any] = {"empty": np.empty, "address": _address, "as_array": _as_array}
        self.names |= {"begin": numbers.begin, "addressed": numbers.addressed, "own": _own, "changed": _changed}
        # What has been communicated, for as long as the run may turn out not to be that of the trace.
        self.names |= {"log": [], "logged": logged}
        self._last_look = replays.last_look
        self._memories: dict[int, Array] = {}
        self._arrays: dict[int, str] = {}
        self._pointers: dict[int, str] = {}
        self._lines: list[str] = []
        self._as_memory = {
            root_of(self.schedule.buffers, b) for text in replays.texts if text is not None for b in text.buffers
        }

    def functions(self) -> tuple[Callable, Callable]:
        """Return both functions."""
        schedule, steps = self.schedule, self.schedule.steps
        used = [self._used(at) for at in range(len(steps))]
        # Arrays that calls before the cut have returned, and that are used after it.
        before = {b for at in range(schedule.cut) for b in self._made(at)}
        kept = sorted(before & {b for at in range(schedule.cut, len(steps)) for b in used[at]})
        names = ", ".join(f"r{b}, m{b}, p{b}" for b in kept)
        calls = [node.data for node in self.nodes if node.kind == "communicate" and node.data.kind == "communicate"]
        numbers_messages = any(is_numbered(call.args[1]) for call in calls)
        parts = []
        for late, span in ((False, range(schedule.cut)), (True, range(schedule.cut, len(steps)))):
            self._lines = [f"global {names}"] if kept else []
            if numbers_messages and not late:
                self._lines.append("begin()")
            if self._last_look >= 0 and not late:
                self._lines.append("log.clear()")
            outputs = [b for b, is_late in zip(schedule.outputs, schedule.late) if is_late == late]
            self._begin({b for at in span for b in used[at]} | set(outputs))
            for at in span:
                self._step(at)
            self._lines.append(f"return [{', '.join(self._result(b) for b in outputs)}]")
            parts.append(self._lines)
        first, rest = parts
        inputs = ", ".join(f"n{k}" for k in range(len(schedule.program.inputs)))
        text = "\n".join(
            f"def {name}({inputs}):\n" + "\n".join(f"    {line}" for line in lines)
            for name, lines in (("first", first), ("rest", rest))
        )
        self.text = text
        exec(compile(text, str(Path(__file__).with_name("<replay>")), "exec"), self.names)
        return self.names["first"], self.names["rest"]

    def _used(self, at: int) -> set[int]:
        """Return the buffers that a step reads or writes."""
        step, text = self.schedule.steps[at], self.replays.texts[at]
        return {root_of(self.schedule.buffers, b) for b in (step.inputs if text is None else text.buffers)}  # type: ignore[union-attr]

    def _made(self, at: int) -> list[int]:
        """Return the buffers that come from a call."""
        step = self.schedule.steps[at]
        return [] if isinstance(step, Loop) or step.in_place else self.replays.results.get(step.node, [])

    # ---- buffers

    def _begin(self, touched: set[int]) -> None:
        """Append lines that take the arguments in and make the outputs; bind all other buffers."""
        buffers = self.schedule.buffers
        for b in sorted({root_of(buffers, b) for b in touched}):
            found = buffers[b]
            if found.kind == "input":
                self._take_in(b, f"n{found.data}")
            elif found.kind == "output" and self._is_large(b):
                self._arrays[b], self._pointers[b] = f"o{b}", f"p{b}"
                self.names[f"d{b}"] = found.dtype
                self._lines += [f"o{b} = empty({found.shape}, d{b})", f"p{b} = address(o{b})"]
            elif found.kind != "result":
                self._bind(b)

    def _is_large(self, b: int) -> bool:
        found = self.schedule.buffers[b]
        return math.prod(found.shape) * found.dtype.itemsize > _SMALL

    def _bind(self, b: int) -> None:
        if b in self._arrays:
            return
        found = self.schedule.buffers[b]
        if found.kind == "constant":
            array = np.require(self.schedule.program.constants[found.data], found.dtype, ["C", "A"])
        elif b in self.replays.homes:
            home = self.replays.homes[b]
            if home.memory not in self._memories:
                self._memories[home.memory] = np.empty(home.nbytes, np.uint8)
            count = math.prod(found.shape) * found.dtype.itemsize
            array = self._memories[home.memory][:count].view(found.dtype).reshape(found.shape)
        else:
            array = np.empty(found.shape, found.dtype)
        self._arrays[b], self._pointers[b] = f"b{b}", f"p{b}"
        self.names[f"b{b}"], self.names[f"p{b}"] = array, _address(array)

    def _take_in(self, b: int, name: str) -> None:
        """Append lines by which an array that comes from outside can be read by kernels."""
        if self._is_large(b):
            self.names[f"d{b}"] = self.schedule.buffers[b].dtype
            self._lines += [f"m{b} = as_array({name}, d{b})", f"p{b} = address(m{b})"]
            self._arrays[b], self._pointers[b] = f"m{b}", f"p{b}"
        else:
            self._bind(b)
            self._lines.append(f"b{b}[...] = {name}")

    def _array(self, b: int) -> str:
        root = root_of(self.schedule.buffers, b)
        if root == b or self.schedule.buffers[b].shape == self.schedule.buffers[root].shape:
            return self._arrays[root]
        return f"{self._arrays[root]}.reshape({self.schedule.buffers[b].shape})"

    def _result(self, b: int) -> str:
        """Return the text of an output: an array of its own, or a number of NumPy's."""
        found = self.schedule.buffers[b]
        name = self._arrays[b]
        if found.kind == "result":
            return f"r{b}"
        if not found.shape:
            return f"{name}[()]"
        return name if self._is_large(b) else f"{name}.copy()"

    # ---- steps

    def _step(self, at: int) -> None:
        step = self.schedule.steps[at]
        if isinstance(step, Loop):
            self._kernel(at)
        elif step.in_place:
            call: Call = self.nodes[step.node].data
            site = self.nodes[step.node].site
            self.names[f"f{at}"], self.names[f"q{at}"] = called_at(site, "in place", call.rule), call.fun
            rest = [self._constant(at, k, x) for k, x in enumerate(call.args) if k]
            arguments = [f"q{at}", self._array(step.inputs[0]), *rest]
            self._lines.append(f"f{at}({', '.join(arguments)})")
            if at < self._last_look:
                self._lines.append(f"log.append({self._made_in_place(step, call)}.copy())")
        else:
            self._call(at, step)

    def _kernel(self, at: int) -> None:
        text, kernel = self.replays.texts[at], self.replays.kernels[at]
        given: list[str] = []
        for b in text.buffers:  # type: ignore[union-attr]
            shape = self.schedule.buffers[b].shape or (1,)
            given += [self._pointers[root_of(self.schedule.buffers, b)], *map(str, shape)]
        for name, array in (("e", text.boxes), ("w", np.empty(text.lanes) if text.lanes else None)):  # type: ignore[union-attr]
            if array is not None:
                array = np.ascontiguousarray(array)
                self.names[f"{name}{at}"], self.names[f"p{name}{at}"] = array, _address(array)
                given += [f"p{name}{at}", *map(str, array.shape)]
        self.names[f"k{at}"] = kernel.function.unchecked  # type: ignore[union-attr]
        self._lines.append(f"k{at}({', '.join(given)})")

    def _constant(self, at: int, k: Any, x: Any) -> str:
        if x is None or type(x) in (bool, int):
            return repr(x)
        self.names[f"c{at}_{k}"] = x
        return f"c{at}_{k}"

    def _call(self, at: int, step: Run) -> None:
        node = self.nodes[step.node]
        call: Call = node.data
        if node.kind == "communicate":
            self._communicate(at, step, node)
        else:
            self.names[f"f{at}"] = call.fun
            args = [self._argument(at, step, x) for x in call.args]
            args += [f"{key}={self._argument(at, step, x)}" for key, x in call.kwargs.items()]
            self._lines.append(f"v{at} = f{at}({', '.join(args)})")
        for b in self._made(at):
            made = self.nodes[self.schedule.buffers[b].data]
            self._received(b, f"v{at}[{made.data}]" if made.kind == "item" else f"v{at}")

    def _communicate(self, at: int, step: Run, node: Node) -> None:
        """Append lines that communicate, and that stop where what comes isn't what the program was made for."""
        call: Call = node.data
        self.names[f"f{at}"], self.names[f"q{at}"] = called_at(node.site, call.kind, call.rule), call.fun
        params = "None"
        if call.kind == "communicate":
            x = self._argument(at, step, call.args[0])
            params = self._argument(at, step, call.args[1])
            if is_numbered(call.args[1]):
                self._lines.append(f"a{at} = addressed({params})")
                params = f"a{at}"
            made = f"own(f{at}(q{at}, {x}, {params}))"
        elif call.kind == "operate":
            args = self._argument(at, step, call.args)
            made = f"f{at}(q{at}, {args}, {self._argument(at, step, call.kwargs)})"
        else:
            made = f"f{at}(q{at}, {self._argument(at, step, call.args)})"
        self._lines.append(f"v{at} = {made}")
        if at <= self._last_look:
            made = f"logged(v{at}, {params})" if params == f"a{at}" else f"v{at}"
            self._lines.append(f"log.append({made})")
        if _is_looked_at(self.schedule, at):
            self.names[f"G{at}"] = node
            self._lines.append(f"if {self._differs(at, node)}: changed(v{at}, G{at}, log)")
        if at == self._last_look:
            self._lines.append("log.clear()")

    def _differs(self, at: int, node: Node) -> str:
        """Return the text of the condition under which a result is no longer that of the trace."""
        if node.data.kind == "settle":
            self.names[f"E{at}"] = node.data.kwargs["expected"]
            return f"v{at} != E{at}"
        if node.data.kind == "opaque":
            self.names[f"E{at}"] = node.data.kwargs["expected"]
            return f"[(x.shape, x.dtype) for x in v{at}[:-1]] != E{at}"
        self.names[f"D{at}"] = node.dtype
        return f"v{at}.shape != {node.shape} or v{at}.dtype != D{at}"

    def _made_in_place(self, step: Run, call: Call) -> str:
        """Return the text of what an operator has made in its buffer."""
        starts, shape = call.fun.in_place.result(*call.args[1:]), self.nodes[step.node].shape
        cut = ", ".join(f"{start}:{start + n}" for start, n in zip(starts, shape[len(shape) - len(starts) :]))
        return f"{self._array(step.inputs[0])}[..., {cut}]"

    def _received(self, b: int, text: str) -> None:
        found = self.schedule.buffers[b]
        self._lines.append(f"r{b} = {text}")
        node = self.nodes[found.data]
        made = self.nodes[node.inputs[0]] if node.kind == "item" else node
        if made.kind == "call":
            # Kernels are made for a shape: they would read beyond the end of another one.
            self.names[f"g{b}"] = made
            log = "None" if any(node.kind == "communicate" for node in self.nodes) else "log"
            self._lines.append(f"if r{b}.shape != {found.shape}: changed(r{b}, g{b}, {log})")
        if b in self._as_memory:
            self._take_in(b, f"r{b}")
        else:
            self._arrays[b] = f"r{b}"

    def _argument(self, at: int, step: Run, x: Any) -> str:
        """Return the text of an argument of a call."""
        if isinstance(x, Slot):
            text = self._array(step.inputs[x.place])
            if self.nodes[self.nodes[step.node].inputs[x.place]].dtype == object:
                return text
            found = self.schedule.buffers[step.inputs[x.place]]
            if self.nodes[step.node].inputs[x.place] in self.schedule.program.weak:
                return f"{text}.item()"
            return text if found.shape else f"{text}[()]"
        if type(x) in (tuple, list):
            parts = ", ".join(self._argument(at, step, part) for part in x)
            return f"[{parts}]" if type(x) is list else f"({parts}{',' if len(x) == 1 else ''})"
        if type(x) is dict:
            return "{" + ", ".join(f"{key!r}: {self._argument(at, step, part)}" for key, part in x.items()) + "}"
        if type(x) is slice:
            return f"slice({', '.join(self._argument(at, step, part) for part in (x.start, x.stop, x.step))})"
        return self._constant(at, len(self.names), x)


def _is_looked_at(schedule: Schedule, at: int) -> bool:
    """Tell whether a communication may give something else than in the trace."""
    step = schedule.steps[at]
    if isinstance(step, Loop) or step.in_place:
        return False
    node = schedule.program.nodes[step.node]
    if node.kind != "communicate" or node.data.kind in ("settle", "opaque"):
        return node.kind == "communicate"
    fun = node.data.fun
    known = isinstance(fun, Operation) and fun.__name__ != "mpi_bcast" or getattr(fun, "in_place", None) is not None
    return not known and node.dtype != object


class Changed(TypeError):
    """Report a call whose result isn't what the program was made for.

    Attributes
    ----------
    log : list or None
        What was communicated in this run until then, that call's result the last; None where that isn't known.
    """

    log: list[Any] | None = None


def _changed(made: Any, node: Node, log: list[Any] | None = None) -> None:
    name = getattr(node.data.fun, "__name__", repr(node.data.fun))
    line = "" if node.site is None else f"{node.site.text}: "
    error = Changed(
        f"{line}{name} returns an array of shape {np.shape(made)}, and returned one of shape {node.shape} for the same "
        "arguments when the function was compiled. Leave it out of the jitted function"
    )
    if log is not None:
        error.log = list(log)
        log.clear()
    raise error


def _own(x: Any) -> Any:
    """Return a result in memory of its own: a view may be one of what was sent."""
    return x.copy() if type(x) is np.ndarray and x.base is not None else x


def _address(array: Array) -> int:
    return array.__array_interface__["data"][0]


def _as_array(x: Any, dtype: np.dtype) -> Array:
    """Return what kernels take of an array."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.flags.aligned and x.dtype == dtype:
        return x
    return np.require(x, dtype, ["C", "A"])
