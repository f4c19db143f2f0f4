"""The text of a program: one assignment to a local scalar for each operation, to be put into a loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad.ensemble.compiled.operations import OPERATIONS
from mpiad.ensemble.compiled.program import Program

__all__ = ["Names", "lines"]


class Names(NamedTuple):
    """The texts that stand for a program's inputs.

    Parameters
    ----------
    states, parameters : sequence of str
    time : str
    seeds : sequence of str
    """

    states: Sequence[str]
    parameters: Sequence[str]
    time: str
    seeds: Sequence[str] = ()


def lines(
    program: Program, names: Names, outputs: Sequence[str], language: str = "python", dtype: Any = float, prefix: str = "v"
) -> list[str]:
    """Return statements that compute a program's outputs.

    Parameters
    ----------
    program : Program
    names : Names
        Texts of the inputs; each is read as often as it is used, so give local scalars.
    outputs : sequence of str
        What the outputs are assigned to, one after the other, after everything has been computed.
    language : {"python", "c"}
        Python for numba, in which ``math`` and ``np`` must be known; or C, which is also C++ and CUDA.
    dtype : dtype
        float64 or float32.
    prefix : str
        What the names of local scalars begin with; two programs in one function need different ones.

    Returns
    -------
    list of str
        Lines without indentation.
    """
    style = _Style(language == "c", np.dtype(dtype) == np.float32)
    inputs = {"state": names.states, "parameter": names.parameters, "seed": names.seeds}
    texts: list[str] = []
    made: list[str] = []
    for number, (operation, arguments, value) in enumerate(program.instructions):
        if operation == "constant":
            texts.append(style.literal(value))  # type: ignore[arg-type]
        elif operation == "time":
            texts.append(names.time)
        elif operation in inputs:
            texts.append(inputs[operation][value])  # type: ignore[index]
        else:
            texts.append(f"{prefix}{number}")
            text = style.operation(operation, [texts[i] for i in arguments])
            made.append(style.declared(texts[-1], text, program.is_boolean(number)))
    return made + [style.assigned(target, texts[i]) for target, i in zip(outputs, program.outputs, strict=True)]


class _Style(NamedTuple):
    """A language and a precision."""

    c: bool
    single: bool

    def operation(self, name: str, arguments: list[str]) -> str:
        entry = OPERATIONS[name]
        if self.c:
            return entry.c.format(*arguments, f="f" if self.single else "")
        text = entry.python.format(*arguments)
        # Python's 1.0 is double, and would make the rest double.
        return text.replace("1.0", "np.float32(1.0)") if self.single else text

    def declared(self, name: str, text: str, boolean: bool) -> str:
        if not self.c:
            return f"{name} = {text}"
        return f"const {'bool' if boolean else 'float' if self.single else 'double'} {name} = {text};"

    def assigned(self, target: str, text: str) -> str:
        return f"{target} = {text};" if self.c else f"{target} = {text}"

    def literal(self, value: float | bool) -> str:
        if isinstance(value, bool):
            return str(value).lower() if self.c else str(value)
        if math.isfinite(value):
            text = f"{abs(value)!r}{'f' if self.c and self.single else ''}"
        else:
            name = "nan" if math.isnan(value) else "inf"
            text = {"nan": "NAN", "inf": "INFINITY"}[name] if self.c else f"math.{name}"
        # In parentheses: the places are beside operators.
        text = f"(-{text})" if math.copysign(1, value) < 0 else text
        return f"np.float32({text})" if self.single and not self.c else text
