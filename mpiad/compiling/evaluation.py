"""A program's values by NumPy, one operation after the other: the reference for what is generated from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Program

__all__ = ["evaluated"]


def evaluated(program: Program, *groups: Sequence[Any] | Array) -> list[Any]:
    """Return the outputs of a program.

    Parameters
    ----------
    program : Program
    *groups : sequence of number or array
        Of each group one entry for each input; arrays of one shape stand for many evaluations.

    Returns
    -------
    list
        One entry for each output.
    """
    inputs = dict(zip(program.groups, groups, strict=True))
    values: list[Any] = []
    with np.errstate(all="ignore"):
        for operation, arguments, value in program.instructions:
            if operation == "constant":
                values.append(value)
            elif operation == "input":
                group, place = value  # type: ignore[misc]
                values.append(inputs[group][place])
            else:
                values.append(OPERATIONS[operation].function(*(values[i] for i in arguments)))
    return [values[i] for i in program.outputs]
