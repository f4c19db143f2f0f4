"""`TracedProblem`: the traced programs of f and of the conditions and affects of events, with a cache.

Training loops solve with the same f repeatedly. The programs are reused if the functions read the same values (see
`function_fingerprint`), and states and parameters have the same structure, shapes and dtypes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Function, Shape
from mpiad.compiling.arguments import is_complex, real_dtype
from mpiad.compiling.function_fingerprint import Fingerprint, fingerprint_of, without_floats
from mpiad.compiling.program import Program, Untraceable, exact
from mpiad.compiling.rerolling import rerolled
from mpiad.compiling.source import numbered
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.trace import Called, ParameterPacking, identity_of, names_of, packing_of, program_of
from mpiad.ensemble.event import Event, affected

_log = logging.getLogger("mpiad")

# A function that receives a user's function and the reason why it isn't compiled.
Warn: TypeAlias = "Callable[[Function, str], None]"
_Found = TypeVar("_Found")

# Tangents in up to this number of directions are faster than an adjoint, unless they have too many numbers.
FEW, _FEW_NUMBERS = 4, 40
# States with more components are large: no CUDA kernels are made for them, their f isn't evaluated by its program in
# derivatives by arrays, and only the nonzero entries of Jacobians count in estimates of times.
LARGE = 100
# Maximum number of statements of f, where repeated operations are loops; a step calls f two to ten times.
MOST_OPERATIONS = 1500
_FIT = "fit into a kernel that is fast and compiles quickly"
# Maximum number of different programs of a function that are compiled.
_MOST_PROGRAMS = 8

_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
# Per function, the structures of its programs: their operations, without numbers.
_structures: WeakKeyDictionary[Any, set[tuple]] = WeakKeyDictionary()
# Per f and structure: the numbers of the first solve, the indices of the numbers that have changed since then, and the
# problem in which the changed numbers are parameters.
_first_numbers: WeakKeyDictionary[Any, dict[tuple, tuple[list[float | bytes], list[int], TracedProblem]]] = (
    WeakKeyDictionary()
)
# Maximum numbers of cached traces, of all functions together, and of their operations: a few hundred bytes each.
_MOST_KNOWN, _MOST_KNOWN_OPERATIONS = 64, 500_000
_known: dict[tuple[Fingerprint, tuple], Any] = {}  # the cached traces
_kinds: dict[tuple[Fingerprint | None, tuple], None] = {}  # the keys of the cached traces, without floats


@dataclass(frozen=True, eq=False)
class TracedProblem:
    """The traced programs of f, and of the conditions and affects of events, and their parameters; compared by identity."""

    program: Program
    conditions: tuple[Program, ...]
    packing: ParameterPacking
    names: tuple[str, ...]  # of the program's parameters: see `names_of`
    affects: tuple[Program | None, ...]  # for all events; None for events without an affect
    numbers: tuple[float, ...] = ()  # constants of the functions that differ between solves; the last parameters
    origin: TracedProblem | None = None  # the same problem without `numbers`, if there are any

    @cached_property
    def tables(self) -> tuple[tuple[str, int, int], ...]:
        """The parameters that are entries of tables: "p" or "s", the first index and the number of indices."""
        programs = [g for g in (self.program, *self.conditions, *self.affects) if g is not None]
        tables = {(self.direction(first), count) for g in programs for _, first, count in g.tables}
        return tuple(sorted((*first, count) for first, count in tables))

    def direction(self, j: int) -> tuple[str, int]:
        """Return the direction of a tangent for parameter j, as in `KernelSpec.directions`."""
        return self.names[j][0], int(self.names[j][1:])

    def directions(self, by_u0: bool, places: Collection[int]) -> tuple[tuple[str, int], ...]:
        """Return the directions of tangents for the initial states, if `by_u0`, and for the scalars of leaves."""
        states = [("u", c) for c in range(self.program.groups["state"])] if by_u0 else []
        return (*states, *(self.direction(j) for part in self.packing.parts if part.place in places for j in part.scalars))

    def carried(self, inputs: Batch, gradient: str | None) -> tuple[tuple[str, int], ...]:
        """Return the directions of tangents for the traced inputs, or an empty tuple if an adjoint is faster."""
        d, boxed = self.program.groups["state"], [place for place, leaf in enumerate(inputs.p.leaves) if isbox(leaf)]
        count = d * isbox(inputs.u0) + sum(len(part.scalars) for part in self.packing.parts if part.place in boxed)
        if gradient != "tangent" and (gradient == "adjoint" or count > FEW or count * d > _FEW_NUMBERS):
            return ()
        return self.directions(isbox(inputs.u0), boxed)


def remembered(
    make: Callable[[bool], _Found | None], batch: Batch, events: Sequence[Event], *further: object
) -> _Found | None:
    """Return the cached trace, or cache ``make(known)``; `known`: whether a cached trace differs only by numbers."""
    # Leaves that can be differentiated are compared by dtype and shape, others by value.
    parts = packing_of(batch.p).parts
    places = {part.place for part in parts}
    others = batch.p.build(["" if place in places else leaf for place, leaf in enumerate(batch.p.leaves)])
    functions = [f for event in events for f in (event.written, event.affect, event.times) if callable(f)]
    kinds = (parts, batch.shape, batch.u0.dtype, tuple([event.terminal for event in events]), *further)
    retraced = "f and the events are traced again in each solve, since a new trace may differ: they read {}, {}"
    advice = "whose value can't be compared with that of the last solve; pass it in p"
    log = lambda reads: warn_once(batch.f, retraced.format(reads, advice), level=logging.INFO)  # noqa: E731
    values = fingerprint_of(batch.f, others, *functions, unknown=log)
    if values is None:
        return make(False)
    key = values, kinds
    if (known := _known.get(key)) is not None:
        return known
    kind = without_floats(values), kinds
    result = make(kind in _kinds)
    if result is not None:
        _known[key], _kinds[kind] = result, None
        # The oldest entries are dropped.
        operations = sum(problem.program.cost for problem in _known.values() if isinstance(problem, TracedProblem))
        if len(_known) > _MOST_KNOWN or operations > _MOST_KNOWN_OPERATIONS:
            _known.pop(next(iter(_known)))
        if len(_kinds) > _MOST_KNOWN:
            _kinds.pop(next(iter(_kinds)))
    return result


def problem_of(batch: Batch, events: Sequence[Event], most: int, must: bool, warn: Warn) -> TracedProblem | None:
    """Return the programs of f and the events; if they can't be compiled, warn and return None, or with `must` raise.

    `most`: the number of components of a state beyond which `must` is needed.
    """
    program = _program_of(batch.f, "f", batch, must, warn)
    if program is None:
        return None
    if (d := program.groups["state"]) > most:
        kind = "real and imaginary parts" if is_complex(batch.u0) else "components"
        instead = "" if must else ", so f is called with arrays instead"
        warn(batch.f, f"a state has {d} {kind}; up to {most} {_FIT}{instead}")
        if not must:
            return None
    conditions: list[Program] = []
    affects: list[Program | None] = []
    real = real_dtype(batch.u0.dtype)
    for event in events:
        affects.append(None)
        if event.condition is not None:
            value = lambda u, p, t, event=event: event.value(u, p, t).astype(real)[None]  # noqa: E731
            condition = _program_of(event.written, "a condition of the events", batch, must, warn, value, ())
            if condition is None:
                return None
            conditions.append(condition)
        if event.affect is not None:
            affects[-1] = _program_of(event.affect, "an affect", batch, must, warn, partial(affected, event, batch))
            if affects[-1] is None:
                return None
    packing = packing_of(batch.p)
    return _changing(batch.f, TracedProblem(program, tuple(conditions), packing, names_of(packing), tuple(affects)))


def _changing(f: Function, problem: TracedProblem) -> TracedProblem:
    """Return a problem whose parameters include the numbers that have changed since earlier solves, to reuse its kernel."""
    programs = [g for g in (problem.program, *problem.conditions, *problem.affects) if g is not None]
    functions = (problem.program, *problem.conditions, *problem.affects)
    structure = (problem.packing, tuple(g and g.structure for g in functions))
    numbers = [number for g in programs for number in g.numbers.values()]
    known = _first_numbers.setdefault(identity_of(f), {})
    first, before, result = known.pop(structure, (numbers, [], problem))
    # Tables are always parameters.
    changed = [i for i, x in enumerate(numbers) if isinstance(x, bytes) or i in before or exact(x) != exact(first[i])]
    if changed != before:
        result = _with_parameters(problem, changed, numbers)
    known[structure] = first, changed, result
    if len(known) > _MOST_PROGRAMS:
        known.pop(next(iter(known)))
    values = [np.frombuffer(x) if isinstance(x, bytes) else [x] for x in (numbers[i] for i in changed)]
    return replace(result, numbers=tuple(np.concatenate(values).tolist()), origin=result) if changed else result


def _with_parameters(problem: TracedProblem, changed: Sequence[int], numbers: Sequence[float | bytes]) -> TracedProblem:
    """Return a problem with some of its numbers replaced by additional shared parameters."""
    size, shared, place = problem.packing.size, len(problem.packing.shared), count()
    inputs, total = {}, size
    for i in changed:
        length = len(numbers[i]) // 8 if isinstance(numbers[i], bytes) else 0  # type: ignore[arg-type]
        inputs[i] = ("parameter", total, length) if length else ("parameter", total)
        total += length or 1

    def lifted(program: Program | None) -> Program | None:
        if program is None:
            return None
        numbered = {i: inputs.get(next(place)) for i in program.numbers}
        replaced = {i: value for i, value in numbered.items() if value is not None}
        return program.with_inputs(replaced, {"parameter": total})

    programs = [lifted(g) for g in (problem.program, *problem.conditions, *problem.affects)]
    stop = 1 + len(problem.conditions)
    names = (*problem.names, *(f"s{shared + k}" for k in range(total - size)))
    return TracedProblem(programs[0], tuple(programs[1:stop]), problem.packing, names, tuple(programs[stop:]))  # type: ignore[arg-type]


def changes(f: Function, program: Program, warn: Warn, name: str = "f") -> bool:
    """Return whether a function has had too many different programs, and warn if so; `name`: its name in the warning."""
    known = _structures.setdefault(identity_of(f), set())
    known.add(program.structure)
    if len(known) <= _MOST_PROGRAMS:
        return False
    # The new structure is forgotten, so that the earlier ones remain usable.
    known.discard(program.structure)
    text = f"{name} has performed different operations in {len(known)} solves, and was compiled for each"
    warn(f, f"{text}; this solve calls f with arrays. Pass the changing values as p, and branch on them with np.where")
    return True


def warn_once(f: Function, text: str, logs: bool = True, level: int = logging.WARNING) -> None:
    """Log a warning, or a message of another level, about an f, once per text; `logs`: whether this rank logs."""
    known = _warned.setdefault(identity_of(f), set())
    if text not in known:
        known.add(text)
        if logs:
            _log.log(level, "solve: %s.", text)


def _program_of(
    f: Function, name: str, batch: Batch, must: bool, warn: Warn, called: Called | None = None, result: Shape | None = None
) -> Program | None:
    """Return the program of f, or of a condition or an affect, which ``called(u, p, t)`` evaluates for several columns."""
    instead = f"so {'it' if called is None else 'f'} is called with arrays instead"
    try:
        program = program_of(batch, f, called, result)
    except Untraceable as error:
        if must:
            raise TypeError(f"solve: compile=True, but {name} can't be compiled: {error}.") from error
        warn(f, f"{name} can't be compiled ({error}), {instead}")
        return None
    count = statements(program, MOST_OPERATIONS)
    if count > MOST_OPERATIONS:
        warn(f, f"{name} has {count} operations; up to {MOST_OPERATIONS} {_FIT}" + ("" if must else f", {instead}"))
        if not must:
            return None
    return None if not must and changes(f, program, warn, name) else program


@lru_cache(64)
def statements(program: Program, most: int = MOST_OPERATIONS) -> int:
    """Return the number of operations of a program; if it is above `most`, that of statements, where loops count once."""
    if program.cost <= most:
        return program.cost
    leaves = {i: f"s[{i}]" for i, x in enumerate(program.instructions) if not x.arguments}
    loops = rerolled(program, leaves, numbered("out", len(program.outputs)), {}, False)
    return program.cost if loops is None else len(loops)
