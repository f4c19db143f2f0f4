"""A loop as one operator of its first state, its inputs and its parameters, differentiable at any order.

Its adjoint is an operator of its own, L(x)ᵀ g, that runs the loop backwards from kept states. For derivatives of that one,
let T(x, w) = L(x) w be the tangent of the loop along w, which is a loop too: of the state with its tangent. Then L(x)ᵀ g is
the gradient of ⟨g, T(x, w)⟩ by w, so that along directions it changes by L(x)ᵀ ġ + ∂ₓ⟨g, T(x, ẋ)⟩, and a cotangent w of
it gives T(x, w) to g and ∂ₓ⟨g, T(x, w)⟩ to x: one loop run forwards and backwards with as few states kept as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.concatenation import Concatenation
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.extend import custom_operator, defjvp_together, defvjp_together
from mpiad.primitives.cotangents import conform, spec_like, tangent_of
from mpiad.primitives.operation import current
from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.loop import Loop
from mpiad.timestepping.stepping import Arguments, Stepping, TangentStepping


class LoopOperator:
    """A loop and the operators that it makes.

    `args`: tell how many leaves there are of each kind.
    """

    def __init__(self, stepping: Stepping, steps: int, kept: CheckpointSchedule, args: Arguments):
        self._stepping, self._steps, self._kept, self._like = stepping, steps, kept, args
        self._loop = Loop(stepping, steps, kept)
        leaves = args.all()
        self.active = [k for k, leaf in enumerate(leaves) if isbox(leaf)]
        # Also without a traced argument: what the steps communicate has a reverse pass, in which other ranks take part.
        self._recorded = bool(self.active) or current.tape is not None
        self._state = [spec_like(leaf) for leaf in args.state]
        # Of the active arguments alone: cotangents of all would be as large as the inputs of every step.
        self._cotangents = Concatenation([spec_like(leaves[k]) for k in self.active])

    def __call__(self, args: Arguments) -> tuple[list[Array], list[Array]]:
        """Return the last state and what was observed."""
        # One node with one vector: an operator of the tape returns one array, and its cotangent comes back whole.
        vector = _run(*args.all(), loop=self)  # what is observed is known only after that
        parts = self._results.parts(vector)
        return parts[: len(self._state)], parts[len(self._state) :]

    @property
    def _results(self) -> Concatenation:
        seen = self._loop.seen or []
        return Concatenation([*self._state, *[spec._replace(shape=(self._steps, *spec.shape)) for spec in seen]])

    def forwards(self, leaves: Sequence[Any]) -> Array:
        """Return the results as one vector, from plain arguments."""
        state, observed = self._loop.forwards(self._like.like(leaves), self._recorded)
        return self._results.vector([*state, *observed])

    def backwards(self, g: Array, leaves: Sequence[Any]) -> Array:
        """Return the cotangents of the active arguments as one vector, from plain arguments."""
        parts = self._results.parts(g)
        cut = len(self._state)
        found = self._loop.backwards(self._like.like(leaves), self.active, parts[:cut], parts[cut:])
        return self._cotangents.vector(found)

    def tangent(self, leaves: Sequence[Any], directions: Sequence[Any]) -> Array:
        """Return the tangent of the results along directions of the leaves, None where they don't move; traces see it."""
        args, along = self._like.like(leaves), self._like.like(directions)
        inputs = [k for k, direction in enumerate(along.inputs) if direction is not None]
        params = [k for k, direction in enumerate(along.params) if direction is not None]
        # A loop whose state is twice as long; what doesn't move carries no tangent along.
        both = Arguments(
            [*args.state, *map(tangent_of, args.state, along.state)],
            [*args.inputs, *[tangent_of(args.inputs[k], along.inputs[k]) for k in inputs]],
            [*args.params, *[tangent_of(args.params[k], along.params[k]) for k in params]],
        )
        counts = len(args.state), len(args.inputs), len(args.params)
        stepping = TangentStepping(self._stepping, counts, inputs, params)
        state, observed = LoopOperator(stepping, self._steps, self._kept, both)(both)
        return self._results.vector([*state[len(state) // 2 :], *observed[len(observed) // 2 :]])

    def directions(self, vector: Array) -> list[Any]:
        """Return a vector like that of the cotangents as directions of all leaves."""
        found: list[Any] = [None] * len(self._like.all())
        for k, part in zip(self.active, self._cotangents.parts(vector)):
            found[k] = part
        return found

    def curvature(self, g: Array, leaves: Sequence[Any], directions: Sequence[Any]) -> tuple[Array, Array]:
        """Return the tangent of the results along directions, and the cotangents of ⟨g, tangent⟩ as one vector."""
        leaves = list(leaves)
        traced = trace_backwards(lambda given: self.tangent(given, directions), Variables(leaves, self.active, list))
        tangent, place = traced.values[0], traced.places[0]
        seeds = [(place, conform(g, *spec_like(tangent)))] if place >= 0 else []
        found = run_backward(traced.recording, seeds, len(self.active))
        # In the shape of each leaf, zeros where nothing depends on it: the vector has room for all.
        return tangent, self._cotangents.vector([tangent_of(leaves[k], part) for k, part in zip(self.active, found)])


@custom_operator
def _run(*leaves: Any, loop: LoopOperator) -> Array:
    return loop.forwards(leaves)


@custom_operator
def _reversed(g: Array, *leaves: Any, loop: LoopOperator, linear: bool = False) -> Array:
    return loop.backwards(g, leaves)


def _run_adjoint(ans: Array, *leaves: Any, loop: LoopOperator) -> Callable:
    def vjp(g: Array) -> list:
        # Decided by the tape, on all ranks alike; an autograd trace around everything is the exception.
        linear = current.tape is not None and current.tape.of_cotangents and not any(map(isbox, leaves))
        return loop.directions(_reversed(g, *leaves, loop=loop, linear=linear))

    return vjp


def _reversed_adjoint(ans: Array, g: Array, *leaves: Any, loop: LoopOperator, linear: bool = False) -> Callable:
    def vjp(w: Array) -> list:
        if linear:  # in g alone: the tangent of the loop, without a way back
            return [loop.tangent(leaves, loop.directions(w))]
        tangent, found = loop.curvature(g, leaves, loop.directions(w))
        return [tangent, *loop.directions(found)]

    return vjp


def _reversed_tangent(gs: list, ans: Array, g: Array, *leaves: Any, loop: LoopOperator, linear: bool = False) -> Array:
    along = _reversed(tangent_of(g, gs[0]), *leaves, loop=loop)
    return along + loop.curvature(g, leaves, gs[1:])[1]


defvjp_together(_run, _run_adjoint)
defjvp_together(_run, lambda gs, ans, *leaves, loop: loop.tangent(leaves, gs))
defvjp_together(_reversed, _reversed_adjoint)
defjvp_together(_reversed, _reversed_tangent)
