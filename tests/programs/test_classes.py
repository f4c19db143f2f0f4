"""Jitted functions that create objects of classes: results are those of Python, also after a class has changed."""

from __future__ import annotations

import abc
import copy
import enum
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad import ensemble, timestepping
from mpiad.compiling.closure import Unknown, survey, watch_of

pytestmark = pytest.mark.serial

X = np.arange(1.0, 6.0)
FACTOR = 2.0
T = TypeVar("T")


class Option:
    rate = 0.5
    weights = np.ones(5)

    def __init__(self, spot: Any, strike: float = 2.5) -> None:
        self.spot, self.strike = spot, strike

    def payoff(self) -> Any:
        return anp.maximum(self.spot - self.strike, 0.0) * self.discount * self.weights

    @property
    def discount(self) -> Any:
        return anp.exp(-self.rate * self.scaled(0.1))

    @staticmethod
    def scaled(x: float) -> float:
        return x * FACTOR

    @classmethod
    def at_the_money(cls, spot: Any) -> Option:
        return cls(spot, cls.rate * 4.0)


class Barrier(Option):
    __slots__ = ("level",)

    def __init__(self, spot: Any, level: float) -> None:
        super().__init__(spot)
        self.level = level

    def payoff(self) -> Any:
        return anp.where(self.spot < self.level, super().payoff(), 0.1 * self.spot)


@dataclass
class State:
    u: Any
    decay: float = 0.5
    scale: ClassVar[float] = 2.0
    history: list[Any] = field(default_factory=list)

    def stepped(self) -> State:
        return replace(self, u=self.u * self.decay * self.scale, history=[*self.history, self.u])


@mpiad.pytrees.register
@dataclass
class Registered:
    u: Any
    scale: ClassVar[float] = 2.0

    def value(self) -> Any:
        return self.u * self.scale


class Pair(NamedTuple):
    a: Any
    b: Any = 3.0

    def product(self) -> Any:
        return self.a * self.b * FACTOR


class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self) -> Any: ...


class Disk(Shape, Generic[T]):
    factor = 3.0

    def __init__(self, radius: T) -> None:
        self.radius = radius

    @cached_property
    def square(self) -> Any:
        return self.radius**2 * self.factor  # type: ignore[operator]

    def area(self) -> Any:
        return self.square + self.square

    def __add__(self, other: Disk) -> Any:
        return self.area() + other.area() if isinstance(other, Disk) else NotImplemented


class Warm:
    warmth = 4.0

    def warmed(self, x: Any) -> Any:
        return x * self.warmth


class Colour(Warm, enum.Enum):
    RED = 2.0

    def scaled(self, x: Any) -> Any:
        return x * self.value * FACTOR

    @property
    def doubled(self) -> float:
        return self.value * FACTOR

    @staticmethod
    def halved(x: Any) -> Any:
        return x * 0.5 * FACTOR


class Direction(enum.IntEnum):
    EAST, NORTH = 1, 2


def option(x: Any) -> Any:
    return Option(x).payoff() + Option.at_the_money(x).payoff() ** 2


def barrier(x: Any) -> Any:
    return Barrier(x * 1.5, 5.0).payoff()


def state(x: Any) -> Any:
    end = State(x).stepped().stepped()
    return end.u + end.history[1] ** 2


def disk(x: Any) -> Any:
    return Disk(x) + Disk(x * 2.0)


def pair(x: Any) -> Any:
    return Pair(x).product() + Pair(x, b=x).product()


def namespace(x: Any) -> Any:
    return types.SimpleNamespace(u=x, v=x * FACTOR).v


def set_to(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


def of_this_module(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(globals(), name, value)


def in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Option, "weights", np.ones(5))
    Option.weights[3] = 3.0


CASES = {
    option: [
        set_to(Option, "rate", 0.25), in_place, of_this_module("FACTOR", 3.0),
        set_to(Option, "payoff", lambda self: self.spot * self.rate),
        set_to(Option, "scaled", staticmethod(lambda x: x * 7.0)),
        set_to(Option, "discount", property(lambda self: self.rate + self.spot)),
        set_to(Option.__init__, "__defaults__", (1.5,)),
        set_to(Option, "at_the_money", classmethod(lambda cls, spot: cls(spot, 0.5))),  # type: ignore[arg-type]
    ],
    barrier: [
        set_to(Option, "rate", 0.25), set_to(Barrier, "rate", 0.125), set_to(Barrier, "discount", 3.0),
        set_to(Option, "payoff", lambda self: self.spot * 2.0),
    ],
    state: [
        set_to(State, "scale", 3.0),
        set_to(State, "stepped", lambda self: replace(self, history=[self.u, -self.decay])),
    ],
    disk: [
        set_to(Disk, "factor", 2.0), set_to(Disk, "area", lambda self: self.radius),
        set_to(Disk, "__add__", lambda self, other: other.area()),
    ],
    pair: [of_this_module("FACTOR", 3.0), set_to(Pair, "product", lambda self: self.a)],
    namespace: [of_this_module("FACTOR", 3.0)],
    lambda x: Colour(2.0).scaled(x[Direction.NORTH] + x[[d - 1 for d in Direction]].sum()) + x: [
        of_this_module("FACTOR", 3.0), set_to(Colour, "scaled", lambda self, x: x)
    ],
    lambda x: Colour(2.0).warmed(x) + Colour(2.0).halved(x) * Colour(2.0).doubled: [
        of_this_module("FACTOR", 3.0), set_to(Warm, "warmth", 5.0), set_to(Warm, "warmed", lambda self, x: -x),
        set_to(Colour, "doubled", property(lambda self: 3.0 * self.warmth)),
        set_to(Colour, "halved", staticmethod(lambda x: 7.0 * x)),
    ],
    lambda x: (x * Colour.RED.value if Colour.RED is Colour["RED"] else x) * FACTOR: [of_this_module("FACTOR", 3.0)],
    lambda x: vars(Disk(x))["radius"] * vars(Disk)["factor"]: [set_to(Disk, "factor", 2.0)],
    lambda x: Registered(x).value(): [set_to(Registered, "scale", 3.0), set_to(Registered, "value", lambda self: -self.u)],
}  # fmt: skip
CHANGES = [(fun, change) for fun, changes in CASES.items() for change in changes]


@pytest.mark.few(15)
@pytest.mark.parametrize(("fun", "change"), CHANGES)
def test_values_and_derivatives_follow_the_class(fun: Callable, change: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    jitted = mpiad.jit(fun, strict=True)
    outside = mpiad.grad(lambda x: anp.sum(jitted(x) ** 2))
    seen = []
    for _ in range(2):
        for x in (X, X * 1.25, X):
            np.testing.assert_allclose(jitted(x), fun(x), rtol=1e-13)
            moved = [np.sum(fun(x + h) ** 2) for h in 1e-6 * np.stack([np.eye(5), -np.eye(5)], 1).reshape(10, 5)]
            np.testing.assert_allclose(outside(x), -np.diff(moved)[::2] / 2e-6, rtol=1e-6, atol=1e-5)
        seen.append(jitted(X))
        change(monkeypatch)
    assert np.any(fun(X) != seen[0]), "the change doesn't show"
    np.testing.assert_allclose(jitted(X), fun(X), rtol=1e-13)


class Tracked(type):
    pass


class Made(metaclass=Tracked):
    def __init__(self, x: Any) -> None:
        self.x = x


class Drawn:
    def __init__(self, x: Any) -> None:
        self.x = x + np.random.standard_normal(5)  # noqa: NPY002


class Counted:
    count = 0

    def __init__(self, x: Any) -> None:
        Counted.count += 1
        self.x = x * Counted.count


@pytest.mark.parametrize(
    ("fun", "named"),
    [(lambda x: Made(x).x, "class Made, which has a metaclass"), (lambda x: Drawn(x).x, "random")],
)  # fmt: skip
def test_other_classes_are_refused(fun: Callable, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        mpiad.jit(fun, strict=True)(X)


def test_an_object_of_outside_beside_one_of_the_call() -> None:
    other = Option(X)
    jitted = mpiad.jit(lambda x: anp.where(x < 3.0, Option(x).payoff(), other.payoff()) + other.spot)
    for other.spot in (X, X + 1.0):
        expected = np.where(X < 3.0, Option(X).payoff(), other.payoff()) + other.spot
        np.testing.assert_allclose(jitted(X), expected, rtol=1e-13)


def test_a_count_in_a_class_is_that_of_python() -> None:
    jitted = mpiad.jit(lambda x: Counted(x).x)
    np.testing.assert_array_equal([jitted(X) for _ in range(4)], np.outer([1, 2, 3, 4], X))


def test_a_step_that_creates_objects_is_part_of_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    decay = mpiad.jit(lambda u: u * anp.exp(-0.1 * u))

    def step(u: Any, k: int) -> Any:
        return decay(State(u).stepped().u) + 0.5

    def loss(u: Any) -> Any:
        return anp.sum(run(u) ** 2)

    def run(u: Any) -> Any:
        return timestepping.scan(step, u, 60, checkpoints=4)

    def complex_run(u: np.ndarray) -> np.ndarray:
        for _ in range(60):
            v = u * 0.5 * 2.0
            u = v * np.exp(-0.1 * v) + 0.5
        return u

    value, gradient = mpiad.value_and_grad(loss)(X)
    expected = [np.sum(complex_run(X + 1e-30j * e) ** 2).imag / 1e-30 for e in np.eye(5)]
    np.testing.assert_allclose(value, np.sum(complex_run(X) ** 2), rtol=1e-13)
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    assert "isn't compiled" not in caplog.text


def test_an_ensemble_whose_f_creates_objects() -> None:
    def f(u: Any, p: Any, t: Any) -> Any:
        return [-State(u[0], p[0]).decay * u[0] * State.scale]

    p = np.array([[0.25], [0.5]])
    decay = ensemble.EnsembleProblem(ensemble.ODEProblem(f, [1.0], (0.0, 1.0), np.zeros(1)), p=p)
    for State.scale in (2.0, 3.0):
        for compile in (True, False):
            ends = ensemble.solve(decay, rtol=1e-9, atol=1e-12, compile=compile).u_end
            np.testing.assert_allclose(ends, np.exp(-State.scale * p), rtol=1e-7)
    State.scale = 2.0


class Curve:
    def __init__(self, x: Any, rate: float) -> None:
        self.x, self.rate, self.factors = x, rate, [2.0, 3.0]

    def value(self) -> Any:
        return self.factors[0] * anp.sin(self.rate * self.x)


def test_copies_of_objects_and_of_traced_arrays() -> None:
    """A shallow copy shares the list, and a deep one doesn't; changes in place of one array aren't the other's."""

    def loss(x: Any) -> Any:
        one = Curve(x * 2.0, 0.5)
        other, deep = copy.copy(one), copy.deepcopy(one)
        other.rate, deep.rate, deep.factors[0], other.factors[0] = 1.5, 0.25, 5.0, 4.0
        y = copy.copy(x)
        y += 1.0
        z = copy.deepcopy(y)
        z *= 2.0
        deep.x += z
        return anp.sum(one.value() ** 2 + 2 * other.value() + 3 * deep.value() * y)

    steps = [loss(X + 1e-30j * e) for e in np.eye(5)]
    jitted = mpiad.jit(loss, strict=True)
    for _ in range(3):
        np.testing.assert_allclose(jitted(X), steps[0].real, rtol=1e-14)
        for fun in (jitted, loss):
            np.testing.assert_allclose(mpiad.grad(fun)(X), np.imag(steps) / 1e-30, rtol=1e-12)


def test_deep_copies_of_objects_with_jitted_functions() -> None:
    """A jitted function is its own copy, like a function; a jitted method computes with the copy of its object."""
    curve = Curve(X.copy(), 0.5)
    model = {"plain": mpiad.jit(anp.sin), "method": mpiad.jit(curve.value), "partial": mpiad.jit(partial(anp.add, curve.x))}
    before = [model["plain"](X), model["method"](), model["partial"](X)]
    copied = copy.deepcopy(model)
    assert copied["plain"] is model["plain"]
    curve.factors[0], curve.x[:] = 7.0, 0.0
    found = [copied["plain"](X), copied["method"](), copied["partial"](X)]
    for made, expected in zip(found, [np.sin(X), 2.0 * np.sin(0.5 * X), 2.0 * X]):
        np.testing.assert_allclose(made, expected, rtol=1e-14)
    np.testing.assert_allclose(before, [np.sin(X), 2.0 * np.sin(0.5 * X), 2.0 * X], rtol=1e-14)
    np.testing.assert_allclose(model["method"](), np.zeros(5))


@pytest.mark.parametrize("fun", [option, barrier, state, disk, pair])
def test_objects_next_to_a_communicator(fun: Callable) -> None:
    """Communicators have an `__init__`, an `__eq__` and a `__class__`, as all objects have."""
    comm = MPI.COMM_SELF
    jitted = mpiad.jit(lambda x: fun(x) * mpiad.mpi_allreduce(anp.sum(x), comm=comm), strict=True)
    for x in (X, X * 1.25):
        np.testing.assert_allclose(jitted(x), fun(x) * np.sum(x), rtol=1e-13)


class Module:
    def __init__(self) -> None:
        self.training = 2.0

    def doubled(self) -> Any:
        return 2.0 * self.x * self.training  # type: ignore[attr-defined]


class Scale(Module):
    def __init__(self, x: Any) -> None:
        Module.__init__(self)
        self.x = x

    def doubled(self) -> Any:
        return Module.doubled(self) * FACTOR


def test_methods_called_as_functions_of_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of a loop, whose objects are new, is compiled as well."""
    jitted, decay = mpiad.jit(lambda x: Scale(x).doubled() + Module.doubled(Scale(x)), strict=True), mpiad.jit(anp.tanh)
    for training, factor in ((2.0, 2.0), (3.0, 2.0), (3.0, 5.0)):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        if training > 2:
            monkeypatch.setattr(Module, "__init__", lambda self: setattr(self, "training", 3.0))
        np.testing.assert_allclose(jitted(X), 2.0 * training * (factor + 1.0) * X, rtol=1e-13)
    monkeypatch.undo()
    survey_of_step = survey(lambda u, k: decay(Scale(u).doubled()), type(decay))
    assert survey_of_step == (True, "")


class Data:
    def __init__(self, x: Any) -> None:
        self.x = x

    def load(self, path: str) -> None:
        self.x = np.loadtxt(path)

    def part(self, i: int) -> Any:
        return self.x[3 * i : 3 * i + 3]

    def reloaded(self) -> Any:
        return self.load("data.txt")

    @property
    def noise(self) -> Any:
        return np.random.standard_normal(6)  # noqa: NPY002

    @noise.setter
    def noise(self, value: Any) -> None:
        pass

    @staticmethod
    def opened() -> Any:
        return open("data.txt").read()

    @cached_property
    def cached(self) -> Any:
        return np.random.standard_normal(6)  # noqa: NPY002

    @mpiad.jit
    def jitted(self, x: Any) -> Any:
        return x + np.random.standard_normal(6)  # noqa: NPY002

    def __neg__(self) -> Any:
        return self.part(1)


class Operator(Data):
    def __call__(self, x: Any) -> Any:
        return x


class Described:
    def noise(self, x: Any) -> Any:
        return x


def with_noise(data: Any) -> Any:
    return data.noise


NAME, fetched, noise_of = "noise", getattr, operator.attrgetter("noise")


def test_methods_that_are_never_called_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(6.0)
    jitted = mpiad.jit(lambda x: Data(x).part(0) * -Data(x), strict=True)
    np.testing.assert_array_equal(jitted(x), x[:3] * x[3:])
    monkeypatch.setattr(Data, "part", lambda self, i: self.x[i : i + 3])
    np.testing.assert_array_equal(jitted(x), x[:3] * x[1:4])


@pytest.mark.parametrize("fun", [
    lambda x: Data(x).noise,
    lambda x: with_noise(Data(x)),
    lambda x: [with_noise(kind(x)) for kind in (Data, Data)],
    lambda x: Data(x).reloaded(),
    lambda x: Data(x).opened(),
    lambda x: Data(x).cached,
    lambda x: Data(x).jitted(x),
    lambda x: (lambda data: data.noise)(Data(x)),
    lambda x: getattr(Data(x), NAME),
    lambda x: hasattr(Data(x), NAME),
    lambda x: setattr(Data(x), NAME, x),
    lambda x: fetched(Data(x), NAME),
    lambda x: noise_of(Data(x)),
    lambda x: operator.methodcaller("load", "data.txt")(Data(x)),
    lambda x: vars(type(Data(x)))[NAME],
    lambda x: type(Data(x)).__dict__[NAME],
    lambda x: f"{x}{{0.noise}}".format(Data(x)),
    lambda x: Operator(x),  # solvers read `transpose` of an operator
    lambda x: [Described().noise(x), Data(x)],  # the code doesn't show the class
])  # fmt: skip
def test_methods_whose_names_occur_are_followed(fun: Callable) -> None:
    """And all of them if code may read an attribute by a name that is computed."""
    with pytest.raises(Unknown, match="Data|draws"):
        watch_of(fun)
    with pytest.raises(TypeError, match="can't be compiled"):
        mpiad.jit(fun, strict=True)(np.arange(6.0))


class Gauss:
    def __init__(self, mean: Any) -> None:
        self.mean = mean

    def log_prob(self, theta: Any) -> Any:
        return -FACTOR * anp.sum((theta - self.mean) ** 2)


def test_methods_that_the_library_calls_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions such as those of `mpiad.vi` call `log_prob`, whose name doesn't occur in the code."""
    watch = watch_of(lambda x: anp.shape(Gauss(x)))
    assert watch.is_the_same()
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert not watch.is_the_same()
