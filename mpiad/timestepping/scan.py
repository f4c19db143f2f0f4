"""`scan`: a loop over time steps whose gradient stores a few states and recomputes the others."""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from itertools import chain, dropwhile
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, Tree
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation import Linearization, linearize
from mpiad.differentiation.backward import run_backward, run_backward_together
from mpiad.differentiation.concatenation import Concatenation
from mpiad.differentiation.tape import OrderedTape, changeable
from mpiad.differentiation.trace import Traced, Variables, trace_backwards
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.primitives.cotangents import conform, conformed, spec_like, tangent_of
from mpiad.pytrees import fetched, is_variable, named_leaves
from mpiad.timestepping.checkpoints import (
    Advance,
    CheckpointSchedule,
    Keep,
    Restore,
    Reverse,
    actions,
    log_repeated_steps,
    schedule_of,
)
from mpiad.timestepping.snapshots import Snapshots, checksum, checksums, copy_of
from mpiad.timestepping.stepping import Arguments, Span, Stepping, TangentStepping, UserStepping, joined, own, spans
from mpiad.transport import Spec
from mpiad.transport.core.tracing import opaque, restoring_state, tracing
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array
from mpiad.transport.world import level_of_repeats

_log = logging.getLogger("mpiad")


class _Steps(NamedTuple):
    """Some steps that were recorded for a reverse pass."""

    span: Span
    # Returns the cotangents of the variables in each of several reverse passes, given those of the results.
    pull: Callable[[list[list[Array]]], list[list[Array]]]


class _CheckpointedRun:
    """One pass through the checkpoint schedule: the constructor runs forward to the last steps, `reversed` backward."""

    def __init__(self, loop: Loop, args: Arguments, observed: list[Array] | None):
        # The loop isn't stored: without a reference cycle, stored states and files are released immediately.
        self._snapshots = Snapshots(loop.schedule)
        self._actions = actions(loop.steps, loop.schedule)
        # Copies, here and below, since a step may write into its argument, or return the same buffer each time.
        self.state = list(map(copy_of, args.state))
        self.last = Reverse(0, loop.steps)  # the first action of `reversed`
        for action in self._actions:
            if isinstance(action, Reverse):
                self.last = action
                break
            self._perform(action, loop, args, observed)
        # The last steps run twice from this state: in the forward pass, and recorded in `reversed`.
        self.state = own(loop.stepping, self.state)
        self._shares = False

    def shared(self, loop: Loop) -> _CheckpointedRun:
        """Return a run for another reverse pass, which uses the same stored states."""
        other = copy(self)
        other._snapshots, other.state = self._snapshots.shared(), list(map(copy_of, self.state))
        other._actions = dropwhile(lambda action: not isinstance(action, Reverse), actions(loop.steps, loop.schedule))
        next(other._actions)
        self._shares = other._shares = True
        return other

    def reversed(self, loop: Loop, args: Arguments, passes: str) -> Iterator[_Steps]:
        """Yield recorded steps, from the last to the first; `passes` as in `Tape`."""
        comparison, after = Comparison(loop.schedule, loop.stepping.places, loop.steps), loop.last_checksums
        for action in chain([self.last], self._actions):
            if not isinstance(action, Reverse):
                self._perform(action, loop, args, None)
                continue
            state, records = self.state, []
            before = [checksum(leaf, comparison.part(action.first - 1)) for leaf in state]
            for span in spans(loop.stepping, action.first, action.stop):
                # The records of all these steps are in memory at once; `CheckpointSchedule.recorded` limits their number.
                values, pull = loop.recorded(args, span, state, passes)
                records.append(_Steps(span, pull))
                state, columns = values[: len(state)], values[len(state) :]
                known = loop.observed_checksums
                if not all(same_bits(column, sums[span.first : span.stop]) for column, sums in zip(columns, known)):
                    for number in range(*span):
                        row = [column[number - span.first] for column in columns]
                        comparison.add(number, row, [sums[number] for sums in known], observed=True)
                del columns
            comparison.add(action.stop - 1, state, after)
            after = before
            while records:
                yield records.pop()
            del state, values  # references to recorded values, which the restored state replaces
        comparison.require_same()

    def _perform(self, action: Keep | Advance | Restore, loop: Loop, args: Arguments, observed: list[Array] | None) -> None:
        if isinstance(action, Keep):
            self._snapshots.keep(action.number, self.state, action.on_disk, loop.stepping.is_pure)
        elif isinstance(action, Restore):
            state = self._snapshots.state(action.number, action.last)
            # A state that is needed again must stay unchanged, even if a step writes into its argument.
            self.state = state if action.last and not self._shares else own(loop.stepping, state)
        else:
            self.state = loop.run(Span(action.first, action.stop), args, self.state, observed)


class _Cotangents:
    """Cotangents of the arguments in one reverse pass; `results`: those of the last state and of the observed arrays."""

    def __init__(self, args: Arguments, active: Sequence[int], indices: Sequence[int], results: list[Array]):
        # `indices`: those of the variables of recorded steps among all leaves, the state first.
        leaves, states, self._active = args.all(), len(args.state), active
        self._specs = {k: spec_like(leaves[k]) for k in indices}
        self._state, self._observed = results[:states], results[states:]
        self._others, self._inputs = indices[states:], states + len(args.inputs)
        self._sums = {k: self._specs[k].zeros() for k in self._others}

    def of_results(self, span: Span) -> list[Array]:
        """Return the cotangents of the results of some steps: of the state after them, and of the observed values."""
        return [*self._state, *[x[span.first : span.stop] for x in self._observed]]

    def add(self, span: Span, cotangents: list[Array]) -> None:
        """Accumulate the cotangents of the variables of these steps."""
        for k, g in zip(self._others, cotangents[len(self._state) :]):
            if g is None:
                continue
            if k < self._inputs:
                # Each step reads a different entry of the inputs, so the cotangents of different steps aren't summed.
                self._sums[k][span.first : span.stop] = g
            else:
                self._sums[k] += conform(g, *self._specs[k])
        self._state = [conformed(g, spec) for g, spec in zip(cotangents[: len(self._state)], self._specs.values())]

    def of_arguments(self) -> list[Array]:
        """Return the cotangents of the active arguments, in their order."""
        return [self._state[k] if k < len(self._state) else self._sums[k] for k in self._active]


# A loop as one operator on its first state, its inputs and its parameters (together x), differentiable to any order.
#
# Let L(x) be the Jacobian of the loop. The adjoint L(x)ᵀ g is another operator, which runs the loop backwards from stored
# states. The tangent T(x, w) = L(x) w is also a loop, over the state together with its tangent. L(x)ᵀ g is the gradient of
# ⟨g, T(x, w)⟩ with respect to w. Since second derivatives are symmetric, the tangent of the adjoint is
# L(x)ᵀ ġ + ∂ₓ⟨g, T(x, ẋ)⟩. A cotangent w of the adjoint contributes T(x, w) to the cotangent of g, and ∂ₓ⟨g, T(x, w)⟩ to
# the cotangent of x; both come from one forward and reverse pass of the tangent loop, with the same
# number of stored states.


class Loop:
    """A time loop as a differentiable operator; `args`: the arguments' structure; `schedule`: limits the stored states."""

    def __init__(self, stepping: Stepping, steps: int, schedule: CheckpointSchedule, args: Arguments):
        self.stepping, self.steps, self.schedule, self._like = stepping, steps, schedule, args
        self.observed_specs: list[Spec] | None = None  # of the arrays observed in one step; None before the first run
        # Of the last state, and of each observed array after each step, in the forward run of a recorded loop.
        self.last_checksums: list[Array] = []
        self.observed_checksums: list[Any] = []
        self._stored: _CheckpointedRun | None = None
        leaves = args.all()
        self.active = [k for k, leaf in enumerate(leaves) if isbox(leaf)]
        # The variables of recorded steps: inputs and parameters that are constant outside of the loop need no cotangents.
        self._indices = (*range(len(args.state)), *[k for k in self.active if k >= len(args.state)])
        # If there is a tape, the loop is recorded even without a traced argument, since other ranks may need the reverse
        # pass of steps that communicate.
        self._recorded = bool(self.active) or tracing.tape is not None
        if self._recorded:
            log_repeated_steps(steps, schedule)
        # Whether further reverse passes use the stored states again; files are removed by a reverse pass.
        # They do if the current tape is that of `linearize`, or that of a gradient in `make_hvp`.
        passes = [tape.passes for tape in (tracing.tape, tracing.tape and tracing.tape.outer) if tape is not None]
        self._keeps = (passes[:1] == ["recorded"] or passes[1:] == ["kept"]) and not schedule.disk
        self._state = [spec_like(leaf) for leaf in args.state]
        # The vector of cotangents contains active arguments only, since those of all inputs could need much memory.
        self._cotangents = Concatenation([spec_like(leaves[k]) for k in self.active])

    def __call__(self, args: Arguments) -> tuple[list[Array], list[Array]]:
        """Return the last state and the observed arrays."""
        # A custom operator returns one array, a vector. `_results` depends on the observed arrays of this call.
        vector = _run(*args.all(), loop=self)
        parts = self._results.parts(vector)
        return parts[: len(self._state)], parts[len(self._state) :]

    @property
    def _results(self) -> Concatenation:
        observed = self.observed_specs or []
        return Concatenation([*self._state, *[spec._replace(shape=(self.steps, *spec.shape)) for spec in observed]])

    def forwards(self, leaves: Sequence[Array]) -> Array:
        """Return the results as one vector, given plain arguments; store states if the loop is recorded."""
        args, observed = self._like.like(leaves), list[Array]()
        first, state = 0, args.state
        self.stepping.begin_pass()
        if self._recorded:
            # The forward run also stores the states for the reverse pass, so no additional run is needed.
            self._stored = run = _CheckpointedRun(self, args, observed)
            first, state = run.last.first, run.state
        state = self.run(Span(first, self.steps), args, own(self.stepping, state), observed)
        self.last_checksums = list(map(checksum, state)) if self._recorded else []
        return self._results.vector([*state, *observed])

    def backwards(self, g: Array, leaves: Sequence[Array]) -> Array:
        """Return the active arguments' cotangents as one vector, or one per entry of g's first axis ("lanes")."""
        args, together = self._like.like(leaves), len(spec_like(g).shape) > 1
        self.stepping.begin_pass()
        # Unless the states are kept, this reverse pass releases them, and a second one runs the loop again.
        run = self._stored or _CheckpointedRun(self, args, None)
        self._stored = run.shared(self) if self._keeps else None
        results = self._results
        lanes = [_Cotangents(args, self.active, self._indices, results.parts(row)) for row in (g if together else [g])]
        for span, pull in run.reversed(self, args, "together" if together else "several"):
            found = pull([lane.of_results(span) for lane in lanes])
            for lane, cotangents in zip(lanes, found):
                lane.add(span, cotangents)
        vectors = [self._cotangents.vector(lane.of_arguments()) for lane in lanes]
        return stack(vectors) if together else vectors[0]

    def run(self, span: Span, args: Arguments, state: list[Array], observed: list[Array] | None) -> list[Array]:
        """Run some steps on plain arrays, and store what they observe, unless `observed` is None.

        A TypeError is raised if a step uses a traced value that isn't an argument.
        """
        for part in spans(self.stepping, *span):
            given = args.at(part, state)
            if self._recorded and self.stepping.keeps_values:
                # The use of a value that a step keeps is an error.
                values = self._traced(part, given, repeats=self.stepping.places[0]).values
                state, columns = values[: len(state)], values[len(state) :]
            else:
                state, columns = self.stepping.run(part, given)
            if any(map(isbox, [*state, *columns])):
                raise TypeError(
                    "timestepping.scan: step uses a traced variable from outside, with respect to which scan can't "
                    "differentiate. Pass it to scan among the params, so that step gets it as an argument, or, if no "
                    "derivative is needed, use its plain value, mpiad.stop_gradient(x)."
                )
            if observed is not None and columns:
                self._store(columns, part, observed)
        return state

    def _traced(self, span: Span, args: Arguments, passes: str = "several", repeats: str = "") -> Traced:
        """Run some steps on plain arrays in a trace; `passes` and `repeats` as in `Tape`."""
        variables = Variables(args.all(), list(self._indices), list)
        outputs = lambda new: self._outputs(span, args.like(new))  # noqa: E731
        traced = trace_backwards(outputs, variables, passes=passes, repeats=repeats)
        if traced.problem is not None:
            raise traced.problem.kind(traced.problem.text)
        return traced

    def _store(self, columns: list[Array], span: Span, observed: list[Array]) -> None:
        """Store the values observed after some steps in the `observed` arrays, which the first step creates."""
        specs = [spec._replace(shape=spec.shape[1:]) for spec in map(spec_like, columns)]
        # The first step determines the shapes and dtypes.
        if span.first == 0:
            self.observed_specs = specs
            observed[:] = [spec._replace(shape=(self.steps, *spec.shape)).empty() for spec in specs]
        if not all(spec.differentiable for spec in specs):
            got = ", ".join([f"dtype {spec.dtype}" for spec in specs])
            raise TypeError(
                f"timestepping.scan: with checkpoints, observe must return arrays of floats, but it returned {got}. "
                "Convert the others to floats."
            )
        for array, column in zip(observed, columns):
            array[slice(*span)] = column
        if self._recorded:
            found = [checksums(column, None if _is_lossy(self.schedule) else span.first) for column in columns]
            if span.first == 0:
                self.observed_checksums = [
                    [None] * self.steps if isinstance(sums, list) else spec_like(array).empty()
                    for sums, array in zip(found, observed)
                ]
            for known, sums in zip(self.observed_checksums, found):
                known[span.first : span.stop] = sums

    def recorded(
        self, args: Arguments, span: Span, state: list[Array], passes: str
    ) -> tuple[list[Array], Callable[[list[list[Array]]], list[list[Array]]]]:
        """Run some steps, and return the state, followed by the observed values, and the steps' reverse pass."""
        args = args.at(span, state)
        made = self.stepping.recorded(span, args, self._indices) if passes == "several" else None
        if made is not None:
            return made.values, lambda lanes: [made.pull(gs) for gs in lanes]
        traced = self._traced(span, args, passes)
        places, count = [(value, place) for value, place in zip(traced.values, traced.places)], len(self._indices)

        def pull(lanes: list[list[Array]]) -> list[list[Array]]:
            seeds = [
                [(place, conform(g, *spec_like(value))) for g, (value, place) in zip(gs, places) if place >= 0]
                for gs in lanes
            ]
            if passes == "together":
                return run_backward_together(traced.recording, seeds, count)
            return [run_backward(traced.recording, seeds[0], count)]

        return traced.values, pull

    def tangent(self, leaves: Sequence[Array], directions: Sequence[Array]) -> Array:
        """Return the tangent of the results; the direction of a constant leaf is None. Enclosing traces record the loop."""
        args, tangents = self._like.like(leaves), self._like.like(directions)
        inputs = [k for k, direction in enumerate(tangents.inputs) if direction is not None]
        params = [k for k, direction in enumerate(tangents.params) if direction is not None]
        # A loop over states and their tangents; constant inputs and parameters have no tangents.
        extended = Arguments(
            [*args.state, *map(tangent_of, args.state, tangents.state)],
            [*args.inputs, *[tangent_of(args.inputs[k], tangents.inputs[k]) for k in inputs]],
            [*args.params, *[tangent_of(args.params[k], tangents.params[k]) for k in params]],
        )
        counts = len(args.state), len(args.inputs), len(args.params)
        stepping = TangentStepping(self.stepping, counts, inputs, params)
        state, observed = Loop(stepping, self.steps, self.schedule, extended)(extended)
        return self._results.vector([*state[len(state) // 2 :], *observed[len(observed) // 2 :]])

    def tangents(self, leaves: Sequence[Array], vectors: Array) -> Array:
        """Return tangents along several directions, by Jacobians of a few steps, since forward mode has no batches."""
        args, along, lanes = self._like.like(leaves), self._like.like(self.directions(vectors)), len(vectors)
        state, columns, length = args.state, list[Array](), self.schedule.recorded
        zeros = [spec_like(leaf)._replace(shape=(lanes, *np.shape(leaf))).zeros() for leaf in state]
        tangents = [zero if g is None else g for zero, g in zip(zeros, along.state)]
        for first in range(0, self.steps, length):
            # As many steps as a reverse pass records at a time, since these are recorded, too.
            block = Span(first, min(first + length, self.steps))
            entries = [g if g is None else g[:, slice(*block)] for g in along.inputs]
            given = [*tangents, *entries, *along.params]
            active = [k for k, g in enumerate(given) if g is not None]
            linear = self.linearized(block, [*state, *[leaf[slice(*block)] for leaf in args.inputs], *args.params], active)
            changes: list[Array] = linear.jvp(tuple([given[k] for k in active]), batch=True)
            state, tangents = linear.value[: len(state)], changes[: len(state)]
            columns += changes[len(state) :]
        count = len(self.observed_specs or [])
        columns = [*tangents, *[concatenate(columns[k::count], 1) for k in range(count)]]
        return stack([self._results.vector([column[k] for column in columns]) for k in range(lanes)])

    def linearized(self, block: Span, leaves: list[Array], active: list[int]) -> Linearization:
        """Return the linearization of some steps with respect to the leaves with the indices `active`.

        `leaves`: the state before the steps, their entries of the inputs, and the parameters.
        """

        def run(*leaves: Array) -> list[Array]:
            args, blocks = self._like.like(leaves), []
            state = args.state
            for span in spans(self.stepping, *block):
                part = Span(span.first - block.first, span.stop - block.first)
                state, columns = self.stepping.run(span, args.at(part, state))
                blocks.append(columns)
            return [*state, *joined(blocks)]

        return linearize(run, tuple(active))(*leaves)

    def _outputs(self, span: Span, args: Arguments) -> list[Array]:
        """Return the state after a span of steps, followed by the observed values."""
        after, columns = self.stepping.run(span, args)
        return [*after, *columns]

    def directions(self, vector: Array) -> list[Array]:
        """Split a vector of cotangents, or several, into one direction per leaf, None for inactive leaves."""
        directions: list[Array] = [None] * len(self._like.all())
        parts = self._cotangents.parts
        is_block = len(spec_like(vector).shape) > 1
        found = map(stack, zip(*[parts(row) for row in vector])) if is_block else parts(vector)
        for k, part in zip(self.active, found):
            directions[k] = part
        return directions

    def curvature(self, g: Array, leaves: Sequence[Array], directions: Sequence[Array]) -> tuple[Array, Array]:
        """Return the tangent of the results along directions, and the gradient of ⟨g, tangent⟩ as one vector."""
        leaves = list(leaves)
        traced = trace_backwards(lambda new: self.tangent(new, directions), Variables(leaves, self.active, list))
        tangent, place = traced.values[0], traced.places[0]
        seeds = [(place, conform(g, *spec_like(tangent)))] if place >= 0 else []
        gradient = run_backward(traced.recording, seeds, len(self.active))
        # The cotangent of a leaf on which the tangent doesn't depend is None, and becomes zero.
        return tangent, self._cotangents.vector([tangent_of(leaves[k], part) for k, part in zip(self.active, gradient)])


@custom_operator
def _run(*leaves: Array, loop: Loop) -> Array:
    return loop.forwards(leaves)


@custom_operator
def _reversed(g: Array, *leaves: Array, loop: Loop, linear: bool = False) -> Array:
    return loop.backwards(g, leaves)


def _run_adjoint(ans: Array, *leaves: Array, loop: Loop) -> Callable:
    def vjp(g: Array) -> list:
        # If the variables of the tape are cotangents, derivatives with respect to g only are needed, unless the arguments
        # depend on these variables, as the directions of a loop with tangents do.
        linear = tracing.tape is not None and tracing.tape.of_cotangents and not any(map(isbox, leaves))
        return loop.directions(_reversed(g, *leaves, loop=loop, linear=linear))

    return vjp


def _reversed_adjoint(ans: Array, g: Array, *leaves: Array, loop: Loop, linear: bool = False) -> Callable:
    def pulled(g: Array, w: Array) -> tuple[Array, list]:
        if linear:  # only the derivative with respect to g is needed: the tangent of the loop, without a reverse pass
            return loop.tangent(leaves, loop.directions(w)), []
        tangent, gradient = loop.curvature(g, leaves, loop.directions(w))
        return tangent, loop.directions(gradient)

    def vjp(w: Array) -> list:
        is_row = len(spec_like(g).shape) == 1
        if len(spec_like(w).shape) > len(spec_like(ans).shape):
            # The kind of tape is the same on all ranks.
            if linear and is_row and tracing.tape is None and not isbox(w):
                return [loop.tangents(leaves, w)]
            return [None if parts[0] is None else stack(parts) for parts in zip(*map(vjp, w))]
        if is_row:
            tangent, directions = pulled(g, w)
            return [tangent, *directions]
        tangents, directions = zip(*map(pulled, g, w))
        return [stack(tangents), *[None if parts[0] is None else sum(parts) for parts in zip(*directions)]]

    return vjp


def _reversed_tangent(gs: list, ans: Array, g: Array, *leaves: Array, loop: Loop, linear: bool = False) -> Array:
    linear_part = _reversed(tangent_of(g, gs[0]), *leaves, loop=loop)
    if len(spec_like(g).shape) == 1:
        return linear_part + loop.curvature(g, leaves, gs[1:])[1]
    return linear_part + stack([loop.curvature(row, leaves, gs[1:])[1] for row in g])


_run.batched_adjoint = _reversed.batched_adjoint = True
defvjp_together(_run, _run_adjoint)
defjvp_together(_run, lambda gs, ans, *leaves, loop: loop.tangent(leaves, gs))
defvjp_together(_reversed, _reversed_adjoint)
defjvp_together(_reversed, _reversed_tangent)


_Schedule: TypeAlias = int | CheckpointSchedule | None
_MANY_STEPS = 50  # the number of interpreted steps above which scan suggests jit
_MAX_UNROLLED = 50  # maximum number of steps for which a loop without checkpoints is unrolled in a compiled function


State = TypeVar("State")
Observed = TypeVar("Observed")


@overload
def scan(
    step: Callable[..., State], u0: State, n_steps: int, *params: Tree, inputs: Tree = None, observe: None = None,
    checkpoints: int | CheckpointSchedule | None = None,
) -> State: ...  # fmt: skip
@overload
def scan(
    step: Callable[..., State], u0: State, n_steps: int, *params: Tree, inputs: Tree = None,
    observe: Callable[..., Observed], checkpoints: int | CheckpointSchedule | None = None,
) -> tuple[State, Observed]: ...  # fmt: skip
def scan(
    step: Function,
    u0: Tree,
    n_steps: int,
    *params: Tree,
    inputs: Tree = None,
    observe: Function | None = None,
    checkpoints: int | CheckpointSchedule | None = None,
) -> Tree:
    """Step a state forward in time; the gradient stores a limited number of states and recomputes the others.

    Parameters
    ----------
    step : callable
        ``step(u, k, *params)`` returns the state after step k = 0, 1, ..., with the keys and lengths of `u`. With `inputs`
        it is called as ``step(u, k, x, *params)``. It may communicate. With `checkpoints`, the gradient calls `step` again,
        so it must return the same state for the same arguments; and arrays to differentiate with respect to must be among
        the arguments of `step`, not in its closure. If `step` is jitted, or a lambda, closure or method around jitted
        functions, several steps are compiled as one program, unless `step` prints or changes lists or attributes.
    u0 : pytree of arrays of floats or complex numbers
        The initial state. All states have the same shapes and dtypes.
    n_steps : int
        The number of steps.
    *params : pytree of arrays
        Parameters, the same in all steps; differentiable.
    inputs : pytree of arrays of shape (n_steps, ...), optional
        Step k gets entry k of each array; differentiable. The reverse pass of step k computes the cotangent of entry k
        only, whereas it computes the cotangents of whole arrays in `params`.
    observe : callable, optional
        ``observe(u, k, *params)`` is called with the result of step k, and returns a pytree of arrays of floats, with the
        same structure, shapes and dtypes after each step. It is compiled with the steps if possible. With `checkpoints`,
        the gradient calls it again, the last steps first: store frames of a picture in a dict, ``frames[k] =
        stop_gradient(u).copy()``, since those in a list would be there twice.
    checkpoints : int or CheckpointSchedule, optional
        The number of states stored for the gradient, including the initial one; a `CheckpointSchedule` has more options.
        With a number c, the reverse pass also stores the intermediate values of min(c, ⌈n_steps / (c + 1)⌉) steps.
        The other states are recomputed with the minimum number of steps, which is logged at level INFO; with
        √n_steps or more stored states every step runs about twice. By default all intermediate values of the steps are
        stored, and no step runs again.

    Returns
    -------
    pytree of arrays, or (pytree of arrays, pytree of arrays)
        The last state; with `observe`, also the results of `observe`, stacked along a new first axis.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, `step` doesn't return a state like `u0`, `observe` doesn't return arrays like those after
        the first step, or, with `checkpoints`, `step` uses a traced value from its closure.
    OSError
        If a state can't be written to a file.
    RuntimeError
        In the gradient, if `step` or `observe` returned another result than in the forward run, as with random numbers or
        clocks; relative differences up to the square root of the precision of the stored states are allowed.
    FloatingPointError
        With ``CheckpointSchedule(dtype="float32")``, if an entry of a state overflows in single precision, or if all
        entries underflow, so that the steps that the gradient repeats have other results.

    Ranks
    -----
    The ranks that communicate in `step` and `observe` call it, with the same `n_steps` and `checkpoints`. With checkpoints,
    a message that a step sends must be received in the same step. The loop itself doesn't communicate: if `step` raises an
    exception on a rank, only this rank raises.

    Adjoint
    -------
    The derivative of the discrete steps with respect to `u0`, `inputs` and `params`, in reverse and forward mode and to any
    order. Derivatives of all orders store the same number of states, by binomial checkpointing (Griewank and
    Walther, Algorithm 799: revolve, ACM TOMS 26, 2000).

    Examples
    --------
    >>> print(mpiad.timestepping.scan(lambda u, k, a: a * u, 1.0, 10, 2.0))
    1024.0
    """
    if tracing.recorder is not None and not tracing.recorder.ended:
        return _in_a_trace(step, u0, n_steps, params, inputs, observe, checkpoints)
    return _scan(step, u0, n_steps, params, inputs, observe, checkpoints)


def _scan(
    step: Function, u0: Tree, n_steps: int, params: tuple, inputs: Tree, observe: Function | None, checkpoints: _Schedule
) -> Tree:
    _check_arguments(step, u0, n_steps, inputs, observe)
    steps, schedule = int(n_steps), schedule_of(checkpoints, int(n_steps))
    length = schedule.recorded if schedule is not None and schedule.recorded > 1 else steps
    stepping = UserStepping(step, observe, u0, inputs, params, steps, length)
    state, inputs_on_device = ([is_device_array(getval(x)) for x in part] for part in stepping.args[:2])
    if stepping.is_plain and steps > _MANY_STEPS and not any(state):
        _suggest_jit(stepping.places[0], steps)
    if any(state) and not stepping.is_plain and not all(inputs_on_device):
        _suggest_device(stepping.places[0])
    if steps == 0:
        if observe is not None:
            raise ValueError("timestepping.scan: there is nothing to observe in n_steps=0 steps. Omit observe.")
        return u0
    if schedule is None or (tracing.tape is not None and tracing.tape.unfolds):
        state, observed = _on_the_tape(stepping, steps)
    else:
        run = run_by_commands(stepping, steps, schedule, stepping.args)
        state, observed = run or Loop(stepping, steps, schedule, stepping.args)(stepping.args)
    last = stepping.build_state(state)
    return last if stepping.build_observed is None else (last, stepping.build_observed(observed))


_opaque_scan = opaque(_scan)


@functools.lru_cache(256)
def _suggest_jit(place: str, steps: int) -> None:
    """Log advice, the first time only."""
    text = (
        "timestepping.scan: %d steps of the function at %s are interpreted. If they consist of NumPy's functions and "
        "messages, step = mpiad.jit(step) runs several of them as one compiled program."
    )
    _log.info(text, steps, place)


@functools.lru_cache(256)
def _suggest_device(place: str) -> None:
    """Log a warning, the first time only: a program of several steps would get arrays on the host and on the device."""
    text = (
        "timestepping.scan: the inputs of the function at %s are on the host, and its state is on a device, so its steps "
        "are compiled and called one by one. Pass inputs=mpiad.device.to_device(inputs)."
    )
    _log.log(level_of_repeats(), text, place)


def _in_a_trace(
    step: Function, u0: Tree, n_steps: int, params: tuple, inputs: Tree, observe: Function | None, checkpoints: _Schedule
) -> Tree:
    """Run the loop in a function that is being compiled: unrolled if short, otherwise as one call with compiled steps."""
    # A late import, since user programs without jit don't need this package.
    from mpiad.programs import Jitted, jit
    from mpiad.programs.traced_array import TracedArray

    n_steps = operator.index(n_steps) if isinstance(n_steps, TracedArray) else n_steps
    if checkpoints is None and not (isinstance(n_steps, Integral) and n_steps > _MAX_UNROLLED):
        return _scan(step, u0, n_steps, params, inputs, observe, checkpoints)
    compiled = [jit(fun) if callable(fun) and not isinstance(fun, Jitted) else fun for fun in (step, observe)]
    return _opaque_scan(compiled[0], u0, n_steps, params, inputs, compiled[1], checkpoints)


def _on_the_tape(stepping: UserStepping, steps: int) -> tuple[list[Array], list[Array]]:
    """Run the loop so that the enclosing tape records every step."""
    # Inputs and params are the caller's; a broadcast array can't be written.
    inputs, params = (
        [np.broadcast_to(leaf, leaf.shape) if type(leaf) is np.ndarray else leaf for leaf in leaves]
        for leaves in stepping.args[1:]
    )
    args, blocks = Arguments(stepping.args.state, inputs, stepping.args.params if stepping.is_pure else params), []
    # Copies, since a step may write into its argument, which mustn't be the caller's array.
    state = list(map(copy_of, args.state))
    if tracing.recorder is None and not stepping.is_pure:
        # Plain autograd changes no array in place, and its traced arrays have no `copy`.
        state = [leaf.copy() if isbox(leaf) and np.ndim(leaf) and hasattr(leaf, "copy") else leaf for leaf in state]
    with restoring_state():
        for span in spans(stepping, 0, steps):
            plain = [] if stepping.is_pure else [leaf for leaf in state if type(leaf) is np.ndarray]
            with changeable(plain) if plain else nullcontext():
                state, columns = stepping.run(span, args.at(span, state))
            blocks.append(columns)
    return state, joined(blocks)


def _is_lossy(schedule: CheckpointSchedule) -> bool:
    """Return whether states are stored with rounding errors."""
    return schedule.compress or schedule.dtype is not None


def _check_arguments(step: object, u0: Tree, n_steps: object, inputs: Tree, observe: object) -> None:
    if not isinstance(n_steps, Integral) or isinstance(n_steps, bool):
        raise TypeError(f"timestepping.scan: n_steps must be an integer, but got {type(n_steps).__name__} {n_steps!r:.60}.")
    if n_steps < 0:
        raise ValueError(f"timestepping.scan: n_steps must not be negative, but got {n_steps}.")
    for name, value in (("step", step), ("observe", observe)):
        if not callable(value) and (name == "step" or value is not None):
            raise TypeError(f"timestepping.scan: {name} must be a function, but got {type(value).__name__} {value!r:.60}.")
    for name, leaf in named_leaves(u0, "u0"):
        if not is_variable(leaf):
            kind = f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else f"{type(leaf).__name__} {leaf!r:.40}"
            advice = "Pass floats or arrays in a dict, list, tuple, or dataclass with the decorator mpiad.pytrees.register."
            if isinstance(leaf, int) or getattr(leaf, "dtype", np.dtype(object)).kind in "iub":
                advice = "Convert it. A counter isn't needed in the state, since step gets the number of the step."
            raise TypeError(
                f"timestepping.scan: the state must consist of real or complex floats, but {name} is of {kind}. {advice}"
            )
    for name, leaf in [] if inputs is None else named_leaves(inputs, "inputs"):
        if np.ndim(leaf) == 0 or len(leaf) != n_steps:
            raise ValueError(
                f"timestepping.scan: inputs need one entry for each of n_steps={n_steps} steps along their first axis, but "
                f"{name} has shape {np.shape(leaf)}."
            )


# Loops with checkpoints of small compiled steps, run by machine code between two calls of Python.


def run_by_commands(
    stepping: UserStepping, steps: int, schedule: CheckpointSchedule, args: Arguments
) -> tuple[list[Array], list[Array]] | None:
    """Run a loop of a gradient as one node of the tape; return the last state and the observed values.

    None if there are no commands; see `mpiad.programs.scheduled_calls`.
    """
    tape, leaves, count = tracing.tape, args.all(), len(args.state)
    active = [k for k, leaf in enumerate(leaves) if isbox(leaf)]
    if type(tape) is not OrderedTape or tape.passes != "one" or not active:
        return None
    if not tape.is_only_trace_of([leaves[k] for k in active]):
        return None
    if schedule.disk or _is_lossy(schedule) or schedule.host:
        return None
    indices = (*range(count), *[k for k in active if k >= count])
    plain = args.like(list(map(getval, leaves)))
    stepping.begin_pass()
    calls = stepping.scheduled(
        (schedule.memory, schedule.recorded), plain, indices, lambda calls: _append_actions(calls, steps, schedule)
    )
    if calls is None:
        return None

    def pull(gs: Sequence[Array]) -> list[Array]:
        comparison = Comparison(schedule, stepping.places, steps)
        cotangents = dict(zip(indices, calls.backward(gs, comparison.add_values)))
        comparison.require_same()
        return [conformed(cotangents[k], spec_like(getval(leaves[k]))) for k in active]

    weakref.finalize(pull, calls.pool.free.append, calls).atexit = False  # no other gradient uses them until then
    given = stepping.leaves(0, plain)
    arguments = [given[k] for k in calls.traced]
    if not calls.admits(arguments):
        return None
    log_repeated_steps(steps, schedule)
    with restoring_state():
        values = calls.forward(arguments)
    places = [leaves[k]._node.index for k in active]
    made = tape.record_call(calls.channels, values, [True] * len(values), places, pull, calls.communicates)
    return made[:count], made[count:]


def _append_actions(calls: Any, steps: int, schedule: CheckpointSchedule) -> None:
    for action in actions(steps, schedule):
        if isinstance(action, Keep):
            calls.keep(action.number)
        elif isinstance(action, Restore):
            calls.restore(action.number, action.last)
        elif isinstance(action, Advance):
            calls.advance(*action)
        else:
            calls.reverse(*action)


# Whether the steps that a reverse pass repeats have the results of the forward run.


class Comparison:
    """A comparison of the steps that a reverse pass repeats with the forward run.

    The state after a recorded step is compared with the state from which the following step was recorded, and the last
    state and all observed values with those of the forward run. Nothing is raised before the end of the pass, so that this
    rank makes all communications for which others wait, and so that one copy from a device suffices.
    """

    def __init__(self, schedule: CheckpointSchedule, places: tuple[str, ...], steps: int):
        # `places`: the lines of the step and of the observation.
        self._schedule, self._places, self._last = schedule, places, steps - 1
        self._deviations: list[
            tuple[int, bool, list[float]]
        ] = []  # step, whether it was observed, accuracies of the leaves
        self._sizes: list[Array] = []  # for each of these leaves: the largest difference, and the largest sum

    def add(self, number: int, leaves: Sequence[Array], expected: Sequence[Array], observed: bool = False) -> None:
        """Compare the state after step `number`, or the values observed after it, with checksums."""
        self._add(number, leaves, expected, observed, self.part(number, observed))

    def _add(
        self, number: int, leaves: Sequence[Array], expected: Sequence[Array], observed: bool, part: int | None
    ) -> None:
        pairs = [(checksum(leaf, part), sums) for leaf, sums in zip(leaves, expected) if np.size(leaf)]
        if all(same_bits(np.asarray(a) if arrays_of(a) is None else a, b) for a, b in pairs):
            return
        stored = 1e-6 if self._schedule.compress else np.finfo(self._schedule.dtype or float).eps
        precisions = [float(max(stored, np.finfo(getattr(sums, "dtype", float)).eps)) for sums, _ in pairs]
        self._deviations.append((number, observed, precisions))
        with np.errstate(all="ignore"):
            for a, b in pairs:
                self._sizes += np.max(np.abs(a - b)), np.max(np.abs(b))

    def add_values(self, number: int, leaves: Sequence[Array], others: Sequence[Array], observed: bool) -> None:
        """Compare parts of the state after step `number`, or of the values observed after it, with those before."""
        self._add(number, leaves, list(map(checksum, others)), observed, None)

    def part(self, number: int, observed: bool = False) -> int | None:
        """Return the step that determines which entries are compared; None if all are."""
        # Rounding errors are compared with the largest sums of the whole state: where a wave arrives, it is at rest before.
        is_whole = _is_lossy(self._schedule) or not observed and number >= self._last
        return None if is_whole else number

    def require_same(self) -> None:
        """Raise a RuntimeError if values differ by more than rounding."""
        sizes = iter(fetched(self._sizes))
        for number, observed, precisions in self._deviations:
            differences, scales = np.array([(next(sizes), next(sizes)) for _ in precisions], float).T
            # The last term: a leaf of zeros may contain rounding errors of the others. Compression rounds noise to 5e-5,
            # and steps may compute small values from differences of large ones.
            others = 2.0 if self._schedule.compress else np.power(precisions, 0.25)
            allowed = np.sqrt(precisions) * (scales + others * scales.max())
            if np.any(differences > allowed):
                k, what = int(np.argmax(differences - allowed)), "the observed values" if observed else "the state"
                if self._schedule.dtype is not None and scales.max() < np.finfo(self._schedule.dtype).tiny:
                    raise FloatingPointError(
                        f"timestepping.scan: all entries of {what} after step {number} are below "
                        f"{np.finfo(self._schedule.dtype).tiny:.2e}, and lose digits or become zero in "
                        f"CheckpointSchedule(dtype={self._schedule.dtype!r}). Scale the state, or omit dtype."
                    )
                raise RuntimeError(
                    f"timestepping.scan: the result of the function at {self._places[observed]} doesn't depend on its "
                    f"arguments alone: {what} after step {number} changed by {differences[k]:.1e}, compared with "
                    f"{scales[k]:.1e}, when the gradient repeated the steps. Compute random numbers, times and counts "
                    "before the loop, and pass them as inputs= or params; keep no values in attributes; and leave arrays "
                    "that the steps read as they are until the reverse pass. Or omit checkpoints."
                    + " Or does a step amplify the rounding of compressed checkpoints? Then take dtype='float32'."
                    * self._schedule.compress
                )


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays, or an array and a number, are on the host and have the same bits."""
    return type(a) is np.ndarray and not isinstance(b, list) and a.tobytes() == np.asarray(b).tobytes()
