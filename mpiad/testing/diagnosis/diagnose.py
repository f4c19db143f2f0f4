"""`diagnose`: find the operations of a program whose adjoints are wrong.

Every operation a = φ(b) of a program must satisfy ⟨ā, ȧ⟩ = ⟨b̄, ḃ⟩, where ȧ and ḃ are tangents, ā is any cotangent, and
b̄ is what the adjoint of φ makes of it. The tangents come from differences of runs at x ± h v, so nothing but the values of
the program enters; both sides change by the error of this one adjoint, whatever happens before and after it.

1. `record`: a run on a tape (`runs`), whose nodes keep values, names and lines, and one reverse pass, which keeps the
   cotangents: the *weights* of a value are its own cotangent, and what each operation that reads it contributes.
2. `Search`: runs at x ± h v and x ± h v / 2 for two directions v. They compute the inner products of each value with its
   weights, and keep no value. The balance of an operation is the difference of the two sides; errors of order h² are
   extrapolated away. For a communication the sides are summed over the ranks. A message and a request have a balance that
   both ends share.
3. `Execution`: only operations out of balance are executed again, alone, with their arguments moved: this separates wrong
   adjoints from kinks, noise and steep functions, and tells the argument, for an operator that communicates also the rank.

At a kink, a derivative is right if it is between the derivatives in the neighborhood. So a maximum must divide a cotangent
among equal arguments or choose one of them, and the derivative of max(x, 0) at zero may be any number from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpiad._typing import Argnum, Array, Comm, Function, Rng, Shared, Tree
from mpiad.device import to_host
from mpiad.differentiation.objective import PendingError, problem_with, raise_everywhere
from mpiad.differentiation.trace import Traced, variables_of
from mpiad.errors import ConvergenceError
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable, map_leaves
from mpiad.testing.derivative_checks import noise_like
from mpiad.testing.diagnosis.record import (
    Key,
    Products,
    Record,
    Term,
    WrongAdjoint,
    eps_of,
    norm,
    product,
    without_autograds_sparse_form,
)
from mpiad.testing.diagnosis.runs import Call, Program
from mpiad.transport import Channel, channel
from mpiad.transport.core import calls
from mpiad.transport.core.random_keys import generator_of, shared_key

_CALL = "diagnose"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `diagnose`, the same on all ranks.

    Attributes
    ----------
    findings : tuple of WrongAdjoint
        The wrong adjoints, by rank and in the order of the program; one for each rank, line and operation.
    branches : tuple of str
        Lines from which a rank made other operations at a point next to x than at x. The operations after such a line are
        checked only along the directions in which the program didn't change.
    unrepeatable : tuple of str
        Lines from which a rank computed other values in a second run with the same arguments.
    checked, unchecked : int
        The number of operations on all ranks that were checked, and of those that couldn't be: nothing depends on their
        results, differences aren't finite, or it can't be executed accurately enough, such as an ill-conditioned solve.

    Examples
    --------
    >>> print(mpiad.testing.diagnose(lambda x: mpiad.mpi_allreduce(np.sum(np.sin(x))), np.ones(2)).findings)
    ()
    """

    findings: tuple[WrongAdjoint, ...]
    branches: tuple[str, ...]
    unrepeatable: tuple[str, ...]
    checked: int
    unchecked: int

    def __repr__(self) -> str:
        lines = [each.text for each in self.findings] or ["no wrong adjoint"]
        lines += [f"not repeatable: {text}" for text in self.unrepeatable]
        lines += [f"branch: {text}" for text in self.branches]
        return "\n".join([*lines, f"{self.checked} operations checked, {self.unchecked} not"])


def diagnose(
    fun: Function,
    *args: object,
    cotangents: Tree = None,
    argnum: Argnum = 0,
    shared: Shared = False,
    comm: Comm = None,
    rng: Rng = 0,
) -> Diagnosis:
    """Find the operations of a function whose adjoints are wrong, by rank and line; not differentiable.

    The function runs at most ten times, at `args` and at points nearby, and is differentiated once. Each operation on
    traced values is checked by itself: operations of NumPy, communications, custom operators, functions of other libraries.
    The steps of `scan` and the operations in functions that are compiled by `jit` are checked one by one. Operations out of
    balance are executed again, alone. The reverse pass keeps all cotangents, so the memory for each value is that of three.

    Parameters
    ----------
    fun : callable
        The function, as for `value_and_grad`.
    *args : object
        This rank's arguments.
    cotangents : pytree, optional
        Cotangents of the results, in their structure, for a function that doesn't return one real number or None. By
        default 1.0 on each rank that returns a number. The check doesn't depend on the objective.
    argnum, shared, comm
        As for `value_and_grad`.
    rng : Generator, SeedSequence or int, optional
        The source of the directions, the same on all ranks; None: other ones in each call.

    Returns
    -------
    Diagnosis
        The wrong adjoints, branches and operations that aren't repeatable; the same on all ranks.

    Raises
    ------
    TypeError
        On all ranks, if a result isn't a real number or None, and there are no `cotangents`. Also if the argument has no
        real or complex floats.
    CommunicationMismatchError
        On all ranks, if a message isn't received, or a rank doesn't take part in a collective call.
    RequestError
        On all ranks, if a rank never waits for a request.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defvjp
    >>> wrong = custom_operator(lambda x: x**2)
    >>> defvjp(wrong, lambda ans, x: lambda g: 2.02 * x * g)  # it should be 2 x g
    >>> report = mpiad.testing.diagnose(lambda x: mpiad.mpi_allreduce(np.sum(wrong(x))), np.ones(3))
    >>> print(len(report.findings) == mpiad.mpi_size(), report.findings[0].rank)
    True 0
    """
    group = channel(comm, _CALL)
    key = shared_key(rng, group, _CALL)
    program, record = Program(fun, args, argnum, variables_of(args, argnum, _CALL, shared)), Record(group.rank)
    run = program.run(program.x, record.visit, keeps_adjoints=True)
    problem = run.problem or _problem_with(run, cotangents)
    if any(group.data.allgather(problem is not None)):
        raise_everywhere(group, problem)
    record.match(group, _CALL)
    record.run_backward(run.recording, _seeds(run, cotangents), len(program.x))
    del run
    search = Search(program, record, group, key)
    search.run()
    findings, branches, unrepeatable = (
        tuple(chain.from_iterable(group.data.allgather(each)))
        for each in (record.largest_errors(), list(search.branches), search.unrepeatable)
    )
    return Diagnosis(findings, branches, unrepeatable, search.checked, search.unchecked)


def _problem_with(run: Traced, cotangents: Tree) -> PendingError | None:
    """Return the problem of a run's result that doesn't match its cotangents; None if there is no problem."""
    if cotangents is None:
        wanted = "without cotangents= the function must return one real number or None on each rank"
        return problem_with(run.build(run.values), 0.0, _CALL, wanted)
    expected, shapes = [np.shape(y) for y in run.values], [np.shape(g) for g in flatten(cotangents)[0]]
    if shapes == expected:
        return None
    return PendingError(
        ValueError, f"{_CALL}: cotangents= must have the shapes of the results, {expected}, but got {shapes}."
    )


def _seeds(run: Traced, cotangents: Tree) -> Iterable[tuple[int, Array]]:
    """Return the cotangents of the results with their positions."""
    if cotangents is None:
        return [(place, spec_like(y).zeros() + 1) for place, y in zip(run.places, run.values) if place >= 0]
    return [(place, np.asarray(g)[()]) for place, g in zip(run.places, flatten(cotangents)[0])]


# The search: balances from runs at points nearby, and the execution of suspects.

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


# Operations out of balance, executed alone, with their arguments moved.

RTOL = 1e-5  # of the error of an adjoint, relative to the larger side
_NEARBY = 3
Directions = dict[int, Tree]  # by the positions of the arguments


class _Interval(NamedTuple):
    """⟨pull(g), d⟩, the range of ⟨g, ∂φ d⟩ near the arguments, and a bound of rounding errors."""

    adjoint: float = 0.0
    low: float = 0.0
    high: float = 0.0
    rounding: float = 0.0

    def error(self) -> float:
        """Return the relative distance of the adjoint from the range of derivatives; 0.0 if within rounding."""
        outside = max(self.adjoint - self.high, self.low - self.adjoint)
        size = max(abs(self.adjoint), abs(self.low), abs(self.high))
        return float(outside / size) if outside > self.rounding + RTOL * size else 0.0


class Execution:
    """A call of an operation, with copies of its arguments and of its result."""

    def __init__(self, call: Call, ans: Array):
        self.call, self.ans = call._replace(args=map_leaves(_copied, call.args)), map_leaves(_copied, ans)
        self.varies = False  # whether the result has depended on the arguments
        self.tolerance, self.is_accurate = 0.0, True  # of a solve

    def solve_accurately(self) -> None:
        """Solve again, if the operation is a linear or nonlinear solve, with a small tolerance of the residual.

        The derivatives of a solution are those of the exact one. That of the program may have a larger error.
        """
        problem: Any = self.call.params.get("problem") if isinstance(self.call.params, dict) else None
        if not hasattr(problem, "with_rtol"):
            return
        rtol = eps_of(self.ans) ** (2 / 3)
        accurate = self.call._replace(params={"problem": problem.with_rtol(rtol)})
        try:
            self.ans, self.call, self.tolerance = map_leaves(_copied, accurate.run(accurate.args)), accurate, rtol
        except ConvergenceError:  # on all ranks, for example since the system is ill-conditioned
            self.tolerance, self.is_accurate = problem.settings.rtol, False

    def interval(self, moving: Sequence[int], rng: np.random.Generator, is_uniform: bool) -> _Interval:
        """Return the interval for a random g, and a direction d that is zero except for the arguments in `moving`."""
        args, argnums = self.call.args, self.call.argnums
        g = map_leaves(lambda leaf: _positive(leaf, rng) if is_variable(leaf) else leaf, self.ans)
        directions = {k: direction_like(args[k], rng, is_uniform) for k in moving}
        nearby = [{k: direction_like(args[k], rng) for k in argnums} for _ in range(_NEARBY)]
        with np.errstate(all="ignore"):
            pulled = self.call.pull(self.ans)(g)
            parts = {k: without_autograds_sparse_form(part) for k, part in zip(argnums, pulled) if part is not None}
            adjoint = sum([product(part, directions[k]) for k, part in parts.items() if k in directions])
            eps = max([self.tolerance, eps_of(self.ans), *[eps_of(args[k]) for k in argnums]])
            step = eps**0.4
            before, here, after = (self._products(g, (t, directions)) for t in (-step, 0.0, step))
            slopes = [(after - here).real / step, (here - before).real / step]
            for shift in nearby:
                before, after = (self._products(g, (4 * step, shift), (t, directions)) for t in (-step, step))
                slopes.append((after - before).real / (2 * step))
            low, high = np.fmin.reduce(slopes), np.fmax.reduce(slopes)
            self.varies |= bool(np.any(low) or np.any(high))
            # The derivatives at some points nearby are a sample of those that a kink has.
            width = np.sum(high - low)
            size = np.sum(np.abs(here.real)) + sum([norm(part) * norm(args[k]) for k, part in parts.items()])
            return _Interval(adjoint, np.sum(low) - width, np.sum(high) + width, 16 * eps * size / step)

    def _products(self, g: Tree, *moves: tuple[float, Directions]) -> Array:
        """Return the products of g with the entries of the result, after some moves of the arguments."""
        args = list(self.call.args)
        for step, directions in moves:
            for k, direction in directions.items():
                args[k] = moved(args[k], step, direction)
        pairs = zip(flatten(g)[0], flatten(self.call.run(args))[0])
        return np.concatenate([np.zeros(0), *[np.ravel(to_host(w) * to_host(leaf)) for w, leaf in pairs if is_variable(w)]])


def _copied(leaf: Array) -> Array:
    return np.copy(leaf)[()] if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _positive(leaf: Array, rng: np.random.Generator) -> Array:
    noise = noise_like(leaf, rng)
    return noise if np.iscomplexobj(noise) else abs(noise) + spec_like(leaf).dtype.type(0.5)


class AdjointError(NamedTuple):
    """The error of an adjoint, on a rank and for an argument; None: for all that take part together."""

    rank: int | None
    argument: int | None
    error: float


def adjoint_errors(
    execution: Execution | None, participants: list[tuple[int, int]], rank: int, gather: Callable[[object], list], key: int
) -> list[AdjointError]:
    """Return the errors of the adjoint of an operation; nothing for a right adjoint.

    `participants`: the ranks that execute the operation, with the positions of their traced arguments.
    """

    def error(moving: Sequence[tuple[int, int]]) -> float:
        errors = []
        for trial, is_uniform in enumerate((True, False, False)):
            rng, interval = generator_of(key, trial, rank), _Interval()
            if execution is not None:
                interval = execution.interval([k for r, k in moving if r == rank], rng, is_uniform)
            errors.append(_Interval(*np.sum(gather(interval), axis=0)).error())
        return max(errors)

    if execution is not None:
        execution.solve_accurately()
    total = error(participants)
    if total == 0.0:
        return []
    single = [AdjointError(*participant, error([participant])) for participant in participants]
    return [each for each in single if each.error > 0.0] or [AdjointError(None, None, total)]


def direction_like(x: Tree, rng: np.random.Generator, is_uniform: bool = False) -> Tree:
    """Return a random direction with the size of x; if `is_uniform`, all its entries are nearly the same, if x is real."""
    leaves, build = flatten(x)
    noises = [noise_like(leaf, rng) for leaf in map(to_host, leaves)]
    scales = [_scale(to_host(leaf)) for leaf in leaves]
    directions = [scale * (1 + 0.1 * noise if is_uniform else noise) for scale, noise in zip(scales, noises)]
    return build([np.asarray(d, spec_like(leaf).dtype) for d, leaf in zip(directions, leaves)])


def _scale(x: Array) -> Array:
    """Return the size of a step for each entry of an array: that of the entry, or of the array if the entry is tiny."""
    rms = np.sqrt(np.mean(np.abs(x) ** 2)) if np.size(x) else 0.0
    return np.maximum(np.abs(x), 0.01 * rms) if 0 < rms < np.inf else np.ones(np.shape(x))


def moved(x: Tree, step: float, direction: Tree) -> Tree:
    """Return ``x + step * direction`` in the dtypes and on the devices of x."""
    leaves, build = flatten(x)
    return build([_moved(leaf, step, d) for leaf, d in zip(leaves, flatten(direction)[0])])


def _moved(x: Array, step: float, direction: Array) -> Array:
    spec = spec_like(x)
    new = np.asarray(to_host(x) + step * direction, spec.dtype)
    return new[()] if spec.arrays is None else spec.arrays.to_device(new)
