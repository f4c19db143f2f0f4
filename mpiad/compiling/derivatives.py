"""Derivatives of programs, which are programs: transposed, or along directions.

Both compute the values that they need once, and nothing for inputs that aren't requested. Derivatives are with respect to
groups of inputs, or some inputs of these. Seeds (cotangents, tangents) are one more group, the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TypeAlias

from mpiad.compiling.builder import Builder, copied
from mpiad.compiling.program import Input, Program
from mpiad.compiling.symbols import Symbol, choose

# The partial derivatives of each operation, written with symbols.
#
# At a kink or a tie of an operation they are those of autograd: 0 for the absolute value at 0, a half for each of two
# equal arguments of a maximum, a third for each of three. So gradients agree with those of the vectorized path.


# A factor, or a linear function if a product would make NaN of 0 times infinity; None is zero.
Partial: TypeAlias = "Symbol | float | Callable[[Symbol], Symbol] | None"
Rule: TypeAlias = "Callable[..., list[Partial]]"


def _power(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    # At x = 0 the logarithm's infinity times zero would be NaN.
    safe = choose(x == 0.0, 1.0, x)
    return [y * x ** choose(y == 0.0, 1.0, y - 1.0), safe.log() * r]


def _divide(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    if y.builder.value(y.number) is not None:
        return [1.0 / y, None]
    # The quotient g / y is computed once for both.
    return [lambda g: g / y, lambda g: -(r * (g / y))]


def _largest(*arguments: Symbol) -> list[Partial]:
    """Largest or smallest of several, the last argument here: shared equally among the arguments that equal it."""
    *given, r = arguments
    ties = [choose(x == r, 1.0, 0.0) for x in given]
    count = reduce(Symbol.__add__, ties)

    def share(argument: Symbol) -> Callable[[Symbol], Symbol]:
        return lambda g: choose(argument == r, g, 0.0) / count

    return [share(x) for x in given]


def _larger(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    """Maximum or minimum r: all to the argument that it equals, half to each in a tie."""
    tie = x == y

    def share(argument: Symbol) -> Callable[[Symbol], Symbol]:
        return lambda g: choose(tie, 0.5 * g, choose(argument == r, g, 0.0))

    return [share(x), share(y)]


def _modulus(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    safe = choose(r == 0.0, 1.0, r)
    return [x / safe, y / safe]


def _arctan2(y: Symbol, x: Symbol, _: Symbol) -> list[Partial]:
    square = x * x + y * y
    return [x / square, -y / square]


# Zero derivative: comparisons, functions of conditions, sign, and rounding.
PARTIALS: dict[str, Rule] = {
    "add": lambda x, y, r: [1.0, 1.0],
    "subtract": lambda x, y, r: [1.0, -1.0],
    "multiply": lambda x, y, r: [y, x],
    "divide": _divide,
    "negative": lambda x, r: [-1.0],
    "absolute": lambda x, r: [x.sign()],
    "sqrt": lambda x, r: [0.5 / abs(r)],  # the root of -0 is -0
    "cbrt": lambda x, r: [1.0 / (3.0 * r * r)],
    "power": _power,
    "maximum": _larger,
    "minimum": _larger,
    "fmax": _larger,
    "fmin": _larger,
    "largest": _largest,
    "smallest": _largest,
    "copysign": lambda x, y, r: [x.sign() * r.sign(), None],
    "where": lambda c, x, y, r: [None, lambda g: choose(c, g, 0.0), lambda g: choose(c, 0.0, g)],
    "exp": lambda x, r: [r],
    "expm1": lambda x, r: [r + 1.0],
    "log": lambda x, r: [1.0 / x],
    "log1p": lambda x, r: [1.0 / (x + 1.0)],
    "log2": lambda x, r: [1.0 / math.log(2.0) / x],
    "log10": lambda x, r: [1.0 / math.log(10.0) / x],
    "sin": lambda x, r: [x.cos()],
    "cos": lambda x, r: [-x.sin()],
    "tan": lambda x, r: [1.0 + r * r],
    "arcsin": lambda x, r: [1.0 / (1.0 - x * x).sqrt()],
    "arccos": lambda x, r: [-1.0 / (1.0 - x * x).sqrt()],
    "arctan": lambda x, r: [1.0 / (1.0 + x * x)],
    "arctan2": _arctan2,
    "sinh": lambda x, r: [x.cosh()],
    "cosh": lambda x, r: [x.sinh()],
    "tanh": lambda x, r: [1.0 - r * r],
    "arcsinh": lambda x, r: [1.0 / (x * x + 1.0).sqrt()],
    "arccosh": lambda x, r: [1.0 / (x * x - 1.0).sqrt()],
    "arctanh": lambda x, r: [1.0 / (1.0 - x * x)],
    "erf": lambda x, r: [2.0 / math.sqrt(math.pi) * (-(x * x)).exp()],
    "erfc": lambda x, r: [-2.0 / math.sqrt(math.pi) * (-(x * x)).exp()],
    "expit": lambda x, r: [r * (1.0 - r)],
    "logit": lambda x, r: [1.0 / (x * (1.0 - x))],
    "hypot": lambda x, y, r: [x / r, y / r],
    "modulus": _modulus,
    "fmod": lambda x, y, r: [1.0, -(x / y).trunc()],
    "remainder": lambda x, y, r: [1.0, -(x / y).floor()],
}


# Groups, each with places in it; None is all of them.
Wanted: TypeAlias = "Mapping[str, Sequence[int] | None]"


def vjp(program: Program, wanted: Wanted | None = None, seeds: str = "seed") -> Program:
    """Return the transposed derivative of a program: its seeds are the cotangents of the outputs, a group of this name.

    Its outputs are the cotangents of the inputs that are wanted, in this order: by default of all groups; else of these
    groups, at these places in each, of which None is all. A ValueError if the program has no such groups, or one of the
    seeds' name.
    """
    builder = Builder()
    new = copied(builder, program)
    cotangents: dict[int, Symbol] = {}
    for place, output in enumerate(program.outputs):
        _add(cotangents, new[output], 1.0, Symbol(builder, builder.input(seeds, place)))
    # Numbers of values are in an order of computation, so all uses of a value come after it.
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
        raise ValueError(
            f"derivatives with respect to {unknown} were requested, but the groups of inputs are {program.groups}"
        )
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
        if builder.value(argument) is None:  # a constant's isn't needed
            _add(cotangents, argument, partial, cotangents[number])


def _push(builder: Builder, size: int, tangents: dict[int, Symbol]) -> None:
    """Give the first values, so many, the sums of their arguments' tangents; values added meanwhile have none."""
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
    """Return the derivatives of an operation's value with respect to each argument."""
    operation, arguments, _ = builder.instructions[number]
    rule = PARTIALS.get(operation)
    if rule is None:
        return [None] * len(arguments)
    return rule(*(Symbol(builder, i) for i in arguments), Symbol(builder, number))


def _add(sums: dict[int, Symbol], number: int, partial: Partial, g: Symbol) -> None:
    if partial is None:
        return
    term = partial(g) if callable(partial) else g * partial
    sums[number] = sums[number] + term if number in sums else term
