"""Programs as loops compute, bit for bit, what the same programs compute without loops."""

from __future__ import annotations

import math
from functools import reduce

import autograd.numpy as anp
import numpy as np
import pytest
from one_kernel import one_kernel

from mpiad.compiling import rerolling
from mpiad.compiling.derivatives import jvp, vjp
from mpiad.compiling.program import Builder, evaluated
from mpiad.compiling.rerolling import Stored
from mpiad.compiling.source import function_source, numbered
from mpiad.compiling.symbols import Symbol, choose
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import trace
from mpiad.pytrees import flatten

pytestmark = pytest.mark.serial


def layers(u, p, t):
    first, second, bias, last = p
    return last @ anp.tanh(second @ anp.tanh(first @ u) + bias) - u * anp.cos(t)


def network(width, d=3):
    rng = np.random.default_rng(width)
    p = [rng.normal(size=shape) for shape in ((width, d), (width, width), (width, 1), (d, width))]
    leaves, build = flatten(p)
    return trace(layers, (d,), Parameters(leaves, [False] * len(leaves), build), np.dtype(float))


def reactions(count, seed):
    """Return the rates of reactions among some species, with the signs and the lengths of sums at random."""
    rng = np.random.default_rng(seed)
    builder = Builder()
    u = [Symbol(builder, builder.input("state", i)) for i in range(count)]
    p = [Symbol(builder, builder.input("parameter", i)) for i in range(2 * count)]
    rates = [0.0 * x for x in u]
    for k, (i, j, n) in enumerate(rng.integers(0, count, (2 * count, 3))):
        rate = p[k] * u[i] * u[j]
        rates[i], rates[n] = rates[i] - rate, rates[n] + rate
    return builder.program({"state": count, "parameter": 2 * count, "time": 1}, [x.number for x in rates])


def drawn(seed):
    """Return a program of random operations, with repeated parts, conditions and constants."""
    rng = np.random.default_rng(seed)
    builder = Builder()
    groups = {"state": 5, "parameter": 40, "time": 1}
    pool = [Symbol(builder, builder.input(name, i)) for name, size in groups.items() for i in range(size)]
    pool += [Symbol(builder, builder.constant(x)) for x in (0.5, -2.0, 1.0)]
    for _ in range(30):
        chosen = [[pool[i] for i in rng.integers(0, len(pool), 3)] for _ in range(rng.integers(1, 9))]
        kind = rng.integers(0, 6)
        for x, y, z in chosen:
            if kind == 0:
                pool.append(reduce(Symbol.__add__, (pool[i] * pool[-1 - i] for i in range(rng.integers(2, 20))), x))
            elif kind == 1:
                pool.append(choose((x > y) & (z <= 0.3), x - y, 1.5 * z))
            elif kind == 2:
                pool.append(x - y * z - 0.25 + z)
            elif kind == 3:
                pool.append((0.1 * x).sin().maximum(y))
            elif kind == 4:
                pool.append(x * x - (y + z).cos())
            else:
                pool.append(abs(x) ** 2 * float(rng.integers(1, 3)) + (y > 0.0).as_number())
    outputs = [pool[i].number for i in rng.integers(0, len(pool), 20)]
    return builder.program(groups, outputs)


def values(program, given, loops, monkeypatch, stored=()):
    """Return a program's values and its text, with or without loops, where Python runs the text."""
    monkeypatch.setattr(rerolling, "SHORT", 0 if loops else 10**9)
    monkeypatch.setattr(rerolling, "_GAIN", 0)
    names = {group: numbered(f"{group}_", size) for group, size in program.groups.items()}
    names["parameter"] = [f"s[{k}]" for k in range(program.groups.get("parameter", 0))]
    arguments = [name for group in names if group != "parameter" for name in names[group]]
    statements = {i: Stored("bars[{0}] += 2.0 * {1}", 3 * i) for i in stored}
    text = function_source(program, "f", names, [*arguments, "s", "bars"], stored=statements)
    scope = {"math": math, "np": np, "where": lambda condition, a, b: a if condition else b, "vector_tanh": math.tanh}
    scope |= {"on_stack": lambda count, kind: [math.nan] * count, "constants": lambda *entries: entries}
    exec(text[text.index("def f") :], scope)
    bars = [1.0] * (3 * len(program.outputs))
    scalars = [x for group, numbers in given.items() if group != "parameter" for x in numbers]
    return [*scope["f"](*scalars, given["parameter"], bars), *bars], text


def checked(program, monkeypatch, stored=()):
    """Compare the values with and without loops, and with NumPy's; return the number of lines."""
    rng = np.random.default_rng(9)
    given = {group: rng.normal(size=size).tolist() for group, size in program.groups.items()}
    (found, text), (expected, _) = (values(program, given, loops, monkeypatch, stored) for loops in (True, False))
    assert "on_stack" in text
    assert np.array(found).tobytes() == np.array(expected).tobytes()
    if not stored:
        by_numpy = evaluated(program, *given.values())
        np.testing.assert_allclose(found[: len(by_numpy)], by_numpy, rtol=1e-9, atol=1e-12)
    return text.count("\n")


def test_the_number_of_lines_does_not_grow_with_the_width_of_a_network(monkeypatch):
    lines = []
    for width in (8, 16):
        program = network(width)
        back = vjp(program, {"state": None, "parameter": None})
        forward = jvp(program, {"state": None})
        stored = range(program.groups["state"], len(back.outputs))
        lines.append([checked(program, monkeypatch), checked(forward, monkeypatch), checked(back, monkeypatch, stored)])
    assert all(wide <= narrow < 200 for narrow, wide in zip(*lines))


@pytest.mark.parametrize("seed", [0, 1])
def test_sparse_reactions(monkeypatch, seed):
    program = reactions(30, seed)
    back = vjp(program, {"state": None, "parameter": None})
    assert checked(program, monkeypatch) < 0.9 * program.cost
    assert checked(back, monkeypatch, range(30, len(back.outputs))) < 0.9 * back.cost


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(monkeypatch, seed):
    program = drawn(seed)
    checked(program, monkeypatch)
    checked(program, monkeypatch, range(5, 15))


def test_values_that_take_too_much_memory_are_scalars(monkeypatch):
    monkeypatch.setattr(rerolling, "_MOST_ENTRIES", 10)
    program = network(8)
    given = {group: [0.5] * size for group, size in program.groups.items()}
    assert "on_stack" not in values(program, given, True, monkeypatch)[1]


def test_long_chains_of_conditions_are_scalars(monkeypatch):
    """Each is used by two others, so trees of all conditions would have a size that grows exponentially."""
    builder = Builder()
    u = [Symbol(builder, builder.input("state", i)) for i in range(4)]
    a, b = u[0] > 0.0, u[1] > 0.0
    for k in range(600):
        c = u[k % 4] > 0.01 * k
        a, b = a & (b | c), a | (b & c)
    outputs = [choose(a, x, -x) + choose(b, 1.0, x) for x in u]
    program = builder.program({"state": 4, "parameter": 0}, [x.number for x in outputs])
    assert "on_stack" not in values(program, {"state": [0.5] * 4, "parameter": []}, True, monkeypatch)[1]


@pytest.mark.parametrize("dtype", [float, np.float32])
def test_arrays_on_the_stack_in_machine_code(dtype):
    real = np.dtype(dtype).name
    text = f"""
def f(x, a):
    stack = on_stack(4, np.{real})
    places = constants(2, 0, 3)
    weights = constants(np.{real}(0.5), np.{real}(-2.0), np.{real}(4.0))
    stack[1] = x
    for k in range(3):
        stack[places[k]] = weights[k] * stack[1] + a[k]
    return stack[0], stack[3]


def run(x: {real}[::1], a: {real}[::1], out: {real}[:, ::1]):
    for l in lanes(16):
        out[0, l], out[1, l] = f(x[l], a)
    out[2, 0], out[3, 0] = f(x[0], a)
"""
    signature = f"void({real}[::1], {real}[::1], {real}[:, ::1])"
    x, a, out = np.arange(16, dtype=dtype), np.array([1, 2, 3], dtype), np.zeros((4, 16), dtype)
    one_kernel(text, "run", signature)(x, a, out)
    np.testing.assert_array_equal(out[:2], [2 - 2 * x, 4 * x + 3])
    np.testing.assert_array_equal(out[2:, 0], [2, 3])
