"""Functions that change objects from outside have Python's effects: each change occurs once, with Python's values."""

import collections
import functools
import types

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.timestepping import scan

pytestmark = pytest.mark.serial

X = np.linspace(0.1, 1.0, 5)
COUNT = 0
LAST = None
halved = mpiad.jit(lambda u: anp.sin(u) * 0.5)


class Odd(dict):
    """A dict with methods of its own, which restoring mustn't call."""

    def __setitem__(self, key, value):
        super().__setitem__(key * 2, value)

    def __iter__(self):
        return iter(())

    def clear(self):
        raise NotImplementedError


class Backwards(list):
    def __iter__(self):
        return reversed([*super().__iter__()])


def changes():
    """Return, by kind, a function that changes an object, and a function that returns what the object contains."""
    log, kept, counts, table = {}, [], [0], np.zeros(3)
    owner = types.SimpleNamespace(seen={}, total=0.0)
    shared, odd, backwards = [0], Odd(), Backwards()
    table_of_view = np.zeros(3)
    view = table_of_view[1:]
    view.flags.writeable = False
    frozen, masked = types.MappingProxyType(settings := {"n": 0}), np.ma.array(np.zeros(3), mask=[False, True, False])
    masked.harden_mask()

    class Counted:
        number = 0
        log = []  # noqa: RUF012

    numbers, last_two, ordered = set(), collections.deque(maxlen=2), collections.OrderedDict()
    total, latest = 0, None

    def in_dict(k, u):
        log["last"] = u * 2.0

    def in_alias(k, u):
        records = log
        records["alias"] = u

    def in_list(k, u):
        kept.append(u)

    def in_place(k, u):
        counts[0] += 1

    def in_array(k, u):
        table[1] += 1

    def in_attribute(k, u):
        owner.seen["x"] = u

    def in_set(k, u):
        numbers.add(int(k))

    def in_deque(k, u):
        last_two.append(u)

    def in_ordered(k, u):
        ordered["x"] = u

    def in_global(k, u):
        global COUNT
        COUNT += 1

    def in_global_only_stored(k, u):
        global LAST
        LAST = u

    def in_variable(k, u):
        nonlocal total
        total += 1

    def in_variable_only_stored(k, u):
        nonlocal latest
        latest = u

    def in_partial(k, u, held):
        held[0] += 1

    def in_subclass(k, u):
        odd["x"] = u

    def in_sequence(k, u):
        backwards.append(u)

    def in_class(k, u):
        Counted.number += 1
        Counted.log.append(u)

    def in_class_only_stored(k, u):
        Counted.latest = u

    def through_view(k, u):
        table_of_view[2] += view[1] + 1

    def in_proxy(k, u):
        settings["n"] += 1 + 0 * frozen["n"]

    def in_masked(k, u):
        masked[0] += 1

    return {
        "partial": (functools.partial(in_partial, held=shared), lambda: shared),
        "subclass of dict": (in_subclass, lambda: dict.copy(odd)),
        "subclass of list": (in_sequence, lambda: [list.__getitem__(backwards, k) for k in range(len(backwards))]),
        "class": (in_class, lambda: [Counted.number, *Counted.log]),
        "stored in a class": (in_class_only_stored, lambda: Counted.latest),
        "view": (through_view, lambda: table_of_view),
        "proxy": (in_proxy, lambda: settings),
        "masked": (in_masked, lambda: masked.data),
        "dict": (in_dict, lambda: log),
        "alias": (in_alias, lambda: log),
        "list": (in_list, lambda: kept),
        "place": (in_place, lambda: counts),
        "array": (in_array, lambda: table),
        "attribute": (in_attribute, lambda: owner.seen),
        "set": (in_set, lambda: numbers),
        "deque": (in_deque, lambda: last_two),
        "ordered": (in_ordered, lambda: ordered),
        "global": (in_global, lambda: COUNT),
        "stored in a global": (in_global_only_stored, lambda: LAST),
        "variable": (in_variable, lambda: total),
        "stored in a variable": (in_variable_only_stored, lambda: latest),
    }


def calls(fun):
    jitted, u = mpiad.jit(fun), X
    for _ in range(5):
        u = jitted(u, 3)
    return u


def loop(fun):
    return scan(lambda u, k: fun(u, k), X, 12)


def by_python(fun, numbers):
    u = X
    for k in numbers:
        u = fun(u, k)
    return u


# Each with the numbers of its calls.
WAYS = {
    "calls": (calls, [3] * 5),
    "loop": (loop, range(12)),
    "loop of a jitted step": (lambda fun: scan(mpiad.jit(fun), X, 12), range(12)),
}


def contents(x):
    """Return what an object contains, in a form that can be compared."""
    if isinstance(x, dict):
        return {key: contents(value) for key, value in x.items()}
    if isinstance(x, (list, collections.deque)):
        return [contents(value) for value in x]
    return sorted(x) if isinstance(x, set) else np.asarray(x).tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", changes())
def test_changes_are_those_of_python(kind, way):
    global COUNT, LAST
    results = []
    for k in range(2):
        COUNT, LAST = 0, None
        change, content = changes()[kind]

        def fun(u, k, change=change, half=halved if way == "loop" and not k else lambda u: anp.sin(u) * 0.5):
            change(k, u)
            return half(u)

        run, numbers = WAYS[way]
        results.append((by_python(fun, numbers) if k else run(fun), contents(content())))
    (u, changed), (expected, of_python) = results
    np.testing.assert_allclose(u, expected, rtol=1e-14)
    assert changed == (pytest.approx(of_python, rel=1e-14) if type(of_python) in (int, float) else of_python)


def test_frames_of_a_jitted_step_are_those_of_its_states():
    frames = {}

    def observe(u, k):
        frames[int(k)] = u
        return anp.sum(u**2)

    def loss(u):
        return anp.sum(scan(lambda u, k: halved(u), u, 12, observe=observe)[1])

    expected, u = {}, X
    for k in range(12):
        u = np.sin(u) * 0.5
        expected[k] = u
    _, gradient = mpiad.value_and_grad(loss)(X)
    assert frames.keys() == expected.keys()
    for k in expected:
        np.testing.assert_allclose(mpiad.stop_gradient(frames[k]), expected[k], rtol=1e-14)
    complex_sum = lambda u: sum(np.sum((u := np.sin(u) * 0.5) ** 2) for _ in range(12))  # noqa: E731, F841
    by_complex_steps = [complex_sum(X + 1e-30j * e).imag / 1e-30 for e in np.eye(5)]
    np.testing.assert_allclose(gradient, by_complex_steps, rtol=1e-13)


def test_a_cache_that_is_filled_in_the_first_call_is_compiled():
    tables, runs = {}, []

    def table(n):
        if n not in tables:
            tables[n] = np.arange(n) ** 2.0
        return tables[n]

    def fun(x):
        return anp.sum(table(len(x)) * x**3)

    jitted = mpiad.jit(fun)
    for x in (X, X + 1, X + 2, X + 3):
        np.testing.assert_allclose(jitted(x), np.sum(np.arange(5) ** 2.0 * x**3), rtol=1e-14)
        runs.append(jitted.is_interpreted)
    assert runs == [False] * 4 and "program" in str(jitted.program(X))
    assert list(tables) == [5]


def test_a_cache_with_an_entry_per_shape_is_compiled():
    tables = {}

    @mpiad.jit
    def fun(x):
        if len(x) not in tables:
            tables[len(x)] = np.arange(len(x)) + 1.0
        return anp.sum(tables[len(x)] * x**2)

    for n in (7, 6, 5, 4, 7, 6, 5, 4):
        x = np.linspace(0.0, 1.0, n)
        np.testing.assert_allclose(fun(x), np.sum((np.arange(n) + 1.0) * x**2), rtol=1e-14)
        np.testing.assert_allclose(mpiad.grad(fun)(x), 2.0 * (np.arange(n) + 1.0) * x, rtol=1e-14)
    assert not fun.is_interpreted and "program" in str(fun.program(np.ones(4)))


def test_a_variable_that_is_deleted():
    found = []

    def outer(fun):
        y = None

        def inner(x):
            nonlocal y
            y = x * 2.0
            made = y + 1.0
            del y
            return made

        f = fun(inner)
        for k in range(5):
            y = k
            found.append(f(X))

    outer(mpiad.jit)
    np.testing.assert_allclose(found, [2 * X + 1.0] * 5, rtol=1e-15)


def test_arguments_that_are_changed():
    def fun(x, c):
        c["n"] += 1
        c["last"] = x
        return x * c["n"]

    for derivative in (lambda f: f, lambda f: mpiad.jacobian(f)):
        jitted, given = mpiad.jit(fun), {"n": 0, "last": None}
        for k in range(1, 5):
            made = derivative(lambda x, jitted=jitted, given=given: jitted(x, given))(X)
            np.testing.assert_allclose(made, k * (X if np.ndim(made) == 1 else np.eye(5)), rtol=1e-15)
            assert given["n"] == k and np.array_equal(mpiad.stop_gradient(given["last"]), X)


def test_a_changed_argument_may_be_returned():
    @mpiad.jit
    def step(state):
        state["u"] = anp.sin(state["u"])
        return state

    state = {"u": X, "v": [1.0]}
    for _ in range(4):
        state = step(state)
    np.testing.assert_allclose(state["u"], np.sin(np.sin(np.sin(np.sin(X)))), rtol=1e-14)
    assert not step.is_interpreted


def test_no_traced_values_are_kept_before_an_exception():
    kept = []

    def step(u, k):
        kept.append(u * 1.0)
        if k == 2:
            raise KeyError("of the third step")
        return u * 0.5

    for fun in (mpiad.jit(step), lambda u, k: mpiad.jit(step)(u, k)):
        kept.clear()
        with pytest.raises(KeyError, match="of the third step"):
            scan(fun, X, 12)
        np.testing.assert_allclose(kept, [X, X / 2, X / 4], rtol=1e-15)


def test_strict_names_what_is_changed():
    kept = []

    @mpiad.jit(strict=True)
    def fun(x):
        kept.append(x)
        return x * 2.0

    with pytest.raises(TypeError, match=r"can't be compiled: it changes kept in .*fun, which it hasn't created"):
        for _ in range(4):
            fun(X)
    assert len(kept) == 4


def test_changes_before_an_exception_of_the_function_stay():
    kept = []

    @mpiad.jit
    def fun(x):
        kept.append(len(x))
        raise KeyError("of the function")

    for k in range(3):
        with pytest.raises(KeyError, match="of the function"):
            fun(X)
        assert kept == [5] * (k + 1)
