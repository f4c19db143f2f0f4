"""`mpiad.jit`: compilation of functions for the shapes of their arguments.

The first call with a signature (shapes and dtypes of the arguments) traces the function: it runs on traced arrays, which
record the operations without communication (see `recorder`). The operations are compiled to a program, which this call and
later calls run. If the trace needs something that only a run can tell, the first call is interpreted, which means that
Python runs the function itself, and then traces the function again. If a trace fails for another reason, all calls with
this signature are interpreted. Exceptions of the function, of a communication or of a signal handler propagate.

In a derivative computed by this library, a call of the compiled function is one node of the tape (see `calls_on_tape`).
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.closure import PRINTS, HoldsTraced, may_communicate, survey, watch_of
from mpiad.compiling.program import place_of
from mpiad.compiling.source import indented
from mpiad.compiling.watch import Watch
from mpiad.primitives.operation import suspended
from mpiad.programs.alike_functions import CHANGED, Form, Parts, Template, Templates, is_unchanged, token
from mpiad.programs.array_program import operation_of
from mpiad.programs.calls_on_tape import called_on_tape
from mpiad.programs.fusion import Loop
from mpiad.programs.interpretation import message_counts
from mpiad.programs.loops import LoopText
from mpiad.programs.number_conditions import admits_of, admitted
from mpiad.programs.program_cache import (
    Attempts,
    Entry,
    ProgramCache,
    Traced,
    count,
    fresh,
    raising_failures,
    traced_parts,
)
from mpiad.programs.recorder import Recorder
from mpiad.programs.repeated_calls import Layout, RepeatedProgram, prepared, repeated_on_tape, with_traced_state
from mpiad.programs.replay import Changed, Replays
from mpiad.programs.signature import MOST, Arguments, arguments_of
from mpiad.pytrees import flatten
from mpiad.transport.core import calls
from mpiad.transport.core.channels import communications, is_watched
from mpiad.transport.core.fault_tolerance import FAULT_TOLERANT
from mpiad.transport.core.tracing import note_channels, restoring_state, tracing
from mpiad.transport.world import level_of_repeats


class Traffic(NamedTuple):
    """The memory traffic of loops, per entry of the program's largest argument."""

    arrays: float  # entries read and written
    bytes: float


class Listing:
    """The program of a compiled function in printable form; ``print(jit(f).program(x))`` shows it.

    Attributes
    ----------
    operations : str
        The arrays in the order of the user's code, each with its operation, operands and line.
    loops : str
        The loops and calls in the order in which they run; for a loop, the arrays that it computes, and the numbers of
        bytes that it reads and writes: each array counts once, with at most as many entries as the loop has.
    traffic : list of Traffic
        The sum over the loops, for each part of the program: a reverse pass is a second part.
    kernels : list of str
        The code of the loops.
    """

    def __init__(self, name: str, replays: Replays):
        self._name, self._replays, self._nodes = name, replays, replays.schedule.nodes

    @property
    def operations(self) -> str:
        """The arrays, one per line."""
        lines = []
        for n in self._replays.schedule.program.needed():
            node = self._nodes[n]
            what = f"%{n}: {node.dtype}{list(node.shape)} = {operation_of(node)}({', '.join(f'%{x}' for x in node.inputs)})"
            lines.append(f"{what:72}  {getattr(node.site, 'text', '')}".rstrip())
        return "\n".join(lines)

    @property
    def loops(self) -> str:
        """The loops and calls, one per line."""
        schedule, lines = self._replays.schedule, []
        for step, text in zip(schedule.steps, self._replays.texts):
            if isinstance(step, Loop):
                made = ", ".join(f"%{item.node}{' (copy)' * item.copies}" for item in step.items)
                (_, read), (_, written) = self._accesses(step, text)  # type: ignore[arg-type]
                lines.append(f"loop over {list(step.shape)}: {made}; reads {read} bytes, writes {written}")
            else:
                node = self._nodes[step.node]
                what = f"{operation_of(node)} -> %{step.node}{' in place' * step.in_place}"
                lines.append(f"{what}  {getattr(node.site, 'text', '')}")
        return "\n".join(lines)

    @property
    def traffic(self) -> list[Traffic]:
        """The memory traffic of each part."""
        schedule, totals = self._replays.schedule, [[0, 0] for _ in range(len(self._replays.schedule.part_starts) + 1)]
        for at, (step, text) in enumerate(zip(schedule.steps, self._replays.texts)):
            for entries, nbytes in self._accesses(step, text) if isinstance(step, Loop) else ():  # type: ignore[arg-type]
                total = totals[schedule.part(at)]
                total[:] = total[0] + entries, total[1] + nbytes
        return [Traffic(entries / self._cells, nbytes / self._cells) for entries, nbytes in totals]

    @property
    def _cells(self) -> int:
        """The number of entries of the largest argument."""
        return max([math.prod(self._nodes[n].shape) for n in self._replays.schedule.program.inputs], default=0) or 1

    def _accesses(self, loop: Loop, text: LoopText) -> list[tuple[int, int]]:
        """Return the numbers of entries and of bytes that a loop reads, and those that it writes."""
        buffers, accesses = self._replays.schedule.buffers, list[tuple[int, int]]()
        entries = math.prod(loop.shape)
        if loop.without is not None:
            entries -= math.prod([end - start for start, end in loop.without])
        # Loops on devices don't count at how many indices they read each array.
        reads = {b: text.reads.get(b, entries) for b, _ in text.loads if b in text.buffers}
        for part in (reads, dict.fromkeys(text.written, entries)):
            counts = {b: min(math.prod(buffers[b].shape), n) for b, n in part.items()}
            accesses.append((sum(counts.values()), sum(n * buffers[b].dtype.itemsize for b, n in counts.items())))
        return accesses

    @property
    def kernels(self) -> list[str]:
        """The code of the loops."""
        return [text.text for text in self._replays.texts if text is not None]

    def __str__(self) -> str:
        lines = [f"program of {self._name}", self.operations, "", self.loops]
        for part, (arrays, nbytes) in enumerate(self.traffic):
            of_part = f" of part {part}" if self._replays.schedule.part_starts else ""
            lines.append(f"all loops{of_part}: {arrays:.1f} arrays, {nbytes:.0f} bytes per entry of the largest argument")
        return "\n".join(lines)


# Fast calls, for positional arguments that are arrays and floats, or tuples, lists and dicts of them.
#
# A small program takes a few µs, less than `Jitted.__call__` takes to select it. Therefore a function is generated for a
# signature: it checks that the arguments have this signature and that the program is valid, and runs the program. It
# returns `MISSED` if `Jitted.__call__` must handle the call: for other arguments, after a change of the closure, if all
# replays are in use, or if calls are recorded or watched.
MISSED: Any = object()
_PLAIN = (np.ndarray, float, np.float64, int)


def fast_call(entry: Entry, args: tuple, outputs: Any) -> Callable[[tuple], Any] | None:
    """Return a fast call for the signature of `args`, None if it needs `Jitted.__call__`; `outputs`: the program's."""
    names: dict[str, Any] = {"missed": MISSED, "count": count, "counted": communications, "is_watched": is_watched}
    lines, leaves = list[str](), list[str]()
    may_differ = FAULT_TOLERANT or entry.may_change or entry.device is not None
    if may_differ or not _unpack(args, "args", lines, leaves, names) or not leaves:
        return None
    names |= {"same": entry.watch.is_the_same, "free": entry.replays.free[True], "is_noting": calls.is_noting}
    names |= {
        "admits": entry.admits,
        "build": entry.build,
        "leaves": entry.leaves,
        "note": note_channels,
        "channels": entry.channels,
    }
    others = []
    for k, (channel, _) in enumerate(entry.channels):
        names[f"c{k}"] = channel
        others.append(f"c{k}.fault or ")
    given = ", ".join(leaves)
    text = f"""
    if {"".join(others)}is_noting() or is_watched() or not same(){f" or not admits(({given},))" if entry.admits else ""}:
        return missed
    try:
        replay = free.pop()
    except IndexError:
        return missed
    {"note(channels)" if entry.channels else ""}
    {"next(counted); " * entry.communications if entry.communications < 5 else f"count({entry.communications})"}
    made = replay.first({given})
    free.append(replay)
    return {_result(entry, outputs)}
"""
    text = "\n".join(["def call(args):", *indented(lines)]) + text
    exec(compile(text, str(Path(__file__).with_name("<call>")), "exec"), names)
    return names["call"]


def _unpack(tree: Tree, name: str, lines: list[str], leaves: list[str], names: dict[str, object]) -> bool:
    """Append lines that assign the leaves of a pytree to names, or leave the call; return whether that is possible."""
    kind = type(tree)
    tests = [f"type({name}) is not {kind.__name__}"]
    if kind in _PLAIN:
        leaves.append(name)
        names[kind.__name__] = kind
        if kind is int:
            tests.append(f"not {-MOST} < {name} < {MOST}")
        if kind is np.ndarray:
            names[f"dtype_{name}"] = tree.dtype
            tests.append(f"{name}.dtype is not dtype_{name} or {name}.shape != {tree.shape}")
        lines.append(f"if {' or '.join(tests)}: return missed")
        return True
    parts = [f"{name}_{k}" for k in range(len(tree))] if kind in (tuple, list, dict) else []
    if kind is dict and all(type(key) is str for key in tree):
        lines.append(f"if {tests[0]} or tuple({name}) != {tuple(tree)!r}: return missed")
        lines += [f"{part}, = {name}.values()" for part in [", ".join(parts)] if part]
        # The leaves of a dict are sorted by key.
        return all(_unpack(tree[key], part, lines, leaves, names) for key, part in sorted(zip(tree, parts)))
    if kind is tuple or kind is list:
        lines.append(f"if {tests[0]} or len({name}) != {len(tree)}: return missed")
        lines += [f"{part}, = {name}" for part in [", ".join(parts)] if part]
        return all(_unpack(part, inner, lines, leaves, names) for part, inner in zip(tree, parts))
    return False


def _result(entry: Entry, outputs: Any) -> str:
    """Return the expression of the function's result in terms of the program's outputs."""
    if not all(entry.inside):
        return "build(leaves(made))"
    return _display(outputs, iter(range(len(entry.inside)))) or "build(made)"


def _display(tree: Tree, places: Iterator[int]) -> str:
    """Return the expression of a pytree of outputs, "" if it has other parts than tuples, lists and dicts."""
    if isinstance(tree, (np.ndarray, np.generic)):
        return f"made[{next(places)}]"
    if type(tree) is dict and all(type(key) is str for key in tree):
        found = {key: _display(tree[key], places) for key in sorted(tree)}
        return f"{{{', '.join(f'{key!r}: {found[key]}' for key in tree)}}}" if all(found.values()) else ""
    parts = [_display(part, places) for part in tree] if type(tree) in (tuple, list) else [""]
    if not all(parts):
        return ""
    return f"[{', '.join(parts)}]" if type(tree) is list else f"({', '.join(parts)},)" if parts else "()"


P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("mpiad")
_boxes = Box.types
# The number of operations of value and gradient, compared with those of the value.
_WITH_REVERSE_PASS = 3
_MOST_FAST_CALLS = 4
# The maximum number of derived functions, for example one per optimizer; the least recently used ones are removed.
_MOST_DERIVED = 16
# Of a program of several steps, by `replace_by`: a rare step is at one of the places of 8 steps, or at none.
MOST_VARIANTS = 9


@overload
def jit(fun: Callable[P, R], *, strict: bool = False, exact: bool = False) -> Jitted[P, R]: ...
@overload
def jit(fun: None = None, *, strict: bool = False, exact: bool = False) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...
def jit(fun: Function | None = None, *, strict: bool = False, exact: bool = False) -> Any:
    """Compile a function: its computations between communications become fused loops, as do those of its derivatives.

    Parameters
    ----------
    fun : callable
        A function written with autograd.numpy, mpiad's primitives and `Domain`; its arguments and results are pytrees of
        numbers and of arrays on the host, or on one device. It is compiled separately for each structure, shape and dtype
        of the arguments, and for each value of a boolean or string among them, or of an integer on which the function
        branches.
    strict : bool
        Whether to raise an error if the function can't be compiled. By default a warning is logged once, and the function
        is interpreted.
    exact : bool
        Whether sums, differences, products, quotients and square roots of real arrays have the same bits as in NumPy. By
        default, the quotient of an array and a scalar is a product with the reciprocal of the scalar, unless the reciprocal
        overflows or is subnormal, and reverse passes add the cotangents of halo cells after other terms.

    Returns
    -------
    Jitted
        A function with the same arguments, results, derivatives and communications. Results never share memory with
        arguments. Prints happen only while the function is traced or interpreted. A function that changes an object from
        outside, such as a list of results, isn't compiled.

    Raises
    ------
    TypeError
        With `strict`, if a call can't be compiled; the message names the user's line and the reason.

    Ranks
    -----
    The same as for `fun`. Compilation isn't collective: some ranks may run the compiled function while others interpret it.

    Adjoint
    -------
    The same as for `fun`. Derivatives of every order are compiled: both those of compiled functions, as in
    `value_and_grad(jit(f))`, `hvp(jit(f))` and `make_hvp(jit(f))`, and those in compiled functions, as in
    `jit(value_and_grad(f))`. Without communication this includes derivatives by plain autograd.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> energy = mpiad.jit(lambda x: mpiad.mpi_allreduce(np.sum(np.exp(-x) * x**2)))
    >>> J, gradient = mpiad.value_and_grad(energy)(np.array([1.0, 2.0]))
    >>> print(round(J / size, 4), gradient.round(4))
    0.9092 [0.3679 0.    ]
    """
    if fun is None:
        return functools.partial(jit, strict=strict, exact=exact)
    return Jitted.shared(fun, strict, exact)


class Jitted(Generic[P, R]):
    """A compiled function, created by `jit`.

    Examples
    --------
    >>> step = mpiad.jit(lambda x: x + 0.1 * np.sin(x))
    >>> print(np.allclose(step(np.ones(3)), 1 + 0.1 * np.sin(1.0)), type(step).__name__)
    True Jitted
    """

    def __init__(self, fun: Callable[P, R], strict: bool = False, exact: bool = False, attempts: Attempts | None = None):
        self.fun, self.strict = fun, strict
        self.__name__ = getattr(fun, "__name__", type(fun).__name__)
        functools.update_wrapper(self, fun, updated=())
        self._cache: ProgramCache = ProgramCache(fun, self.__name__, strict, exact, attempts or Attempts())
        self._fast_calls: list[tuple[Entry, Callable[[tuple], Any]]] = []  # entries with their fast calls, the newest first
        self._derived: dict[Any, Jitted] = {}  # for example the function that computes value and tangent
        self._has_program = False  # see `is_compiled`
        # See `estimated`; the condition on the numbers of this trace, if there is one (see `number_conditions`).
        self._estimate: int | None = None
        self.condition: Callable[[Sequence[Array]], bool] | None = None
        self._on_tape: set[Any] = set()  # the signatures of plain arguments whose calls are parts of derivatives
        self.calls = 1  # the number of calls that a derived function makes of the one from which it was derived
        # The compiled function that has the programs, None if unknown, and the functions for which that holds.
        self._form: Form | None = Form(self)
        self.snapshot: Any = ()
        self._own: Jitted | None = None  # has the programs if no other function can have them
        self.is_read = False  # whether its parts are being read: it may call itself

    @classmethod
    def shared(cls, fun: Function, strict: bool, exact: bool) -> Jitted:
        """Return a compiled function that has its programs in common with functions that are alike."""
        made = cls(fun, strict, exact)
        made._form, made.snapshot = None, CHANGED
        return made

    @property
    def options(self) -> tuple[bool, bool]:
        """The options `strict` and `exact`."""
        return self.strict, self._cache.exact

    def form(self) -> Form:
        """Return the compiled function that has the programs, with its first arguments."""
        if tracing.recorder is not None:  # programs contain this function's operations; its closure may be traced
            return Form(self)
        if self._form is not None and is_unchanged(self.snapshot):
            return self._form
        self.is_read = True
        try:
            parts = Parts(self.fun, Jitted)
        finally:
            self.is_read = False
        template = None if parts.assigns else self._template(parts)
        if template is None:
            self._own = self._own or Jitted(self.fun, *self.options)
            form, snapshot = Form(self._own), ()
        else:
            # The compiled function watches the functions of which it has no copies.
            watched = parts.copied if template.build is parts.build else parts.snapshot
            form, snapshot = template.form(parts.numbers), () if template.made.fun is self.fun else watched
        self._cache, self._derived = form.jitted._cache, {} if form.variables else form.jitted._derived
        self._fast_calls = [] if form.variables else form.jitted._fast_calls
        # Traced values, and thus their tapes, aren't kept.
        self._form, self.snapshot = (None, CHANGED) if parts.traced else (form, snapshot)
        return form

    def _template(self, parts: Parts) -> Template | None:
        """Return the compiled function for functions like this one; None if a call may change what later calls read."""
        strict, exact = self.options
        key: Any = (strict, exact, parts.key)
        template, attempts = _templates.get(key), Attempts()
        if template is not None and template.made.arguments and template.made.jitted.is_interpreted:
            key = *key, *map(token, parts.numbers)  # numbers that can't be arguments are constants
            template, attempts = _templates.get(key), template.attempts
        elif template is not None and template.made.jitted._cache.is_used_up:
            template = None
        if template is None:

            def compiled(fun: Function, arguments: Sequence[int]) -> Jitted:
                return Jitted(fun, strict and not arguments, exact, Attempts(warned=True) if arguments else attempts)

            template = Template(parts, compiled)
            template.attempts, template.owner = attempts, weakref.ref(self)
            if _templates.lapsed(parts.codes) == Templates.MOST_OF_ONE_CODE - 1:
                _warn_of_new_objects(place_of(self.fun))
            try:
                if survey(template.made.fun, ())[1] not in ("", PRINTS):
                    return None
            except HoldsTraced:
                return None
            _templates.add(key, template)
        return template

    def rename(self, name: str) -> None:
        """Set the name that messages show."""
        self.__name__ = self._cache.name = name

    def limit(self, operations: int | None) -> None:
        """Interpret calls whose programs would have more operations; None for no limit."""
        self._cache.most_operations = operations

    def __repr__(self) -> str:
        return f"<jit of {self.__name__}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Jitted:
        # Like a function, it is its own copy; what a method or a partial function is bound to is copied.
        fun = copy.deepcopy(self.fun, memo)
        return self if fun is self.fun else Jitted.shared(fun, *self.options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the compiled method of an object."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        if not kwargs and tracing.tape is None and tracing.recorder is None and is_unchanged(self.snapshot):
            for _, call in self._fast_calls:
                made = call(args)
                if made is not MISSED:
                    return made
        # In the trace of another compiled function, this function is traced, too.
        if tracing.recorder is not None or (tracing.tape is not None and tracing.tape.unfolds):
            return self.fun(*args, **kwargs)
        form = self.form()
        if form.jitted is not self:
            return form(*args, **kwargs)
        cache = self._cache
        with restoring_state():
            try:
                arguments = arguments_of(args, kwargs, cache.asked)
            except TypeError as error:
                cache.give_up(None, f"an argument can't be compared with the same argument of another call: {error}")
                return fresh(self.fun(*args, **kwargs))

            def traced(recorder: Recorder, watch: Watch) -> tuple[list[Any], Callable[[list[Any]], Any]]:
                return traced_parts(self.fun, arguments, recorder)

            if any(type(arguments.leaves[k]) in _boxes for k in arguments.traced):
                return called_on_tape(cache, arguments, self.derived)
            if tracing.tape is not None:
                entry = self._plain_entry(arguments, traced)
                return called_on_tape(cache, arguments, self.derived) if entry is None else self._replayed(entry, arguments)
            entry = cache.entry(arguments.key, arguments, traced)
            if isinstance(entry, Entry):
                return self._replayed(entry, arguments)
            if entry is not None and cache.asks(arguments, entry):
                return self(*args, **kwargs)
            retrace = lambda watch, notes: cache.compiled(arguments.key, watch, traced, notes)  # noqa: E731
            return cache.interpreted(arguments.key, arguments, entry, retrace)

    def program(self, *args: Any, **kwargs: Any) -> Listing:
        """Return the program for these arguments, in printable form: its operations and loops.

        Raises
        ------
        TypeError
            If the function can't be compiled.

        Ranks
        -----
        The same as for a call of the function, since the function is called if the signature is new.
        """
        form = self.form()
        if form.jitted is not self:
            return form.jitted.program(*form.variables, *args, **kwargs)
        arguments = arguments_of(args, kwargs, self._cache.asked)
        if not self._cache.is_refused(arguments.key) and arguments.key not in self._cache.entries:
            self(*args, **kwargs)
        entry = self._cache.entries.get(arguments.key)
        if entry is None:
            raise TypeError(f"{self.__name__} isn't compiled for these arguments; the log gives the reason.")
        return Listing(self.__name__, entry.replays)

    @property
    def is_interpreted(self) -> bool:
        """Whether some call can't be compiled."""
        return any(map(self._cache.is_refused, [*self._cache.reasons]))

    @property
    def refused(self) -> bool:
        """Whether some call can't be compiled, or only for fixed values of its integer arguments."""
        return self.is_interpreted or bool(self._cache.asked)

    def replace_by(self, fun: Function) -> None:
        """Let calls that aren't compiled run `fun`; so are those that take other branches than the first few calls."""
        self._cache.instead, self._cache.most_variants = fun, MOST_VARIANTS

    @property
    def is_compiled(self) -> bool:
        """Whether there is a program, and no call is known that can't be compiled."""
        self._has_program = self._has_program or self.operations > 0
        return self._has_program and not self.refused

    @property
    def operations(self) -> int:
        """The number of operations of value and gradient, estimated before the first gradient; 0 if `refused` or unknown.

        If the function has been called in forward mode only, the programs are those of its derivatives.
        """
        if self.refused:
            return 0
        programs = [
            len(entry.replays.schedule.program.nodes) * (1 if key[0] == "reverse" else _WITH_REVERSE_PASS)
            for key, entry in self._cache.entries.items()
            if entry is not None
        ]
        # A program for derivatives contains the operations of the function only.
        programs = programs or [_WITH_REVERSE_PASS * made.program.size for made in self._cache.programs.values()]
        return max(programs or [made.operations // made.calls for made in self._derived.values()], default=0)

    def estimated(self, args: Callable[[], tuple]) -> int:
        """Return `operations` at the first call, or an estimate by a trace for these arguments; 0 if that fails."""
        if self._estimate is None:
            known = 0 if self._cache.variants else self.operations
            self._estimate = known or (0 if self._cache.is_exhausted else self._traced_operations(args()))
        return 0 if self.refused else self._estimate or self.operations

    def _traced_operations(self, args: tuple) -> int:
        recorder = Recorder(self._cache.exact, most=self._cache.most_operations)
        with suspended(body=False):  # no exception leaves it: it would take the messages of the trace for unfinished ones
            try:
                # This raises Unknown for functions that aren't traced: they may draw random numbers.
                watch = watch_of(self.fun, args)
                with restoring_state(), raising_failures(recorder, watch):
                    traced_parts(self.fun, arguments_of(args, {}, self._cache.asked), recorder)
            except Exception:  # noqa: BLE001
                return 0
        self.condition = admits_of(recorder) if recorder.decisions else None
        return _WITH_REVERSE_PASS * len(recorder.steps)

    def outcomes(self, args: tuple, place: int, numbers: range) -> tuple[bool, ...]:
        """Return for some numbers as argument leaf `place` whether the function branches as in the trace of `estimated`."""
        return admitted(self.condition, numbers, place, flatten(args)[0])

    def derived(
        self, key: Any, make: Callable[[], Function], optional: bool = False, exact: bool = False, calls: int = 1
    ) -> Jitted:
        """Return the compiled form of ``make()``, which makes some calls of the function, cached by key.

        If it is `optional`, there is no warning or error on failure.
        """
        made = self._derived.pop(key, None)
        if made is None:
            attempts = Attempts(warned=optional or self._cache.attempts.warned)
            made = Jitted(make(), self.strict and not optional, exact or self._cache.exact, attempts)
            made.calls = calls
        self._derived[key] = made
        if len(self._derived) > _MOST_DERIVED:
            del self._derived[next(iter(self._derived))]
        return made

    def repeated(self, layout: Layout, leaves: Sequence[Any], variables: Sequence[int] | None) -> RepeatedProgram | None:
        """Prepare repeated calls of the function; see `mpiad.programs.repeated_calls`."""
        return prepared(self._cache, layout, leaves, variables)

    def with_traced_state(self, layout: Layout, leaves: Sequence[Array]) -> Sequence[Array]:
        """Return the arguments of the first call on the tape; see `mpiad.programs.repeated_calls`."""
        return with_traced_state(self._cache, layout, leaves)

    def repeated_on_tape(
        self, layout: Layout, calls: int, leaves: Sequence[Any], known: dict[tuple[int, ...], RepeatedProgram]
    ) -> Any:
        """Call the function repeatedly as one node of the current tape; see `mpiad.programs.repeated_calls`."""
        return repeated_on_tape(self._cache, layout, calls, leaves, known)

    def _plain_entry(self, arguments: Arguments, traced: Traced) -> Entry | None:
        """Return the program for plain arguments in a derivative; None if the call must be a part of the derivative.

        It must if it communicates. Other results of plain arguments are plain, as those of interpreted functions.
        """
        key, cache = arguments.key, self._cache
        if key in self._on_tape:
            return None
        entry = cache.known(cache.entries, key, arguments)
        if not isinstance(entry, Entry):
            entry = None if may_communicate(self.fun) else cache.entry(key, arguments, traced)
        if isinstance(entry, Entry) and not entry.communicates:
            return entry
        self._on_tape.add(key)
        return None

    def _replayed(self, entry: Entry, arguments: Arguments) -> Any:
        counts = message_counts() if entry.replays.last_check >= 0 else None
        note_channels(entry.channels)
        try:
            made = entry.called([arguments.leaves[k] for k in arguments.traced])
        except Changed as change:
            with self._cache.changed(arguments.key, change, counts):
                return self._cache.run(arguments)
        is_plain = not arguments.kwargs and len(arguments.traced) == len(arguments.leaves)
        if is_plain and all(known is not entry for known, _ in self._fast_calls):
            call = fast_call(entry, arguments.args, made)
            if call is not None:
                self._fast_calls[:] = [(entry, call), *self._fast_calls[: _MOST_FAST_CALLS - 1]]
        return made


@functools.lru_cache(256)
def _warn_of_new_objects(place: str) -> None:
    """Log a warning, the first time only."""
    text = (
        "jit: the function at %s is traced each time it is jitted, since it reads a list, dict or object that is new each "
        "time. Create this object once, outside of the function that calls jit, or pass its arrays as arguments."
    )
    _log.log(level_of_repeats(), text, place)


# The compiled functions of `jit`; see `alike_functions`.
_templates = Templates()


def shared(fun: Any) -> Any:
    """Return for a jitted function the one that has the programs, unless numbers are its arguments; others as they are."""
    form = fun.form() if isinstance(fun, Jitted) else Form(fun)
    return fun if form.variables else form.jitted
