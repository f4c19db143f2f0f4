"""Derivatives of programs, as programs: vector-Jacobian and Jacobian-vector products.

These programs compute each value of the original program at most once, and nothing for inputs that weren't requested.
Inputs are requested by group, and optionally by index in a group. The seeds (cotangents or tangents) are an additional last
group of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import reduce
from typing import TypeAlias

from mpiad.compiling.program import Builder, Input, Program, copy_program
from mpiad.compiling.symbols import Symbol, choose

# The partial derivatives of each operation, written with symbols.
#
# At kinks and ties they equal those of autograd: the derivative of the absolute value at 0 is 0, and equal arguments of a
# maximum have equal derivatives. Gradients therefore agree with those by which autograd differentiates the uncompiled
# function.

# A partial derivative: a factor, None for zero, or a linear function if a product with a factor could be 0 · ∞.
Partial: TypeAlias = "Symbol | float | Callable[[Symbol], Symbol] | None"
Rule: TypeAlias = "Callable[..., list[Partial]]"


def _power(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    if x.builder.value(y.number) == 2.0:
        return [2.0 * x, None]
    # At x = 0 the logarithm is infinite, and its product with zero would be NaN.
    safe = choose(x == 0.0, 1.0, x)
    return [y * x ** choose(y == 0.0, 1.0, y - 1.0), safe.log() * r]


def _divide(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    if y.builder.value(y.number) is not None:
        return [1.0 / y, None]
    # g / y occurs in both derivatives, and is computed once.
    return [lambda g: g / y, lambda g: -(r * (g / y))]


def _largest(*arguments: Symbol) -> list[Partial]:
    """Return the derivatives of the largest or smallest value, the last argument; equal arguments share the derivative."""
    *given, r = arguments
    ties = [choose(x == r, 1.0, 0.0) for x in given]
    count = reduce(Symbol.__add__, ties)

    def share(argument: Symbol) -> Callable[[Symbol], Symbol]:
        return lambda g: choose(argument == r, g, 0.0) / count

    return [share(x) for x in given]


def _larger(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    """Return the derivatives of the maximum or minimum r of two arguments: 1 if the argument equals r, 1/2 in a tie."""
    tie = x == y

    def share(argument: Symbol) -> Callable[[Symbol], Symbol]:
        return lambda g: choose(tie, 0.5 * g, choose(argument == r, g, 0.0))

    return [share(x), share(y)]


def _modulus(x: Symbol, y: Symbol, r: Symbol) -> list[Partial]:
    safe = choose(r == 0.0, 1.0, r)
    return [x / safe, y / safe]


def _arctan2(y: Symbol, x: Symbol, _: Symbol) -> list[Partial]:
    # The derivatives don't depend on the scale, without which the squares could overflow or vanish.
    scale = abs(x).maximum(abs(y)).call("stop_gradient")
    scale = choose((scale > 0.0) & (scale < math.inf), scale, 1.0)
    x, y = x / scale, y / scale
    square = x * x + y * y
    return [x / square / scale, -y / square / scale]


# Operations missing here have derivative zero: comparisons, logical operations, sign, rounding, and stop_gradient.
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
    **dict.fromkeys(("maximum", "minimum", "fmax", "fmin"), _larger),
    **dict.fromkeys(("largest", "smallest"), _largest),
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

# Requested inputs: for each group their indices, or None for all inputs of the group.
Wanted: TypeAlias = "Mapping[str, Sequence[int] | None]"


def vjp(program: Program, wanted: Wanted | None = None, seeds: str = "seed") -> Program:
    """Return the vector-Jacobian product of a program: cotangents of the inputs in `wanted` (default: all), in order."""
    # `seeds`: a new name, for the additional group of inputs, the cotangents of the program's outputs.
    builder = Builder()
    new, inputs = copy_program(builder, program), [builder.input(*place) for place in _inputs(program, wanted)]
    cotangents: dict[int, Symbol] = {}
    for place, output in enumerate(program.outputs):
        _add(cotangents, new[output], 1.0, Symbol(builder, builder.input(seeds, place)))
    # Values are numbered in the order of computation, so all uses of a value have higher numbers.
    for number in range(max(new, default=-1), -1, -1):
        if number in cotangents:
            arguments = _arguments(builder, number, inputs)
            for argument, partial in zip(arguments, _partials(builder, number, arguments)):
                if builder.value(argument) is None:  # not a constant
                    _add(cotangents, argument, partial, cotangents[number])
    zero = Symbol(builder, builder.constant(0.0))
    outputs = [cotangents.get(number, zero).number for number in inputs]
    return builder.program({**program.groups, seeds: len(program.outputs)}, outputs)


def jvp(program: Program, wanted: Wanted | None = None, seeds: str = "seed") -> Program:
    """Return the Jacobian-vector product of a program; the seeds are the tangents of the inputs in `wanted` (see `vjp`)."""
    builder = Builder()
    new, zero = copy_program(builder, program), Symbol(builder, builder.constant(0.0))
    inputs = _inputs(program, wanted)
    tangents = {builder.input(*place): Symbol(builder, builder.input(seeds, i)) for i, place in enumerate(inputs)}
    _push(builder, range(max(new, default=-1) + 1), tangents)
    outputs = [tangents.get(new[output], zero).number for output in program.outputs]
    return builder.program({**program.groups, seeds: len(inputs)}, outputs)


def derivatives_by_inputs(builder: Builder, program: Program, wanted: Wanted) -> dict[tuple[int, int], int]:
    """Append the nonzero partial derivatives to a builder; return their numbers by (output, place in `wanted`)."""
    new, found = copy_program(builder, program), {}
    one, users = Symbol(builder, builder.constant(1.0)), dict[int, list[int]]()
    inputs = [builder.input(*place) for place in _inputs(program, wanted)]
    for number in range(max(new, default=-1) + 1):
        for argument in _arguments(builder, number, inputs):
            users.setdefault(argument, []).append(number)
    for j, place in enumerate(inputs):
        # The other inputs have no tangents, since zero tangents would remain in products: 0 · x may be NaN.
        tangents, dependent, waiting = {place: one}, set[int](), [place]
        while waiting:
            new_users = set(users.get(waiting.pop(), ())) - dependent
            dependent |= new_users
            waiting += new_users
        _push(builder, sorted(dependent), tangents)
        found |= {(i, j): tangents[new[o]].number for i, o in enumerate(program.outputs) if new[o] in tangents}
    return found


def _inputs(program: Program, wanted: Wanted | None) -> list[Input]:
    chosen: Wanted = dict.fromkeys(program.groups) if wanted is None else wanted
    ranges = [(group, range(program.groups[group]) if places is None else places) for group, places in chosen.items()]
    return [(group, place) for group, places in ranges for place in places]


def _push(builder: Builder, numbers: Iterable[int], tangents: dict[int, Symbol]) -> None:
    """Compute the tangents of values, given their numbers in order."""
    for number in numbers:
        operation, arguments = builder.instructions[number].operation, _arguments(builder, number, tangents)
        with_tangents = [i for i, argument in enumerate(arguments) if argument in tangents]
        if with_tangents and operation == "where":
            condition, x, y = arguments
            # One `where` of both tangents instead of a sum of two.
            tangents[number] = choose(Symbol(builder, condition), tangents.get(x, 0.0), tangents.get(y, 0.0))
        elif with_tangents:
            partials = _partials(builder, number, arguments)
            for i in with_tangents:
                _add(tangents, number, partials[i], tangents[arguments[i]])


def _arguments(builder: Builder, number: int, known: Container[int]) -> Sequence[int]:
    """Return the arguments of an operation; instead of a table and an index, the inputs of the table that are `known`."""
    operation, arguments, _ = builder.instructions[number]
    if operation != "lookup":
        return arguments
    value = builder.instructions[arguments[0]].value
    group, first, count = value if isinstance(value, tuple) else ("", 0, 0)  # type: ignore[misc]
    return [number for k in range(count) if (number := builder.input(group, first + k)) in known]


def _partials(builder: Builder, number: int, arguments: Sequence[int]) -> list[Partial]:
    operation, given, _ = builder.instructions[number]
    if operation == "lookup":
        first, index = builder.instructions[given[0]].value[1], Symbol(builder, given[1])  # type: ignore[index]
        places = [builder.instructions[argument].value[1] - first for argument in arguments]  # type: ignore[index]
        return [lambda g, k=k: choose(index == k, g, 0.0) for k in places]
    rule = PARTIALS.get(operation)
    if rule is None:
        return [None] * len(arguments)
    return rule(*(Symbol(builder, i) for i in arguments), Symbol(builder, number))


def _add(sums: dict[int, Symbol], number: int, partial: Partial, g: Symbol) -> None:
    if partial is None:
        return
    # Without products with 1, the terms of a sum have one cotangent.
    term = partial(g) if callable(partial) else g if isinstance(partial, float) and partial == 1.0 else g * partial
    sums[number] = sums[number] + term if number in sums else term
