"""Conditions on the numbers among a call's arguments under which a program computes what the function computes.

A program holds Python's numbers in arrays, so they must not be too large for them, and mustn't be of a type that depends on
their values. Where a function branches on its numbers, as in ``if k % 10 == 0`` of a time step, the program is that of
one branch: a condition is that the numbers lead to the same decisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.compiling.source import indented
from mpiad.programs.traced_array import PYTHON_COMPARISONS, PYTHON_OPERATORS, Ref, Step, is_number_of


class Trace(Protocol):
    """What conditions depend on of a `Recorder`."""

    specs: list[tuple[Shape, np.dtype]]
    inputs: list[int]
    weak: set[int]
    steps: list[Step]
    decisions: dict[tuple[int, type], object]
    condition: Callable[[Sequence[Array]], bool] | None


_OPERATORS = PYTHON_OPERATORS | PYTHON_COMPARISONS
MOST_NUMBERS = 2**53  # up to this limit, integers are exact as floats, with which loops compute


def admits_of(recorder: Trace) -> Callable[[Sequence[Array]], bool] | None:
    """Return a function of the arguments: whether a program computes with Python numbers as Python does; None if always."""
    kinds = _kinds(recorder)
    names: dict[str, Any] = {"i": int, "f": float, "c": complex, "is_number_of": is_number_of}
    inputs = {n: place for place, n in enumerate(recorder.inputs) if kinds.get(n, "b") != "b"}
    lines, checks, limited = [f"v{n} = {kinds[n]}(given[{k}])" for n, k in inputs.items()], list[str](), set[int]()
    for step in _computed(recorder):
        (out,), *others = step.outs, *[x for x in step.args if type(x) is not Ref]
        names |= {f"f{out}": _OPERATORS[step.fun]} | {f"c{out}": x for x in others}
        args = [f"v{x.number}" if type(x) is Ref else f"c{out}" for x in step.args]
        lines.append(f"v{out} = f{out}({', '.join(args)})")
        is_quotient = step.fun in (np.true_divide, np.floor_divide, np.remainder)
        if kinds[out] in "bi" or is_quotient:  # in sums and products with a float, Python converts the integer, too
            limited |= {x.number for x in step.args if type(x) is Ref and kinds[x.number] == "i"} & inputs.keys()
        if kinds[out] == "i" and step.fun is not np.power:
            limited.add(out)
        elif is_quotient and type(step.args[1]) is Ref or step.fun is np.power:
            checks.append(f"is_number_of({kinds[out]!r}, v{out})")
    checks += [f"{-MOST_NUMBERS} <= v{n} <= {MOST_NUMBERS}" for n in sorted(limited)]
    checks += [f"{kind.__name__}(v{n}) == {value}" for (n, kind), value in recorder.decisions.items()]
    if recorder.condition is not None:
        names["condition"] = recorder.condition
        checks.append("condition(given)")
    if not checks:
        return None
    body = ["try:", *indented(lines), "except ArithmeticError:", "    return False", f"return {' and '.join(checks)}"]
    text = "\n".join(["def admits(given):", *indented(body)])
    exec(compile(text, str(Path(__file__).with_name("<numbers>")), "exec"), names)
    places = {*inputs.values(), *getattr(recorder.condition, "places", ())}
    names["admits"].places = tuple(sorted(places))  # of the arguments that it reads
    # Whether another program may admit other numbers.
    names["admits"].decides = bool(recorder.decisions) or recorder.condition is not None
    return names["admits"]


def is_computed(recorder: Trace, number: int) -> bool:
    """Return whether a value of a trace is a Python number that is computed from numbers among the arguments only."""
    return number in recorder.weak and (
        number in recorder.inputs or any(number in step.outs for step in _computed(recorder))
    )


def _kinds(recorder: Trace) -> dict[int, str]:
    return {n: recorder.specs[n][1].kind for n in recorder.weak}


def _computed(recorder: Trace) -> Iterator[Step]:
    """Yield the steps that compute Python numbers from numbers among the arguments as Python does."""
    kinds = _kinds(recorder)
    known = {n for n in recorder.inputs if kinds.get(n, "b") != "b"}
    for step in recorder.steps:
        numbers = {x.number for x in step.args if type(x) is Ref}
        if not known.issuperset(numbers) or kinds.keys().isdisjoint(step.outs) or step.fun not in _OPERATORS:
            continue
        if kinds[step.outs[0]] != "b" or step.fun in PYTHON_COMPARISONS:  # NumPy's sums of booleans are booleans
            known.add(step.outs[0])
            yield step


def admits_all(admits: Any, numbers: Sequence[int], given: Sequence[object] | Mapping[int, object]) -> bool:
    """Return whether a program can compute with each of some numbers as its first argument, and the other arguments."""
    return all(admitted(admits, numbers, 0, given))


def admitted(
    admits: Any, numbers: Sequence[int], place: int, given: Sequence[object] | Mapping[int, object]
) -> tuple[bool, ...]:
    """Return for some numbers whether a program can compute with them as the argument at a place."""
    others = tuple([(k, np.asarray(given[k]).item()) for k in admits.places if k != place])
    return _admitted(admits, numbers, place, others)


@functools.lru_cache(maxsize=256)
def _admitted(
    admits: Callable[[dict[int, object]], bool], numbers: Sequence[int], place: int, others: tuple
) -> tuple[bool, ...]:
    given: dict[int, object] = dict(others)
    return tuple([admits(given | {place: number}) for number in numbers])
