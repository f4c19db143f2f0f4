"""The search for wrong adjoints: balances from runs at points nearby, and the execution of suspects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpiad._typing import Array
from mpiad.testing.diagnosis.execution import RTOL, AdjointError, Execution, adjoint_errors
from mpiad.testing.diagnosis.record import Key, Products, Record, Term
from mpiad.testing.diagnosis.runs import Call, Program
from mpiad.testing.diagnosis.vectors import direction_like, moved, norm
from mpiad.transport import Channel
from mpiad.transport.core import calls
from mpiad.transport.core.random_keys import generator_of

T = TypeVar("T")
_DIRECTIONS = 2


def _alone(value: T) -> list[T]:
    return [value]


class Balances(NamedTuple):
    """Balances: the derivatives of their sides by key, side, direction and step h, and bounds of rounding errors by key."""

    keys: list[Key]
    sides: Array
    noise: Array

    @classmethod
    def of(cls, terms: Sequence[Term], tangents: Array, h: float) -> Balances:
        """Return the balances of a record; `tangents`: of the products, by weight, direction and step."""
        sides = np.zeros((len(terms), 2, *tangents.shape[1:]))
        sides[range(len(terms)), [term.side for term in terms]] = tangents[[term.weight for term in terms]]
        noise = np.array([16 / h * term.rounding for term in terms])
        return cls([term.key for term in terms], sides, noise).summed()

    def summed(self) -> Balances:
        """Return the sums of balances with the same key."""
        places = {key: k for k, key in enumerate(dict.fromkeys(self.keys))}
        chosen = np.array([places[key] for key in self.keys], dtype=int)
        sides, noise = np.zeros((len(places), *self.sides.shape[1:])), np.zeros(len(places))
        np.add.at(sides, chosen, self.sides)
        np.add.at(noise, chosen, self.noise)
        return Balances(list(places), sides, noise)

    def where(self, condition: Callable[[Key], bool]) -> Balances:
        """Return the balances whose keys satisfy a condition."""
        chosen = [k for k, key in enumerate(self.keys) if condition(key)]
        return Balances([self.keys[k] for k in chosen], self.sides[chosen], self.noise[chosen])

    def defects(self) -> tuple[Array, Array]:
        """Return the defects by key and direction, extrapolated if there are two steps, and their uncertainty."""
        difference = self.sides[:, 0] - self.sides[:, 1]
        coarse, fine = difference[..., 0], difference[..., -1]
        change = fine - coarse  # zero if there is one step
        return np.abs(coarse + 4 / 3 * change), self.noise[:, None] + 0.05 * np.abs(change)

    def suspects(self) -> list[int]:
        """Return the places of the balances with a defect that rounding and the next order of h don't explain."""
        defects, uncertainty = self.defects()
        sizes = np.max(np.abs(self.sides), axis=(1, 3))
        return np.flatnonzero(np.any(defects > uncertainty + 0.1 * RTOL * sizes, axis=1)).tolist()

    def known(self) -> Array:
        """Return whether a balance is known in some direction."""
        return np.any(np.isfinite(self.defects()[0]), axis=1)

    def error(self, place: int) -> float:
        """Return a defect, relative to the larger side, if it is clear in all directions that are known; otherwise 0.0.

        Noise and kinks near x don't cause defects that are the same for both steps.
        """
        defects, uncertainty = (x[place] for x in self.defects())
        defects, uncertainty = defects[np.isfinite(defects)], uncertainty[np.isfinite(defects)]
        error = float(np.max(defects, initial=0.0) / np.nanmax(np.abs(self.sides[place]), initial=1e-300))
        return error if np.all(defects > 5 * uncertainty) and error > RTOL else 0.0


class Search:
    """The search for wrong adjoints."""

    def __init__(self, program: Program, record: Record, group: Channel, key: int):
        self.program, self.record, self.group, self.key = program, record, group, key
        self.gather: Callable[[Any], list[Any]] = group.data.allgather
        self.branches, self.unrepeatable = dict[str, None](), list[str]()  # each text begins with the rank
        self.steps: dict[Key, list[int]] = {}  # the steps of a balance on this rank
        for index, step in enumerate(record.steps):
            for balance in set(step.keys):
                self.steps.setdefault(balance, []).append(index)
        # A shared variable moves in the same direction on all ranks.
        self.directions = []
        for trial in range(_DIRECTIONS):
            rngs = [generator_of(key, trial, rank) for rank in (group.rank, 0)]
            shared = program.variables.shared
            self.directions.append([direction_like(x, rngs[k in shared], trial == 1) for k, x in enumerate(program.x)])
        # Truncation errors of order h² and rounding errors of order ε / h have the same size.
        eps = max([step.rounding / step.norm for step in record.steps if step.norm > 0], default=0.0)
        self.h = max(self.gather(eps)) ** (1 / 3)
        self.tangents: list[Array] = []  # of the products, by step h

    def run(self) -> None:
        """Search on all ranks, and count the balances that are checked."""
        self._run_nearby(self.h)
        local, common = self._balances()
        if any(self.gather(bool(local.suspects() or common.suspects()))):
            self._run_nearby(self.h / 2)
            local, common = self._balances()
            self._examine(local, common)
        variables = range(len(self.program.x))
        known = int(np.sum(local.where(lambda key: key not in variables).known()))
        self.checked = sum(self.gather(known)) + int(np.sum(common.known()))
        count = sum(self.gather(sum(isinstance(key, int) and key not in variables for key in self.steps)))
        self.unchecked = count + len(common.keys) - self.checked

    def _run_nearby(self, h: float) -> None:
        """Compute the derivatives of all products along the directions, by differences of runs."""
        tangents = []
        for directions in self.directions:
            ends = []
            for step in (h, -h):
                products = Products(self.record)
                self.program.run([moved(x, step, d) for x, d in zip(self.program.x, directions)], products.visit)
                products.end()
                if products.branch:
                    self.branches[f"rank {self.group.rank}: {products.branch}"] = None
                ends.append(products.values)
            tangents.append((ends[0] - ends[1]) / (2 * h))
        self.tangents.append(np.stack(tangents, axis=-1))

    def _balances(self) -> tuple[Balances, Balances]:
        """Return the balances of operations on this rank, and those that several ranks have in common."""
        balances = Balances.of(self.record.terms, np.stack(self.tangents, axis=-1), self.h)
        parts: list[Balances] = self.gather(balances.where(lambda key: isinstance(key, tuple)))
        keys = [key for part in parts for key in part.keys]
        common = Balances(keys, *[np.concatenate(arrays) for arrays in zip(*[part[1:] for part in parts])])
        return balances.where(lambda key: isinstance(key, int)), common.summed()

    def _worst(self, balances: Balances) -> list[int]:
        """Return the places of at most three suspects for each operation and line of this rank, the largest defects."""
        lines: dict[tuple[str, calls.Site], list[int]] = {}
        defects = np.nanmax(balances.defects()[0], axis=1, initial=0.0)
        for place in sorted(balances.suspects(), key=lambda place: -defects[place]):
            for index in self.steps.get(balances.keys[place], ())[:1]:
                step = self.record.steps[index]
                lines.setdefault((step.name, step.site), []).append(place)
        return [place for same in lines.values() for place in same[:3]]

    def _examine(self, local: Balances, common: Balances) -> None:
        """Execute the suspects again, and note their errors."""
        places = self._worst(local)
        common_places = sorted(set[int]().union(*self.gather(self._worst(common))))
        if not any(self.gather(bool(places or common_places))):
            return
        keys = [local.keys[place] for place in places] + [common.keys[place] for place in common_places]
        executions = self._executions({index for key in keys for index in self.steps.get(key, ())})
        is_repeatable = not any(self.gather(bool(self.unrepeatable)))
        if not is_repeatable:  # if a rank doesn't reach an operation again, other ranks would wait for it
            common.sides[common_places], common_places = np.nan, []
        every = [(local, place, 0, _alone) for place in places]
        every += [(common, place, self.group.rank, self.gather) for place in common_places]
        for balances, place, rank, gather in every:
            indices = self.steps.get(balances.keys[place], [])
            execution = executions.get(indices[0]) if len(indices) == 1 else None
            is_decisive = False
            if all(gather(not indices or execution is not None)):
                traced = gather(() if execution is None else execution.call.argnums)
                participants = [(member, k) for member, argnums in enumerate(traced) for k in argnums]
                errors = adjoint_errors(execution, participants, rank, gather, self.key)
                # The solve of an ensemble is recorded after it has run: executed again, it returns the same result, and its
                # derivative is that for the steps it has taken.
                varies = any(gather(execution is not None and execution.varies))
                if varies or not np.any(balances.sides[place, 0]):
                    is_decisive = all(gather(execution is None or execution.is_accurate))
                else:
                    errors = []
            else:
                errors = [AdjointError(None, None, balances.error(place) if is_repeatable else 0.0)]
            if not (is_decisive or any(each.error > 0.0 for each in errors)):
                balances.sides[place] = np.nan  # unknown, so it isn't counted as checked
            for each in errors if indices else ():
                if each.rank in (rank, None) and each.error > 0.0:
                    text = f"has an adjoint with a relative error of {each.error:.1e}"
                    self.record.note(indices[0], each.argument, each.error, text)

    def _executions(self, indices: set[int]) -> dict[int, Execution]:
        """Run the function again at x, compare values with those of the first run, and return the calls of some steps."""
        executions = dict[int, Execution]()

        def visit(index: int, value: Array, call: Call) -> None:
            if self.unrepeatable:
                return
            step = self.record.step_of(index, call)
            if step is None or (step.rounding and abs(norm(value) - step.norm) > 1e4 * step.rounding):
                self.unrepeatable.append(f"rank {self.group.rank}: {step or f'{call.name} at {call.site}'}")
            elif index in indices and step.is_separable:
                executions[index] = Execution(call, value)

        self.program.run(self.program.x, visit)
        return executions
