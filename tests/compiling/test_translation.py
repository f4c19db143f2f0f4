"""A kernel compiled does what the same text does as Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from one_kernel import one_kernel

from mpiad.compiling import translation

pytestmark = pytest.mark.serial

FLOW = """
def clipped(x, low):
    larger = x if x > low else low
    return (larger, x < low)

def run(x, n, out, codes):
    total = 0
    for i in range(n):
        if x[i] != x[i]:
            pass
        elif x[i] > 9.0 and not n < 3 or x[i] == -7.5:
            codes[0] = i
            break
        elif x[i] < 0.0:
            total -= x[i]
        else:
            total = total + x[i]
        i = 100
    low = high = 0
    while low * low < n:
        low += 1
        high = (low << 3) | 5
    for j in range(n - 1, -1, -2):
        y, was_low = clipped(x[j], 1.5)
        codes[1] += 1 if was_low else 10 * j
        out[j] = out[j] * 0.5 + y
    a, b = 2.0, 3.0
    a, b = b, a
    out[n] = total
    out[n + 1] = low / high + a ** b
    out[n + 2] = 7 if n > 4 or x[1000000000] > 0.0 else -7
    codes[2] = high ^ (n & 6) >> 1
"""

TABLES = """
def run(table, flags, few, small, cube, column):
    for i in range(table.shape[0]):
        row = i * table.shape[1]
        for j in range(table.shape[1]):
            cube[i, j, column] = table[i, j] - 0.5 * cube[i, j, 0]
            flags[j] = flags[j] | (table[i, j] > 0.0)
            few[j] += row + j
        small[i] = few[0] - 100
    column = few.size + table.size
    few[0] = column
"""

VIEWS = """
def run(memory, starts, length, out):
    for k in range(0, starts.size, 2):
        a = memory[starts[k] : starts[k] + length]
        b = memory[starts[k + 1] : starts[k + 1] + length]
        p = q = 0.0
        for i in range(a.size):
            p += a[i] * b[i]
            q = max(q, abs(a[i]), min(b[i], 2))
        out[k] = p
        out[k + 1] = q
        a[0] = -1.0
        memory = memory[1 : memory.size]
"""

LANES = """
def tangent(x, c):
    return (x * c + math.sin(x), x < c)

def inner(out, x, l, c):
    for i in range(3):
        out[16 * i + l] = c * x[16 * i + l] - i
    return x[l]

def run(x, y, few, c, n, out):
    t = -1.0
    for l in lanes(n):
        t = x[l] * c
        s, below = tangent(x[16 + l], few[0])
        total = 0.0
        for i in range(3):
            total = total + x[16 * i + l] * (i + 1)
        t = where(below | (x[l] > 0.5), abs(t), max(s, total))
        out[l] = fma(t, 2.0, -s)
        out[16 + l] = number_of(bits_of(t) ^ (bits_of(total) & (15 << 3)))
        out[32 + l] = where(not below, np.floor(total), 1 if c > 0.0 else 2)
        y[l] = c
        y[16 + l] += x[l] * np.float32(0.5)
        y[32 + l] = math.atan2(s, t) if n > 3 else 0.0
        first = inner(out[48:96], x, l, few[1])
        y[l] = y[l] - first
    out[0] = t
    first = inner(out[96:144], x, n - 1, c)
"""


def as_python(text, given):
    scope = {"math": math, "np": np, "lanes": range, "where": lambda c, a, b: a if c else b}
    scope |= {"fma": lambda a, b, c: a * b + c}
    scope["bits_of"], scope["number_of"] = lambda x: x.view(np.int64), lambda i: np.int64(i).view(float)
    exec(text, scope)
    scope["run"](*given)


def both(text, signature, *given):
    """Return the arrays that the text leaves, compiled and as Python."""
    compiled, python = ([x.copy() if isinstance(x, np.ndarray) else x for x in given] for _ in range(2))
    one_kernel(text, "run", signature)(*compiled)
    as_python(text, python)
    return [(a, b) for a, b in zip(compiled, python) if isinstance(a, np.ndarray)]


@pytest.mark.parametrize("x", [
    [0.5, -2.0, math.nan, 3.25, 9.5, 1.0], [4.0, -7.5, 2.0, 0.0, 1.0, 8.0], [1.0, -1.0, 1e300, 5.0, -0.0, 2.0],
])  # fmt: skip
def test_branches_and_loops(x):
    x = np.array(x)
    signature = "void(float64[::1], int64, float64[::1], int64[::1])"
    found = both(FLOW, signature, x, len(x), np.arange(9.0), np.zeros(3, np.int64))
    for compiled, python in found:
        np.testing.assert_array_equal(compiled, python)


def test_entries_of_every_dtype():
    rng = np.random.default_rng(3)
    given = (
        rng.normal(size=(3, 4)).astype(np.float32), np.array([True, False, False, False]), np.arange(4, dtype=np.int32),
        np.zeros(3, np.int8), rng.normal(size=(3, 4, 2)), 1,
    )  # fmt: skip
    signature = "void(float32[:, ::1], boolean[::1], int32[::1], int8[::1], float64[:, :, ::1], int64)"
    for compiled, python in both(TABLES, signature, *given):
        np.testing.assert_array_equal(compiled, python)


def test_views_share_memory():
    rng = np.random.default_rng(4)
    signature = "void(float64[::1], int64[::1], int64, float64[::1])"
    for compiled, python in both(VIEWS, signature, rng.normal(size=50), np.array([3, 20, 8, 40]), 9, np.zeros(4)):
        np.testing.assert_array_equal(compiled, python)


def test_arguments_that_overlap():
    """A loop reads what it has just written through another argument, except in linked kernels."""
    text = "def run(x, y):\n    for i in range(x.size):\n        y[i] = 0.5 * x[i] + 1.0"
    signature = "void(float64[::1], float64[::1])"
    function = one_kernel(text, "run", signature)
    for distance in (0, 1, 3):
        found, expected = np.arange(1000.0), list(range(1000))
        function(found[: 1000 - distance], found[distance:])
        for i in range(1000 - distance):
            expected[i + distance] = 0.5 * expected[i] + 1.0
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("most", [0, 300])
@pytest.mark.parametrize("dtype", [float, np.float32])
def test_lanes_are_computed_as_vectors(dtype, most, monkeypatch):
    monkeypatch.setattr(translation, "_MOST_INLINED", most)
    rng = np.random.default_rng(5)
    name = np.dtype(dtype).name
    signature = f"void(float64[::1], {name}[::1], float64[::1], float64, int64, float64[::1])"
    given = rng.normal(size=48), rng.normal(size=48).astype(dtype), np.array([0.25, 3.0]), 1.5, 16, np.zeros(144)
    for compiled, python in both(LANES, signature, *given):
        # fma is rounded once, and NumPy's scalars keep the precision of y.
        np.testing.assert_allclose(compiled[1:], python[1:], rtol=1e-6 if dtype == np.float32 else 1e-14)


def test_vectors_have_no_branches():
    text = "def run(x):\n    for l in lanes(8):\n        if x[l] > 0.0:\n            x[l] = 1.0"
    with pytest.raises(NotImplementedError, match="line 3 of a kernel"):
        one_kernel(text, "run", "void(float64[::1])")


def test_sums_are_reordered_only_where_that_is_allowed():
    text = "def run(x, out):\n    s = 0.0\n    for i in range(x.size):\n        s += x[i]\n    out[0] = s"
    signature, x, found = "void(float64[::1], float64[::1])", np.full(4096, 0.1), []
    for fast in ("", "reassoc"):
        out = np.zeros(1)
        one_kernel(text, "run", signature, fast)(x, out)
        found.append(out[0])
    in_order = 0.0
    for value in x.tolist():
        in_order += value
    assert found[0] == in_order != found[1]
    np.testing.assert_allclose(found[1], 409.6, rtol=1e-13)


@pytest.mark.parametrize("line", [
    "y = [1.0]", "y = x + 1.0",
    "x[0, 0] = 1.0", "y = x[:2:1]", "for y in x: pass", "y = np.ones(3)", "y = unknown", "y = 1 // 2",
    "import os", "y = x[0.5]", "y, z = 1.0", "y = 1 < 2 < 3", "print(x)",
])  # fmt: skip
def test_what_is_not_of_the_language_is_refused_with_its_line(line):
    with pytest.raises(NotImplementedError, match="line 2 of a kernel"):
        one_kernel(f"def run(x):\n    {line}", "run", "void(float64[::1])")
