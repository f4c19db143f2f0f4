"""One trace for each signature: shapes, dtypes, forms, and the values that Python decides by."""

import logging
from collections import namedtuple

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same

import mpiad
from mpiad.compiling.closure import watch_of
from mpiad.programs import program_cache

pytestmark = pytest.mark.serial

X = np.arange(1.0, 6.0)
WAVELET = np.array([3.0, 1.0, 4.0, 1.0, 5.0])


class Jitted:
    """A function whose traces are counted."""

    def __init__(self, fun):
        self.fun, self.jitted = fun, mpiad.jit(fun, strict=True)

    def check(self, *args, **kwargs):
        """Call it, compare it, and return how often it was traced."""
        before = self.jitted._cache.attempts.traces
        assert_same(self.jitted(*args, **kwargs), self.fun(*args, **kwargs))
        return self.jitted._cache.attempts.traces - before


def test_a_trace_for_each_shape_dtype_and_form():
    fun = Jitted(lambda *args, **kwargs: [x * 2 for x in args] + [kwargs[name] - 1.0 for name in sorted(kwargs)])
    assert [fun.check(x) for x in (X, X * 2, X[:3], X, X[:3], X.astype(np.float32), X.reshape(5, 1), X[::-1])] == [
        1, 0, 1, 0, 0, 1, 1, 0
    ]  # fmt: skip
    assert [fun.check(x) for x in (2.0, 3.5, np.float64(3.5), np.float32(1), np.array(1.0), -0.0)] == [1, 0, 1, 1, 1, 0]
    assert [fun.check(X, a=X), fun.check(X, a=X * 2), fun.check(X, b=X), fun.check(X, a=X, b=2.0)] == [1, 0, 1, 1]
    assert fun.check(X, b=2.0, a=X) <= 1 and fun.check(X, a=X * 3, b=4.0) == 0
    assert fun.check(X, b=2.5, a=X) == 0


@pytest.mark.parametrize("form", [tuple, list, lambda parts: parts[1], lambda parts: (parts[0], {"sum": parts[1]}, None)])
def test_plain_arguments_of_several_signatures_in_turn(form):
    """They aren't taken apart, as long as one of the latest calls' was of their signature."""
    fun = Jitted(lambda x, y: form([x * y, x + y]))
    first = X, X[::-1], X[:1], X.astype(np.float32), X.astype(">f8"), X.reshape(5, 1)
    calls = [(x, y) for x in first for y in (2.5, X[0])]
    assert sum(fun.check(*args) for args in calls) <= len(calls)
    assert [fun.check(*args) for args in [*calls, *calls[::-1], (X,) * 2, *calls[:2] * 3]] == [0] * 24 + [1] + [0] * 6


def test_nests_by_their_forms():
    Pair = namedtuple("Pair", "u v")
    fun = Jitted(lambda p: type(p).__name__ == "dict" and p["u"] * p["v"] or p[0] * p[1] if type(p) is not dict else p["v"])
    forms = [(X, X * 2), [X, X * 2], Pair(X, X * 2), {"v": X, "u": X * 2}, {"u": X, "v": X * 2}, (X * 3, X)]
    assert [fun.check(p) for p in forms] == [1, 1, 1, 1, 1, 0]


def test_integers_that_are_computed_with_are_values():
    """A table that isn't traced is another thing: NumPy asks for the integer, so each is a constant of its own."""
    fun = Jitted(lambda x, k: x * k + x[k])
    assert fun.check(X, 2) == 1
    assert [fun.check(X, k) for k in (0, 1, 4, -1, 3)] == [0] * 5
    with pytest.raises(IndexError):
        fun.jitted(X, 7)
    table = Jitted(lambda x, k: x * WAVELET[k])
    assert [table.check(X, k) <= 1 for k in (0, 1, 4, 0, 1)]
    assert [table.check(X, k) for k in (0, 1, 4)] == [0, 0, 0]


def test_integers_that_python_decides_by_are_constants():
    """Equal numbers of other types are other constants: True is 1 and 1.0, too."""

    def decides(x, k, name="sum"):
        for _ in range(k):
            x = x * 2
        return x[: k + 1] if name == "part" else x

    fun = Jitted(decides)
    fun.check(X, 2)
    assert fun.check(X, 3) >= 1
    assert fun.check(X, 2) <= 1  # the first time it wasn't known that it would be asked for
    assert [fun.check(X, k) for k in (3, 2)] == [0, 0]
    assert fun.check(X, True) == 1
    # A call of another form is traced again, when it is known that Python asks for its integer.
    assert [fun.check(X, 1), fun.check(X, 1, "part"), fun.check(X, 1, name="part")] == [1, 2, 2]
    assert [fun.check(X, 1), fun.check(X, 1, "part"), fun.check(X, 1, name="part")] == [0, 0, 0]
    both = Jitted(lambda x, flag: x * 3 if flag else -x)
    assert [both.check(X, flag) for flag in (True, False, True, False)] == [1, 1, 0, 0]


CONSTANTS = {
    "branch": lambda x, n: x * n if n > 2 else x - n,
    "equality": lambda x, n: x * n if n == 1 else 2 * x if n != 3 else x - 1.0,
    "reshape": lambda x, n: anp.reshape(x, (n, -1)) * 2,
    "method": lambda x, n: x.reshape(-1, n + 0) * x[0],
    "broadcast_to": lambda x, n: anp.broadcast_to(x, (n, 6)),
    "expand_dims": lambda x, n: anp.expand_dims(anp.outer(x, x), n - 1),
    "tile": lambda x, n: anp.tile(x, n),
    "repeat": lambda x, n: anp.repeat(x, n),
    "pad": lambda x, n: anp.pad(x, (n, 1), "constant"),
    "split": lambda x, n: anp.split(x, n)[-1],
    "slice": lambda x, n: x[: n + 1] * x[-1:],
    "step": lambda x, n: x[::n] ** 2,
    "number of segments": lambda x, n: mpiad.segment_sum(x**2, np.array([0, 1, 0, 0, 1, 1]), n + 1),
    "repeated list": lambda x, n: anp.stack([x, x[::-1]] * n) * x[0],
    "repeated tuple": lambda x, n: anp.concatenate(n * (x,)) * x[0],
    "axis of stack": lambda x, n: anp.stack([anp.outer(x, x)] * 2, n - 1),
    "argnum": lambda x, n: mpiad.grad(lambda a, b, c: anp.sum(a * b**2 + c**3), n - 1)(x, x, x),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("name", CONSTANTS)
def test_integers_that_shapes_and_comparisons_depend_on_are_constants(name):
    """In values and in derivatives: a replay with another integer would have the shape or the branch of the trace."""
    f, x = CONSTANTS[name], np.arange(1.0, 7.0)
    fun, inner = Jitted(f), mpiad.jit(f, strict=True)
    gradient = mpiad.jit(mpiad.grad(lambda x, n: anp.sum(f(x, n) ** 3)), strict=True)
    for n in (1, 3, 2, 3, 1):
        fun.check(x, n)
        y = f(x, n)
        # The Jacobian by central differences, which are exact up to rounding for polynomials of degree 2.
        columns = [(f(x + e, n) - f(x - e, n)) / 2.0 for e in np.eye(6)]
        expected = np.array([np.sum(3 * y**2 * column) for column in columns])
        np.testing.assert_allclose(gradient(x, n), expected, rtol=1e-12)
        vjp, value = mpiad.make_vjp(inner)(x, n)
        np.testing.assert_allclose(vjp(3 * y**2), expected, rtol=1e-12)
        linear = mpiad.linearize(inner)(x, n)
        np.testing.assert_allclose(
            linear.jvp(np.arange(6.0)), sum(k * columns[k] for k in range(6)), rtol=1e-12, atol=1e-13
        )
        assert np.shape(value) == np.shape(linear.value) == np.shape(y)
    assert fun.check(2 * x, 3) == 0


def test_windows_of_fixed_length_are_read_at_values():
    fun = Jitted(lambda x, k: x[k : k + 2] * x[k])
    assert [fun.check(X, k) for k in (0, 1, 3)] == [1, 0, 0]


def test_ranges_and_slices_are_constants():
    """Ranges are equal if their numbers are, and only newer Pythons hash slices."""
    fun = Jitted(lambda x, part: x[part] * 2 if type(part) is slice else x * part.stop + part.step)
    parts = [
        slice(1, 3),
        slice(1, 4),
        slice(None, None, -1),
        range(0, 3, 2),
        range(0, 4, 2),
        range(0),
        range(1, 1),
        range(0),
    ]
    assert [fun.check(X, part) for part in parts] == [1] * 7 + [0]


def test_at_most_so_many_traces(caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    jitted = mpiad.jit(lambda x: x * 2.0)
    for n in range(1, 41):
        np.testing.assert_array_equal(jitted(np.ones(n)), np.full(n, 2.0))
    (record,) = caplog.records
    assert "traced 32 times" in record.getMessage()
    assert sum(entry is not None for entry in jitted._cache.entries.values()) == 32
    np.testing.assert_array_equal(jitted(np.ones(3)), np.full(3, 2.0))


def test_signatures_after_the_last_trace_take_no_memory_and_no_reads(monkeypatch):
    class Model:
        def __init__(self, rate):
            self.rate = rate

    read = []
    jitted = mpiad.jit(lambda model, x: model.rate * x)
    monkeypatch.setattr(program_cache, "watch_of", lambda *args: read.append(args) or watch_of(*args))
    for k in range(100):
        np.testing.assert_array_equal(jitted(Model(0.5 * k), X), 0.5 * k * X)
    assert jitted.is_interpreted
    assert len(read) == program_cache.MAX_TRACES
    assert len(jitted._cache.entries) == len(jitted._cache.reasons) + len(read) == program_cache.MAX_TRACES + 1


def test_the_line_that_needs_an_integer_is_named():
    table = np.arange(50.0)

    def entry(x, k):
        return x * table[k]

    jitted, line = mpiad.jit(entry, strict=True), entry.__code__.co_firstlineno + 1
    with pytest.raises(TypeError, match=rf"traced 32 times: .* test_signature\.py:{line} in entry branches .* or indexes"):
        for k in range(50):
            np.testing.assert_array_equal(jitted(X, k), X * k)


def test_a_closure_that_changes_each_time_ends_being_traced(caplog):
    caplog.set_level(logging.WARNING, "mpiad")
    scale = np.ones(5)
    jitted = mpiad.jit(lambda x: x * scale)
    for k in range(40):
        scale[2] = k
        np.testing.assert_array_equal(jitted(X), X * scale)
    assert len(caplog.records) == 1


def test_recursion_and_jitted_functions_inside():
    @mpiad.jit
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    square = mpiad.jit(lambda x: power(x, 2) + 1.0)
    for x in (X, X * 2):
        np.testing.assert_allclose(power(x, 4), x**4, rtol=1e-13)
        np.testing.assert_allclose(square(x), x**2 + 1, rtol=1e-13)
        np.testing.assert_allclose(mpiad.grad(lambda x: anp.sum(square(power(x, 3))))(x), 6 * x**5, rtol=1e-13)


def test_results_share_no_memory():
    """With arguments, one another, constants and later calls: each may be written to."""
    table = np.ones(3)

    def fun(x, y):
        z = x * 2
        return x, x, x[1:3], y.T, z, z, table, [z[::-1], anp.reshape(z, (5, 1))], anp.sum(z), anp.sort(x)[:2]

    big = np.arange(4000.0)
    for x in (X, big[:5], big):
        y = np.arange(6.0).reshape(2, 3)
        jitted = mpiad.jit(fun) if x is not big else mpiad.jit(lambda x, y: (x, x * 2, x[1:], x[::-1], x.reshape(2, -1), y))
        interpreted = fun if x is not big else jitted.fun
        results = []
        for _ in range(3):
            results.append(jitted(x, y))
            parts = [part for out in results for part in mpiad.pytrees.flatten(out)[0]] + [x, y, table]
            arrays = [part for part in parts if isinstance(part, np.ndarray)]
            for k, a in enumerate(arrays):
                assert not any(np.shares_memory(a, b) for b in arrays[:k])
            kept = interpreted(x.copy(), y.copy())
            assert_same(results[-1], kept)
            for part in mpiad.pytrees.flatten(results[-1])[0]:
                if isinstance(part, np.ndarray):
                    part[...] = np.nan


def test_tangents_of_arguments_of_another_shape():
    """The function of value and tangent is traced again, after a call whose result has another structure."""
    f = mpiad.jit(lambda x: {"twice": 2 * x})
    for length in (2, 3):
        value, tangent = mpiad.jvp(f, np.ones(length), np.full(length, 3.0))
        np.testing.assert_array_equal(value["twice"], np.full(length, 2.0))
        np.testing.assert_array_equal(tangent["twice"], np.full(length, 6.0))


def numbers_as_keys(x, k):
    tens, names = {0: 1.0, 2: 5.0, 3: 7.0}, {"w2": 4.0}
    inside = 2.0 if k in {0, 3} else 3.0
    return inside * x + tens.get(k, 0.5) * x**2 + names.get(f"w{k}", 0.25) + (str(k) == "3") * x


def powers_of_integers(x, k):
    return x * 10**k + x / 7**k + x * k**3 + 0.5**k


@pytest.mark.parametrize(("fun", "numbers"), [(numbers_as_keys, (0, 1, 2, 3, 0)), (powers_of_integers, (2, -2, 25))])
def test_integers_as_python_has_them(fun, numbers):
    """They are keys by value, and their powers don't overflow."""
    x = np.array([0.5, 2.0])
    jitted, gradient = mpiad.jit(fun, strict=True), mpiad.jit(mpiad.grad(lambda x, k: anp.sum(fun(x, k) ** 2)), strict=True)
    for k in numbers:
        np.testing.assert_allclose(jitted(x, k), fun(x, k), 1e-14)
        np.testing.assert_allclose(gradient(x, k), mpiad.grad(lambda x, k: anp.sum(fun(x, k) ** 2))(x, k), 1e-13)
    cube = mpiad.jit(lambda x, k: x * k**3, strict=True)
    for k in (3, 10**7):
        np.testing.assert_allclose(cube(x, k), x * float(k) ** 3, 1e-14)


def test_a_flattened_copy_has_memory_of_its_own():
    @mpiad.jit
    def fun(x):
        y = x * 1.0
        z = y.flatten()
        z[0] = 4.0
        return y, z

    for _ in range(3):
        y, z = fun(np.ones(2))
        np.testing.assert_array_equal([y, z], [[1.0, 1.0], [4.0, 1.0]])


def turned(state, a):
    return {"v": state["v"][0] - a * state["u"], "u": [state["u"] + a * state["v"][0], ()], "a": (state["v"][1],)}


@pytest.mark.unguarded
@pytest.mark.parametrize("fun, args, others", [
    (lambda s, a: (s[0] + a * s[1], s[1] - a * s[0]), ((X, 2 * X), 0.5), [
        ([X, 2 * X], 0.5), ((X, 2 * X, X), 0.5), ((X[:3], X[:3]), 0.5), ((X, 2.0), 0.5), ((X, X.astype(np.float32)), 0.5),
        ((X, 2 * X), 1), ((2 * X, X), np.float64(0.5)),
    ]),
    (turned, ({"v": (X, 1.0), "u": 3 * X}, 2.0), [
        ({"u": 3 * X, "v": (X, 1.0)}, 2.0), ({"v": [X, 1.0], "u": 3 * X}, 2.0), ({"v": (X, 1.0), "u": 3 * X, "w": X}, 2.0),
        ({"v": (X, np.float64(1.0)), "u": X}, 2.0),
    ]),
    (lambda s: [s[1], {"b": s[0], "a": -s[0]}, s[2][0][0]], ([X, 2 * X, [[X]]],), [((X, X, [[X]]),), ([X, X, [(X,)]],)]),
    (lambda s, t: s.u + t[0] if len(t) else s.u, (namedtuple("S", "u")(X), (X,)), [(namedtuple("S", "u")(X), ())]),
])  # fmt: skip
def test_calls_with_nested_arguments(fun, args, others, monkeypatch):
    """Those of a known signature don't flatten the arguments; others are noticed, in whichever order they come."""
    jitted, flattened = mpiad.jit(fun, strict=True), []
    plain = mpiad.programs.function.arguments_of
    monkeypatch.setattr(mpiad.programs.function, "arguments_of", lambda *given: (flattened.append(1), plain(*given))[1])
    for given in (args, *others, args, *others[::-1]):
        assert_same(jitted(*given), fun(*given))
    del flattened[:]
    for k in range(3):
        given = mpiad.pytrees.map_leaves(lambda x, k=k: x * (k + 1.5), args)
        found, expected = jitted(*given), fun(*given)
        assert_same(found, expected)
        assert not isinstance(expected, dict) or list(found) == list(expected)
    # A named tuple isn't a tuple.
    assert len(flattened) <= 1 or isinstance(args[0], tuple) and hasattr(args[0], "_fields")


def test_a_dict_as_an_argument_isn_t_a_keyword():
    fun = Jitted(lambda x, options=None, a=2.0: options["a"] - x if options else a * x)
    assert [fun.check(X, {"a": 3 * X}), fun.check(X, a=3 * X), fun.check(X, {"a": X}), fun.check(X, a=X)] == [1, 1, 0, 0]
    fun = Jitted(lambda *args, **kwargs: args[0] + kwargs["a"] if kwargs else args[1]["a"] * args[0][0])
    assert [fun.check((X,), {"a": X}), fun.check(X, a=X), fun.check((X,), {"a": X})] == [1, 1, 0]
    fun = Jitted(lambda *args, **kwargs: [len(args), *kwargs.values()][-1] * args[0][0])
    assert [fun.check((X,), {"a": X}), fun.check((X,), a=X), fun.check((X,), {}), fun.check((X,))] == [1, 1, 1, 1]
