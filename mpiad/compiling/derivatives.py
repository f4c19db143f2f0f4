"""Derivatives of programs, which are programs: transposed, or along directions.

Both compute the values that they need once, and nothing for inputs that aren't asked for. They are taken by groups of
inputs, or by some inputs of these. Seeds (cotangents, tangents) are one more group, the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mpiad.compiling.builder import Builder, copied
from mpiad.compiling.partials import Partial, partials_of
from mpiad.compiling.program import Input, Program
from mpiad.compiling.symbols import Symbol, choose

# Groups, each with places in it; None is all of them.
Wanted: TypeAlias = "Mapping[str, Sequence[int] | None]"


def vjp(program: Program, wanted: Wanted | None = None, seeds: str = "seed") -> Program:
    """Return the transposed derivative of a program: its seeds are the cotangents of the outputs, a group of this name.

    Its outputs are the cotangents of the inputs that are wanted, in this order: by default of all groups; else of these
    groups, at these places in each, of which None is all. A ValueError where the program has no such groups, or one of the
    seeds' name.
    """
    builder = Builder()
    new = copied(builder, program)
    cotangents: dict[int, Symbol] = {}
    for place, output in enumerate(program.outputs):
        _add(cotangents, new[output], 1.0, Symbol(builder, builder.input(seeds, place)))
    # Numbers of values are in an order of computation, so all that uses one is behind it.
    last = max(new, default=-1)
    for number in range(last, -1, -1):
        if number in cotangents:
            _pull(builder, number, cotangents)
    zero = Symbol(builder, builder.constant(0.0))
    outputs = [cotangents.get(builder.input(*place), zero).number for place in _inputs(program, wanted)]
    return builder.program(_with_seeds(program, seeds, len(program.outputs)), outputs)


def jvp(program: Program, wanted: Wanted | None = None, seeds: str = "seed") -> Program:
    """Return the derivative of a program along a direction: its seeds are the tangents of the inputs that are wanted.

    Its outputs are the tangents of the outputs. `wanted` and errors are as for `vjp`; `simplify` sets seeds that are known.
    """
    builder = Builder()
    new, zero = copied(builder, program), Symbol(builder, builder.constant(0.0))
    inputs = _inputs(program, wanted)
    tangents = {builder.input(*place): Symbol(builder, builder.input(seeds, i)) for i, place in enumerate(inputs)}
    _push(builder, max(new, default=-1) + 1, tangents)
    outputs = [tangents.get(new[output], zero).number for output in program.outputs]
    return builder.program(_with_seeds(program, seeds, len(inputs)), outputs)


def derivatives_by_inputs(builder: Builder, program: Program, wanted: Wanted) -> dict[tuple[int, int], int]:
    """Write a program's derivatives into a builder, and return their numbers by the places of outputs and of inputs.

    Those of outputs that don't depend on an input are left out. The inputs are counted in the order of `wanted`.
    """
    new, found = copied(builder, program), {}
    size, one = max(new, default=-1) + 1, Symbol(builder, builder.constant(1.0))
    for j, place in enumerate(_inputs(program, wanted)):
        # No other input has a tangent of zero: products with it would stay, since they may be NaN.
        tangents = {builder.input(*place): one}
        _push(builder, size, tangents)
        found |= {(i, j): tangents[new[o]].number for i, o in enumerate(program.outputs) if new[o] in tangents}
    return found


def _inputs(program: Program, wanted: Wanted | None) -> list[Input]:
    chosen: Wanted = dict.fromkeys(program.groups) if wanted is None else wanted
    unknown = [group for group in chosen if group not in program.groups]
    if unknown:
        raise ValueError(f"derivatives by {unknown} are asked for, but the program's groups of inputs are {program.groups}")
    return [
        (group, place)
        for group, places in chosen.items()
        for place in (range(program.groups[group]) if places is None else places)
    ]


def _with_seeds(program: Program, seeds: str, count: int) -> dict[str, int]:
    if seeds in program.groups:
        raise ValueError(f"the program has a group {seeds!r} already, of {program.groups[seeds]}: name the seeds otherwise")
    return {**program.groups, seeds: count}


def _pull(builder: Builder, number: int, cotangents: dict[int, Symbol]) -> None:
    """Give the arguments of a value their shares of its cotangent."""
    for argument, partial in zip(builder.instructions[number].arguments, _partials(builder, number)):
        if builder.value(argument) is None:  # nobody asks for a constant's
            _add(cotangents, argument, partial, cotangents[number])


def _push(builder: Builder, size: int, tangents: dict[int, Symbol]) -> None:
    """Give the first values, so many, the sums of their arguments' tangents; what is added on the way has none."""
    for number in range(size):
        operation, arguments, _ = builder.instructions[number]
        moving = [i for i, argument in enumerate(arguments) if argument in tangents]
        if moving and operation == "where":
            condition, x, y = arguments
            # One choice instead of the sum of two.
            tangents[number] = choose(Symbol(builder, condition), tangents.get(x, 0.0), tangents.get(y, 0.0))
        elif moving:
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
