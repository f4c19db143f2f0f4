"""Steps of a loop on lists of arrays: the user's, checked, and the same with tangents.

If the step is compiled, several steps may run as one program. A program writes its results into arrays of its own, which
the next one copies into the halos that it exchanges. Within one program a field is computed directly into the memory that
the next step reads, cotangents of parameters are accumulated in loops, and Python's overhead is paid once for all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from mpiad._typing import Array, Function, Tree
from mpiad.differentiation.trace import Variables, trace_forwards
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable, named_leaves
from mpiad.transport import Spec
from mpiad.transport.tracing import tracing

# Steps in one program. More gain little, and take long to compile.
_MOST, _MOST_OPERATIONS = 32, 600


class Span(NamedTuple):
    """Steps that run as one, from `first` up to, not including, `stop`."""

    first: int
    stop: int


class Arguments(NamedTuple):
    """The arguments of a loop, as lists of leaves."""

    state: list[Any]  # of the first step
    inputs: list[Any]  # each with one entry per step along its first axis
    params: list[Any]  # the same in all steps

    def all(self) -> list[Any]:
        """Return all leaves in one list."""
        return [*self.state, *self.inputs, *self.params]

    def like(self, leaves: Sequence[Any]) -> Arguments:
        """Return other leaves, given as one list, in the form of these arguments."""
        a, b = len(self.state), len(self.state) + len(self.inputs)
        return Arguments(list(leaves[:a]), list(leaves[a:b]), list(leaves[b:]))

    def at(self, span: Span, state: list[Any]) -> Arguments:
        """Return the arguments of some steps: for one step its entries of the inputs, for several all of theirs."""
        first, stop = span
        # One step gets its entry, as the user's function takes it; several get an axis of entries.
        entries = first if stop == first + 1 else slice(first, stop)
        return Arguments(state, [leaf[entries] for leaf in self.inputs], self.params)


Stepping: TypeAlias = "UserStepping | TangentStepping"
"""How a state becomes another one."""


def spans(stepping: Stepping, first: int, stop: int) -> Iterator[Span]:
    """Yield spans of steps that run as one, from the first to the last."""
    while first < stop:
        count = stepping.together
        # The remainder runs step by step: a program for each remainder would have to be compiled.
        span = Span(first, first + count if count <= stop - first else first + 1)
        yield span
        first = span.stop


@runtime_checkable
class CompiledFunction(Protocol):
    """The result of `mpiad.jit`."""

    fun: Function

    @property
    def operations(self) -> int:
        """Number of operations of its largest program; 0 if there is none yet, or some call can't be compiled."""
        ...

    def derived(self, key: Any, make: Callable[[], Function], optional: bool = False) -> Any:
        """Return a compiled function derived from this one, the same for equal keys; `optional`: without a warning."""
        ...


class UserStepping:
    """The user's step and observation.

    - `advance`: ``advance(state, number, *input, *params)``.
    - `observe`: ``observe(state, number, *params)``.
    - `state`, `inputs`, `params`: as the user gave them; `inputs` None if steps have none.
    - `length`: largest number of consecutive steps.
    - `args`: their leaves.
    - `build_state`: from leaves to the user's pytree.
    - `build_seen` (or None): the same for observed values; known after a step.
    """

    def __init__(self, advance: Any, observe: Any, state: Tree, inputs: Tree, params: tuple, length: int):
        self._advance, self._observe, self._has_inputs, self._length = advance, observe, inputs is not None, length
        # Whether steps may become one program, immediately or once one of them is compiled.
        self._compiled = all(isinstance(fun, CompiledFunction) for fun in (advance, observe) if fun is not None)
        leaves, self.build_state = flatten(state)
        entries, self._build_input = flatten(inputs) if self._has_inputs else ([], list)
        rest, self._build_params = flatten(params)
        self.args = Arguments(leaves, entries, rest)
        self.build_seen: Callable[[list[Any]], Any] | None = None
        self._specs = [_spec(leaf) for leaf in leaves]
        # Their paths in the user's pytree, for errors: one of many leaves may be wrong.
        self._names = [name for name, _ in named_leaves(state, "u0")]

    @property
    def together(self) -> int:
        """Number of steps that can run as one: 1 if there is no program of several, or before the first step."""
        if not self._compiled or tracing.recorder is not None or not self._advance.operations:
            return 1
        length, most = self._length, min(_MOST, self._length, max(_MOST_OPERATIONS // self._advance.operations, 1))
        # The number with the smallest remainder, whose steps run one by one.
        count = min(range(most, most // 2, -1), key=lambda count: length % count)
        return count if count > 1 and not self._several(count).refused else 1

    def _several(self, count: int) -> Any:
        """Return a compiled function that runs `count` steps of the loop.

        It maps the state, the first step's number, a pytree of inputs with `count` entries (or None) and all params to the
        last state and a list of the values observed after each step.
        """
        advance, observe, has_inputs = self._advance, self._observe, self._has_inputs
        key = observe, has_inputs, count
        return advance.derived(key, lambda: _steps(advance.fun, observe and observe.fun, has_inputs, count), True)

    def run(self, span: Span, now: Arguments) -> tuple[list[Array], list[list[Array]]]:
        """Return the state after some steps, and the values observed after each; raise if the state's form has changed."""
        params = self._build_params(now.params)
        entry = (self._build_input(now.inputs),) if self._has_inputs else ()
        first, stop = span
        if stop > first + 1:
            several = self._several(stop - first)
            state, observed = several(self.build_state(now.state), first, *(entry or (None,)), params)
        else:
            state = self._advance(self.build_state(now.state), first, *entry, *params)
            observed = [] if self._observe is None else [self._observe(state, first, *params)]
        rows = []
        for each in observed:
            # Stored at each step, because only a step determines the observed values.
            leaves, self.build_seen = flatten(each)
            rows.append(leaves)
        return self._checked(flatten(state)[0], stop - 1), rows

    def _checked(self, leaves: list[Any], number: int) -> list[Any]:
        if len(leaves) != len(self._specs):
            raise TypeError(
                f"timestepping.scan: step must return a state like the one that it gets, which has {len(self._specs)} "
                f"array(s), but in step {number} it returned {len(leaves)}."
            )
        for leaf, spec, name in zip(leaves, self._specs, self._names):
            if not is_variable(leaf) or _spec(leaf) != spec:
                # Its plain value: a trace in a message would say nothing to the user.
                raise _wrong_state(stop_gradient(leaf), spec, name, number)
        return leaves


def _spec(leaf: Array) -> Spec:
    spec = spec_like(leaf)
    # In a compiled function a traced array stands for one of the host: a constant state becomes traced, or the reverse.
    return spec._replace(arrays=None) if spec.arrays is not None and spec.arrays.takes_host_arrays else spec


def _wrong_state(leaf: Array, spec: Spec, name: str, number: int) -> Exception:
    known = hasattr(leaf, "dtype")
    found = f"dtype {leaf.dtype} and shape {leaf.shape}" if known else f"{type(leaf).__name__} {leaf!r:.40}"
    text = (
        f"timestepping.scan: step must return a state like the one that it gets: {name} has dtype {spec.dtype} and shape "
        f"{spec.shape}, but step {number} returned {found}."
    )
    if getattr(leaf, "shape", None) == spec.shape:
        return TypeError(f"{text} Convert it in the step, or start from that dtype.")
    return ValueError(text)


class TangentStepping(NamedTuple):
    """Steps with tangents of the state, of some inputs and of some parameters.

    In each of the lists the tangents follow the values.
    """

    plain: Stepping
    counts: tuple[int, int, int]  # numbers of leaves without the tangents, for state, inputs and params
    # `inputs`, `params`: positions of those with tangents.
    inputs: list[int]
    params: list[int]

    @property
    def together(self) -> int:
        """Number of steps that can run as one."""
        return self.plain.together

    def run(self, span: Span, now: Arguments) -> tuple[list[Array], list[list[Array]]]:
        """Return the state after some steps and the values observed after each, each followed by its tangents."""
        a, b, c = self.counts
        # Values first, then tangents: so a loop with tangents is an ordinary loop, checkpoints included.
        leaves = [*now.state[:a], *now.inputs[:b], *now.params[:c]]
        places = [*range(a), *[a + k for k in self.inputs], *[a + b + k for k in self.params]]
        tangents = [*now.state[a:], *now.inputs[b:], *now.params[c:]]

        def called(leaves: list[Any]) -> tuple[list[Any], list[list[Any]]]:
            return self.plain.run(span, Arguments(leaves[:a], leaves[a : a + b], leaves[a + b :]))

        (state, observed), (moved, noted) = trace_forwards(called, Variables(leaves, places, list), tangents)
        return [*state, *moved], [[*each, *along] for each, along in zip(observed, noted)]


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
