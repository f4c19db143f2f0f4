"""The rules of folding, each by the statements that remain; and the same functions as plain Python."""

from __future__ import annotations

import ast
import math

import numpy as np
import pytest

from mpiad.compiling.folding import FoldingError, Variables, definitions, folded, inlined, static, variable_named
from mpiad.compiling.kernel_language import (
    Row,
    bits_of,
    call_function,
    constants,
    fma,
    number_of,
    separate,
    single,
    total,
    vector,
    where,
)  # fmt: skip

pytestmark = pytest.mark.serial


def text_of(function, *arguments, reserved=()):
    """Return the statements of a function; strings are names of symbolic arguments."""
    given = [variable_named(x) if isinstance(x, str) else x for x in arguments]
    names = {x for x in arguments if isinstance(x, str)}
    statements = folded(function, *given, reserved=names.union(reserved)).statements
    return [line for x in statements for line in ast.unparse(ast.fix_missing_locations(x)).splitlines()]


@inlined
def branches(flag, x):
    if flag:
        y = x + 1.0
    elif x > 2.0:
        y = -x
    else:
        y = 2.0
    z = (y if flag else x) * 2.0
    if (flag and x > 0.0) or not flag:
        z = 0.0
    return z


def test_static_conditions_are_decided():
    assert text_of(branches, True, "x") == ["y = x + 1.0", "z = y * 2.0", "if x > 0.0:", "    z = 0.0"]
    assert text_of(branches, False, "x") == [
        "if x > 2.0:", "    y = -x", "else:", "    y = 2.0", "z = x * 2.0", "z = 0.0",
    ]  # fmt: skip
    assert branches(True, 3.0) == 0.0 and branches(True, -3.0) == -4.0


@inlined
def chains(n, x):
    if 0 < n < 3:
        x[0] = 1.0
    if x[0] > 0.0 and (n > 5 or x[1] > 0.0) and n > 0:
        x[0] = 2.0
    if not x[0] > 0.0:
        x[0] = 3.0


def test_conditions_of_several_parts():
    tail = ["    x[0] = 2.0", "if not x[0] > 0.0:", "    x[0] = 3.0"]
    assert text_of(chains, 1, "x") == ["x[0] = 1.0", "if x[0] > 0.0 and x[1] > 0.0:", *tail]
    assert text_of(chains, 4, "x") == ["if x[0] > 0.0 and x[1] > 0.0:", *tail]
    assert text_of(chains, 7, "x") == ["if x[0] > 0.0:", *tail]


@inlined
def defaults(given, x):
    for value in static(given or ()):
        x[0] = value
    for value in static(given and [7.0]):
        x[1] = value


def test_the_value_of_conditions_of_static_parts():
    assert text_of(defaults, (), "x") == [] and text_of(defaults, (2.0,), "x") == ["x[0] = 2.0", "x[1] = 7.0"]


@inlined
def loops(n, x):
    for i in static(range(2)):
        for weight, place in static([(0.5, 3), (-1.5, 4)]):
            x[i] = x[i] + weight * x[place]
    for i in range(n):
        x[i] = i * 2
    for i in range(n - 1, -1, -1):
        if x[i] > 3:
            break
    while x[0] < 7:
        x[0] += 1


def test_loops_over_ranges_remain():
    assert text_of(loops, 3, "x") == [
        "x[0] = x[0] + 0.5 * x[3]", "x[0] = x[0] + -1.5 * x[4]", "x[1] = x[1] + 0.5 * x[3]", "x[1] = x[1] + -1.5 * x[4]",
        "for i in range(3):", "    x[i] = i * 2", "for i__2 in range(2, -1, -1):", "    if x[i__2] > 3:", "        break",
        "while x[0] < 7:", "    x[0] = x[0] + 1",
    ]  # fmt: skip
    assert text_of(loops, "n", "x")[4] == "for i in range(n):"
    x = np.arange(5.0)
    loops(3, x)
    np.testing.assert_array_equal(x, [7, 2, 4, 3, 4])


@inlined
def square(x, scale):
    y = x * x
    y = y * scale
    return y


@inlined
def twice(x):
    return x + x


@inlined
def calls(x):
    y, count = square(x, 2.0), 3
    z = square(y + 1.0, count)
    x = twice(x * z) + abs(y) + twice(y)
    return x


def test_calls_are_inlined_with_their_own_variables():
    assert text_of(calls, "x") == [
        "x__2 = x", "y = x__2 * x__2", "y = y * 2.0", "y__2 = y", "x__3 = y__2 + 1.0", "y__3 = x__3 * x__3",
        "y__3 = y__3 * 3", "z = y__3", "x__4 = x__2 * z", "x__2 = x__4 + x__4 + abs(y__2) + (y__2 + y__2)",
    ]  # fmt: skip
    assert calls(1.5) == 2 * 1.5 * (3 * 5.5**2) + 4.5 + 9.0


@inlined
def vectors(d, rolled, out):
    u = vector(d, rolled)
    components = range(d) if rolled else tuple(range(d))
    for c in components:
        u[c] = out[c] * 2.0
    call_function("f", (u,), u, [out, 1.0])
    out[0] = total(u[c] for c in static(range(d)))
    row = Row(out, 4)
    row[1] = u[1]


def test_vectors_are_variables_or_arrays():
    assert text_of(vectors, 2, False, "out") == [
        "u_0 = out[0] * 2.0", "u_1 = out[1] * 2.0", ast.unparse(ast.parse("u_0, u_1 = f(u_0, u_1, out, 1.0)")),
        "out[0] = u_0 + u_1", "out[4, 1] = u_1",
    ]  # fmt: skip
    assert text_of(vectors, 2, True, "out") == [
        "u_ = on_stack(2, np.float64)", "for c in range(2):", "    u_[c] = out[c] * 2.0", "f(u_, u_, out, 1.0)",
        "out[0] = u_[0] + u_[1]", "out[4, 1] = u_[1]",
    ]  # fmt: skip


@inlined
def numbers(x):
    x[0] = where(x[1] < -math.inf, single(0.1), np.float32(0.1))
    x[1] = fma(x[2], math.nan, np.sqrt(x[3])) + (1 if x[3] >= 0.0 else -1)
    x[2] = number_of((bits_of(x[3]) >> 52) | 7) ** 0.5 / np.sqrt(4.0)
    table = constants([2, 3])
    x[table[1]] = min(x[0], 1.0)


def test_numbers():
    single_tenth = float(np.float32(0.1))
    assert text_of(numbers, "x") == [
        f"x[0] = where(x[1] < -np.float64(math.inf), np.float32({single_tenth!r}), np.float32({single_tenth!r}))",
        "x[1] = fma(x[2], math.nan, np.sqrt(x[3])) + (1 if x[3] >= 0.0 else -1)",
        "x[2] = number_of(bits_of(x[3]) >> 52 | 7) ** 0.5 / 2.0", "table = constants(2, 3)", "x[table[1]] = min(x[0], 1.0)",
    ]  # fmt: skip


@inlined
def halved(x):
    for i in range(2):
        x[i] = x[i] / 2


@inlined
def with_function(x):
    separate("halved", halved, x)
    separate("halved", halved, x)


def test_functions_that_are_called():
    texts = [
        ast.unparse(ast.fix_missing_locations(x)) for x in definitions("kernel", ["x"], with_function, variable_named("x"))
    ]
    assert texts == [
        "def halved(a0):\n    for i in range(2):\n        a0[i] = a0[i] / 2",
        "def kernel(x):\n    halved(x)\n    halved(x)",
    ]  # fmt: skip


@inlined
def wrong(x):
    if any([x[0] > 1.0]):
        x[0] = 1.0


def test_a_static_condition_must_be_known():
    with pytest.raises(FoldingError, match="line 3 of wrong, if any.*static condition depends on x\\[0\\] > 1.0"):
        text_of(wrong, "x")


def test_variables_with_several_indices():
    @inlined
    def function(x):
        w = Variables("w")
        w[1, 2] = x
        w[0, 0] = w[1, 2] * 2.0

    assert text_of(function, "x") == ["w_1_2 = x", "w_0_0 = w_1_2 * 2.0"]
