"""Programs that compute nothing twice, and no constants, have the same values, NaN and infinity included."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiad.compiling.program import OPERATIONS, Builder, Instruction, Program, evaluated, simplify
from mpiad.compiling.source import lowered

pytestmark = pytest.mark.serial

CONSTANTS = [0.0, 1.0, -1.0, 2.0, 0.5, -4.0, 3.0, math.inf, math.nan]
EXACT = [
    name for name, entry in OPERATIONS.items() if name not in ("power", "copysign", "arctan2") and entry.simple
]  # fmt: skip


@st.composite
def raw_programs(draw):
    """Draw a program that nothing has simplified yet: reals and conditions in two lists."""
    instructions = [Instruction("input", (), ("state", i)) for i in range(2)]
    instructions += [Instruction("constant", (), draw(st.sampled_from(CONSTANTS))) for _ in range(2)]
    instructions += [Instruction("constant", (), draw(st.booleans()))]
    reals, flags = [0, 1, 2, 3], [4]
    for _ in range(draw(st.integers(1, 15))):
        name = draw(st.sampled_from(EXACT))
        entry = OPERATIONS[name]
        pick = [flags if name.startswith("logical") else reals] * entry.arity
        if name == "where":
            pick = [flags, reals, reals]
        instructions.append(Instruction(name, tuple(draw(st.sampled_from(kind)) for kind in pick)))
        (flags if entry.boolean else reals).append(len(instructions) - 1)
    return Program({"state": 2}, instructions, reals)


def all_pairs():
    """Return a program of each exact operation on all simple arguments: constants, conditions, what is negated."""
    instructions = [Instruction("input", (), ("state", i)) for i in range(2)]
    instructions += [Instruction("constant", (), value) for value in CONSTANTS]
    reals = len(instructions)
    instructions += [Instruction(name, (i,)) for name in ("negative", "absolute") for i in range(2)]
    flags = len(instructions)
    instructions += [Instruction("constant", (), value) for value in (True, False)]
    instructions += [Instruction("less", (0, 1)), Instruction("less", (1, 2)), Instruction("logical_not", (flags + 2,))]
    kinds = {"real": [*range(reals), *range(reals, flags)], "flag": [*range(flags, len(instructions))]}
    outputs = []
    for name in EXACT:
        kind = ["flag" if name.startswith("logical") else "real"] * OPERATIONS[name].arity
        kind = ["flag", "real", "real"] if name == "where" else kind
        for arguments in itertools.product(*(kinds[k] for k in kind)):
            outputs.append(len(instructions))
            instructions.append(Instruction(name, arguments))
    return Program({"state": 2}, instructions, outputs)


def test_values_stay_in_all_pairs():
    program = all_pairs()
    simple = simplify(program)
    assert simple.cost < program.cost
    for u in ([1.5, -2.0], [-0.7, -0.7], [math.nan, 1.0], [3.0, math.inf], [0.0, 2.0]):
        before, after = (np.array(evaluated(p, u), float) for p in (program, simple))
        np.testing.assert_array_equal(after, before)


@given(raw_programs(), st.lists(st.sampled_from([0.0, 1.5, -2.0, math.inf, math.nan]), min_size=2, max_size=2))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_values_stay(program, u):
    simple = simplify(program)
    before, after = (np.array(evaluated(p, u), float) for p in (program, simple))
    np.testing.assert_array_equal(after, before)
    assert simplify(simple) == simple
    assert simple.cost <= program.cost


@pytest.mark.parametrize("exponent, cost", [(1, 0), (2, 1), (3, 2), (4, 2), (7, 4), (0.5, 1), (1.5, 2), (-1, 1), (-2.5, 5)])
def test_small_powers_become_multiplications(exponent, cost):
    builder = Builder()
    number = builder.call("power", builder.input("state", 0), builder.constant(exponent))
    program = lowered(builder.program({"state": 1}, [number]))
    assert program.cost == cost and "power" not in {i.operation for i in program.instructions}
    np.testing.assert_allclose(evaluated(program, [1.7]), 1.7**exponent, rtol=1e-15)


def test_other_powers_are_powers():
    builder = Builder()
    powers = [builder.call("power", builder.input("state", 0), builder.constant(x)) for x in (2.3, 1 / 3, 65.0)]
    program = lowered(builder.program({"state": 1}, powers))
    assert [i.operation for i in program.instructions].count("power") == 3


def test_what_is_undefined_is_not_folded_away():
    builder = Builder()
    x = builder.input("state", 0)
    outputs = [builder.call(name, x, x) for name in ("subtract", "divide")]
    outputs.append(builder.call("multiply", x, builder.constant(0.0)))
    assert np.isnan(evaluated(builder.program({"state": 1}, outputs), [math.inf])).all()


def test_signs_of_zero_and_kinds_of_one_are_told_apart():
    builder = Builder()
    numbers = [builder.constant(value) for value in (0.0, -0.0, 1.0, True, math.nan)]
    assert len(set(numbers)) == 5 and builder.constant(math.nan) == numbers[-1]
