"""Programs without what can be known before: constants folded, nothing computed twice, nothing that isn't needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpiad.compiling.builder import Builder
from mpiad.compiling.program import Input, Program

__all__ = ["copied", "simplify"]


def simplify(
    program: Program, known: Mapping[Input, float] | None = None, outputs: Sequence[int] | None = None
) -> Program:
    """Return a program of the same values with less to compute; `identities` says which changes are made.

    Parameters
    ----------
    program : Program
    known : mapping of (str, int) to float, optional
        Inputs whose values are known, by groups and places; the places of the others stay as they are.
    outputs : sequence of int, optional
        Places of the outputs that are wanted, all by default.

    Returns
    -------
    Program
    """
    builder = Builder()
    new = copied(builder, program, known)
    wanted = range(len(program.outputs)) if outputs is None else outputs
    kept = [new[program.outputs[place]] for place in wanted]
    return builder.program(program.groups, kept)


def copied(builder: Builder, program: Program, known: Mapping[Input, float] | None = None) -> list[int]:
    """Write a program's instructions into a builder, and return their new numbers."""
    new: list[int] = []
    for operation, arguments, value in program.instructions:
        if operation == "constant":
            new.append(builder.constant(value))  # type: ignore[arg-type]
        elif operation == "input":
            given = (known or {}).get(value)  # type: ignore[arg-type]
            new.append(builder.input(*value) if given is None else builder.constant(float(given)))  # type: ignore[misc]
        else:
            new.append(builder.call(operation, *(new[i] for i in arguments)))
    return new
