"""Replays: executable instances of a scheduled program, each with its own buffers.

The kernels are compiled once per program, and a replay allocates its buffers once. The functions of a replay are generated
Python code with one line per step; the operands are global variables of this code. Small arguments and results are copied
into and out of buffers, which is faster than looking up their addresses. Large arrays are used without a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from itertools import pairwise
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import address_of, aligned
from mpiad.compiling.cache import Kernel, Source, kernels_of
from mpiad.compiling.source import indented
from mpiad.primitives.catalogue import BCAST, IRECV, ISEND, WAIT
from mpiad.primitives.operation import Operation, recorded_call
from mpiad.programs.array_program import COMPUTED, Node, Slot, described, operation_of, strides_of
from mpiad.programs.fusion import Loop, Run, Schedule, root_of
from mpiad.programs.interpretation import logged
from mpiad.programs.kernel_blocks import CompiledLoops, KernelBlocks, Message, Messages, Operators
from mpiad.programs.loops import NAME, LoopText
from mpiad.programs.memory_plan import SMALL, Scratch, allocate, overwrite, spans_of
from mpiad.programs.message_numbers import MessageNumbers, channels_of, envelopes_of, is_numbered, renewal_text, tag_text
from mpiad.programs.overlap import Action, actions_of, is_divided, run_together
from mpiad.programs.tiling import tiled
from mpiad.programs.traced_array import Step, mapped
from mpiad.transport import Envelope
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Site
from mpiad.transport.core.channels import is_watched
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.core.linked_calls import LinkedRun

# Bytes of each array up to which a prepared operator saves time even if its arguments must be copied to fixed places.
_PREPARED = 1 << 16


class Replays:
    """The replays of a program, and the data that they share. Several replays may be in use at a time."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        steps = enumerate(schedule.steps)
        self.texts: list[Any] = [self._text(at) if isinstance(step, Loop) else None for at, step in steps]  # None for calls
        overwrite(schedule, self.texts)
        self.uses = spans_of(schedule, self.texts)
        self.allocations, self.own_bytes, scratch_bytes = allocate(schedule, self.uses)
        self.scratch = Scratch(scratch_bytes)
        late = [schedule.buffers[b] for b, at in self.uses.items() if schedule.part(at[-1]) > 0]
        self.read_later = {buffer.data for buffer in late if buffer.kind == "input"}  # inputs for later parts
        # The steps whose results are compared with the trace, and the last: if they differ, the program can't continue.
        self.checked = [at for at in range(len(schedule.steps)) if is_checked(schedule, at)]
        self.last_check = max(self.checked, default=-1)
        self.free: dict[Hashable, list[Any]] = {False: [], True: []}  # unused replays, by `key` of the replay
        self.compile()

    def _text(self, at: int) -> Any:
        """Return the text of a loop."""
        return LoopText(self.schedule, at, is_divided(self.schedule, at))

    def compile(self) -> None:
        """Compile the loops, and choose the order of actions."""
        self.kernels = self._kernels()
        # The keys of the following dicts are `Replay.prepared`.
        actions, overlapping = (actions_of(self.schedule, self.texts, overlaps) for overlaps in (False, True))
        self.actions = {False: actions, True: tiled(self.schedule, self.texts, self.allocations, overlapping)}

    def _kernels(self) -> list[Kernel | None]:
        sources = [None if text is None else Source(text.text, NAME, text.signature) for text in self.texts]
        try:
            made = iter(kernels_of([source for source in sources if source is not None]))
        except NotImplementedError as error:  # its message refers to the kernel's text, which the user doesn't know
            step: Any = self.schedule.steps[sources.index(error.args[1])]
            nodes = [self.schedule.program.nodes[item.node] for item in step.items]
            operations = ", ".join(dict.fromkeys(map(described, nodes)))
            raise NotImplementedError(f"no kernel can compute {operations}") from error
        return [None if source is None else next(made) for source in sources]

    def take(self) -> Replay:
        """Return an unused replay."""
        # Prepared communications can't be logged, recorded, watched or interrupted.
        prepared = self.last_check < 0 and not (calls.is_noting() or is_watched() or FAULT_TOLERANT)
        try:
            return self.free[prepared].pop()
        except IndexError:
            return Replay(self, prepared)

    def lease(self) -> Lease:
        """Take a replay, which is given back when no array refers to its memory any more."""
        replay = self.take()
        lease: Any = replay.memory.view(_Memory).view(Lease)
        lease.replay, replay.lease = replay, weakref.ref(lease)
        return lease

    def give_back(self, replay: Replay) -> None:
        """Mark a replay as unused."""
        self.free[replay.prepared].append(replay)


class Changed(TypeError):
    """Raised by a replay if a result's shape or dtype differs from the trace; `log`: this run's communications, or None."""

    def __init__(self, result: Any, node: Node, log: list[Any] | None):
        line = "" if node.site is None else f"{node.site.text}: "
        is_array = hasattr(result, "dtype")
        what = f"an array of shape {result.shape} and dtype {result.dtype}" if is_array else "other results than"
        before = f", but one of shape {node.shape} and dtype {node.dtype}" if is_array else ""
        super().__init__(
            f"{line}{operation_of(node)} has returned {what}{before} when the function was compiled for arguments of the "
            "same shapes. Call it outside of the jitted function"
        )
        self.log = log


def is_checked(schedule: Schedule, at: int) -> bool:
    """Return whether the result of a step must be compared with its result in the trace."""
    step = schedule.steps[at]
    if isinstance(step, Loop) or step.in_place:
        return False
    node = schedule.program.nodes[step.node]
    if node.kind != "communicate" or node.data.kind in ("settle", "opaque"):
        return node.kind == "communicate" and "expected" in node.data.kwargs
    fun = node.data.fun
    if isinstance(fun, Operation):  # this rank may not know the shape of the broadcast array
        known = fun is not BCAST or node.data.args[1].spec is not None
    else:
        known = fun.spec_of is not None or fun.fixes_spec
    return not known and node.dtype != object


def _as_argument(x: Any, dtype: np.dtype) -> Array:
    """Return an array, or a copy that is contiguous, aligned and of the given dtype, as kernels require."""
    if type(x) is np.ndarray and x.flags.c_contiguous and x.flags.aligned and x.dtype == dtype:
        return x
    return np.require(x, dtype, ["C", "A"])


# Attribution of communications to the user's lines.
#
# Reports and timeouts name the innermost frame of user code. Each communication of a replay is therefore called from a
# generated function whose code object has the file, line and function name of the user's call in the trace.


def call_at(site: Site | None, kind: str, rule: tuple[str, str, Site] | None = None) -> Callable[..., Any]:
    """Return the function `_CALLS[kind]` with a frame of the user's line; `rule`: see `Step.rule`."""
    made: Any = _CALLS[kind]
    if rule is not None:
        return _in_rule(made, rule)
    if site is None or not site.file:
        return made
    # The site is stored among the code's constants, where `site_of` finds it without inspecting the stack.
    name, code = site.function, made.__code__
    consts = (*code.co_consts, site)
    code = code.replace(co_filename=site.file, co_firstlineno=site.line, co_name=name, co_consts=consts)
    return FunctionType(code, {}, name)


def _in_rule(function: Callable[..., Any], rule: tuple[str, str, Site]) -> Callable[..., Any]:
    """Return a function that makes a call, and records it, on request, at the line of the derivative's call."""

    def call(operation: Any, x: Any, *rest: Any) -> Any:
        if not calls.is_noting():
            return function(operation, x, *rest)
        first = (x[0] if x else None) if isinstance(x, tuple) else x
        arguments = *rule, first, None if isinstance(x, tuple) or not rest else rest[0]
        return recorded_call(calls.begin_rule, arguments, function, operation, x, *rest)

    return call


# Each function is on one line, since a code object stores line numbers relative to its first line. In-place operators
# return an iterator over their parts: "begin" runs the first part, and "end" the others.
_CALLS: dict[str, Any] = {
    "communicate": lambda operation, x, params: operation.forward(x, params),
    "operate": lambda operator, args, kwargs: operator.body(args, kwargs),
    "in place": lambda operator, buffer, *rest: operator.run_in_place(buffer, *rest),
    "prepared": lambda prepared: prepared(),
    "begin": lambda parts: next(parts, None),
    "end": lambda parts: list(parts),
    **dict.fromkeys(("settle", "opaque"), lambda fun, args: fun(*args)),
}


class Replay:
    """A program with its buffers: ``first(*inputs)`` runs its first part, and ``later[k](*inputs)`` part k + 1."""

    def __init__(self, replays: Replays, prepared: bool):
        self.replays, self.schedule, self.prepared = replays, replays.schedule, prepared
        self.nodes: list[Node] = self.schedule.program.nodes
        self._actions = replays.actions[prepared]
        self.numbers = MessageNumbers()
        messages, numbered = self._messages_of_steps()
        self._messages: Messages = {}
        for at, message in messages.items() if prepared else ():
            self._messages[at] = message and self._numbered(message)
        self.memory = aligned(replays.own_bytes, np.dtype(np.uint8), np.empty)
        self._operators = self._linked_operators() if prepared else {}
        loops = CompiledLoops(replays.texts, replays.kernels, replays.allocations)
        self.blocks = KernelBlocks(self.schedule, loops, self._actions, self._messages, self._operators)
        self.lease: Callable[[], Any] = lambda: None  # returns the `Lease`, if there is one
        self.log: list[Any] = []  # the results of communications, as long as a later result may differ from the trace
        # The global variables of the generated functions.
        self.names: dict[str, Any] = {"empty": np.empty, "ndarray": np.ndarray, "address": address_of}
        self.names |= {"begin": self.numbers.begin, "addressed": self.numbers.addressed, "t": self.blocks.words}
        self.names |= {"as_array": _as_argument, "own": _own, "together": run_together, "Changed": Changed}
        self.names |= {"lease": lambda: self.lease(), "take_known": self.numbers.take_known}
        self.names |= {"log": self.log, "logged": logged}
        self._arrays: dict[int, str] = {}
        self._lines: list[str] = []
        # Arrays that kernels read, or that are read through views, are contiguous.
        buffers = self.schedule.buffers
        self._in_kernels = {root_of(buffers, b) for text in replays.texts if text is not None for b in text.buffers}
        self._in_kernels |= {root_of(buffers, b) for b, found in enumerate(buffers) if found.map is not None}
        self.names |= {"bind": self._bind_communicators, "fail": self.fail}
        self._bind_communicators()
        self._renumbers, self.is_numbered = bool(numbered - self._messages.keys()), bool(numbered)
        # For `FixedReplay`, of each part: the addresses of the first linked kernels and their blocks, the envelopes that
        # it renews, and those of its messages with the places of their tags. And the lines of other steps.
        self.heads: dict[int, list[tuple[int, int]]] = {}
        self.by_python: list[tuple[int, list[str]]] = []
        self.is_linked = prepared and not self._renumbers and not self.numbers.has_known
        self.renewed: dict[int, list[Envelope]] = {}
        self.tagged: dict[int, list[tuple[int, Envelope]]] = {}
        self.first, *self.later = self._functions()

    def _bind_communicators(self) -> None:
        self.blocks.bind_communicators()
        for k, call in enumerate(self.blocks.channels().values()):
            self.names |= {f"C{k}": call.channel, f"D{k}": call.comm}

    def name_of(self, b: int) -> str:
        """Return the name of a buffer in `place_of`."""
        return self._arrays[b]

    def fail(self, number: int) -> None:
        """Raise the error of a call of MPI at the user's line."""
        step = self.schedule.steps[self.blocks.step_of(number)]
        call_at(self.nodes[step.node].site, "prepared")(lambda: self.blocks.raise_error(number))

    def _linked_operators(self) -> Operators:
        """Return the operators that linked kernels run in their buffers."""
        operators: Operators = {}
        for at, step in enumerate(self.schedule.steps):
            if isinstance(step, Loop) or not step.in_place:
                continue
            root = root_of(self.schedule.buffers, step.inputs[0])
            buffer, allocation = self.schedule.buffers[root], self.replays.allocations.get(root)
            array = np.empty(buffer.shape, buffer.dtype)
            if allocation is not None:  # the layout determines which parts are contiguous
                memory = np.empty(self.replays.scratch.size, np.uint8) if allocation.is_scratch else self.memory
                array = allocation.array(memory, buffer.shape, buffer.dtype)
            call: Step = self.nodes[step.node].data
            operator = call.fun.in_place.prepared(array, *call.args[1:])
            if isinstance(operator, LinkedRun) and operator.linked is not None:
                operators[at] = operator
        return operators

    def _numbered(self, message: Message) -> Message:
        """Return a message whose envelopes this replay renews."""
        params, renewed, buffers = message.params, list[Envelope](), self.schedule.buffers
        if envelopes_of(params):
            params, renewed = self.numbers.with_copies(params)
        arrays = [None if b is None else np.empty(buffers[b].shape, buffers[b].dtype) for b in (message.x, message.out)]
        made = message.prepared(params, *arrays)
        linked = None if made is None or made.linked is None or made.linked.kernel is None else made.linked
        if message.x is not None and not self._is_dense(message.x):
            linked = None
        return message._replace(params=params, renewed=renewed, linked=linked)

    def _is_dense(self, b: int) -> bool:
        """Return whether a buffer has an address, at which its entries follow each other."""
        buffers, allocations = self.schedule.buffers, self.replays.allocations
        root = root_of(buffers, b)
        if buffers[root].kind == "result" and all(x is None or x.out != root for x in self._messages.values()):
            return False  # Python allocates it
        shape = buffers[root].shape
        is_padded = root in allocations and len(shape) > 1 and allocations[root].pitch != shape[-1]
        return buffers[b].map is None and not is_padded

    def _messages_of_steps(self) -> tuple[Messages, set[int]]:
        """Return the communications of small arrays, which can be prepared, and the steps of numbered messages.

        For a request, the start sends, and the wait receives: a wait for a send and the start of a receive have no message.
        """
        found: Messages = {}
        numbered: set[int] = set()
        active: dict[int, list[Any]] = {}  # nodes of started receives, and what MPI matches
        is_mixed = False  # whether an operator may receive the message of a receive that is posted at its wait
        for at, step in enumerate(self.schedule.steps):
            if isinstance(step, Loop) or step.in_place:
                continue
            node = self.nodes[step.node]
            if node.kind != "communicate":
                continue
            if node.data.kind != "communicate":  # halo exchanges, which work in place, have tags of their own
                is_mixed |= bool(active) and getattr(node.data.fun, "in_place", None) is None
                continue
            request = node.inputs[0] if node.data.fun is WAIT else -1
            call = node.data if request < 0 else self.nodes[request].data
            if not isinstance(call, Step):  # a request that another program started
                return {}, {at}
            params, out = call.args[1], next(iter(step.results), None)
            if is_numbered(params) or call.fun in (ISEND, IRECV):  # requests without a partner have no number
                numbered.add(at)
            out = None if call.fun in (ISEND, IRECV) and request < 0 else out  # the request
            is_unused = out not in self.replays.uses and out not in self.schedule.outputs
            if is_unused and not channels_of(params):  # there is no partner
                found[at] = None
                continue
            if call.fun is ISEND and request >= 0:
                # The sent values, which the wait returns, would have to be kept.
                if is_unused:
                    found[at] = None
                continue
            matched = [(id(e.channel), e.reverse, e.peer, e.mpi_tag) for e in envelopes_of(params) if not e.outgoing]
            if call.fun is IRECV and request < 0:
                active[step.node], found[at] = matched, None
                continue
            x = next(iter(step.inputs), None) if request < 0 else None
            sends_number = request < 0 and x is None and call.args[0] is not None  # a constant, which has no buffer
            prepared = None if sends_number else call.fun.prepared
            message = None if prepared is None else Message(prepared, params, x, out)
            # A receive that is posted at its wait gets the same message only if no earlier one is active.
            first = next((n for n, others in active.items() if matched and others == matched), request)
            if message is not None and first == request and len(step.inputs) <= 1 and self._is_preparable(message):
                found[at] = message
            active.pop(request, None)
        # Either all communications with message numbers are prepared, or none of them.
        if is_mixed or not numbered <= found.keys():
            found = {at: message for at, message in found.items() if at not in numbered}
        return found, numbered

    def _is_preparable(self, message: Message) -> bool:
        buffers = [None if b is None else self.schedule.buffers[b] for b in (message.x, message.out)]
        if any(buffer is not None and buffer.nbytes > SMALL for buffer in buffers):
            return False
        spare = [None if buffer is None else np.empty(buffer.shape, buffer.dtype) for buffer in buffers]
        return message.prepared(message.params, *spare) is not None

    def _functions(self) -> list[Callable]:
        """Return a function for each part of the program."""
        schedule, steps = self.schedule, self.schedule.steps
        uses, returned = self.replays.uses, schedule.outputs
        ends = [0, *schedule.program.ends, len(returned)]
        # Arrays that calls return in one part of the program, and that a later part uses or returns, are global variables.
        made = {b: schedule.part(at) for at, step in enumerate(steps) if isinstance(step, Run) for b in step.results}
        kept = [b for b, k in made.items() if schedule.part(uses.get(b, [0])[-1]) > k or b in returned[ends[k + 1] :]]
        names = ", ".join(f"r{b}, m{b}" for b in kept)
        self.names |= {"take": self._scratch(), "give_back": self.replays.scratch.give_back}
        # A part doesn't get the inputs of later parts.
        inputs = ", ".join(f"n{k}=None" for k in range(len(schedule.program.inputs)))
        text: list[str] = []
        for part, (start, end) in enumerate(pairwise(ends)):
            self._lines = [f"global {names}"] if kept else []
            if self.is_numbered and not part:
                self._lines.append("begin()" if self._renumbers else "take_known()")
            if self.replays.last_check >= 0 and not part:
                self._lines.append("log.clear()")
            outputs = returned[start:end]
            if part in self.blocks.calls:
                channels = enumerate(self.blocks.channels())
                changed = [f"C{k}.{'reverse' if reverse else 'data'} is not D{k}" for k, (_, reverse) in channels]
                self._lines.append(f"if {' or '.join(changed)}: bind()")
                for (channel, (name, key)), n in self.blocks.counts(part).items():
                    self._lines.append(f"d = {self._bound(channel)}.{name}; d[{key}] = d.get({key}, 0) + {n}")
            self._begin({b for b, found in uses.items() if part in map(schedule.part, found)} | set(outputs))
            for k, action in enumerate(self._actions):
                if schedule.part(action.at) == part:
                    self._append_action(k, action)
            is_kept = [k in schedule.program.kept for k in range(start, end)]
            if any(kept and self._is_leased(b) for b, kept in zip(outputs, is_kept)):
                self._lines.append("memory = lease()")
            results = [self._kept(b) if kept else self._result(b) for b, kept in zip(outputs, is_kept)]
            self._lines.append(f"made = [{', '.join(results)}]")
            if self.replays.scratch.size:
                self._lines = ["scratch = take()", *self._lines, "give_back(scratch)"]
            text += [f"def part{part}({inputs}):", *indented([*filter(None, self._lines), "return made"])]
        exec(compile("\n".join(text), str(Path(__file__).with_name("<replay>")), "exec"), self.names)
        return [self.names[f"part{part}"] for part in range(len(ends) - 1)]

    def _begin(self, touched: set[int]) -> None:
        """Append lines that read the inputs and allocate the outputs, and bind the other buffers that are `touched`."""
        buffers = self.schedule.buffers
        for b in sorted({root_of(buffers, b) for b in touched}):
            found = buffers[b]
            if found.kind == "input":
                self._read_argument(b, f"n{found.data}")
            elif found.kind == "output" and self._is_large(b):
                self._assign(b, f"o{b}", f"empty({found.shape}, d{b})")
            elif found.kind != "result":
                self._bind(b)

    def _is_large(self, b: int) -> bool:
        return self.schedule.buffers[b].nbytes > SMALL

    def _bind(self, b: int) -> None:
        """Allocate a buffer, unless it is in scratch memory, and store its address in the kernels' arguments."""
        if b in self._arrays:
            return
        found = self.schedule.buffers[b]
        if found.kind == "constant":
            array = np.require(self.schedule.program.constants[found.data], found.dtype, ["C", "A"])
        elif b in self.replays.allocations:
            if self.replays.allocations[b].is_scratch:
                self._arrays[b] = f"b{b}"
                return
            array = self._in_memory(b, self.memory)
        else:
            array = np.empty(found.shape, found.dtype)
        self._arrays[b], self.names[f"b{b}"] = f"b{b}", array
        self.blocks.bind(b, address_of(array))

    def _in_memory(self, b: int, memory: Array) -> Array:
        found = self.schedule.buffers[b]
        return self.replays.allocations[b].array(memory, found.shape, found.dtype)

    def _scratch(self) -> Callable[[], Any]:
        """Return a function that takes scratch memory for a run, and binds buffers to it unless the last run used it."""
        buffers = [b for b, allocation in self.replays.allocations.items() if allocation.is_scratch]
        steps = enumerate(self.schedule.steps) if self.prepared else ()
        in_place = [(at, step) for at, step in steps if isinstance(step, Run) and step.in_place]
        exchanged = [at for at, step in in_place if root_of(self.schedule.buffers, step.inputs[0]) in buffers]
        scratch = self.replays.scratch
        bound: dict[str, Any] = {"memory": None}

        def taken(memory: Array | None = None) -> Array:
            memory = scratch.take(bound["memory"]) if memory is None else memory
            if memory is not bound["memory"]:
                for b in buffers:
                    self.names[f"b{b}"] = array = self._in_memory(b, memory)
                    self.blocks.bind(b, address_of(array))
                for at in exchanged:
                    self._prepare(at)
                bound["memory"] = memory
            return memory

        return taken

    def _read_argument(self, b: int, name: str) -> None:
        """Append lines that provide kernels with an input or the result of a call."""
        if self._is_large(b):
            self._assign(b, f"m{b}", f"as_array({name}, d{b})")
        else:
            self._bind(b)
            self._lines.append(f"b{b}[...] = {name}")

    def _assign(self, b: int, name: str, text: str) -> None:
        """Append lines that assign a large array to a name, and store its address in the kernels' arguments."""
        self._arrays[b], self.names[f"d{b}"] = name, self.schedule.buffers[b].dtype
        self._lines += [f"{name} = {text}", self.blocks.assignment(b, f"address({name})")]

    def place_of(self, b: int) -> str:
        """Return an expression of names of buffers (`name_of`) and of `names`: the array of a buffer."""
        buffers, root = self.schedule.buffers, root_of(self.schedule.buffers, b)
        found = buffers[b]
        if found.map is not None:
            strides, start = strides_of(found.map, buffers[found.data].shape, found.shape)  # type: ignore[misc]
            size, dtype = found.dtype.itemsize, self._bound(found.dtype)
            offset, steps = start * size, [n * size for n in strides]
            return f"ndarray({found.shape}, {dtype}, {self.place_of(found.data)}, {offset}, {steps})"
        return self._arrays[root] + ("" if found.shape == buffers[root].shape else f".reshape({found.shape})")

    def _result(self, b: int) -> str:
        """Return the expression of an output: a new array, or a NumPy scalar."""
        found, name = self.schedule.buffers[b], self._arrays[b]
        if not found.shape:
            return f"{name}[()]"
        if found.kind == "result" and name != f"b{b}" and found.dtype in COMPUTED:
            return f"r{b}"
        return name if found.kind == "output" and self._is_large(b) else f"{name}.copy()"

    # A result that only other programs read is an array in the replay's memory. As long as one of these arrays exists, the
    # replay is in use: their base is the lease.

    def _is_leased(self, b: int) -> bool:
        return root_of(self.schedule.buffers, b) in self.replays.allocations and self._is_large(b)

    def _kept(self, b: int) -> str:
        """Return the expression of an output that only other programs read."""
        found, root = self.schedule.buffers[b], root_of(self.schedule.buffers, b)
        if self._is_leased(b):
            start = self.replays.allocations[root].start
            return f"ndarray({found.shape}, {self._bound(found.dtype)}, memory, {start})"
        is_own = self._arrays[root] == f"b{root}" and self.schedule.buffers[root].kind != "constant"
        return self.place_of(b) + ("[()]" if not found.shape else ".copy()" if is_own else "")

    def _append_action(self, k: int, action: Action) -> None:
        at, step, before = action.at, self.schedule.steps[action.at], len(self._lines)
        if self.blocks.chains[k] is not None:
            self._append_linked(k, action)
        elif action.kind == "loop":
            self.names[f"k{at}"] = self.replays.kernels[at].function  # type: ignore[union-attr]
            self._lines.append(f"together(k{at}, {[self.blocks.address(k, n) for n in range(len(action.shares))]})")
        elif action.kind == "end":
            self.names[f"h{at}"] = call_at(self.nodes[step.node].site, "end")
            self._lines.append(f"h{at}(x{at})")
        elif step.in_place:
            self._in_place(at, step, action.kind == "begin")
        elif at in self._messages:
            self._prepared(at, step, self._messages[at])  # type: ignore[arg-type]
        elif not self._prepared_operator(at, step):
            self._call(at, step)
        if action.kind in ("call", "end") and step.in_place and self._is_logged(at):
            call, shape = self.nodes[step.node].data, self.nodes[step.node].shape
            starts = call.fun.in_place.result(*call.args[1:])
            cut = ", ".join(f"{start}:{start + n}" for start, n in zip(starts, shape[len(shape) - len(starts) :]))
            made = f"{self.place_of(step.inputs[0])}[..., {cut}]"
            # A prepared operator takes no message numbers.
            self._lines.append(f"log.append({f'{made}.copy()' if self.prepared else f'logged({made})'})")
        if self.blocks.chains[k] is None:
            self.by_python.append((at, self._lines[before:]))

    def _in_place(self, at: int, step: Run, is_begun: bool) -> None:
        """Append lines that run an operator in its buffer; if `is_begun`, they run the first part of the operator."""
        node, buffer = self.nodes[step.node], self.place_of(step.inputs[0])
        call: Step = node.data
        if self.prepared:
            self._prepare_in_place(at)
            self.names[f"f{at}"] = call_at(node.site, "begin" if is_begun else "end")
            self._lines += [f"x{at} = q{at}()", f"f{at}(x{at})"]
            return
        self.names[f"f{at}"], self.names[f"q{at}"] = call_at(node.site, "in place", call.rule), call.fun
        self._lines.append(f"f{at}({', '.join([f'q{at}', buffer, *map(self._bound, call.args[1:])])})")

    def _prepare_in_place(self, at: int) -> None:
        """Prepare an operator, unless `_scratch` does it because its buffer is in scratch memory."""
        if self.place_of(self.schedule.steps[at].inputs[0]) in self.names:
            self._prepare(at)

    def _is_logged(self, at: int) -> bool:
        return at <= self.replays.last_check

    def _prepare(self, at: int) -> None:
        step = self.schedule.steps[at]
        call: Step = self.nodes[step.node].data
        operator = call.fun.in_place.prepared(self.names[self.place_of(step.inputs[0])], *call.args[1:])
        self.names[f"q{at}"] = operator
        if at in self._operators:
            self.blocks.set_operator(at, operator)

    def _call(self, at: int, step: Run) -> None:
        node = self.nodes[step.node]
        call: Step = node.data
        if node.kind == "communicate":
            self._communicate(at, step, node)
        else:
            self.names[f"f{at}"] = call.fun
            args = [self._argument(step, x) for x in call.args]
            args += [f"{key}={self._argument(step, x)}" for key, x in call.kwargs.items()]
            self._lines.append(f"v{at} = " + self._owned(step, f"f{at}({', '.join(args)})"))
        for b in step.results:
            made = self.nodes[self.schedule.buffers[b].data]
            self._received(b, f"v{at}[{made.data}]" if made.kind == "item" else f"v{at}")

    def _owned(self, step: Run, call: str) -> str:
        """Return the expression of a call's results, copied if they share memory with the arguments."""
        buffers, nodes = self.schedule.buffers, self.nodes[step.node].inputs
        given = {root_of(buffers, b): None for b, n in zip(step.inputs, nodes) if self.nodes[n].dtype != object}
        return f"own({', '.join([call, *[self._arrays[b] for b in given]])})" if given else call

    def _communicate(self, at: int, step: Run, node: Node) -> None:
        """Append lines that communicate, and that raise `Changed` if the result differs from the trace (`is_checked`)."""
        call: Step = node.data
        self.names[f"f{at}"], self.names[f"q{at}"] = call_at(node.site, call.kind, call.rule), call.fun
        parts = {"communicate": call.args, "operate": (call.args, call.kwargs)}.get(call.kind, (call.args,))
        given = [self._argument(step, part) for part in parts]
        numbered = call.kind == "communicate" and is_numbered(call.args[1])
        if numbered:
            self._lines.append(f"a{at} = addressed({given[1]})")
            given[1] = f"a{at}"
        made = f"f{at}({', '.join([f'q{at}', *given])})"
        is_new = call.kind == "settle" or call.kind == "opaque" and "expected" not in call.kwargs
        self._lines.append(f"v{at} = {made if is_new else self._owned(step, made)}")
        if self._is_logged(at):
            entry = f"logged(v{at}, a{at})" if numbered else f"v{at}" if call.kind == "communicate" else f"logged(v{at})"
            self._lines.append(f"log.append({entry})")
        if is_checked(self.schedule, at):
            if call.kind in ("settle", "opaque"):
                made = f"v{at}" if call.kind == "settle" else f"[(x.shape, x.dtype) for x in v{at}[:-1]]"
                condition = f"{made} != {self._bound(call.kwargs['expected'])}"
            else:
                condition = f"v{at}.shape != {node.shape} or v{at}.dtype != {self._bound(node.dtype)}"
            self._lines.append(f"if {condition}: raise Changed(v{at}, {self._bound(node)}, log)")
        if at == self.replays.last_check:
            self._lines.append("log.clear()")

    def _bound(self, value: Any) -> str:
        """Return a new name for a value."""
        name = f"N{len(self.names)}"
        self.names[name] = value
        return name

    def _append_linked(self, k: int, action: Action) -> None:
        """Append the call of a kernel or a communication, unless it is linked to the one before."""
        at, message, renewals = action.at, self._messages.get(action.at), list[str]()
        part = self.schedule.part(at)
        if at in self._operators and action.kind != "end":
            self._prepare_in_place(at)
        if message is not None and message.out is not None:
            self._bind(message.out)
        if not self.blocks.chains[k]:
            return
        if k not in self.blocks.linked:
            address, kernel = self.blocks.head(k)
            self.names[f"k{k}"], self._head = kernel.function, len(self._lines)
            self.heads.setdefault(part, []).append((kernel.function.address, address))  # type: ignore[attr-defined]
            self._lines.append(f"k{k}({address})")
        if message is not None:  # it gets its numbers before the first kernel is called
            renewals = self._renewals(message)
            self.renewed.setdefault(part, []).extend(message.renewed)
            for place, envelope in message.linked.tags():  # type: ignore[union-attr]
                if envelope.reverse:
                    tag = self.blocks.tag_of(at, place)
                    renewals.append(f"t[{tag}] = {tag_text(envelope, self._bound)}")
                    self.tagged.setdefault(part, []).append((tag, envelope))
            self._lines[self._head : self._head] = renewals
            self._head += len(renewals)
        if (message is not None or at in self._operators) and len(self._lines) == self._head + 1:
            self._lines.append("if t[0]: fail(t[0])")

    def _renewals(self, message: Message) -> list[str]:
        """Return the statements that give new numbers to a message's envelopes."""
        return [renewal_text(envelope, self._bound) for envelope in message.renewed]

    def _prepared(self, at: int, step: Run, message: Message) -> None:
        """Append the lines of a prepared communication from one buffer into another."""
        x, out = message.x, message.out
        self._lines += self._renewals(message)
        if out is not None:
            self._bind(out)
        arrays = self._at_fixed_place(x), None if out is None else self.names[f"b{out}"]
        self.names[f"f{at}"] = call_at(self.nodes[step.node].site, "prepared")
        self.names[f"q{at}"] = message.prepared(message.params, *arrays).call  # type: ignore[union-attr]
        self._lines.append(f"f{at}(q{at})")

    def _prepared_operator(self, at: int, step: Run) -> bool:
        """Append the call of an operator from small buffers into another; return False if there is none."""
        call, buffers = self.nodes[step.node].data, self.schedule.buffers
        if not self.prepared or getattr(call, "kind", None) != "operate" or call.fun.prepared is None:
            return False
        nbytes = max([buffers[b].nbytes for b in (*step.inputs, *step.results)], default=0)
        if len(step.results) != 1 or call.kwargs or nbytes > _PREPARED:
            return False
        args = [self._at_fixed_place(step.inputs[x.place]) if isinstance(x, Slot) else x for x in call.args]
        self._bind(step.results[0])
        args = [self.names[f"b{step.results[0]}"], *args]
        is_dense = all(x.flags.c_contiguous for x in args if type(x) is np.ndarray)  # rows may be padded
        run = call.fun.prepared(*args) if is_dense else None
        if run is None:
            return False
        self.names |= {f"f{at}": call_at(self.nodes[step.node].site, "prepared"), f"q{at}": run}
        self._lines.append(f"f{at}(q{at})")
        return True

    def _at_fixed_place(self, b: int | None) -> Array | None:
        """Return the array of a buffer; if its place varies, append a line that copies it into the returned one."""
        if b is None or (name := self.place_of(b)) in self.names:
            return None if b is None else self.names[name]
        array = np.empty(self.schedule.buffers[b].shape, self.schedule.buffers[b].dtype)
        self._lines.append(f"{self._bound(array)}[...] = {name}")
        return array

    def _received(self, b: int, text: str) -> None:
        found = self.schedule.buffers[b]
        self._lines.append(f"r{b} = {text}")
        node = self.nodes[found.data]
        made = self.nodes[node.inputs[0]] if node.kind == "item" else node
        if made.kind == "call":
            # A kernel is compiled for one shape and dtype: it would read beyond the end of a smaller array, and drop the
            # imaginary parts of eigenvalues that were real in the trace.
            log = "log" if all(n.kind != "communicate" for n in self.nodes) else "None"
            differs = f"r{b}.shape != {found.shape} or r{b}.dtype != {self._bound(found.dtype)}"
            self._lines.append(f"if {differs}: raise Changed(r{b}, {self._bound(made)}, {log})")
        if b in self._in_kernels:
            self._read_argument(b, f"r{b}")
        else:  # an opaque step may return numbers of Python
            self._arrays[b] = f"r{b}" if found.shape or found.dtype == object else f"{self._bound(np.asarray)}(r{b})"

    def _argument(self, step: Run, x: Any) -> str:
        """Return the expression of an argument of a call."""

        def leaf(x: Any) -> _Text:
            if not isinstance(x, Slot):
                return _Text(self._bound(x))
            n, text = self.nodes[step.node].inputs[x.place], self.place_of(step.inputs[x.place])
            if n in self.schedule.program.weak:
                return _Text(f"{text}.item()")
            is_array = self.nodes[n].shape or self.nodes[n].dtype == object
            return _Text(text if is_array else f"{text}[()]")

        return repr(mapped(x, leaf))


class _Text(str):
    """An expression in nested arguments; its `repr` is the expression itself."""

    __slots__ = ()
    __repr__ = str.__str__


class _Memory(np.ndarray):
    """The base of a `Lease`: NumPy would replace a base by the base's base if that had the type of the new array."""


class Lease(np.ndarray):
    """A view of a replay's memory, which gives back the replay when nothing refers to it any more."""

    replay: Replay
    is_working_memory = True  # reverse passes overwrite it, so debug mode doesn't compare it

    def __del__(self) -> None:
        if hasattr(self, "replay"):  # arrays that NumPy derives have none
            self.replay.replays.give_back(self.replay)


def _own(result: Any, *arguments: Array) -> Any:
    """Return the results of a call, copied if they are views of its `arguments`, whose memory is reused."""
    if type(result) is np.ndarray:
        shares = any(result is x if result.base is None else np.may_share_memory(result, x) for x in arguments)
        return result.copy() if shares else result
    return [_own(x, *arguments) for x in result] if type(result) in (list, tuple) else result
