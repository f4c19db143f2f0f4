"""A loop run forwards, and backwards from the states that were kept on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.trace import Traced, Variables, trace_backwards
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.pytrees import is_variable
from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.schedule import Advance, Keep, Restore, Reverse, actions
from mpiad.timestepping.snapshots import Snapshots, own
from mpiad.timestepping.stepping import Arguments, Span, Stepping, spans
from mpiad.transport import Spec


class Loop:
    """Steps one after another, of plain arrays.

    `steps`: how many, one at least. `seen`: of what is observed in one step; None until it has been run.
    """

    def __init__(self, stepping: Stepping, steps: int, kept: CheckpointSchedule):
        self.stepping, self.steps, self.kept = stepping, steps, kept
        self.seen: list[Spec] | None = None
        self._begun: _Course | None = None

    def forwards(self, args: Arguments, recorded: bool) -> tuple[list[Array], list[Array]]:
        """Run all steps; return the last state, and what was observed, with one entry for each step along the first axis.

        `recorded` says whether to keep states for a gradient.
        """
        observed = _Observed(self)
        if not recorded:
            return self.run(Span(0, self.steps), args, _own(args.state), observed), observed.arrays
        # Kept for the reverse pass: the states that it starts from are found in this run, not in another one.
        self._begun = course = _Course(self, args, observed)
        state = self.run(Span(course.last.first, self.steps), args, _own(course.state), observed)
        return state, observed.arrays

    def backwards(self, args: Arguments, active: Sequence[int], state: list[Any], observed: list[Any]) -> list[Any]:
        """Return the cotangents of arguments, `active` by their places among all leaves.

        `state` and `observed` are the cotangents of the last state and of what was observed.
        """
        # What was kept is used up by the first gradient; a second one runs the loop again.
        course = self._begun or _Course(self, args, None)
        self._begun = None
        totals = _Totals(args, active)
        for span, traced in course.reversed(self, args):
            seen = [leaf[number] for number in range(*span) for leaf in observed]
            state = totals.pull(span, traced, state, seen)
        return totals.cotangents(state)

    def run(self, span: Span, args: Arguments, state: list[Any], observed: _Observed | None) -> list[Array]:
        """Run some steps of plain arrays, note what is observed, and return the last state.

        A TypeError where a step uses a traced value that isn't among its arguments.
        """
        for part in spans(self.stepping, *span):
            state, seen = self.stepping.run(part, args.at(part, state))
            if any(map(isbox, state)) or any(isbox(leaf) for each in seen for leaf in each):
                raise TypeError(
                    "timestepping.scan: step uses a traced variable from outside itself, through which no derivative can "
                    "flow. Pass it to scan among the params, and take it as an argument; mpiad.stop_gradient(x) gives its "
                    "plain value where no derivative is wanted."
                )
            if observed is not None:
                for number, each in zip(range(*part), seen if seen else [[]] * (part.stop - part.first)):
                    observed.note(number, each)
        return state

    def traced(self, args: Arguments, span: Span, state: list[Any]) -> tuple[list[int], Traced]:
        """Run some steps with their arguments traced; return the places of the variables among them, and the trace."""
        now = args.at(span, state)
        leaves = now.all()
        places = [k for k, leaf in enumerate(leaves) if is_variable(leaf)]

        def called(given: list[Any]) -> list[Any]:
            after, seen = self.stepping.run(span, now.like(given))
            return [*after, *[leaf for each in seen for leaf in each]]

        found = trace_backwards(called, Variables(leaves, places, list))
        if found.problem is not None:
            raise found.problem.kind(found.problem.text)
        return places, found


class _Observed:
    """What is observed in all steps, one array for each leaf."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self.arrays: list[Array] = []

    def note(self, number: int, seen: list[Any]) -> None:
        # Made at the first step, since only that tells what is observed; each later one must fit into it.
        specs = [spec_like(leaf) for leaf in seen]
        if number == 0:
            self._loop.seen = specs
            self.arrays = [spec._replace(shape=(self._loop.steps, *spec.shape)).empty() for spec in specs]
        if specs != self._loop.seen or not all(spec.differentiable for spec in specs):
            raise TypeError(
                "timestepping.scan: observe must return arrays of floats, of the same shapes and dtypes after each step, "
                f"but after step {number} it returned {_listed(specs)}, after step 0 {_listed(self._loop.seen or [])}."
            )
        for array, leaf in zip(self.arrays, seen):
            array[number] = leaf


def _listed(specs: list[Spec]) -> str:
    return ", ".join(f"{spec.dtype} of shape {spec.shape}" for spec in specs) or "nothing"


def _own(state: list[Any]) -> list[Array]:
    """Return copies: a step may write into the state that it gets, or return the same buffer each time."""
    return [own(leaf) for leaf in state]


class _Course:
    """One way through the schedule: begun by running forwards up to the last steps, ended by running backwards.

    It doesn't know its loop, which knows it: what is kept goes as soon as nobody needs it, files too.
    """

    def __init__(self, loop: Loop, args: Arguments, observed: _Observed | None):
        # Of this course alone: a second gradient runs the loop again, and keeps its states anew.
        self._snapshots = Snapshots(loop.kept)
        self._actions = actions(loop.steps, loop.kept)
        self.state = _own(args.state)
        self.last = Reverse(0, loop.steps)  # of the last steps: `reversed` begins with it
        for action in self._actions:
            if isinstance(action, Reverse):
                self.last = action
                break
            self._carry_out(action, loop, args, observed)
        # A copy: the last steps are run from here twice, plain now and with their record later.
        self.state = _own(self.state)

    def reversed(self, loop: Loop, args: Arguments) -> Iterator[tuple[Span, tuple[list[int], Traced]]]:
        """Yield steps that are run as one and their trace, from the last to the first."""
        yield from self._recorded(self.last, loop, args)
        for action in self._actions:
            if isinstance(action, Reverse):
                yield from self._recorded(action, loop, args)
            else:
                self._carry_out(action, loop, args, None)

    def _recorded(self, action: Reverse, loop: Loop, args: Arguments) -> Iterator[tuple[Span, tuple[list[int], Traced]]]:
        """Run some steps with their record, and yield the last of them first."""
        state, found = self.state, []
        for span in spans(loop.stepping, action.first, action.stop):
            # Records of all steps of the block are in memory together, which is what `recorded` bounds.
            found.append((span, loop.traced(args, span, state)))
            state = found[-1][1][1].values[: len(state)]
        while found:
            yield found.pop()

    def _carry_out(self, action: Keep | Advance | Restore, loop: Loop, args: Arguments, observed: _Observed | None) -> None:
        if isinstance(action, Keep):
            self._snapshots.keep(action.number, self.state, action.on_disk)
        elif isinstance(action, Restore):
            state = self._snapshots.state(action.number, action.last)
            # A state that is asked for again must stay as it is, whatever a step writes into what it gets.
            self.state = state if action.last else _own(state)
        else:
            self.state = loop.run(Span(action.first, action.stop), args, self.state, observed)


class _Totals:
    """Cotangents of the arguments, added up on the way back."""

    def __init__(self, args: Arguments, active: Sequence[int]):
        self._leaves, self._active = args.all(), set(active)
        self._states, self._inputs = len(args.state), len(args.inputs)
        self._found: dict[int, Array] = {}

    def pull(self, span: Span, traced: tuple[list[int], Traced], state: list[Any], observed: list[Any]) -> list[Any]:
        """Take some steps' cotangents and return those of the state before them."""
        places, found = traced
        given = zip([*state, *observed], found.values, found.places)
        seeds = [(place, conform(g, *spec_like(value))) for g, value, place in given if place >= 0]
        before: list[Any] = [None] * self._states
        for k, g in zip(places, run_backward(found.recording, seeds, len(places))):
            if k < self._states:
                before[k] = g
            # To a step's record all floats are variables, but only what is traced around the loop needs a cotangent.
            elif g is not None and k in self._active:
                self._add(k, span, g)
        return [spec_like(leaf).zeros() if g is None else g for g, leaf in zip(before, self._leaves)]

    def _add(self, k: int, span: Span, g: Array) -> None:
        leaf = self._leaves[k]
        if k < self._states + self._inputs:
            if k not in self._found:
                self._found[k] = np.zeros_like(leaf)
            # Each step has an entry of its own, so nothing is added up.
            self._found[k][slice(*span)] = g
        elif k in self._found:
            self._found[k] += conform(g, *spec_like(leaf))
        else:
            # A copy, since it is added to in place, and a cotangent may be shared or a view.
            self._found[k] = own(conform(g, *spec_like(leaf)))

    def cotangents(self, state: list[Any]) -> list[Any]:
        """Return what was found, for the active arguments in their order."""
        return [state[k] if k < self._states else self._found_for(k) for k in sorted(self._active)]

    def _found_for(self, k: int) -> Any:
        return self._found[k] if k in self._found else spec_like(self._leaves[k]).zeros()
