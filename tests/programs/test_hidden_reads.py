"""Jitted functions whose closure is read by Python or a library: by methods of values, and attributes that aren't named.

Each case has definitions, an expression of x, and a change after which the expression has another value. It is interpreted
by Python before and after the change, for comparison; `REFUSED` are functions that aren't compiled.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpiad

pytestmark = pytest.mark.serial

X = np.array([0.5, 1.0, 1.5])
HEAD = """
import abc, collections, dataclasses, enum, functools, typing
import autograd, autograd.numpy as np, numpy
import mpiad
FACTOR, TABLE = 2.0, {2.0: 3.0, 3.0: 5.0, "2.0": 3.0, "3.0": 5.0}
def called(value): return value.method()
class A:
    def method(self): return FACTOR
class B(A): pass
class C:
    def method(self): return 7.0
"""
MODE = "class Mode(enum.{}):\n    ON = {}\n    def method(self): return FACTOR\n"
VALUE = "class Value({0}):\n    def {2}: return {3}\nV = Value({1})"
CLASS = "class Value:\n    def __init__(self, x=1.0): self.x = x\n    {}"
METHOD, NEW, PARAMETER = "method(self)", "FACTOR = 3.0", "@dataclasses.dataclass\nclass Value:\n    u: typing.Any\n"
NAMED = "class Value(typing.NamedTuple):\n    u: typing.Any\n    def __mul__(self, y): return self.u * FACTOR * y\n"
OBJECT = "class Model:\n    rate = 2.0\n    def __call__(self, x): return self.rate * np.sum(x**2)\nM = Model()\n"
COMPILED = [
    (OBJECT + "G = autograd.grad(M)", "G(x)", "M.rate = 3.0"),
    (OBJECT + "G = mpiad.value_and_grad(M)", "G(x)[1]", "M.rate = 3.0"),
    (OBJECT + "G = numpy.vectorize(M)", "x * G(numpy.ones(3))", "M.rate = 3.0"),
    (MODE.format("Enum", 1.0), "x * called(Mode.ON)", NEW),
    (MODE.format("IntEnum", 1), "x * [called(mode) for mode in (Mode.ON,)][0]", NEW),
    ("class Mode(enum.Enum):\n    ON = numpy.ones(3)", "x * [m.value for m in [Mode.ON]][0]", "Mode.ON.value[0] = 5.0"),
    ("class Mode(enum.Enum):\n    ON = 1\n    def __init__(self, k): self.k = 1\nM = [Mode.ON]", "x*M[0].k", "M[0].k = 2"),
    (VALUE.format("list", "[1.0]", "__len__(self)", "int(FACTOR)"), "x * len(V)", NEW),
    (VALUE.format("dict", "", "__missing__(self, key)", "FACTOR"), "x * V[1]", NEW),
    (VALUE.format("set", "", "__contains__(self, key)", "FACTOR == 2.0"), "x * (2.0 if 1 in V else 3.0)", NEW),
    (VALUE.format("float", "1.0", "__mul__(self, x)", "x * FACTOR"), "V * x", NEW),
    (VALUE.format("str", "'a'", METHOD, "FACTOR"), "x * called(V)", NEW),
    (VALUE.format("numpy.ndarray", "3", METHOD, "FACTOR"), "x * called(V)", "Value.method = lambda self: 5.0"),
    (NAMED + "    def method(self): return FACTOR\nV = Value(1.0)", "x * called(V)", NEW),
    ("D = collections.defaultdict(lambda: FACTOR)", "x * D[1] * D.pop(1)", NEW),
    (CLASS.format("def __repr__(self): return str(FACTOR)"), "x * TABLE[f'{Value(x)}'] * TABLE[repr(Value(x))]", NEW),
    (CLASS.format("rate = property(None, None, lambda self: setattr(self, 'x', FACTOR))")
     + "\ndef deleted(v):\n    del v.rate\n    return v.x", "x * deleted(Value(x))", NEW),
    ("class Stop(Exception):\n    def method(self): return FACTOR\ndef raises():\n    raise Stop()\ndef caught(x):\n"
     "    try: raises()\n    except Stop as stop: return x * called(stop)", "caught(x)", NEW),
    (CLASS.format("keys = lambda self: [FACTOR]\n    def __getitem__(self, key): return key"), "x * sum({**Value()})", NEW),
    (CLASS.format("def mean(self, **options): return FACTOR") + "\naverage = numpy.mean", "x * average(Value())", NEW),
    (PARAMETER + "    v: float = dataclasses.field(init=False, default=1.0, compare=False, repr=False)\n"
     "Value.v = property(lambda self: FACTOR)", "x * dataclasses.asdict(Value(1.0))['v']", NEW),
    ("", "x * B().method()", "B.__bases__ = (C,)"),
    ("b = B()", "x * b.method()", "B.__bases__ = (C,)"),
    ("class S(B):\n    def method(self): return super().method()\nm = S().method", "x * m()", "S.__bases__ = (C,)"),
    ("class I(abc.ABC): pass", "x * (2.0 if isinstance(A(), I) else 3.0)", "I.register(A)"),
]  # fmt: skip
# Functions `g`, called with the arguments `given(x)`.
OF_ARGUMENTS = [
    (NAMED, "v * 2.0", "Value(x)", NEW),
    (NAMED + "    def method(self): return self.u * FACTOR", "v['a'][0].method()", "{'a': [Value(x)]}", NEW),
    (
        "@mpiad.pytrees.register\n" + PARAMETER + "    def method(self): return self.u * FACTOR",
        "called(v)",
        "Value(x)",
        NEW,
    ),
    ("class Value(dict):\n    def method(self): return self['u'] * FACTOR", "called(v)", "Value(u=x)", NEW),
    (VALUE.format("float", "1.0", "__mul__(self, x)", "x * FACTOR") + "\nW = numpy.arange(3.0)", "v * W", "V", NEW),
    (VALUE.format("int", "1", "__mul__(self, x)", "x * FACTOR") + "\nW = numpy.arange(3.0)", "v * W", "V", NEW),
    ("Mode = enum.IntEnum('Mode', 'ON OFF')\nM = Mode.ON", "(1.0 if v is Mode.ON else 2.0) * FACTOR", "M", "M = Mode.OFF"),
]
DESCRIPTOR = (
    "class D({0}):\n    def __get__(self, *args): return {1}\nclass Value:\n    rate = D(lambda self: 1.0)\nV = Value()"
)
REFUSED = [
    (DESCRIPTOR.format("property", "FACTOR"), "x * Value().rate", NEW),
    (DESCRIPTOR.format("staticmethod", "lambda: FACTOR"), "x * Value().rate()", NEW),
    (DESCRIPTOR.format("staticmethod", "lambda: FACTOR"), "x * V.rate()", NEW),
    (DESCRIPTOR.format("functools.cached_property", "FACTOR"), "x * Value().rate", NEW),
    ("double = numpy.frompyfunc(lambda v: v * FACTOR, 1, 1)", "x * double(numpy.ones(3)).astype(float)", NEW),
    ("", "x * type(A()).__subclasses__()[0]().method()", "B.method = lambda self: 9.0"),
    (
        "def f0(x): return x * FACTOR\n" + "".join(f"def f{k}(x): return f{k - 1}(x)\n" for k in range(1, 500)),
        "f499(x)",
        NEW,
    ),
]


def functions(text: str) -> tuple[ModuleType, Any, Any]:
    """Return a module with definitions, its function `g`, and the function that calls ``g(given(x))``."""
    module = ModuleType("definitions")
    sys.modules["definitions"] = module  # dataclasses look there
    exec(compile(HEAD + text, "definitions", "exec"), vars(module))
    return module, module.g, module.given


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", [*COMPILED, *OF_ARGUMENTS, *REFUSED])
def test_a_change_of_what_is_read_without_a_name_shows(case: tuple[str, ...], strict: bool) -> None:
    definitions, expression, *given, change = case
    text = f"{definitions}\ndef g({'v' if given else 'x'}): return {expression}\ndef given(x): return {(*given, 'x')[0]}\n"
    module, fun, argument = functions(text)
    jitted = mpiad.jit(fun, strict=strict)
    if strict and case in REFUSED:
        with pytest.raises(TypeError, match="can't be followed"):
            jitted(argument(X))
        return
    before = fun(argument(X))
    for _ in range(2):
        np.testing.assert_allclose(jitted(argument(X)), before, rtol=1e-13)
    exec(change, vars(module))
    assert np.any(fun(argument(X)) != before), "the change doesn't show"
    for _ in range(2):
        np.testing.assert_allclose(jitted(argument(X)), fun(argument(X)), rtol=1e-13)
