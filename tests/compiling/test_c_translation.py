"""Statements of the kernel language as C: what a compiler of C++ makes of them gives the numbers that Python gives."""

from __future__ import annotations

import ctypes
import math
import subprocess

import numpy as np
import pytest
from kernels_on_cpu import COMPILER

from mpiad.compiling.c_translation import c_lines

pytestmark = [pytest.mark.serial, pytest.mark.skipif(COMPILER is None, reason="there is no compiler of C++")]

LINES = [
    "a = x * 2.0 - -y",
    "b = fma(a, x, 0.5) if a > y or not x < 1.0 else max(x, y) ** 1.5",
    "y, z, = f(a, b)",
    "for i in range(5):",
    "    w = b * 0.25",
    "    if w < 0.1 and i > 1:",
    "        break",
    "    else:",
    "        b = w",
    "y += where((b > 0.0) & (x < 2.0), abs(-b), math.hypot(3.0, 4.0))",
    "count = 0.0",
    "while count < 2.5:",
    "    count += 1.0",
    "    m[1, 0] = -(a + count)",
    "m[1, 0] += m[1, 0] * -(b - y)",
    "result = y - z / (x - (a - b)) - min(a, b) * m[1, 0]",
]
HEAD = """
#include <math.h>
typedef double real;
static double larger(double a, double b) { return a > b || a != a ? a : b; }
static double smaller(double a, double b) { return a < b || a != a ? a : b; }
static void f(real a, real b, real& c, real& d) { c = a - b; d = a + b; }
extern "C" double computed(double x, double y) {
    double result, elements[4];
    #define m(i, j) elements[(i) * 2 + (j)]
"""


@pytest.mark.parametrize("x, y", [(0.3, -1.2), (1.7, 0.4), (2.5, 9.0), (-3.0, 0.1)])
def test_numbers_are_those_of_python(x, y, tmp_path):
    source, library = tmp_path / "text.cpp", tmp_path / "text.so"
    source.write_text("\n".join([HEAD, *c_lines(LINES, {"y", "result"}), "return result;", "}"]))
    flags = ["-std=c++14", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True)
    computed = ctypes.CDLL(str(library)).computed
    computed.restype, computed.argtypes = ctypes.c_double, [ctypes.c_double] * 2
    names = {
        "x": x, "y": y, "fma": lambda a, b, c: a * b + c, "where": lambda c, a, b: a if c else b, "math": math,
        "f": lambda a, b: (a - b, a + b), "np": np, "m": np.zeros((2, 2)),
    }  # fmt: skip
    exec("\n".join(LINES), names)  # noqa: S102 the language is a part of Python
    assert computed(x, y) == names["result"]
