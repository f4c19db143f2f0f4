"""Derivatives of programs, which are programs: transposed, or along directions.

Both compute the values that they need once, and nothing for inputs that aren't asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from mpiad.compiling.builder import Builder
from mpiad.compiling.partials import Partial, partials_of
from mpiad.compiling.program import Program
from mpiad.compiling.simplify import copied
from mpiad.compiling.symbols import Symbol, choose

__all__ = ["jvp", "vjp"]

Input: TypeAlias = tuple[str, "int | None"]


def vjp(program: Program, parameters: Sequence[int] | None = None, time: bool = True) -> Program:
    """Return the transposed derivative of a program.

    Parameters
    ----------
    program : Program
        With d states and d outputs.
    parameters : sequence of int, optional
        The parameters to differentiate by, all by default.
    time : bool
        Whether to differentiate by time.

    Returns
    -------
    Program
        Its d seeds are the cotangents of the outputs. Its outputs are the cotangents of the states, of these parameters in
        this order, and of time where asked for.
    """
    builder = Builder()
    new = copied(builder, program)
    cotangents: dict[int, Symbol] = {}
    for place, output in enumerate(program.outputs):
        _add(cotangents, new[output], 1.0, Symbol(builder, builder.input("seed", place)))
    # Numbers of values are in an order of computation, so all that uses one is behind it.
    last = max(new, default=-1)
    for number in range(last, -1, -1):
        if number in cotangents:
            _pull(builder, number, cotangents)
    wanted = _inputs(program, parameters, time)
    zero = Symbol(builder, builder.constant(0.0))
    outputs = [cotangents.get(builder.input(*place), zero).number for place in wanted]
    return builder.program(program.states, program.parameters, outputs, len(program.outputs))


def jvp(program: Program, directions: int = 1, parameters: Sequence[int] | None = None, time: bool = True) -> Program:
    """Return a program's values and its derivatives along some directions.

    Parameters
    ----------
    program : Program
        With d states and d outputs.
    directions : int
    parameters : sequence of int, optional
        The parameters that have tangents, all by default.
    time : bool
        Whether time has a tangent.

    Returns
    -------
    Program
        Its seeds are, for each direction, the tangents of the states, of these parameters in this order, and of time where
        asked for. Its outputs are the d values, then d tangents for each direction. `simplify` sets seeds that are known.
    """
    builder = Builder()
    new = copied(builder, program)
    wanted = _inputs(program, parameters, time)
    outputs = [new[output] for output in program.outputs]
    zero = builder.constant(0.0)
    # What is added while tangents are written down has no tangents of its own.
    size = max(new, default=-1) + 1
    for direction in range(directions):
        first = direction * len(wanted)
        tangents = {
            builder.input(*place): Symbol(builder, builder.input("seed", first + i)) for i, place in enumerate(wanted)
        }
        for number in range(size):
            _push(builder, number, tangents)
        outputs += [tangents[new[o]].number if new[o] in tangents else zero for o in program.outputs]
    return builder.program(program.states, program.parameters, outputs, directions * len(wanted))


def _inputs(program: Program, parameters: Sequence[int] | None, time: bool) -> list[Input]:
    places = range(program.parameters) if parameters is None else parameters
    made: list[Input] = [("state", i) for i in range(program.states)]
    made += [("parameter", j) for j in places]
    return [*made, ("time", None)] if time else made


def _pull(builder: Builder, number: int, cotangents: dict[int, Symbol]) -> None:
    """Give the arguments of a value their shares of its cotangent."""
    for argument, partial in zip(builder.instructions[number].arguments, _partials(builder, number)):
        if builder.value(argument) is None:  # nobody asks for a constant's
            _add(cotangents, argument, partial, cotangents[number])


def _push(builder: Builder, number: int, tangents: dict[int, Symbol]) -> None:
    """Give a value the sum of its arguments' tangents."""
    operation, arguments, _ = builder.instructions[number]
    moving = [i for i, argument in enumerate(arguments) if argument in tangents]
    if not moving:
        return
    if operation == "where":
        condition, x, y = arguments
        # One choice instead of the sum of two.
        tangents[number] = choose(Symbol(builder, condition), tangents.get(x, 0.0), tangents.get(y, 0.0))
        return
    partials = _partials(builder, number)
    for i in moving:
        _add(tangents, number, partials[i], tangents[arguments[i]])


def _partials(builder: Builder, number: int) -> list[Partial]:
    operation, arguments, _ = builder.instructions[number]
    return partials_of(operation, [Symbol(builder, i) for i in arguments], Symbol(builder, number))


def _add(sums: dict[int, Symbol], number: int, partial: Partial, g: Symbol) -> None:
    if partial is None:
        return
    term = partial(g) if callable(partial) else g * partial
    sums[number] = sums[number] + term if number in sums else term
