"""Two fingerprints of a function are equal only where nothing has changed that it can reach."""

from __future__ import annotations

import types
from functools import partial, wraps

import autograd.numpy as anp
import autograd.scipy.stats as stats
import numpy as np
import pytest
from autograd.extend import primitive

import mpiad
from mpiad.compiling.function_fingerprint import fingerprint_of, text_of

pytestmark = pytest.mark.serial

FACTOR, TABLE, NAMED, HOLDER = 2.0, np.array([2.0, 3.0]), {"a": [2.0]}, types.SimpleNamespace(a=2.0)
FACTOR_OF_STATIC, HOLDER_OF_SELF = 2.0, types.SimpleNamespace(a=2.0)
MODULE = types.ModuleType("settings_of_the_users")
MODULE.a = 2.0


def factor():
    return FACTOR


def by_default(u, p, t, a=2.0, *, b=1.0):
    return [a * u[0] * b]


def by_attribute(u, p, t):
    return [by_attribute.a * u[0]]


def in_closure():
    a = 2.0

    def change():
        nonlocal a
        a = 5.0

    return lambda u, p, t: [a * u[0]], change


def in_sign():
    a = 0.0

    def change():
        nonlocal a
        a = -0.0

    return lambda u, p, t: [anp.arctan2(a * u[0], -1.0)], change


def in_method():
    class System:
        a = 2.0

        def f(self, u, p, t):
            return [self.a * u[0]]

    return System().f, lambda: setattr(System, "a", 5.0)


def in_comprehension_of_method():
    class System:
        a = 2.0

        def f(self, u, p, t):
            return [(lambda: [self.a * x for x in u])()[i] for i in range(len(u))]

    return System().f, lambda: setattr(System, "a", 5.0)


def in_static_method():
    class System:
        @staticmethod
        def rate(x):
            return FACTOR_OF_STATIC * x

        def f(self, u, p, t):
            return [self.rate(u[0])]

    return System().f, change_global("FACTOR_OF_STATIC", 5.0)


def in_self_assigned_inside():
    class System:
        a = 2.0

        def f(self, u, p, t):
            def replaced():
                nonlocal self
                self = HOLDER_OF_SELF
                return self.a * u[0]

            return [replaced()]

    return System().f, lambda: setattr(HOLDER_OF_SELF, "a", 5.0)


def in_object():
    class System:
        def __init__(self):
            self.rates = [2.0]

        def f(self, u, p, t):
            return [self.rates[0] * u[0]]

    system = System()
    return system.f, lambda: setattr(system, "rates", [5.0])


def in_property():
    class System:
        kept = 2.0
        a = property(lambda self: self.kept)

        def f(self, u, p, t):
            return [self.a * u[0]]

    return System().f, lambda: setattr(System, "kept", 5.0)


def in_method_of_its_own():
    class System:
        a = 2.0

        def rate(self):
            return self.a

        def f(self, u, p, t):
            return [self.rate() * u[0]]

    return System().f, lambda: setattr(System, "a", 5.0)


def handed_on():
    holder = types.SimpleNamespace(a=2.0)
    rate = lambda of: of.a  # noqa: E731
    return lambda u, p, t: [rate(holder) * u[0]], lambda: setattr(holder, "a", 5.0)


def renamed():
    holder = types.SimpleNamespace(a=2.0)

    def f(u, p, t):
        same = holder
        return [same.a * u[0]]

    return f, lambda: setattr(holder, "a", 5.0)


def inside():
    holder = types.SimpleNamespace(of=types.SimpleNamespace(a=2.0))

    def f(u, p, t):
        def rate():
            return holder.of.a

        return [rate() * x for x in u]

    return f, lambda: setattr(holder.of, "a", 5.0)


def computed():
    class Holder:
        def __getattr__(self, name):
            return kept[0]

    kept, holder = [2.0], Holder()
    return lambda u, p, t: [holder.a * u[0]], lambda: kept.append(kept.pop() + 3.0)


def absent():
    def f(u, p, t):
        try:
            return [holder.a * NOWHERE * u[0]]
        except (AttributeError, NameError):
            return [u[0]]

    holder = types.SimpleNamespace()
    return f, lambda: (setattr(holder, "a", object()), globals().update(NOWHERE=2.0), setattr(holder, "a", 5.0))


class Settings:
    a = 2.0


def in_primitive():
    a = [2.0]
    scaled = primitive(lambda x: a[0] * x)
    return lambda u, p, t: [scaled(u[0])], lambda: a.append(a.pop() + 3.0)


def in_wrapped():
    a = [2.0]

    def f(u, p, t):
        return [a[0] * u[0]]

    return wraps(f)(lambda *given: f(*given)), lambda: a.append(a.pop() + 3.0)


def patched(f, change):
    return lambda: (f, change)


def change_global(name, value):
    return lambda: globals().update({name: value})


CASES = {
    "global": patched(lambda u, p, t: [FACTOR * u[0]], change_global("FACTOR", 5.0)),
    "global of another function": patched(lambda u, p, t: [factor() * u[0]], change_global("FACTOR", 6.0)),
    "another function": patched(lambda u, p, t: [factor() * u[0]], change_global("factor", lambda: 7.0)),
    "in a comprehension": patched(lambda u, p, t: [FACTOR * x for x in u], change_global("FACTOR", 8.0)),
    "entry of an array": patched(lambda u, p, t: [TABLE[1] * u[0]], lambda: TABLE.__setitem__(1, 5.0)),
    "inside of a nest": patched(lambda u, p, t: [NAMED["a"][0] * u[0]], lambda: NAMED["a"].__setitem__(0, 5.0)),
    "attribute of an object": patched(lambda u, p, t: [HOLDER.a * u[0]], lambda: setattr(HOLDER, "a", 5.0)),
    "attribute of a module": patched(lambda u, p, t: [MODULE.a * u[0]], lambda: setattr(MODULE, "a", 5.0)),
    "default": patched(by_default, lambda: setattr(by_default, "__defaults__", (5.0,))),
    "default of a keyword": patched(by_default, lambda: by_default.__kwdefaults__.update(b=5.0)),
    "attribute of a function": patched(by_attribute, lambda: setattr(by_attribute, "a", 5.0)),
    "attribute of a class": patched(lambda u, p, t: [Settings.a * u[0]], lambda: setattr(Settings, "a", 5.0)),
    "object": in_object, "inside": inside, "property": in_property, "a method's own": in_method_of_its_own,
    "method's comprehension": in_comprehension_of_method, "static method": in_static_method,
    "self assigned": in_self_assigned_inside, "handed on": handed_on, "renamed": renamed, "computed": computed,
    "closure": in_closure, "sign of zero": in_sign, "method": in_method, "primitive": in_primitive, "wrapped": in_wrapped,
    "absent": absent,
}  # fmt: skip
UNKNOWN = ("property", "self assigned", "handed on", "computed")
by_attribute.a = 2.0


def value(f):
    found = float(f(np.array([1.5]), None, 0.0)[0])
    return found, np.signbit(found)


@pytest.mark.parametrize("case", CASES)
def test_what_has_changed_is_seen(case):
    f, change = CASES[case]()
    before, found = value(f), fingerprint_of(f)
    assert (found is None) == (case in UNKNOWN)
    assert found == fingerprint_of(f)
    change()
    assert value(f) != before
    assert found is None or fingerprint_of(f) != found


def test_what_is_given_with_it_is_seen():
    kinds = [(1,), (1.0,), (True,), [1], {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, 0.0, -0.0, "0.0", None]
    kinds += [np.float32(1), np.float64(1), np.ones(2), np.ones((1, 2)), np.ones(2, int), anp.sin, np.sin, factor, len]
    kinds += [1 + 0j, complex(1.0, -0.0), 1j]
    fingerprints = [fingerprint_of(factor, kind) for kind in kinds]
    assert None not in fingerprints
    assert len(set(fingerprints)) == len(kinds)


def test_an_absent_attribute_differs_from_every_value():
    """In texts, which ranks compare, too."""

    def reading(holder):
        return lambda u, p, t: holder.a

    funs = [reading(types.SimpleNamespace(**state)) for state in ({}, {"a": None}, {"a": object()}, {"a": "MISSING"})]
    for reads in (fingerprint_of, text_of):
        assert len({reads(fun) for fun in funs}) == len(funs)


def test_functions_of_the_same_text_and_values_read_the_same():
    def made(a):
        table, again = np.arange(3.0), lambda n: n and again(n - 1)

        def f(u, p, t):
            return [a * anp.sin(u[0]) + sum(table[i] for i in range(3)) * abs(u[0]) + again(2)]

        return partial(f)

    assert fingerprint_of(made(2.0)) == fingerprint_of(made(2.0)) is not None
    assert fingerprint_of(made(2.0)) != fingerprint_of(made(3.0))


@pytest.mark.parametrize(
    "f",
    [
        lambda u, p, t: np.random.default_rng(0).normal.__self__ and HOLDER,
        lambda u, p, t: eval("FACTOR"),
        lambda u, p, t: __import__("math"),
        np.random.default_rng(0).normal,
        [1.0].append,
    ],
)
def test_what_cannot_be_followed_is_unknown(f):
    assert fingerprint_of(f) is None


def test_primitives_differ_in_texts_as_in_fingerprints():
    """Ranks compare texts, so these must also tell apart primitives of the same name."""

    def applied(function):
        return lambda u, p, t: function(u)

    before = text_of(applied(stats.norm.pdf))
    mpiad.jit(lambda x: 2 * x)(np.ones(3))  # from now on, traces record calls of SciPy's functions
    assert text_of(applied(stats.norm.pdf)) == before
    for function, other in ((anp.sin, anp.tanh), (anp.floor, anp.ceil), (stats.norm.pdf, stats.t.pdf)):
        assert fingerprint_of(applied(function)) == fingerprint_of(applied(function)) != fingerprint_of(applied(other))
        assert text_of(applied(function)) == text_of(applied(function)) != text_of(applied(other))
