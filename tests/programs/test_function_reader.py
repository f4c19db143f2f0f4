"""Kinds of objects that a function can read: fingerprint and watch see each change, or don't follow the function."""

from __future__ import annotations

import collections
import enum
import inspect
import pathlib
import textwrap
import types
from typing import NamedTuple

import autograd
import numpy as np
import pytest
from mpi4py import MPI

from mpiad.compiling.closure import HoldsTraced, Unknown, watch_of
from mpiad.compiling.function_fingerprint import fingerprint_of, text_of
from mpiad.ensemble import ODEProblem, remake

pytestmark = pytest.mark.serial

FACTOR = 2.0
SEEN, REFUSED = "seen", "refused"


def scaled(x):
    return x * FACTOR


def set_factor():
    globals()["FACTOR"] = 3.0


class Number(float):
    pass


class Numbers(list):
    scale = 2.0

    def scaled(self):
        return self[0] * FACTOR


class Point(NamedTuple):
    x: float

    def scaled(self):
        return self.x * FACTOR


class Model:
    rate = 2.0

    def own(self):
        return self.rate

    def value(self, x):
        return self.own() * x

    @classmethod
    def of_class(cls, x):
        return cls.rate * x


def number_with_attribute():
    number = Number(3.0)
    number.scale = 2.0
    return lambda x: x * number.scale, lambda: setattr(number, "scale", 3.0)


def attribute_of_a_list():
    numbers = Numbers([1.0])
    numbers.scale = 2.0
    return lambda x: x * numbers.scale, lambda: setattr(numbers, "scale", 3.0)


def attribute_of_a_class_of_lists():
    numbers = Numbers([1.0])
    return lambda x: x * numbers.scale, lambda: setattr(Numbers, "scale", Numbers.scale + 1.0)


def method_of_a_list():
    numbers = Numbers([1.0])
    return lambda x: x * numbers.scaled(), set_factor


def method_of_a_named_tuple():
    point = Point(2.0)
    return lambda x: x * point.scaled(), set_factor


def created_named_tuple():
    return lambda x: Point(x).scaled(), set_factor


def own_method():
    model = Model()
    return lambda x: model.value(x), lambda: setattr(model, "rate", 3.0)


def inherited_class_method():
    return type("Derived", (Model,), {}).of_class, lambda: setattr(Model, "rate", 3.0)


def class_method():
    return Model.of_class, lambda: setattr(Model, "rate", Model.rate + 1.0)


def derivative():
    slope = autograd.elementwise_grad(scaled)
    return lambda x: slope(x), set_factor


def shadowed_function():
    return lambda x: abs(x), lambda: globals().update(abs=lambda x: -x)


def polynomial():
    p = np.poly1d([1.0, 2.0])
    return lambda x: p(x), lambda: p.__setitem__(0, 3.0)


def vectorized():
    f = np.vectorize(scaled)
    return lambda x: f(x), set_factor


def masked():
    array = np.ma.masked_array([1.0, 2.0], mask=[0, 0])
    return lambda x: x * array.filled(7.0), lambda: array.__setitem__(0, np.ma.masked)


def array_of_structures_with_objects():
    entries = [2.0]
    array = np.array([(entries,)], dtype=[("a", object)])
    return lambda x: x * array["a"][0][0], lambda: entries.append(1.0)


def set_of_numbers():
    found = {1, 2}
    return lambda x: x * (3 in found), lambda: found.add(3)


def double_ended_queue():
    found = collections.deque([2.0])
    return lambda x: x * found[0], lambda: found.appendleft(3.0)


def view_of_a_dict():
    table = {"a": 2.0}
    view = types.MappingProxyType(table)
    return lambda x: x * view["a"], lambda: table.update(a=3.0)


def values_of_a_dict():
    table = {"a": 2.0}
    values = table.values()
    return lambda x: x * sum(values), lambda: table.update(a=3.0)


def bytes_that_change():
    found = bytearray(b"abc")
    return lambda x: x * found[0], lambda: found.append(1)


def one_of_many_numbers():
    found = np.arange(40_000.0).reshape(200, 200)
    return lambda x: x * found[3, 4], lambda: found.__setitem__((150, 20), -1.0)


def random_numbers():
    return lambda x: x * np.random.normal(), lambda: None  # noqa: NPY002


def attributes_by_a_function():
    class Holder:
        def __getattribute__(self, name):
            return lambda x: x * FACTOR

        def value(self, x):
            return x

    holder = Holder()
    return lambda x: holder.value(x), set_factor


# Per kind what the fingerprint and the watch do.
KINDS = [
    (number_with_attribute, SEEN, SEEN), (attribute_of_a_list, SEEN, SEEN), (attribute_of_a_class_of_lists, SEEN, SEEN),
    (method_of_a_list, REFUSED, SEEN), (method_of_a_named_tuple, SEEN, SEEN), (created_named_tuple, SEEN, SEEN),
    (own_method, SEEN, SEEN), (inherited_class_method, SEEN, SEEN), (class_method, SEEN, SEEN),
    (derivative, SEEN, SEEN), (shadowed_function, SEEN, SEEN), (polynomial, SEEN, SEEN), (vectorized, REFUSED, SEEN),
    (masked, REFUSED, SEEN), (array_of_structures_with_objects, REFUSED, REFUSED), (set_of_numbers, REFUSED, SEEN),
    (one_of_many_numbers, SEEN, SEEN),
    (double_ended_queue, REFUSED, SEEN), (view_of_a_dict, SEEN, SEEN), (values_of_a_dict, REFUSED, REFUSED),
    (bytes_that_change, REFUSED, REFUSED), (random_numbers, REFUSED, REFUSED),
    (attributes_by_a_function, REFUSED, REFUSED),
]  # fmt: skip


@pytest.fixture(autouse=True)
def same_globals(monkeypatch):
    yield
    globals().pop("abs", None)
    globals()["FACTOR"] = Model.rate = Numbers.scale = 2.0


@pytest.mark.parametrize(("case", "by_fingerprint", "by_watch"), KINDS, ids=lambda kind: getattr(kind, "__name__", None))
def test_a_change_is_seen_or_the_function_is_not_followed(case, by_fingerprint, by_watch):
    fun, change = case()
    found = fingerprint_of(fun)
    assert (REFUSED if found is None else SEEN) == by_fingerprint
    assert fingerprint_of(fun) == found
    if by_watch == REFUSED:
        with pytest.raises(Unknown):
            watch_of(fun)
        watch = None
    else:
        watch = watch_of(fun)
        assert watch.is_the_same()
    change()
    assert found is None or fingerprint_of(fun) != found
    assert watch is None or not watch.is_the_same()


@pytest.mark.parametrize("name", ["r_", "s_", "index_exp", "mgrid", "ogrid"])
def test_numpys_objects_with_an_index_have_fingerprints(name):
    found = {other: fingerprint_of(fun) for other, fun in INDEXED.items()}
    assert found[name] is not None and fingerprint_of(INDEXED[name]) == found[name]
    assert list(found.values()).count(found[name]) == 1


INDEXED = {
    "r_": lambda x: x * np.r_[1.0, 2.0],
    "s_": lambda x: x[np.s_[1:]],
    "index_exp": lambda x: x[np.index_exp[1:]],
    "mgrid": lambda x: x * np.mgrid[0:3],
    "ogrid": lambda x: x * np.ogrid[0:3],
}


class Level(enum.IntEnum):
    HIGH = 2


@pytest.mark.parametrize(
    "value",
    [
        range(2),
        ...,
        NotImplemented,
        np.dtype(float),
        slice(0, 2),
        frozenset({1}),
        str.join,
        object(),
        Level.HIGH,
        collections.Counter("ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_constants_and_containers_are_followed(value):
    assert watch_of(lambda x: (x, value)).is_the_same()


def test_subclasses_of_library_classes_keep_their_own_attributes():
    """Attributes of the built-in types and of enumerations are read with the object as a whole."""
    ordered, level, point = collections.OrderedDict(a=2.0), Level.HIGH, Point(2.0)
    watch = watch_of(lambda x: [x * sum(ordered.values()) * level.value * point._replace(x=1.0).x, point.count(2.0)])
    assert watch.is_the_same()
    ordered["a"] = 3.0
    assert not watch.is_the_same()


def test_aliases_do_not_matter_and_names_do():
    """A list that is read twice is as good as two equal lists; the same numbers under other names aren't."""

    def reads(a, b):
        return lambda x: x * a[0] * b[0]

    def attribute_of(value):
        return lambda x: x * value.real.imag

    one = [2.0]
    assert fingerprint_of(reads(one, one)) == fingerprint_of(reads([2.0], [2.0])) is not None
    assert text_of(reads(one, one)) == text_of(reads([2.0], [2.0]))
    pair = types.SimpleNamespace(real=types.SimpleNamespace(imag=2.0))
    assert fingerprint_of(attribute_of(pair)) != fingerprint_of(attribute_of(types.SimpleNamespace(real=2.0)))


@pytest.mark.parametrize("name", ["issend", "Ialltoallv", "Ibarrier", "Probe"])
def test_all_methods_of_a_communicator_communicate(name):
    fun = eval(f"lambda x, comms: comms[0].{name}(x)", {})
    fun.__defaults__ = ([MPI.COMM_SELF],)
    with pytest.raises(Unknown, match="calls of mpi4py aren't compiled"):
        watch_of(fun)


def test_a_traced_value_in_a_function_of_the_library_is_no_constant():
    """It raises HoldsTraced, as a traced value in a user's function does."""

    def loss(b):
        def scaled(x):
            return x * b

        of_library = types.FunctionType(scaled.__code__, {"__name__": "mpiad.example"}, closure=scaled.__closure__)
        for fun in (scaled, of_library, lambda x: of_library(x)):
            with pytest.raises(HoldsTraced):
                watch_of(fun)
        return b**2

    assert autograd.grad(loss)(3.0) == 6.0


def test_texts_for_other_ranks_contain_values_beside_functions_of_libraries():
    """Such functions read many objects, which are the same on all ranks, but those of the user may differ."""
    problem = ODEProblem(lambda u, p, t: -p * u, np.ones(2), (0.0, 1.0), np.ones(2))

    def remade(x):
        rows, path = np.full(3, x), pathlib.PurePath
        return lambda i: (remake(problem, p=rows[i]), inspect.signature(remake), path("a").name, textwrap.dedent("a"))

    def many(x):
        parts = [*range(2000), x]
        return lambda i: parts[i]

    for make in (remade, many):
        assert text_of(make(1.0)) == text_of(make(1.0)) != text_of(make(2.0))
