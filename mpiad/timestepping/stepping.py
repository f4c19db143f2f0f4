"""Steps of a loop on lists of arrays: the user's steps, whose results are checked, and the same steps with tangents.

If the step function is compiled, several steps may run as one program. Separate programs copy fields into the buffers in
which halos are exchanged, but within one program a field is computed directly in the memory that the next step reads. One
program for several steps also accumulates the cotangents of parameters in compiled loops, and has less Python overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from mpiad._typing import Array, Function, Tree
from mpiad.compiling.program import place_of
from mpiad.differentiation.trace import Variables, trace_forwards
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable, named_leaves
from mpiad.transport import Spec
from mpiad.transport.core.tracing import tracing

# Maximum numbers of steps and operations in one program; larger programs gain little, and take long to compile.
_MAX_STEPS, _MAX_OPERATIONS = 32, 600


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


def spans(stepping: Stepping, first: int, stop: int) -> Iterator[Span]:
    """Yield the spans of steps that run together, in order."""
    while first < stop:
        count = stepping.together
        # Remaining steps run one by one, since a different number of steps would need another program.
        span = Span(first, first + count if count <= stop - first else first + 1)
        yield span
        first = span.stop


class UserStepping:
    """The user's step and observation: ``advance(state, number, *input, *params)``, ``observe(state, number, *params)``."""

    def __init__(self, advance: Any, observe: Any, state: Tree, inputs: Tree, params: tuple, length: int):
        # `length`: the number of steps that the schedule of checkpoints records at a time if it is more than one, otherwise
        # the number of all steps of the loop. One or several programs run these steps.
        self._advance, self._observe, self._has_inputs, self._length = advance, observe, inputs is not None, length
        # Whether several steps may be compiled into one program.
        self._compiled = all(hasattr(fun, "derived") for fun in (advance, observe) if fun is not None)  # by `mpiad.jit`
        leaves, self.build_state = flatten(state)
        entries, self._build_input = flatten(inputs) if self._has_inputs else ([], list)
        constants, self._build_params = flatten(params)
        self.args = Arguments(leaves, entries, constants)
        # Builds the pytree of observed values from its leaves; None before the first step.
        self.build_observed: Callable[[list[Array]], Tree] | None = None
        self._specs = [_spec(leaf) for leaf in leaves]
        # The lines of `step` and `observe`, and the paths of the state's leaves in the user's pytree, for errors.
        self.places = tuple(place_of(getattr(fun, "fun", fun)) for fun in (advance, observe))
        self._names = [name for name, _ in named_leaves(state, "u0")]

    @property
    def together(self) -> int:
        """The number of steps that can run together: 1 before the first step, or if several steps can't be compiled."""
        if not self._compiled or tracing.recorder is not None or not self._advance.operations:
            return 1
        length, max_count = self._length, min(_MAX_STEPS, self._length, max(_MAX_OPERATIONS // self._advance.operations, 1))
        # The number with the smallest remainder is chosen, since the remaining steps run one by one.
        count = min(range(max_count, max_count // 2, -1), key=lambda count: length % count)
        return count if count > 1 and not self._several(count).refused else 1

    def _several(self, count: int) -> Any:
        """Return a compiled function of (state, first number, inputs or None, params) that runs `count` steps."""
        advance, observe, has_inputs = self._advance, self._observe, self._has_inputs
        key = observe, has_inputs, count
        return advance.derived(key, lambda: _steps(advance.fun, observe and observe.fun, has_inputs, count), True)

    def run(self, span: Span, args: Arguments) -> tuple[list[Array], list[list[Array]]]:
        """Return the state after a span of steps, and the values observed after each step; raise if a state is invalid."""
        params = self._build_params(args.params)
        entry = (self._build_input(args.inputs),) if self._has_inputs else ()
        first, stop = span
        if stop > first + 1:
            advance_span = self._several(stop - first)
            state, observed = advance_span(self.build_state(args.state), first, *(entry or (None,)), params)
        else:
            state = self._advance(self.build_state(args.state), first, *entry, *params)
            observed = [] if self._observe is None else [self._observe(state, first, *params)]
        rows = []
        for tree in observed:
            leaves, self.build_observed = flatten(tree)
            rows.append(leaves)
        return self._checked(flatten(state)[0], stop - 1), rows

    def _checked(self, leaves: list[Array], number: int) -> list[Array]:
        if len(leaves) != len(self._specs):
            raise TypeError(
                f"timestepping.scan: step must return a state like its argument u, which has {len(self._specs)} "
                f"array(s), but in step {number} it returned {len(leaves)}."
            )
        for leaf, spec, name in zip(leaves, self._specs, self._names):
            if not is_variable(leaf) or _spec(leaf) != spec:
                # The message shows the plain value, since the repr of a traced value is uninformative.
                raise _wrong_state(stop_gradient(leaf), spec, name, number)
        return leaves


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
        return TypeError(f"{text} Convert it in step, or pass an initial state of the dtype that step returns.")
    return ValueError(text)


class TangentStepping(NamedTuple):
    """Steps with tangents of the state, some inputs and some parameters; lists of arrays have values, then tangents."""

    plain: Stepping
    counts: tuple[int, int, int]  # numbers of leaves of state, inputs and params, without tangents
    # `inputs`, `params`: indices of the leaves with tangents.
    inputs: list[int]
    params: list[int]

    @property
    def together(self) -> int:
        """The number of steps that can run together."""
        return self.plain.together

    @property
    def places(self) -> tuple[str, ...]:
        """The lines of `step` and `observe`."""
        return self.plain.places

    def run(self, span: Span, args: Arguments) -> tuple[list[Array], list[list[Array]]]:
        """Return the state after a span of steps, and the values observed after each step, both followed by tangents."""
        a, b, c = self.counts
        leaves = [*args.state[:a], *args.inputs[:b], *args.params[:c]]
        indices = [*range(a), *[a + k for k in self.inputs], *[a + b + k for k in self.params]]
        tangents = [*args.state[a:], *args.inputs[b:], *args.params[c:]]

        def called(leaves: list[Array]) -> tuple[list[Array], list[list[Array]]]:
            return self.plain.run(span, Arguments(leaves[:a], leaves[a : a + b], leaves[a + b :]))

        (state, rows), (state_tangents, row_tangents) = trace_forwards(called, Variables(leaves, indices, list), tangents)
        return [*state, *state_tangents], [[*row, *row_tangent] for row, row_tangent in zip(rows, row_tangents)]


def _steps(advance: Function, observe: Function | None, has_inputs: bool, count: int) -> Function:
    def steps(state: Tree, first: int, inputs: Tree, params: tuple) -> tuple[Tree, list[Tree]]:
        leaves, build = flatten(inputs) if has_inputs else ([], list)
        observed = []
        for k in range(count):
            entry = (build([leaf[k] for leaf in leaves]),) if has_inputs else ()
            state = advance(state, first + k, *entry, *params)
            if observe is not None:
                observed.append(observe(state, first + k, *params))
        return state, observed

    steps.__name__ = getattr(advance, "__name__", "step")
    return steps
