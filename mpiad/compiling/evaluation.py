"""A program's values by NumPy, one operation after the other: the reference for what is generated from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Program

__all__ = ["evaluated"]


def evaluated(program: Program, u: Array, p: Array, t: Any, seeds: Array = ()) -> list[Any]:
    """Return the outputs of a program.

    Parameters
    ----------
    program : Program
    u, p, seeds : sequence of number or array
        One entry for each input; arrays of one shape stand for many trajectories.
    t : number or array

    Returns
    -------
    list
        One entry for each output.
    """
    inputs: dict[str, Sequence[Any]] = {"state": u, "parameter": p, "seed": seeds}
    values: list[Any] = []
    with np.errstate(all="ignore"):
        for operation, arguments, value in program.instructions:
            if operation == "constant":
                values.append(value)
            elif operation == "time":
                values.append(t)
            elif operation in inputs:
                values.append(inputs[operation][value])  # type: ignore[index]
            else:
                values.append(OPERATIONS[operation].function(*(values[i] for i in arguments)))
    return [values[i] for i in program.outputs]
