"""Jitted functions that read objects of users' classes in containers, as arguments of helpers, and through properties.

Each case is an expression and a change of what it reads. It is evaluated in several containers, as a value, a gradient, a
tangent, a loop, or in functions that are alike, and compared with plain Python before and after the change.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.compiling.closure import survey
from mpiad.timestepping import scan

X, V = np.array([0.5, 1.0, 1.5]), np.array([1.0, -0.5, 0.25])
HEAD = """
import collections, copy, dataclasses, enum, functools, logging, os, threading, types, typing
import autograd.numpy as np, numpy
import mpiad
from mpi4py import MPI
FACTOR = 2.0
class Part:
    def __init__(self, depth): self.depth = depth
class Base:
    bias = 0.5
    def inherited(self, x): return x * self.bias * FACTOR
    def over(self, x): return x * self.rate
def hooked(x): return x * FACTOR
class Block(Base):
    scale, table = 1.5, [1.0, 2.0]
    def __init__(self, rate):
        self.rate, self.w, self.items, self.part, self.hook = rate, numpy.arange(1.0, 4.0), [1.0, 2.0], Part(rate), hooked
        self.inner, self.level = rate, 1
        # What can't be followed; the code doesn't name it.
        self.rng, self.file = numpy.random.default_rng(1), open(os.devnull)
        self.lock, self.queue = threading.Lock(), iter([1])
        self.comm, self.logger = MPI.COMM_WORLD, logging.getLogger("block")
    def method(self, x): return x * self.rate
    def deep(self, x): return self.method(x) + self.part.depth
    @property
    def twice(self): return self.inner * 2.0
    @staticmethod
    def stat(x): return x * FACTOR
    @classmethod
    def of_class(cls, x): return x * cls.scale
    def over(self, x): return super().over(x) + self.inner
    def __call__(self, x): return x * self.rate + self.scale
    def __add__(self, x): return x * self.rate
    def __getitem__(self, k): return self.items[k]
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.level == other
    def __hash__(self): return 1
    def __repr__(self): return str(self.rate)
    def save(self): self.file.write("a")
class Other(Block):
    scale, bias, twice = 5.5, 8.0, 4.0
    def method(self, x): return x * 7.0
    def __call__(self, x): return x * 9.0
    def over(self, x): return x - self.rate
    def __repr__(self): return "5.5"
class Slots:
    __slots__ = ("rate", "later", "unused")
    def __init__(self, rate): self.rate, self.unused = rate, open(os.devnull)
@dataclasses.dataclass
class Data:
    rate: float
    w: typing.Any = 1.0
@mpiad.pytrees.register
@dataclasses.dataclass
class Registered(Data): pass
@dataclasses.dataclass(init=False, repr=False, eq=False)
class Doubled:
    rate: float = 1.0
    def __init__(self, rate): self.doubled = 2.0 * rate
def doubled():
    made = Doubled(1.0)
    made.rate = 1.5
    return made
class Pair(typing.NamedTuple):
    first: typing.Any
    second: typing.Any
class Listed(list): pass
class Model:
    def __init__(self, part): self.part, self.log = part, open(os.devnull)
    def get(self): return self.part
def rate_of(b): return b.rate
def helper(b, x): return rate_of(b) * b.method(x)
"""
# Definitions of C, which contains the object {0}, and the expression of the object.
CONTAINERS = [
    ("C = [{0}]", "C[0]"), ("C = (1.0, {0})", "C[1]"), ("C = {{'a': {0}}}", "C['a']"), ("C = {0}", "C"),
    ("C = {{'a': {0}}}", "[v for k, v in C.items()][0]"), ("C = collections.deque([{0}])", "C[0]"),
    ("C = Pair(1.0, {0})", "C.second"), ("C = [types.SimpleNamespace(a={0})]", "C[0].a"),
    ("C = [Model({0})]", "C[0].get()"), ("C = Model(Model({0}))", "C.part.part"), ("C = [[{0}]]", "C[0][0]"),
    ("C = functools.partial(lambda b: b, {0})", "C()"),
    ("C = {{1: Listed()}}\nC[1].first = {0}", "C[1].first"), ("class C(enum.Enum):\n    ON = [{0}]", "C.ON.value[0]"),
    ("class C:\n    known = {{'a': {0}}}", "C.known['a']"), ("S = {0}\nC, D = [S], {{1: S}}", "(C[0] if FACTOR else D[1])"),
    ("def enclosing(o):\n    return lambda: o\nC = enclosing({0})", "C()"), ("def C(o={0}): return o", "C()"),
    ("C = types.MappingProxyType({{'a': {0}}})", "C['a']"), ("C = [Data({0})]", "C[0].rate"),
    ("C = [Slots({0})]", "C[0].rate"),
    ("C = [Registered(1.0, {0})]", "C[0].w"), ("C = [Model({0}).get]", "C[0]()"), ("C = [1.0, {0}]", "[b for b in C][-1]"),
]  # fmt: skip
RATE = ["O.rate = 2.75", "vars(O)['rate'] = 3.5", "O.__dict__ = dict(O.__dict__, rate=4.0)", "del O.rate; Base.rate = 6.0"]
METHOD = ["Block.method = lambda self, x: x * 9.0", "O.method = lambda x: x * 4.0", "O.__class__ = Other"]
BLOCK, DATA = "Block(1.25)", "(1.5, numpy.arange(1.0, 4.0))"
READS = [
    (BLOCK, "x * {b}.rate", [*RATE, "Block.rate = property(lambda self: 17.0)"]),
    (BLOCK, "helper({b}, x)", [*RATE, *METHOD]),
    (BLOCK, "x * sorted([{b}], key=rate_of)[0].rate", RATE),
    (BLOCK, "x * {b}.w", ["O.w[1] = 7.0", "O.w = numpy.ones(3)"]),
    (BLOCK, "x * {b}.items[0] * len({b}.items)", ["O.items[0] = 5.0", "O.items.append(1.0)", "O.items = [9.0]"]),
    (BLOCK, "{b}.method(x)", [*RATE, *METHOD, "Block.method.__code__ = (lambda self, x: x * 11.0).__code__"]),
    (BLOCK, "{b}.deep(x)", [*METHOD, "O.part.depth = 5.0", "O.part = Part(7.0)", "Part.depth = property(lambda s: 3.0)"]),
    (BLOCK, "x * {b}.twice", ["O.inner = 4.0", "Block.twice = property(lambda self: FACTOR)", "O.__class__ = Other"]),
    (BLOCK, "{b}(x)", [*RATE, "O.scale = 2.0", "Block.__call__ = lambda self, x: x * 5.0", "O.__class__ = Other"]),
    (BLOCK, "{b}.inherited(x)", ["Base.bias = 2.0", "Block.bias = 3.0", "O.bias = 4.0", "FACTOR = 3.0"]),
    (BLOCK, "{b}.over(x)", [*RATE, "O.inner = 8.0", "Base.over = lambda self, x: x * 3.0", "O.__class__ = Other"]),
    (BLOCK, "{b}.stat(x) * {b}.table[0]", ["FACTOR = 3.0", "Block.stat = staticmethod(lambda x: -x)", "O.table[0] = 3.0"]),
    (BLOCK, "{b}.of_class(x)", ["Block.scale = 4.0", "O.__class__ = Other"]),
    (BLOCK, "{b}.hook(x)", ["FACTOR = 3.0", "O.hook = lambda x: x", "hooked.__code__ = (lambda x: -x).__code__"]),
    (BLOCK, "({b} + x) * {b}[0] * len({b})", [*RATE, "O.items[0] = 5.0", "Block.__len__ = lambda self: 7"]),
    (BLOCK, "(x if {b} == 1 else 2.0 * x)", ["O.level = 2"]),
    (BLOCK, "x * float(repr({b}))", [*RATE, "O.__class__ = Other"]),
    ("Part(1.5)", "x * getattr({b}, 'late' + 'r', 1.0)", ["O.later = 3.0", "Part.later = 2.0"]),
    ("Part(1.5)", "x * vars({b})['depth']", ["O.depth = 3.0"]),
    ("Part(1.5)", "x * copy.copy({b}).depth * copy.deepcopy({b}).depth", ["O.depth = 3.0"]),
    ("Slots(1.5)", "x * {b}.rate", ["O.rate = 3.0"]),
    ("Data" + DATA, "{b}.rate * {b}.w * x", ["O.rate = 3.0", "O.w[0] = 5.0"]),
    ("Data" + DATA, "dataclasses.replace({b}, w=3.0).rate * x", ["O.rate = 3.0"]),
    ("doubled()", "dataclasses.replace({b}).doubled * x", ["O.rate = 3.0"]),
    ("Registered" + DATA, "{b}.rate * {b}.w * x", ["O.rate = 3.0", "O.w[0] = 5.0"]),
    ("types.SimpleNamespace(rate=1.5)", "{b}.rate * x", ["O.rate = 3.0"]),
]  # fmt: skip
CASES = [(made, expression, change) for made, expression, changes in READS for change in changes]


def definitions(text: str) -> dict[str, Any]:
    module = ModuleType("definitions")
    sys.modules["definitions"] = module  # dataclasses look there
    exec(compile(HEAD + text, "definitions", "exec"), vars(module))
    return vars(module)


def alike(f: Any) -> Any:
    return mpiad.jit(lambda x: anp.sin(f(x)), strict=True)(X)


half = mpiad.jit(lambda u: 0.5 * anp.sin(u), strict=True)
MODES: list[Any] = [
    lambda f, jitted: jitted(X),
    lambda f, jitted: mpiad.grad(lambda x: anp.sum(anp.sin(jitted(x)) ** 2), objective="sum")(X),
    lambda f, jitted: mpiad.jvp(lambda x: anp.sin(jitted(x)), X, V)[1],
    lambda f, jitted: scan(lambda u, k: half(f(u)), X, 9, checkpoints=3),
    lambda f, jitted: alike(f),
]
REFERENCES: list[Any] = [
    lambda f: f(X),
    lambda f: complex_steps(lambda x: np.sum(np.sin(f(x)) ** 2)),
    lambda f: np.imag(np.sin(f(X + 1e-30j * V))) / 1e-30,
    lambda f: [u := X, *[u := 0.5 * np.sin(f(u)) for _ in range(9)]][-1],
    lambda f: np.sin(f(X)),
]


def complex_steps(f: Any) -> np.ndarray:
    return np.array([np.imag(f(X + 1e-30j * e)) for e in np.eye(len(X))]) / 1e-30


@pytest.mark.serial
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_change_of_an_object_in_a_container_shows(number: int) -> None:
    made, expression, change = CASES[number]
    names_all = "vars(" in expression or "getattr(" in expression  # then all attributes of all objects must be followed
    containers = CONTAINERS[:8] if names_all else CONTAINERS
    for k in range(3):
        held, found = containers[(7 * number + 5 * k) % len(containers)]
        mode = (number + 2 * k) % len(MODES)
        text = f"O = {made}\n{held.format('O')}\ndef f(x): return {expression.format(b=found)}\n"
        names = definitions(text)
        f = names["f"]
        jitted, reference = mpiad.jit(f, strict=True), REFERENCES[mode]
        before = reference(f)
        for _ in range(2):
            np.testing.assert_allclose(MODES[mode](f, jitted), before, rtol=1e-12, err_msg=text)
        exec(change, names)
        assert not np.allclose(reference(f), before, rtol=1e-9), "the change doesn't show"
        for _ in range(2):
            np.testing.assert_allclose(MODES[mode](f, jitted), reference(f), rtol=1e-12, err_msg=text)


REFUSED = [
    (
        "class G:\n    def __getattr__(self, name): return 2.0\nC = [G()]",
        "x * C[0].rate",
        "C in f: .*type G, whose class computes",
    ),
    (
        "class D:\n    def __get__(self, *a): return 2.0\nclass E: d = D()\nC = [E()]",
        "x * C[0].d",
        "E.d: .*type D, a descriptor",
    ),
    ("class T(type): pass\nclass E(metaclass=T): r = 2.0\nC = [E()]", "x * C[0].r", "type E, whose class has a metaclass"),
    ("C = [Block(1.0)]", "x + C[0].rng.normal()", "Block.rng: .*type Generator, whose state isn't .*: pass the values"),
    ("C = [Block(1.0)]", "(C[0].lock, x)[1]", "Block.lock: an object of type lock"),
    ("C = [Block(1.0)]", "(C[0].queue, x)[1]", "Block.queue: an iterator"),
    ("C = [Block(1.0)]", "C[0].save() or x", "Block.file: an iterator"),
    ("C = [Block(1.0)]", "x * C[0].comm.allreduce(1.0)", "calls of mpi4py aren't compiled .call mpiad's functions"),
    ("C = [Block(1.0)]", "x * getattr(C[0], 'ra' + 'te')", "can't be followed"),
    (
        "C = [[types.SimpleNamespace(a=[1.0])] for _ in range(1500)]",
        "x * C[0][0].a[0]",
        "more than 2000 objects: pass arrays",
    ),
]


@pytest.mark.serial
@pytest.mark.parametrize(("held", "expression", "message"), REFUSED)
def test_what_the_code_can_reach_and_not_follow_is_refused(held: str, expression: str, message: str) -> None:
    f = definitions(f"{held}\ndef f(x): return {expression}\n")["f"]
    with pytest.raises(TypeError, match=message):
        mpiad.jit(f, strict=True)(X)


CHANGING = """
class Kept:
    def __init__(self): self.last, self.total, self.table, self.kept = None, 1.0, numpy.zeros(3), []
    def remember(self, x): self.last = x
    def remember_new(self, x): self.newest = x
    def remember_first(self, x):
        if "first" not in vars(self): self.first = x
    def add(self, x): self.total += 0.5
    def fill(self, x): self.table[1] += 1.0
    def append(self, x): self.kept.append(x)
C = [Kept()]
def outside(x): C[0].last = x
def by_name(x): setattr(C[0], "newest", x)
"""
CALLS = [
    "C[0].remember(x)", "C[0].remember_new(x)", "C[0].remember_first(x)", "C[0].add(x)", "C[0].fill(x)", "C[0].append(x)",
    "outside(x)", "by_name(x)",
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_changes_of_an_object_in_a_container_are_those_of_python(call: str, looped: bool) -> None:
    """Each of them occurs once in each call, with Python's values."""
    results = []
    for is_jitted in (True, False):
        text = f"def f(x):\n    y = x * C[0].total\n    {call}\n    return y * (1.0 + C[0].table[1])\n"
        names = definitions(CHANGING + text)
        f, u = names["f"], X
        if is_jitted and looped:
            u = scan(lambda u, k: half(f(u)), u, 6)  # noqa: B023
        else:
            f, g = (mpiad.jit(f), half) if is_jitted else (f, lambda u: 0.5 * np.sin(u))
            for _ in range(6):
                u = g(f(u))
        results.append((u, vars(names["C"][0])))
    (u, found), (expected, of_python) = results
    np.testing.assert_allclose(u, expected, rtol=1e-13)
    assert found.keys() == of_python.keys()
    for name, value in of_python.items():
        np.testing.assert_allclose(np.array(found[name], float), np.array(value, float), rtol=1e-13)  # NaN for None


@pytest.mark.serial
def test_a_method_of_objects_from_inside_and_outside_has_its_effect():
    f = definitions(CHANGING + "def f(x):\n    Kept().remember(x)\n    C[0].remember(x)\n")["f"]
    assert survey(f, ()) == (False, "assigns variables or attributes in Kept.remember")


def test_subdomains_that_differ_between_ranks(rank, size):
    """The loss is the sum over the ranks r of Σ (2 cos x + c x²)², with the sum c(r) of two objects' rates."""
    names = definitions("C = {'blocks': [Block(1.0), Block(2.0)], 'comm': MPI.COMM_WORLD}\n")
    blocks, comm = names["C"]["blocks"], names["C"]["comm"]
    blocks[0].rate = 1.0 + rank

    def loss(x):
        y = 2.0 * anp.cos(x)
        for b in blocks:
            y = y + b.method(x) * x
        return mpiad.mpi_allreduce(anp.sum(y**2), comm=comm)

    compiled, slope = mpiad.jit(loss, strict=True), mpiad.jit(mpiad.grad(loss), strict=True)
    for step in (0.0, 0.5, 0.0):
        blocks[1].rate = 2.0 + step * rank
        rates = 3.0 + (1.0 + step) * np.arange(size)[:, None]
        y = 2.0 * np.cos(X) + rates * X**2
        np.testing.assert_allclose(compiled(X), np.sum(y**2), rtol=1e-13)
        np.testing.assert_allclose(slope(X), (2.0 * y * (2.0 * rates * X - 2.0 * np.sin(X)))[rank], rtol=1e-13)
