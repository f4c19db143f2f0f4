"""Operations that no processor has, by those that it has.

They stay whole until a program becomes text, so that derivatives are taken of what f says: those of a power by its
factors, or of the largest of three by pairs, would differ from autograd's at zeros and ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import mul

from mpiad.compiling.builder import Builder, copied
from mpiad.compiling.complex_numbers import whole_power
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Program
from mpiad.compiling.symbols import Symbol, choose

# Twelve multiplications at most.
_LARGEST_EXPONENT = 64


# A kernel's text is made of it, and how wide its vectors are.
@lru_cache(32)
def lowered(program: Program) -> Program:
    """Return a program of the same values, to a few roundings, in operations that have a text."""
    builder = Builder()

    def call(operation: str, *arguments: int) -> int:
        simpler = _RULES[operation](*[Symbol(builder, i) for i in arguments]) if operation in _RULES else None
        return builder.call(operation, *arguments) if simpler is None else simpler.number

    new = copied(builder, program, call=call)
    return builder.program(program.groups, [new[i] for i in program.outputs])


def are_simple(programs: Iterable[Program]) -> bool:
    """Return whether programs call nothing: around calls, the wider a vector is, the more there is to put away."""
    operations = {made.operation for program in programs for made in lowered(program).instructions}
    return all(OPERATIONS[operation].simple for operation in operations & OPERATIONS.keys())


def _power(x: Symbol, y: Symbol) -> Symbol | None:
    """Return a power of a small constant exponent by multiplications and a root; None where it is another one."""
    exponent = x.builder.value(y.number)
    if exponent is None or abs(exponent) > _LARGEST_EXPONENT or (2 * exponent) % 1:
        return None
    made = whole_power(x, int(abs(exponent)), mul)
    if exponent % 1:
        root = x.sqrt()
        made = root if made is None else made * root
        # The root of -0 is -0, and what is divided by it would be -inf.
        made = abs(made) if exponent < 0 else made
    if made is None:
        return Symbol(x.builder, x.builder.constant(1.0))
    return made if exponent > 0 else 1.0 / made


def _by_pairs(operation: str) -> Callable[..., Symbol]:
    def made(first: Symbol, *others: Symbol) -> Symbol:
        for other in others:
            first = first.call(operation, other)
        return first

    return made


# Of the sign of the divisor, unlike C's.
def _remainder(x: Symbol, y: Symbol) -> Symbol:
    rest = x.fmod(y)
    return choose((rest != 0.0) & ((rest < 0.0) ^ (y < 0.0)), rest + y, rest)


# A call of hypot would keep a loop over lanes from being vectorised.
def _modulus(x: Symbol, y: Symbol) -> Symbol:
    larger, smaller = abs(x).maximum(abs(y)), abs(x).minimum(abs(y))
    ratio = smaller / choose(larger == 0.0, 1.0, larger)
    return larger * (ratio * ratio + 1.0).sqrt()


_RULES: dict[str, Callable[..., Symbol | None]] = {
    "power": _power,
    "largest": _by_pairs("maximum"),
    "smallest": _by_pairs("minimum"),
    "remainder": _remainder,
    "modulus": _modulus,
    "expit": lambda x: 1.0 / (1.0 + (-x).exp()),
    "logit": lambda x: (x / (1.0 - x)).log(),
}
