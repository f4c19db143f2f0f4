"""The text of a program computes what the program does: as Python, compiled, in C, in both precisions."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
from itertools import count

import numpy as np
import pytest
from kernels_on_cpu import COMPILER
from one_kernel import one_kernel
from traced_right_hand_sides import SYSTEMS

from mpiad.compiling import source
from mpiad.compiling.arguments import arguments_of
from mpiad.compiling.derivatives import vjp
from mpiad.compiling.program import OPERATIONS, Builder, evaluated
from mpiad.compiling.rerolling import Stored
from mpiad.compiling.source import function_source, lines, numbered, with_few_live
from mpiad.compiling.translation import translated
from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import trace
from mpiad.ensemble.problem import ODEProblem
from mpiad.pytrees import flatten

pytestmark = pytest.mark.serial


def function_text(program, dtype=float):
    """Return the source of f(x, o) with the inputs in x and the outputs in o."""
    places = count()
    names = {group: [f"x[{next(places)}]" for _ in range(size)] for group, size in program.groups.items()}
    outputs = [f"o[{i}]" for i in range(len(program.outputs))]
    return "\n    ".join(["def f(x, o):", *lines(program, names, outputs, dtype=dtype)])


def made(text):
    scope = {"math": math, "np": np, "where": lambda condition, a, b: a if condition else b}
    exec(text, scope)
    return scope["f"]


def all_operations():
    """Return a program with an output for each operation."""
    builder = Builder()
    states = [builder.input("state", i) for i in range(3)]
    flag, other = builder.call("less", *states[:2]), builder.call("greater_equal", states[1], builder.constant(0.25))
    outputs = []
    for name, entry in OPERATIONS.items():
        arguments = states[: entry.arity]
        if name.startswith("logical"):
            arguments = [flag, other][: entry.arity]
        elif name == "where":
            arguments = [flag, *states[:2]]
        value = builder.call(name, *arguments)
        if entry.boolean:
            value = builder.call("where", value, builder.constant(1.0), builder.constant(-math.inf))
        outputs.append(value)
    return builder.program({"state": 3}, outputs)


# What NumPy makes of NaN and of zeros, too.
STATES = [[0.3, 0.7, -0.2], [0.7, 0.3, 0.0], [0.0, 0.5, 1.0], [0.5, 0.5, 1.0], [math.nan, 0.5, 1.0], [0.5, math.nan, 1.0]]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_compiled_each_operation_is_numpys(dtype):
    program = all_operations()
    name = np.dtype(dtype).name
    text, signature = function_text(program, dtype), f"void({name}[::1], {name}[::1])"
    f = one_kernel(text, "f", signature)
    for u in np.array(STATES, dtype):
        out = np.empty(len(program.outputs), dtype)
        f(u, out)
        expected = np.array([float(value) for value in evaluated(program, u)])
        rtol = 4e-16 if dtype is np.float64 else 3e-7
        np.testing.assert_allclose(out, expected.astype(dtype), rtol=2 * rtol, atol=rtol, err_msg=f"{u}")
    # Wherever a constant were double, so were the value of the operation; functions of doubles are called with conversions.
    body = translated(text, "f", arguments_of(signature)).partition("define void @f(")[2].partition("\n}")[0]
    operations = [line for line in body.splitlines() if not re.search("fpext|fptrunc|_double", line)]
    assert set(re.findall(r"\b(?:float|double)\b", "\n".join(operations))) == {"double" if dtype is np.float64 else "float"}


@pytest.mark.parametrize("name", ["lorenz_array", "piecewise", "elementary", "remainders", "network"])
def test_python_computes_systems_and_their_derivatives(name):
    system = SYSTEMS[name]
    leaves, build = flatten(ODEProblem(system.f, [0.0], (0, 1), system.p).p)
    program = trace(system.f, (system.states,), Parameters(leaves, [False] * len(leaves), build), float)
    rng = np.random.default_rng(2)
    for derived in (program, vjp(program)):
        given = [(rng.random if group == "parameter" else rng.normal)(size=size) for group, size in derived.groups.items()]
        out = np.empty(len(derived.outputs))
        made(function_text(derived))(np.concatenate(given), out)
        np.testing.assert_allclose(out, np.array(evaluated(derived, *given), float), rtol=1e-14, atol=1e-15)


def test_c_declares_each_value_once_and_keeps_its_precision():
    builder = Builder()
    x, y = builder.input("state", 0), builder.input("state", 1)
    larger = builder.call("greater", x, y)
    chosen = builder.call("where", larger, builder.call("exp", x), builder.constant(-0.1))
    known = builder.call("where", builder.call("logical_not", larger), builder.constant(0.5), builder.constant(math.inf))
    program = builder.program({"state": 2}, [chosen, known])

    def body(dtype):
        head, *inner, end = function_source(program, "f", {"state": ["x", "y"]}, ["x", "y"], dtype, "c").split("\n")
        assert (head, end) == ("INLINE void f(const real x, const real y, real& out0, real& out1) {", "}")
        return [line.strip() for line in inner]

    assert body(np.float32) == [
        "auto v2 = x > y;", "auto v3 = exp(x);", "auto v5 = (v2 ? v3 : (real)((-0.1)));",
        "auto v6 = !(v2);", "auto v9 = (v6 ? 0.5f : (real)(INFINITY));", "out0 = v5;", "out1 = v9;",
    ]  # fmt: skip
    assert body(float)[2:5:2] == ["auto v5 = (v2 ? v3 : (-0.1));", "auto v9 = (v6 ? 0.5 : INFINITY);"]


@pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_each_operation_in_c_is_numpys(dtype, tmp_path):
    program = all_operations()
    source, library = tmp_path / "text.cpp", tmp_path / "text.so"
    names, count = numbered("u", 3), len(program.outputs)
    head = f"""
#include <math.h>
#define INLINE static inline
typedef {"double" if dtype is np.float64 else "float"} real;
"""
    given = [f"u[{i}]" for i in range(3)] + [f"o[{i}]" for i in range(count)]
    text = function_source(program, "f", {"state": names}, names, dtype, "c")
    source.write_text(f'{head}{text}\nextern "C" void g(const real* u, real* o) {{ f({", ".join(given)}); }}\n')
    subprocess.run([COMPILER, "-std=c++14", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    g = ctypes.CDLL(str(library)).g
    for u in np.array(STATES, dtype):
        out = np.empty(count, dtype)
        g(ctypes.c_void_p(u.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        expected = np.array([float(value) for value in evaluated(program, u)])
        rtol = 4e-16 if dtype is np.float64 else 3e-7
        np.testing.assert_allclose(out, expected.astype(dtype), rtol=2 * rtol, atol=rtol, err_msg=f"{u}")


def test_long_functions_are_divided_into_pieces(monkeypatch):
    builder = Builder()
    x = [builder.input("x", i) for i in range(4)]
    for i in range(40):
        x.append(builder.call("multiply", builder.call("sin", x[-3]), builder.call("add", x[-1], x[i // 2])))
    program = builder.program({"x": 4}, [x[-1], x[20], x[2], x[-5]])
    stored = {1: Stored("bars[{0}] += {1}", 0), 3: Stored("bars[{0}] += {1}", 1)}
    text = [function_source(program, "f", {"x": numbered("x", 4)}, [*numbered("x", 4), "bars"], stored=stored)]
    monkeypatch.setattr(source, "_PIECE", 7)
    text.append(function_source(program, "f", {"x": numbered("x", 4)}, [*numbered("x", 4), "bars"], stored=stored))
    assert text[0].count("def ") == 1 < 10 < text[1].count("def ")
    given, found = [0.3, -1.2, 0.7, 2.5], []
    for one in text:
        bars = [1.0, 2.0]
        found.append([*made(one)(*given, bars), *bars])
    expected = evaluated(program, given)
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], [expected[0], expected[2], 1.0 + expected[1], 2.0 + expected[3]], rtol=1e-14)


def most_live(statements, order):
    """Return the largest number of variables between their assignment and their last use."""
    words = [re.findall(r"\w+", statements[k]) for k in order]
    assigned = {each[0]: k for k, each in enumerate(words)}
    used = {name: max(k for k, each in enumerate(words) if name in each) for name in assigned}
    return max(sum(assigned[name] <= k < used[name] for name in assigned) for k in range(len(order)))


def test_few_variables_are_live():
    # The sums of the leaves of four trees with 32 leaves, all loaded before, and with the sums of one level one by one.
    statements, roots = [f"x{k} = a{k % 32}[{k}]" for k in range(128)], []
    for tree in range(4):
        names = [f"x{k}" for k in range(32 * tree, 32 * tree + 32)]
        while len(names) > 1:
            made = [f"v{len(statements) + k}" for k in range(len(names) // 2)]
            statements += [f"{v} = {x} + {y} * x0" for v, x, y in zip(made, names[::2], names[1::2])]
            names = made
        roots += names
    statements += [f"o{k} = {name}" for k, name in enumerate(roots)]
    order = with_few_live(statements, first={"x99", "x3"})
    assert sorted(order) == list(range(len(statements))) and order[:2] == [3, 99]
    found = [{f"a{k}": np.random.default_rng(k).random(128) for k in range(32)} for _ in range(2)]
    for values, places in zip(found, (range(len(statements)), order)):
        exec("\n".join(statements[k] for k in places), values)
    assert all(found[0][f"o{k}"] == found[1][f"o{k}"] for k in range(4))
    # A tree of depth five takes a variable for each level; besides, `x0` and the two first ones.
    assert most_live(statements, range(len(statements))) >= 128
    assert most_live(statements, order) <= 10
