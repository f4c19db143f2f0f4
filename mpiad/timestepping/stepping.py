"""Steps of a loop on lists of arrays: the user's, checked, and the same with tangents carried along.

Where the step is compiled, several may be run as one program. A program writes its results into arrays of their own, which
the next one copies into the halos that it exchanges. Within one program a field is computed where the next step reads it,
cotangents of parameters are added up in loops, and the Python of a call is spent once for all steps.
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

# Steps in one program. More bring little, and take long to compile.
_MOST, _MOST_OPERATIONS = 32, 600


class Span(NamedTuple):
    """Steps that are run as one, from the first up to another."""

    first: int
    stop: int


class Arguments(NamedTuple):
    """What a loop is a function of, as lists of leaves."""

    state: list[Any]  # of the first step
    inputs: list[Any]  # each with one entry for each step along its first axis
    params: list[Any]  # the same in all steps

    def all(self) -> list[Any]:
        """Return the leaves one behind the other."""
        return [*self.state, *self.inputs, *self.params]

    def like(self, leaves: Sequence[Any]) -> Arguments:
        """Return other leaves, which stand one behind the other, in the place of these."""
        a, b = len(self.state), len(self.state) + len(self.inputs)
        return Arguments(list(leaves[:a]), list(leaves[a:b]), list(leaves[b:]))

    def at(self, span: Span, state: list[Any]) -> Arguments:
        """Return the arguments of some steps: one step's own entries of the inputs, or all that several have."""
        first, stop = span
        # One step gets its entry, as the user's function takes it; several get a row each.
        entries = first if stop == first + 1 else slice(first, stop)
        return Arguments(state, [leaf[entries] for leaf in self.inputs], self.params)


Stepping: TypeAlias = "UserStepping | TangentStepping"
"""How a state becomes another one."""


def spans(stepping: Stepping, first: int, stop: int) -> Iterator[Span]:
    """Yield steps that are run as one, from the first to the last."""
    while first < stop:
        count = stepping.together
        # What is left over goes step by step: a program for each remainder would have to be compiled.
        span = Span(first, first + count if count <= stop - first else first + 1)
        yield span
        first = span.stop


@runtime_checkable
class CompiledFunction(Protocol):
    """What `mpiad.jit` makes."""

    fun: Function

    @property
    def operations(self) -> int:
        """How many operations its largest program has; 0 where there is none yet, or some call can't be compiled."""
        ...

    def derived(self, key: Any, make: Callable[[], Function], optional: bool = False) -> Any:
        """Return a compiled function that was made of this one, the same for equal keys; `optional`: without a warning."""
        ...


class UserStepping:
    """The user's step and what is observed after it.

    - `advance`: ``advance(state, number, *input, *params)``.
    - `observe`: ``observe(state, number, *params)``.
    - `state`, `inputs`, `params`: as the user gave them; `inputs` None where steps have none.
    - `length`: how many steps are run one after the other, at most.
    - `args`: their leaves.
    - `build_state`: from leaves to the user's nest.
    - `build_seen` (or None): the same for what is observed; known after a step.
    """

    def __init__(self, advance: Any, observe: Any, state: Tree, inputs: Tree, params: tuple, length: int):
        self._advance, self._observe, self._fed, self._length = advance, observe, inputs is not None, length
        # Whether steps may become one program, now or once one of them is compiled.
        looked_at = observe is None or isinstance(observe, CompiledFunction)
        self._compiled = isinstance(advance, CompiledFunction) and looked_at
        leaves, self.build_state = flatten(state)
        entries, self._build_input = flatten(inputs) if self._fed else ([], list)
        rest, self._build_params = flatten(params)
        self.args = Arguments(leaves, entries, rest)
        self.build_seen: Callable[[list[Any]], Any] | None = None
        self._specs = [_spec(leaf) for leaf in leaves]
        # Their paths in the user's nest, for errors: a step may return one leaf of twenty wrong.
        self._names = [name for name, _ in named_leaves(state, "u0")]

    @property
    def together(self) -> int:
        """How many steps can be run as one: 1 where there is no program of several, or not yet before a step was run."""
        if not self._compiled or tracing.recorder is not None or not self._advance.operations:
            return 1
        length, most = self._length, min(_MOST, self._length, max(_MOST_OPERATIONS // self._advance.operations, 1))
        # As many as leave few over, which are run one by one.
        count = min(range(most, most // 2, -1), key=lambda count: length % count)
        return count if count > 1 and not self._several(count).refused else 1

    def _several(self, count: int) -> Any:
        """Return a compiled function that runs so many steps of the loop.

        It takes the state, the first step's number, a nest of inputs with `count` entries (or None) and all params to the
        last state and a list of what is observed after each step.
        """
        advance, observe, fed = self._advance, self._observe, self._fed
        key = observe, fed, count
        return advance.derived(key, lambda: _steps(advance.fun, observe and observe.fun, fed, count), True)

    def run(self, span: Span, now: Arguments) -> tuple[list[Array], list[list[Array]]]:
        """Return the state after some steps, and what is observed after each; raise where its form isn't that before."""
        params = self._build_params(now.params)
        entry = (self._build_input(now.inputs),) if self._fed else ()
        first, stop = span
        if stop > first + 1:
            several = self._several(stop - first)
            state, seen = several(self.build_state(now.state), first, *(entry or (None,)), params)
        else:
            state = self._advance(self.build_state(now.state), first, *entry, *params)
            seen = [] if self._observe is None else [self._observe(state, first, *params)]
        return self._checked(flatten(state)[0], stop - 1), [self._taken_apart(each) for each in seen]

    def _taken_apart(self, seen: Tree) -> list[Any]:
        # Noted at each step, because only a step tells what is observed.
        leaves, self.build_seen = flatten(seen)
        return leaves

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
    # A traced array of a compiled function stands for one of the host: a constant state becomes traced, or the reverse.
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
    """Steps with tangents of the state, of some inputs and of some parameters carried along.

    The tangents stand behind what they belong to, in each of the lists.
    """

    plain: Stepping
    counts: tuple[int, int, int]  # how many leaves there are without the tangents, as lists of their numbers
    # `inputs`, `params`: which of them have tangents.
    inputs: list[int]
    params: list[int]

    @property
    def together(self) -> int:
        """How many steps can be run as one."""
        return self.plain.together

    def run(self, span: Span, now: Arguments) -> tuple[list[Array], list[list[Array]]]:
        """Return the state after some steps and what is observed after each, all with tangents behind them."""
        a, b, c = self.counts
        # Values first, tangents behind them: so a loop with tangents is a loop like any other, checkpoints included.
        leaves = [*now.state[:a], *now.inputs[:b], *now.params[:c]]
        places = [*range(a), *[a + k for k in self.inputs], *[a + b + k for k in self.params]]
        tangents = [*now.state[a:], *now.inputs[b:], *now.params[c:]]

        def called(leaves: list[Any]) -> tuple[list[Any], list[list[Any]]]:
            return self.plain.run(span, Arguments(leaves[:a], leaves[a : a + b], leaves[a + b :]))

        (state, seen), (moved, noted) = trace_forwards(called, Variables(leaves, places, list), tangents)
        return [*state, *moved], [[*each, *along] for each, along in zip(seen, noted)]


def _steps(advance: Function, look: Function | None, fed: bool, count: int) -> Function:
    def steps(state: Tree, first: int, inputs: Tree, params: tuple) -> tuple[Tree, list[Tree]]:
        leaves, build = flatten(inputs) if fed else ([], list)
        seen = []
        for k in range(count):
            entry = (build([leaf[k] for leaf in leaves]),) if fed else ()
            state = advance(state, first + k, *entry, *params)
            if look is not None:
                seen.append(look(state, first + k, *params))
        return state, seen

    steps.__name__ = getattr(advance, "__name__", "step")
    return steps
