"""Programs as the text of functions, for the kernels.

f itself is computed as it is written, so that its values are those of the vectorised path. In tangents and adjoints
products that are added become `fma`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpiad.ensemble.compiled.operations import OPERATIONS
from mpiad.ensemble.compiled.program import Program

__all__ = ["function_source"]

# Conditional expressions are branches to numba, which keep a loop from becoming vector instructions.
_TEXTS = {
    "where": "where({0}, {1}, {2})",
    "maximum": "where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "fmax": "where(({0} > {1}) | ({1} != {1}), {0}, {1})",
    "fmin": "where(({0} < {1}) | ({1} != {1}), {0}, {1})",
    "sign": "where({0} > 0.0, 1.0, where({0} < 0.0, -1.0, {0}))",
}


def function_source(
    program: Program, name: str, parameters: Sequence[str], seeds: Sequence[str] = (), fused: bool = False
) -> str:
    """Return the text of a function ``name(*u, *parameters, t, *seeds)`` that returns the outputs as a tuple.

    Parameters
    ----------
    program : Program
    name : str
    parameters : sequence of str
        What the program's parameters are called.
    seeds : sequence of str
        What its seeds are called.
    fused : bool
        Whether products that are added are rounded once.
    """
    states = [f"u{i}" for i in range(program.states)]
    inputs = {"state": states, "parameter": list(parameters), "seed": list(seeds)}
    texts, made = _texts(program, inputs, fused)
    order = sorted(parameters, key=lambda text: (text[0], int(text[1:])))
    given = [*states, *order, "t", *seeds]
    body = [*made, f"return ({', '.join(texts[o] for o in program.outputs)},)"]
    return "\n".join([f"def {name}({', '.join(given)}):", *(f"    {line}" for line in body)]) + "\n"


def _texts(program: Program, inputs: dict[str, list[str]], fused: bool) -> tuple[dict[int, str], list[str]]:
    texts: dict[int, str] = {}
    lines: list[str] = []
    sums = _sums(program) if fused else {}
    for i in sorted(_needed(program, sums)):
        operation, arguments, value = program.instructions[i]
        if operation == "constant":
            texts[i] = _literal(value)
        elif operation == "time":
            texts[i] = "t"
        elif operation in inputs:
            texts[i] = inputs[operation][value]  # type: ignore[index]
        else:
            texts[i] = f"v{i}"
            lines.append(f"v{i} = {_text(program, i, texts, sums)}")
    return texts, lines


def _sums(program: Program) -> dict[int, tuple[int, int, int, str]]:
    """Return, of values a b + c, the places of a, b and c, and how they are written."""
    found = {}
    for i, (operation, arguments, _) in enumerate(program.instructions):
        if operation not in ("add", "subtract"):
            continue
        x, y = arguments
        sign = "" if operation == "add" else "-"
        for product, other, form in ((y, x, f"fma({sign}{{0}}, {{1}}, {{2}})"), (x, y, f"fma({{0}}, {{1}}, {sign}{{2}})")):
            if program.instructions[product].operation == "multiply":
                found[i] = (*program.instructions[product].arguments, other, form)
                break
    return found


def _needed(program: Program, sums: dict[int, tuple[int, int, int, str]]) -> set[int]:
    """Return the values that are computed: not products that have become a part of a sum."""
    needed: set[int] = set(program.outputs)
    for i in range(len(program.instructions) - 1, -1, -1):
        if i in needed:
            needed.update(sums[i][:3] if i in sums else program.instructions[i].arguments)
    return needed


def _text(program: Program, i: int, texts: dict[int, str], sums: dict[int, tuple[int, int, int, str]]) -> str:
    if i in sums:
        *places, form = sums[i]
        return form.format(*(texts[j] for j in places))
    operation, arguments, _ = program.instructions[i]
    return _TEXTS.get(operation, OPERATIONS[operation].python).format(*(texts[j] for j in arguments))


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if not math.isfinite(value):
        return "np.nan" if math.isnan(value) else "np.inf" if value > 0 else "(-np.inf)"
    return f"({value!r})" if math.copysign(1.0, value) < 0 else repr(float(value))
