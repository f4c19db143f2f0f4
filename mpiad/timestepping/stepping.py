"""Steps of a loop on lists of arrays: the user's steps, whose results are checked, and the same steps with tangents.

If the step function is jitted, or calls jitted functions and has a compiled form, several steps may run as one program.
Separate programs copy fields into the buffers in which halos are exchanged, but within one program a field is computed
directly in the memory that the next step reads. One program for several steps also accumulates the cotangents of parameters
in compiled loops, and has less Python overhead. It contains the observations, too; an observation that can't be compiled is
called by Python, on the states that the program returns.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.closure import PRINTS, HoldsTraced, survey
from mpiad.compiling.program import place_of
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation.trace import Variables, trace_forwards
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import difference, flatten, is_variable, named_leaves, same_form
from mpiad.timestepping.snapshots import copy_of
from mpiad.transport import Spec
from mpiad.transport.core.tracing import tracing

# Maximum numbers of steps and operations in one program; larger programs gain little, and take long to compile.
_MAX_STEPS, _MAX_OPERATIONS = 32, 1000
_MOST_NUMBERS = 1000  # of the first steps, whose branches determine the length of programs


class Span(NamedTuple):
    """The steps first, ..., stop - 1, which run together."""

    first: int
    stop: int


class Arguments(NamedTuple):
    """The arguments of a loop, as lists of leaves."""

    state: list[Array]  # the state before the first step
    inputs: list[Array]  # arrays with one entry per step along the first axis
    params: list[Array]  # arguments that are the same in all steps

    def all(self) -> list[Array]:
        """Return all leaves in one list."""
        return [*self.state, *self.inputs, *self.params]

    def like(self, leaves: Sequence[Array]) -> Arguments:
        """Return the leaves of one list as arguments of the same structure."""
        a, b = len(self.state), len(self.state) + len(self.inputs)
        return Arguments(list(leaves[:a]), list(leaves[a:b]), list(leaves[b:]))

    def at(self, span: Span, state: list[Array]) -> Arguments:
        """Return the arguments of the steps in a span: the state, these steps' entries of the inputs, and all params."""
        first, stop = span
        # The input of a single step has no axis for steps.
        entries = first if stop == first + 1 else slice(first, stop)
        return Arguments(state, [leaf[entries] for leaf in self.inputs], self.params)


Stepping: TypeAlias = "UserStepping | TangentStepping"
"""An object that advances a state by some steps, without or with tangents."""


def own(stepping: Stepping, state: Sequence[Array]) -> list[Array]:
    """Return a state that no step changes: copies if a step may write into its argument or return the same buffer again."""
    return list(state) if stepping.is_pure else list(map(copy_of, state))


def spans(stepping: Stepping, first: int, stop: int) -> Iterable[Span]:
    """Return the spans of steps that run together, in order."""
    length = stepping.prepared_steps
    return (Span(first, stop),) if length and not (stop - first) % length else _spans(stepping, first, stop)


def _spans(stepping: Stepping, first: int, stop: int) -> Iterator[Span]:
    tape: Any = tracing.tape
    is_kept = tape is not None and tape.passes in ("kept", "recorded")
    while first < stop:
        # The length of a program is known after the first step. Steps that don't fill a program run one by one, but for a
        # record of many passes, in which they are worth a program of their own.
        length, rest = stepping.steps_per_program, stop - first
        length = min(length, rest) if is_kept else length
        span = Span(first, stop - rest % length if rest >= length > 1 else first + 1)
        yield span
        first = span.stop


class UserStepping:
    """The user's step and observation: ``advance(state, number, *input, *params)``, ``observe(state, number, *params)``."""

    def __init__(
        self, advance: Function, observe: Function | None, state: Tree, inputs: Tree, params: tuple, steps: int, length: int
    ):
        # `length`: the number of steps that are recorded at a time; one or several programs run these steps.
        self._length = length
        self._advance, self._observe, self._has_inputs, self._steps = advance, observe, inputs is not None, steps
        # The compiled forms of `step`, and of `observe` if there is one of `step`.
        self._form = compiled_form(advance, calls_jitted=True)
        self._form_of_observe = None if self._form is None else compiled_form(observe, calls_jitted=False)
        self._is_local: bool | None = None  # whether `observe` is known not to communicate
        leaves, self.build_state = flatten(state)
        entries, self._build_input = flatten(inputs) if self._has_inputs else ([], list)
        constants, self._build_params = flatten(params)
        numbers = [k for k, leaf in enumerate(leaves) if isinstance(leaf, (float, complex))]
        if numbers and self._form is not None and not any(map(_is_single, (*leaves, *entries, *constants))):
            # The results of a compiled step are scalars of NumPy: one program serves the first step and all others. Next to
            # arrays in single precision, a number of Python isn't a scalar: their products stay in single precision.
            for k in numbers:
                leaves[k] = np.asarray(leaves[k])[()]
        self._params, self._count = params, None
        self._has_variants = False  # whether some steps need other programs than the first ones do
        # The compiled functions of several steps by their number, and the form of `observe` that they contain.
        self._programs: dict[int, Any] = {}
        self._contained: Any = None
        # The variables of the closures, which programs get as arguments, and the structure of all arguments.
        self._variables, self._build_leaves, self._form_of_leaves = list[Array](), list, None
        # The programs that were prepared since `begin_pass`, by the number of steps and the indices of the variables, and
        # those on the tape, by the number of steps; see `mpiad.programs.repeated_calls`. They stay valid in this pass.
        self._prepared: dict[tuple[int, tuple[int, ...] | None], list[Any]] = {}
        self._on_tape: dict[int, dict[Any, Any]] = {}
        self.prepared_steps = 0  # the number of steps of a program for several steps; 0 if none is prepared
        self.args = Arguments(leaves, entries, constants)
        self._observations = Observations()
        self._specs, self._like = [_spec(leaf) for leaf in leaves], self.build_state([0.0] * len(leaves))
        # The lines of `step` and `observe`, and the paths of the state's leaves in the user's pytree, for errors.
        self.places = tuple(place_of(getattr(fun, "fun", fun)) for fun in (advance, observe))
        self._names = [name for name, _ in named_leaves(state, "u0")]

    @property
    def is_plain(self) -> bool:
        """Whether the step neither is compiled nor calls jitted functions."""
        return self._form is None and tracing.recorder is None

    @functools.cached_property
    def keeps_values(self) -> bool:
        """Whether Python calls a function that may keep values in objects outside of it."""
        if tracing.recorder is not None:
            return False
        called = [self._advance if self._form is None else None, self._python_observe]
        try:
            return any(fun is not None and survey(fun, ())[1] not in ("", PRINTS) for fun in called)
        except HoldsTraced:  # the step raises an error
            return False

    @property
    def is_pure(self) -> bool:
        """Whether steps are known to leave their arguments unchanged and to return new arrays, as compiled functions do."""
        form, observe = self._form, self._form if self._observe is None else self._observe_form
        if form is None or observe is None or not form.jitted.is_compiled or observe.jitted.refused:
            return False
        # Programs of several steps contain the observation, which may never be called alone.
        programs = self._programs.values() if self._contained is self._observe_form else ()
        return observe.jitted.is_compiled or any(program.is_compiled for program in programs)

    @property
    def steps_per_program(self) -> int:
        """The number of steps that one program contains; 1 if the program has only one, or isn't known yet."""
        if self._count is None and self._form is not None and tracing.recorder is None:
            operations = self._form.jitted.estimated(self._plain_arguments)
            if operations:
                most = min(_MAX_STEPS, max(_MAX_OPERATIONS // operations, 1), self._length)
                outcomes: tuple[bool, ...] = ()
                if self._form.jitted.condition is not None:
                    place = len(flatten(self._form.variables)[0]) + len(self.args.state)
                    numbers = range(min(self._steps, _MOST_NUMBERS))
                    outcomes = self._form.jitted.outcomes(self._plain_arguments(), place, numbers)
                self._count, self._has_variants = _steps_of_program(most, self._length, outcomes)
        count = self._count or 1
        if self.prepared_steps:
            return count
        if count == 1 or self._program(count).refused:
            return 1
        by_python = self._python_observe
        if by_python is not None:
            # Programs have different lengths on different ranks, and this observation follows the steps of a program.
            if self._is_local is None:
                from mpiad.programs.compiled_forms import is_local  # see `compiled_form`

                self._is_local = is_local(by_python)
            return count if self._is_local else 1
        return count

    def _plain_arguments(self) -> tuple:
        """Return the arguments of the compiled form without boxes, for the second step if there is one.

        The first step may be of another kind, such as that of a multistep method.
        """
        form: Any = self._form
        step = self._step_arguments(min(1, self._steps - 1), self.args.at(Span(0, 1), self.args.state))
        leaves, build = flatten((*form.variables, *step))
        return build(list(map(getval, leaves)))

    def _step_arguments(self, number: int, args: Arguments) -> tuple:
        """Return the arguments of the user's step."""
        entry = (self._build_input(args.inputs),) if self._has_inputs else ()
        return self.build_state(args.state), number, *entry, *self._build_params(args.params)

    def begin_pass(self) -> None:
        """Begin a sequence of runs between which no other code changes what the compiled functions read."""
        self._prepared, self.prepared_steps = {}, 0

    def _program(self, count: int) -> Any:
        """Return the compiled function of some steps."""
        step, observe = self._form, self._observe_form
        if self._contained is not observe or not self._programs:
            from mpiad.programs.signature import form_of  # see `compiled_form`

            variables = step.variables, () if observe is None else observe.variables
            tree = *variables, self.build_state(self.args.state), self._build_input(self.args.inputs), self._params
            self._programs, self._contained, self._variables = {}, observe, flatten(variables)[0]
            self._build_leaves, self._form_of_leaves = flatten(tree)[1], form_of(tree)
        if count not in self._programs:
            observed = None if self._observe is None else _state_itself if observe is None else observe.jitted.fun
            key = observed, self._has_inputs, count, self._form_of_leaves
            others = self._has_inputs, count, self._build_leaves, self._names
            self._programs[count] = step.jitted.derived(
                key, partial(_steps, step.jitted.fun, observed, *others), True, calls=count
            )
            if count > 1:
                # Steps one by one. The references are weak, since the compiled step has the programs.
                observed = observed if observe is None else weakref.proxy(observe.jitted)
                self._programs[count].replace_by(_steps(weakref.proxy(step.jitted), observed, *others))
        return self._programs[count]

    @property
    def _observe_form(self) -> Any:
        """The compiled form of `observe`; None if Python calls it on the states that the steps return."""
        form = self._form_of_observe
        return None if form is None or form.jitted.refused else form

    def run(self, span: Span, args: Arguments) -> tuple[list[Array], list[Array]]:
        """Return the state after a span of steps, and the observed values; raise if a state is invalid.

        The observed values have an additional first axis, with one entry per step.
        """
        first, stop = span
        if stop > first + 1 or self._records_single_steps:
            return self._called(span, args) or self._run_programs(span, args)
        advance = self._advance if self._form is None or self._form.jitted.is_interpreted else self._form
        tree, columns = advance(*self._step_arguments(first, args)), []
        state = _checked(_leaves_like(tree, self._like, first), self._specs, self._names, first)
        state = list(map(_writable, state))
        if self._observe is not None:
            observe = self._observe_form or self._observe
            columns = self._columns([observe(tree, first, *self._build_params(args.params))], first)
        return state, columns

    @property
    def _records_single_steps(self) -> bool:
        """Whether a single step runs as a program, since it is on a tape, so that `recorded` finds the program."""
        is_known = tracing.tape is not None and self._count is not None and self._python_observe is None
        return is_known and not self._program(1).refused

    @property
    def build_observed(self) -> Callable[[list[Array]], Tree] | None:
        """Builds the pytree of observed values from its leaves; None before the first step."""
        return self._observations.build

    def _columns(self, rows: Sequence[Tree], first: int) -> list[Array]:
        """Return the leaves of the values observed after the steps first, ..., along a new first axis."""
        known = self._observations
        leaves = [known.checked(known.leaves(row, first + k), first + k) for k, row in enumerate(rows)]
        return [stack(column) for column in zip(*leaves)]

    def recorded(self, span: Span, args: Arguments, indices: tuple[int, ...]) -> Any:
        """Run steps by a prepared program, without a tape; None if that is impossible.

        `indices`: those of the variables among ``args.all()``, first of all the state. Return a
        `mpiad.programs.repeated_calls.Recording`.
        """
        inputs = _with_steps(span, args)
        program = self._repeated(span, args, indices)
        return program and program.recorded(span.first, (span.stop - span.first) // program.steps, args.state, inputs)

    def _repeated(self, span: Span, args: Arguments, indices: tuple[int, ...] | None) -> Any:
        """Return a prepared program for some steps; None if that is impossible."""
        steps = span.stop - span.first
        length = min(self.steps_per_program, steps)
        known = self._prepared.setdefault((length, indices), [])
        program = next((each for each in known if each.admits(span.first)), None)
        if program is not None or self._count is None or steps % length or self._python_observe is not None:
            return program
        segment, given = self._program(length), args._replace(inputs=_with_steps(span, args))
        start = 1 + len(self._variables)
        variables = indices and [start + k for k in indices]
        program = segment.repeated(self._layout(length, args), self.leaves(span.first, given), variables)
        if program is not None:
            if self._observe is not None:
                self._observations.leaves(program.entry.build(program.entry.inside)[1], span.first)
            known.insert(0, program)
            self.prepared_steps = length if length == self._count > 1 else self.prepared_steps
        return program

    def scheduled(
        self, schedule: Hashable, args: Arguments, indices: tuple[int, ...], append: Callable[[Any], object]
    ) -> Any:
        """Return the calls of all steps as commands; None if there are none; see `mpiad.programs.scheduled_calls`."""
        length = self.steps_per_program
        if self._count is None:
            return None
        from mpiad.programs.scheduled_calls import scheduled  # see `compiled_form`

        def find(first: int, steps: int, with_reverse_pass: bool) -> Any:
            span = Span(first, first + steps)
            return self._repeated(span, args.at(span, args.state), indices if with_reverse_pass else None)

        lengths = sorted({min(length, self._steps), 1}, reverse=True)
        return scheduled(find, lengths, self._steps, (schedule, indices), append)

    @property
    def _python_observe(self) -> Function | None:
        """The observation, if it isn't compiled."""
        return self._observe if self._observe_form is None else None

    def _layout(self, length: int, args: Arguments) -> Any:
        """Return the positions of the leaves of `args` among a program's arguments."""
        from mpiad.programs.repeated_calls import Layout  # see `compiled_form`

        start = 1 + len(self._variables)
        inputs = start + len(args.state)
        return Layout(length, range(start, inputs), range(inputs, inputs + len(args.inputs)))

    def leaves(self, first: int, args: Arguments) -> list[Any]:
        """Return the arguments of a program."""
        return [first, *self._variables, *args.all()]

    def _run_programs(self, span: Span, args: Arguments) -> tuple[list[Array], list[Array]]:
        """Run programs of several steps, and return the last state and the observed values."""
        (first, stop), state, by_python = span, args.state, self._python_observe
        length, blocks, inputs = min(self.steps_per_program, stop - first), list[list[Array]](), _with_steps(span, args)
        for k in range(first, stop, length):
            end = k + length if self._has_variants else stop
            rest = args._replace(state=state, inputs=[leaf[k - first : end - first] for leaf in inputs])
            # The program is known after its first call.
            result = self._called(Span(k, end), rest) if k > first or end < stop else None
            if result is not None:
                state = result[0]
                blocks.append(result[1])
                if end < stop:
                    continue
                break
            rest = rest._replace(inputs=[leaf[:length] for leaf in rest.inputs])
            leaves = self.leaves(k, rest)
            if tracing.tape is not None and k == 0:
                leaves = self._program(length).with_traced_state(self._layout(length, rest), leaves)
            state, observed = self._program(length)(*leaves)
            if by_python is not None:
                params = self._build_params(args.params)
                blocks.append(self._columns([by_python(each, k + j, *params) for j, each in enumerate(observed)], k))
            else:
                blocks.append(self._observed(observed, k))
        return _checked(state, self._specs, self._names, stop - 1), joined(blocks)

    def _called(self, span: Span, args: Arguments) -> tuple[list[Array], list[Array]] | None:
        """Run steps by repeated calls of a program that is known; None if that is impossible."""
        steps, count = span.stop - span.first, len(args.state)
        if self._has_variants and steps > self.steps_per_program:
            return None
        if tracing.tape is None:
            program = self._repeated(span, args, None)
            values = program and program.called(span.first, steps // program.steps, args.state, args.inputs)
            return values and (values[:count], self._observations.checked(values[count:], span.first, axes=1))
        length = min(self.steps_per_program, steps)
        if self._python_observe is not None or steps % length:
            return None
        given, known = args._replace(inputs=_with_steps(span, args)), self._on_tape.setdefault(length, {})
        program, layout, leaves = self._program(length), self._layout(length, given), self.leaves(span.first, given)
        result = program.repeated_on_tape(layout, steps // length, leaves, known)
        return result and (result[0], self._observed(result[1], span.first))

    def _observed(self, tree: Tree, first: int) -> list[Array]:
        """Return the leaves of the values that a program observed after the steps first, ..., with an axis for steps."""
        known = self._observations
        return [] if self._observe is None else known.checked(known.leaves(tree, first), first, axes=1)


@functools.lru_cache(256)
def _steps_of_program(most: int, length: int, outcomes: tuple[bool, ...]) -> tuple[int, bool]:
    """Return the number of steps of a program, at most `most`, and whether there are several programs of this length.

    Programs run in each `length` steps. `outcomes`: how the first steps branch. The programs of other branches are others,
    and there should be few. Among those numbers, the one with the smallest remainder is chosen, since the remaining steps
    run one by one.
    """

    def variants(count: int) -> int:
        blocks = range(0, len(outcomes), length)
        starts = [start for block in blocks for start in range(block, block + length - count + 1, count)]
        return len({outcomes[start : start + count] for start in starts if start + count <= len(outcomes)})

    from mpiad.programs.function import MOST_VARIANTS  # see `compiled_form`

    while True:
        count = min(range(most, most // 2, -1), key=lambda count: (variants(count), length % count))
        if most == 1 or variants(count) <= MOST_VARIANTS:
            return count, variants(count) > 1
        most //= 2


def _with_steps(span: Span, args: Arguments) -> list[Array]:
    """Return the inputs with an axis for steps, which those of a single step don't have."""
    return args.inputs if span.stop > span.first + 1 else [leaf[None] for leaf in args.inputs]


def joined(blocks: Sequence[list[Array]]) -> list[Array]:
    """Join the observed values of successive spans along their first axis."""
    return blocks[0] if len(blocks) == 1 else [concatenate(column) for column in zip(*blocks)]


class Observations:
    """The structure, shapes and dtypes of what `observe` returned first, which all other values must have."""

    def __init__(self) -> None:
        self.build: Callable[[list[Array]], Tree] | None = None
        self._like, self._specs = None, list[Spec]()
        self._first = [0, 0]  # the steps that have determined the structure, and shapes and dtypes

    def leaves(self, tree: Tree, number: int) -> list[Array]:
        """Return the leaves of what was observed after step `number`; raise a TypeError unless it has this structure."""
        leaves, build = flatten(tree)
        if self.build is None:
            self.build, self._like, self._first[0] = build, build([0.0] * len(leaves)), number
        elif not same_form(tree, self._like):
            path, got, first = difference(tree, self._like, "")
            raise _other_observation(number, f"{got}{path and f' at {path}'}", self._first[0], first)
        return leaves

    def checked(self, leaves: list[Array], number: int, axes: int = 0) -> list[Array]:
        """Return the leaves, with `axes` for steps; raise a TypeError unless they have these shapes and dtypes."""
        specs = [_spec(leaf) for leaf in leaves]
        specs = [spec._replace(shape=spec.shape[axes:]) for spec in specs] if axes else specs
        if specs == self._specs:
            return leaves
        for leaf in leaves:
            if not isinstance(leaf, Number) and getattr(getattr(leaf, "dtype", None), "kind", "O") not in "biufc":
                raise TypeError(
                    "timestepping.scan: observe must return arrays of floats, in dicts, lists and tuples, but after step "
                    f"{number} it returned {type(leaf).__name__} {leaf!r:.60}."
                )
        if self._specs:
            raise _other_observation(number, _described(specs), self._first[1], _described(self._specs))
        self._specs, self._first[1] = specs, number
        return leaves


def _other_observation(number: int, got: str, first: int, expected: str) -> TypeError:
    if tracing.recorder is not None:
        tracing.recorder.refuse("observe returns another structure, other shapes or dtypes in some steps")
    return TypeError(
        "timestepping.scan: observe must return the same structure of arrays, with the same shapes and dtypes, after each "
        f"step, but after step {number} it returned {got}, and after step {first} {expected}."
    )


def _described(specs: list[Spec]) -> str:
    return ", ".join(f"{spec.dtype} of shape {spec.shape}" for spec in specs) or "nothing"


def _leaves_like(tree: Tree, like: Tree, number: int) -> list[Array]:
    """Return the leaves of the state after step `number`; raise a TypeError unless it has the structure of `like`."""
    if same_form(tree, like):
        return flatten(tree)[0]
    if tracing.recorder is not None:
        tracing.recorder.refuse("the step changes the structure of the state")
    path, got, expected = difference(tree, like, "u0")
    raise TypeError(
        f"timestepping.scan: step must return a state like its argument u: {path} is {expected}, but step {number} "
        f"returned {got}."
    )


def _checked(leaves: list[Array], specs: list[Spec], names: list[str], number: int) -> list[Array]:
    """Return the state after step `number`; raise an error unless its leaves have these specs."""
    if all(is_variable(leaf) and _spec(leaf) == spec for leaf, spec in zip(leaves, specs)):
        return leaves
    if tracing.recorder is not None:
        tracing.recorder.refuse("the step changes the shapes or dtypes of the state")
    leaf, spec, name = next(x for x in zip(leaves, specs, names) if not is_variable(x[0]) or _spec(x[0]) != x[1])
    # The message shows the plain value, since the repr of a traced value is uninformative.
    raise _wrong_state(stop_gradient(leaf), spec, name, number)


def _writable(leaf: Array) -> Array:
    """Return a copy of an array that can't be written, such as an input or a param: the next step may change its state."""
    plain = getval(leaf)
    is_fixed = type(plain) is np.ndarray and not plain.flags.writeable
    return leaf.copy() if is_fixed and hasattr(leaf, "copy") else leaf  # traced arrays of plain autograd have no `copy`


def _is_single(leaf: Array) -> bool:
    """Return whether a leaf has the precision of float32 or less."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and dtype.kind in "fc" and np.finfo(dtype).bits < 64


def _spec(leaf: Array) -> Spec:
    spec = spec_like(leaf)
    # In a function that is being compiled, a host array may become a traced array in a step: both get the same spec.
    return spec._replace(arrays=None) if spec.arrays is not None and spec.arrays.takes_host_arrays else spec


def _wrong_state(leaf: Array, spec: Spec, name: str, number: int) -> Exception:
    is_array = hasattr(leaf, "dtype")
    result = f"dtype {leaf.dtype} and shape {leaf.shape}" if is_array else f"{type(leaf).__name__} {leaf!r:.40}"
    text = (
        f"timestepping.scan: step must return a state like its argument u: {name} has dtype {spec.dtype} and shape "
        f"{spec.shape}, but step {number} returned {result}."
    )
    if getattr(leaf, "shape", None) == spec.shape:
        is_wider = is_variable(leaf) and np.finfo(leaf.dtype).bits > np.finfo(spec.dtype).bits
        advice = " In derivatives with respect to a Python number a, it is a float64: pass np.float32(a)." * is_wider
        return TypeError(f"{text} Convert it in step, or pass an initial state of the dtype that step returns.{advice}")
    return ValueError(f"{text} Keep a fixed number of entries, such as particles on the rank where they begin.")


class TangentStepping(NamedTuple):
    """Steps with tangents of the state, some inputs and some parameters; lists of arrays have values, then tangents."""

    plain: Stepping
    counts: tuple[int, int, int]  # numbers of leaves of state, inputs and params, without tangents
    # `inputs`, `params`: indices of the leaves with tangents.
    inputs: list[int]
    params: list[int]
    prepared_steps = 0  # see `UserStepping`; other programs compute tangents
    keeps_values = False  # `run` traces

    @property
    def steps_per_program(self) -> int:
        """See `UserStepping`."""
        return self.plain.steps_per_program

    def begin_pass(self) -> None:
        """See `UserStepping`."""
        self.plain.begin_pass()

    def recorded(self, span: Span, args: Arguments, indices: tuple[int, ...]) -> None:
        """See `UserStepping`."""

    @property
    def places(self) -> tuple[str, ...]:
        """The lines of `step` and `observe`."""
        return self.plain.places

    @property
    def is_pure(self) -> bool:
        """See `UserStepping`."""
        return self.plain.is_pure

    def run(self, span: Span, args: Arguments) -> tuple[list[Array], list[Array]]:
        """Return the state after a span of steps, and the observed values, both followed by tangents."""
        a, b, c = self.counts
        leaves = [*args.state[:a], *args.inputs[:b], *args.params[:c]]
        indices = [*range(a), *[a + k for k in self.inputs], *[a + b + k for k in self.params]]
        tangents = [*args.state[a:], *args.inputs[b:], *args.params[c:]]

        def called(leaves: list[Array]) -> tuple[list[Array], list[Array]]:
            return self.plain.run(span, Arguments(leaves[:a], leaves[a : a + b], leaves[a + b :]))

        variables, line = Variables(leaves, indices, list), self.places[0]
        (state, columns), (dstate, dcolumns) = trace_forwards(called, variables, tangents, repeats=line)
        return [*state, *dstate], [*columns, *dcolumns]


def compiled_form(fun: Function | None, calls_jitted: bool) -> Any:
    """Return the compiled form of a function, None if it hasn't one; see `mpiad.programs.compiled_forms`."""
    # Programs without jit don't need this package, so they don't import it.
    if fun is None or "mpiad.programs" not in sys.modules:
        return None
    from mpiad.programs import compiled_forms

    return compiled_forms.compiled_form(fun, calls_jitted)


def _state_itself(state: Tree, number: int, *params: Tree) -> Tree:
    return state


def _steps(
    advance: Function, observe: Function | None, has_inputs: bool, count: int, build: Callable, names: list[str]
) -> Function:
    """Return the function of the first number and all leaves that runs `count` steps.

    The observed values get an additional first axis; states that Python observes are separate arrays.
    """

    def steps(first: int, *leaves: Array) -> tuple[list[Array], Any]:
        variables, variables_of_observe, state, inputs, params = build(leaves)
        entries, build_input = flatten(inputs) if has_inputs else ([], list)
        # Of this call: a later loop of the same function may have a state of other shapes and dtypes.
        specs, like, rows, observations = [_spec(leaf) for leaf in flatten(state)[0]], state, [], Observations()
        for k in range(count):
            entry = (build_input([leaf[k] for leaf in entries]),) if has_inputs else ()
            state = advance(*variables, state, first + k, *entry, *params)
            after = _checked(_leaves_like(state, like, first + k), specs, names, first + k)
            if observe is _state_itself:
                rows.append(state)
            elif observe is not None:
                row = observe(*variables_of_observe, state, first + k, *params)
                rows.append(observations.checked(observations.leaves(row, first + k), first + k))
        if observations.build is None:
            return after, rows
        return after, observations.build([stack(column) for column in zip(*rows)])

    steps.__name__ = getattr(advance, "__name__", "step")
    return steps
