"""Templates of kernels' texts: each rule, as its lines come out."""

from __future__ import annotations

import pytest

from mpiad.compiling.arguments import signature_in
from mpiad.ensemble import Tsit5
from mpiad.ensemble.compiled.kernel_spec import Fields, KernelSpec, filled

pytestmark = pytest.mark.serial

TEMPLATE = """
    def f(x: {real}[:, ::1], n: int64,
        when some: more: int8[::1],
    ):
        when not some: pass
        for i in range(n):
            @lines
            each c: x[{c}] = {c+1} + y{c+first}
            each c: each d: z{c}{d} = 0
            each c: if a{c}:
                when some:
                    b = {c-1}
                done
"""
FILLED = """\
def f(x: float32[:, ::1], n: int64,
    more: int8[::1],
):
    for i in range(n):
        one
            two
        x[0] = 1 + y3
        x[2] = 3 + y5
        z07 = 0
        z08 = 0
        z27 = 0
        z28 = 0
        if a0:
            b = -1
            done
        if a2:
            b = 1
            done"""


def test_each_rule():
    names = {"real": "float32", "some": True, "c": [0, 2], "d": (7, 8), "first": 3, "lines": ["one", "    two"]}
    made = filled(TEMPLATE, names)
    assert made == FILLED.splitlines()
    assert signature_in("\n".join(made), "f") == "void(float32[:, ::1], int64, int8[::1])"
    assert "    pass" in filled(TEMPLATE, names | {"some": False})


def test_loops():
    names = {"c": "range(3)", "d": [7, 8], "j": 4}
    made = filled("each c: each d: x[{c}, {d}] = y[{c+2}, {j+c}]\neach c:\n    if z:\n        done", names)
    assert made == [
        "for c in range(3):", "    x[c, 7] = y[c + 2, 4 + c]", "    x[c, 8] = y[c + 2, 4 + c]",
        "for c in range(3):", "    if z:", "        done",
    ]  # fmt: skip


@pytest.mark.parametrize("single", [False, True])
def test_places_of_fields(single):
    spec = KernelSpec(2, 0, 0, Tsit5.tableau, Tsit5().controller, single=single, lanes=4)
    fields = Fields(spec)
    fields.add(["# Not these.", "u[3] k[2, 3]", "exact now live"])
    now, live = ("exact[l]", "exact[4 + l]") if single else ("b[36 + l]", "b[40 + l]")
    text = fields.resolved(["$u[0] $u[2] $k[1, 2] $u[e] $k[e, c] $k[1, c]", "$now $live"])
    loops = "b[(0 + e) * 4 + l] b[(3 + e * 3 + c) * 4 + l] b[(6 + c) * 4 + l]"
    assert text == f"b[l] b[8 + l] b[32 + l] {loops}\n{now} {live}\n"
    assert [len(x) for x in fields.buffers(spec.dtype)] == ([36, 8] if single else [44, 0])
