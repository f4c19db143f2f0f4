"""What a jitted function reads beside its arguments is read at each call, or the function isn't compiled."""

import logging
import types
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.stats
from mpi4py import MPI
from scipy.interpolate import CubicSpline

import mpiad
from mpiad.compiling import cache
from mpiad.compiling.closure import Unknown, watch_of
from mpiad.ensemble import ODEProblem, solve
from mpiad.timestepping import scan as scan_steps

pytestmark = pytest.mark.serial

X = np.arange(1.0, 6.0)
FACTOR = 2.0
WEIGHTS = np.ones(5)
TABLE = {"a": [1.0, 2.0]}
CONSTANTS = types.ModuleType("constants_of_this_test")


def inner(x):
    return x + 1.0


def outer(x):
    return inner(x) * FACTOR


def follow(fun, change):
    """Check each call, and each gradient, against the function as it is then; `change` gives it other things to read."""
    jitted, gradient = mpiad.jit(fun, strict=True), mpiad.grad(lambda x: anp.sum(fun(x) ** 2))
    within = mpiad.jit(fun, strict=True)
    outside = mpiad.grad(lambda x: anp.sum(within(x) ** 2))
    inside = mpiad.jit(gradient, strict=True)
    seen = []
    for step in (*change, lambda: None):
        for x in (X, X * 2):
            np.testing.assert_allclose(jitted(x), fun(x), rtol=1e-13)
            np.testing.assert_allclose(outside(x), gradient(x), rtol=1e-13)
            np.testing.assert_allclose(inside(x), gradient(x), rtol=1e-13)
        seen.append(jitted(X))
        step()
    # Each change is one that shows.
    for before, after in zip(seen, seen[1:]):
        assert np.any(before != after)


def test_a_global_number(monkeypatch):
    change = [lambda new=new: monkeypatch.setitem(globals(), "FACTOR", new) for new in (3.0, np.float32(4), -1)]
    follow(lambda x: x * FACTOR, change)


def test_a_global_array_also_changed_in_place(monkeypatch):
    monkeypatch.setitem(globals(), "WEIGHTS", np.ones(5))
    columns = np.ones((5, 2))

    def change_a_view():
        columns[2, 0] = 7.0

    change = [
        lambda: WEIGHTS.__setitem__(2, 5.0),
        lambda: monkeypatch.setitem(globals(), "WEIGHTS", columns[:, 0]),
        change_a_view,
        lambda: monkeypatch.setitem(globals(), "WEIGHTS", np.broadcast_to(columns[2, :1], (5,))),
        lambda: columns.__setitem__((2, 0), -3.0),
    ]
    follow(lambda x: x * WEIGHTS, change)


def test_a_function_that_is_exchanged(monkeypatch):
    change = [
        lambda: monkeypatch.setitem(globals(), "inner", lambda x: x**2),
        lambda: monkeypatch.setitem(globals(), "FACTOR", 5.0),
        lambda: monkeypatch.setitem(globals(), "inner", partial(lambda k, x: x * k, 3.0)),
    ]
    follow(outer, change)


def test_the_code_the_default_and_the_attributes_of_a_function():
    def helper(x):
        return x + 1.0

    def marked(x):
        return x + marked.shift

    marked.shift = 1.0

    def set_code():
        helper.__code__ = (lambda x: x * 7.0).__code__

    def set_default():
        with_default.__defaults__ = (4.0,)

    def set_keyword_default():
        with_default.__kwdefaults__ = {"shift": 1.5}

    def with_default(x, k=2.0, *, shift=0.5):
        return x * k + shift

    changes = [lambda: setattr(marked, "shift", 5.0), set_code, set_default, set_keyword_default]
    follow(lambda x: helper(with_default(marked(x))), changes)


def test_variables_of_functions_around():
    a, b = 1.0, np.zeros(5)

    def fun(x):
        def nested(y):
            return y * a + b

        return nested(x)

    def set_a():
        nonlocal a
        a = 4.0

    def exchange_b():
        nonlocal b
        b = np.full(5, 3.0)

    follow(fun, [set_a, lambda: b.__setitem__(0, 2.0), exchange_b, lambda: b.__setitem__(slice(None), 1.0)])


def test_nests_and_modules(monkeypatch):
    monkeypatch.setitem(TABLE, "a", [1.0, 2.0])
    monkeypatch.setattr(CONSTANTS, "speed", 2.0, raising=False)
    change = [
        lambda: TABLE["a"].__setitem__(0, 3.0),
        lambda: monkeypatch.setitem(TABLE, "a", [5.0, 2.0]),
        lambda: monkeypatch.setattr(CONSTANTS, "speed", -2.0),
        lambda: TABLE["a"].append(6.0),
    ]
    follow(lambda x: x * sum(TABLE["a"]) * CONSTANTS.speed, change)


class Model:
    offset = 1.0

    def __init__(self):
        self.weights, self.options = np.ones(5), {"power": 2.0}

    def value(self, x):
        return self.bent(x) * self.weights + self.offset

    def bent(self, x):
        return x ** self.options["power"]


def test_attributes_of_objects(monkeypatch):
    model = Model()
    change = [
        lambda: model.weights.__setitem__(1, 4.0),
        lambda: setattr(model, "weights", np.full(5, 2.0)),
        lambda: model.options.__setitem__("power", 3.0),
        lambda: setattr(model, "offset", 7.0),
        lambda: delattr(model, "offset"),
        lambda: monkeypatch.setattr(Model, "offset", -1.0),
        lambda: monkeypatch.setattr(Model, "bent", lambda self, x: x * self.options["power"]),
        lambda: setattr(model, "bent", lambda x: x),
    ]
    follow(lambda x: model.value(x), change)


class Divided:
    divided = False

    def value(self, x):
        if self.divided:
            return x * self.counts[0]
        try:
            factor = self.factor
        except AttributeError:
            factor = 1.0
        return absent_function(x) if SHIFTED else x * factor  # noqa: F821


SHIFTED = False


def test_names_and_attributes_that_appear_later(monkeypatch):
    """Those of branches that aren't taken may be absent; the interpreted function is the reference after each change."""
    model = Divided()
    for fun in (lambda x: model.value(x), model.value):
        change = [
            lambda: setattr(model, "factor", 3.0),
            lambda: delattr(model, "factor"),
            lambda: monkeypatch.setattr(Divided, "factor", 2.0, raising=False),
            lambda: [monkeypatch.setitem(globals(), *item) for item in {"SHIFTED": True, "absent_function": inner}.items()],
            lambda: model.__dict__.update(divided=True, counts=[5.0, 1.0]),
        ]
        follow(fun, change)
        monkeypatch.undo()
        vars(model).clear()

    def make():
        def fun(x):
            return library.exp(x) if SHIFTED else x

        def change():
            nonlocal library
            library = anp
            monkeypatch.setitem(globals(), "SHIFTED", True)

        return fun, change
        library = None  # a variable of this function, which isn't assigned at first

    fun, change = make()
    follow(fun, [change])


def test_attributes_that_appear_between_scans_and_solves():
    """A step multiplies by half the factor; the exponential decays at the rate of the factor."""
    model, half = Divided(), mpiad.jit(lambda u: 0.5 * u)
    gradient = mpiad.grad(lambda u: anp.sum(scan_steps(lambda u, k: model.value(half(u)), u, 8)))
    problem = ODEProblem(lambda u, p, t: [-model.value(u[0])], [1.0], (0.0, 1.0))
    for factor in (None, 3.0, None, 2.0):
        vars(model).update({} if factor is None else {"factor": factor})
        np.testing.assert_allclose(gradient(X), (0.5 * (factor or 1.0)) ** 8, rtol=1e-13)
        np.testing.assert_allclose(solve(problem, rtol=1e-9).u_end, np.exp(-(factor or 1.0)), rtol=1e-5)
        vars(model).clear()


def test_absent_names_that_are_read_raise_pythons_errors(monkeypatch):
    model, named = Divided(), mpiad.jit(lambda x: absent_function(x), strict=True)  # noqa: F821
    model.divided = True
    for _ in range(2):
        with pytest.raises(AttributeError, match="'Divided' object has no attribute 'counts'"):
            mpiad.jit(model.value, strict=True)(X)
        with pytest.raises(NameError, match="name 'absent_function' is not defined"):
            named(X)
    monkeypatch.setitem(globals(), "absent_function", inner)
    np.testing.assert_array_equal(named(X), inner(X))


def test_attributes_that_may_be_computed_are_not_absent(monkeypatch):
    """By `__getattr__` of a class or module; of the class of a class."""
    computing, module = type("Computing", (), {"__getattr__": lambda self, name: 2.0})(), types.ModuleType("computing")
    module.__getattr__ = lambda name: 2.0
    for value in (computing, module, Divided):
        with pytest.raises(Unknown, match="value.mro"):
            watch_of(lambda x: x * value.mro)  # noqa: B023
    watch = watch_of(Divided().value)
    monkeypatch.setattr(Divided, "__getattr__", lambda self, name: 2.0, raising=False)
    assert not watch.is_the_same()


class Damped(Model):
    def __init__(self):
        super().__init__()
        self.damping = 0.5

    def value(self, x):
        return super().value(x) * self.damping + super().offset


class Bare:
    def value(self, x):
        return x * 3.0


def test_methods_of_base_classes(monkeypatch):
    """By `super()`, which names neither the object nor the class."""
    model = Damped()
    change = [
        lambda: model.weights.__setitem__(1, 4.0),
        lambda: setattr(model, "damping", 0.25),
        lambda: model.options.__setitem__("power", 3.0),
        lambda: monkeypatch.setattr(Model, "offset", -2.0),
        lambda: monkeypatch.setattr(Model, "bent", lambda self, x: x * self.options["power"]),
        lambda: monkeypatch.setattr(Model, "value", lambda self, x: x * self.weights),
        lambda: setattr(model, "weights", np.full(5, 2.0)),
    ]
    follow(lambda x: model.value(x), change)
    method = mpiad.jit(model.value, strict=True)
    for model.damping in (1.0, 7.0):
        np.testing.assert_array_equal(method(X), model.value(X))


def test_the_class_of_an_object():
    model = Model()
    follow(lambda x: model.value(x), [lambda: setattr(model, "__class__", Bare)])


def test_objects_of_libraries_with_slots():
    spline = CubicSpline([0.0, 1.0, 2.0], [0.0, 1.0, 4.0])
    follow(lambda x: x * spline(0.5), [lambda: spline.c.__imul__(3.0), lambda: setattr(spline, "c", spline.c + 1.0)])


def test_attributes_that_functions_get_later():
    def model(x):
        return getattr(model, "rate", 1.0) * x

    def other(x):
        return 2.0 * x if hasattr(model, "slow") else x

    follow(lambda x: model(x) + other(x), [lambda: setattr(model, "rate", 5.0), lambda: setattr(model, "slow", True)])


def test_a_method():
    """As a decorated method of a class; each object's own attributes are read."""

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        @mpiad.jit
        def value(self, x):
            return x * self.factor

    first, second = Scaled(2.0), Scaled(np.arange(5.0))
    for _ in range(2):
        np.testing.assert_array_equal(first.value(X), 2 * X)
        np.testing.assert_array_equal(second.value(X), np.arange(5) * X)
        first.factor, second.factor = 2.0, np.arange(5.0)
    first.factor = 5.0
    np.testing.assert_array_equal(first.value(X), 5 * X)
    second.factor[1] = 9.0
    np.testing.assert_array_equal(second.value(X)[1], 18.0)
    twice = mpiad.jit(lambda x: first.value(first.value(x)), strict=True)
    np.testing.assert_array_equal(twice(X), 25 * X)
    first.factor = 3.0
    np.testing.assert_array_equal(twice(X), 9 * X)
    calls = mpiad.jit(lambda x, model: model.value(x))
    for first.factor in (2.0, 4.0):
        np.testing.assert_array_equal(calls(X, first), first.factor * X)


def test_a_jitted_function_inside_of_another_one(monkeypatch):
    inner_jitted = mpiad.jit(outer, strict=True)
    change = [
        lambda: monkeypatch.setitem(globals(), "FACTOR", 5.0),
        lambda: monkeypatch.setitem(globals(), "inner", lambda x: x),
    ]
    follow(lambda x: inner_jitted(x) + 1.0, change)


def test_equal_objects_are_different_arguments():
    class Level:
        def __init__(self, height):
            self.height = height

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

        @mpiad.jit
        def above(self, x):
            return x - self.height

    for height in (1.0, 2.0):
        np.testing.assert_array_equal(Level(height).above(X), X - height)


class Hidden:
    @property
    def value(self):
        return next(COUNT)


COUNT = iter(range(100))
HIDDEN = Hidden()
RANDOM = np.random.default_rng(1)


def reads_a_property(x):
    return x * HIDDEN.value


def draws(x):
    return x + RANDOM.standard_normal(5)


def draws_from_numpy(x):
    return x + np.random.standard_normal(5)  # noqa: NPY002


def draws_from_autograd(x):
    return x + anp.random.standard_normal(5)


def communicates(x):
    return x * MPI.COMM_WORLD.allreduce(1.0)


def imports(x):
    import random

    return x * random.random()


def evaluates(x):
    return x * eval("FACTOR")


NOISE = scipy.stats.norm(scale=0.1)


def draws_from_scipy(x):
    return x + NOISE.rvs(size=5)


def draws_from_a_distribution_made_inside(x):
    return x + scipy.stats.norm(scale=0.1).rvs(size=5)


def asks_for_the_time(x):
    return x * (np.datetime64("now", "us") - np.datetime64("2020-01-01", "us")).astype(float)


@pytest.mark.parametrize(
    ("fun", "named"),
    [
        (reads_a_property, "COUNT in Hidden.value"), (draws, "RANDOM"),
        (draws_from_numpy, "random"), (draws_from_autograd, "random"),
        (draws_from_scipy, "NOISE.rvs"), (draws_from_a_distribution_made_inside, ""),
        (asks_for_the_time, "datetime64"),
        (communicates, "COMM_WORLD.allreduce"), (imports, ""), (evaluates, "eval"), (partial(draws), "RANDOM"),
    ],
    ids=lambda case: getattr(case, "__name__", None),
)  # fmt: skip
def test_what_cannot_be_followed_is_interpreted(fun, named, caplog):
    """With one warning that names it; `strict` raises instead, before anything has run."""
    caplog.set_level(logging.WARNING, "mpiad")
    calls = []

    def counted(x):
        calls.append(x)
        return fun(x)

    with pytest.raises(TypeError, match=f"can't be compiled: .*{named}"):
        mpiad.jit(fun, strict=True)(X)
    jitted = mpiad.jit(fun)
    made = [jitted(x) for x in (X, X, X[:3] if "draws" not in str(fun) else X)]
    if fun not in (communicates, evaluates, asks_for_the_time):  # a time in seconds
        assert np.any(made[0] != made[1])
    (record,) = caplog.records
    assert "isn't compiled" in record.getMessage() and named in record.getMessage()


@pytest.mark.parametrize(
    ("name", "read", "write"),
    [
        ("x.txt", np.loadtxt, np.savetxt), ("x.npy", np.load, np.save), ("x.npy", lambda path: np.load(path), np.save),
        ("x.bin", np.fromfile, lambda path, x: x.tofile(path)),
    ],
    ids=["loadtxt", "load", "load in a function", "fromfile"],
)  # fmt: skip
def test_files_that_change(name, read, write, tmp_path):
    path = str(tmp_path / name)
    jitted = mpiad.jit(lambda x: x * read(path))
    for step in range(3):
        write(path, X + step)
        np.testing.assert_array_equal(jitted(X), X * (X + step))


def test_a_watch_sees_what_changes_and_nothing_else():
    array, fixed = np.arange(3.0), np.arange(3.0)
    fixed.flags.writeable = False
    table = [1.0, (2.0, array)]

    def fun(x):
        return x * table[1][1] + fixed + np.pi

    watch = watch_of(fun)
    assert watch.is_the_same()
    array[1] = np.nan
    assert not watch.is_the_same()
    watch = watch_of(fun)
    assert watch.is_the_same()  # NaN is itself
    array[0] = -0.0
    assert not watch.is_the_same()  # and 0 isn't -0
    array[0] = 0.0
    assert watch.is_the_same()
    table.append(0.0)
    assert not watch.is_the_same()
    with pytest.raises(Unknown, match="RANDOM"):
        watch_of(draws)


def test_a_dict_that_stays_is_not_traced_again():
    table = {"a": 2.0, "b": 3.0}
    jitted = mpiad.jit(lambda x: table["a"] * x + table["b"], strict=True)
    for k in range(3):
        np.testing.assert_array_equal(jitted(X * k), 2 * X * k + 3)
    assert jitted._cache.attempts.traces == 1
    table["b"] = 4.0
    np.testing.assert_array_equal(jitted(X), 2 * X + 4)


def test_a_traced_value_of_a_derivative_around_it():
    """Σ w² b with w = 2 b, where the jitted function closes over b: its tangent has a part along b, too."""
    b, v = np.array([0.5, 1.5]), np.array([1.0, -1.0])

    def outer(b):
        inner = mpiad.jit(lambda w: anp.sum(mpiad.mpi_exchange(w * b, None, None, like=w) * 0 + w**2 * b))
        return inner(b * 2.0)

    value, along = mpiad.jvp(outer, b, v)
    np.testing.assert_allclose((value, along), (np.sum(4 * b**3), np.sum(12 * b**2 * v)), rtol=1e-13)
    np.testing.assert_allclose(mpiad.grad(outer, objective="sum")(b), 12 * b**2, rtol=1e-13)
    np.testing.assert_allclose(mpiad.hvp(outer, objective="sum")(b, v), 24 * b * v, rtol=1e-13)


def gradient_of(jitted, weights):
    """Return value and gradient of Σ w exp(-k x) x², and what the jitted function must return, for a number k."""
    value_and_grad = mpiad.value_and_grad(jitted)

    def check(k):
        value, bar = value_and_grad(X)
        np.testing.assert_allclose(value, np.sum(weights * np.exp(-k * X) * X**2), rtol=1e-13)
        np.testing.assert_allclose(bar, weights * np.exp(-k * X) * (2 * X - k * X**2), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(jitted(X), np.sum(weights * np.exp(-k * X) * X**2), rtol=1e-13)

    return check


@pytest.mark.parametrize("style", ["variable", "defined again"])
def test_one_program_has_all_values_of_a_number(style, caplog):
    cache._loaded.clear()
    k, weights = 1.5, np.linspace(0.5, 1.0, 5)

    def defined():
        number = k
        return mpiad.jit(lambda x: anp.sum(weights * anp.exp(-number * x) * x**2))

    jitted = mpiad.jit(lambda x: anp.sum(weights * anp.exp(-k * x) * x**2))
    made = []
    for step in range(80):
        k = 1.5 + 0.01 * step
        gradient_of(jitted if style == "variable" else defined(), weights)(k)
        made.append(len(cache._loaded))
    assert made[2] == made[-1] and not caplog.records
    # An array around is still looked at, also with a number that is an argument.
    weights[2], k = 3.0, 1.2
    gradient_of(jitted if style == "variable" else defined(), weights)(k)


def test_arrays_of_functions_defined_again_are_their_own():
    def defined(number, weights):
        return mpiad.jit(lambda x: anp.sum(weights * anp.exp(-number * x) * x**2), strict=True)

    functions = [(k, weights) for k in (0.5, 0.6, 0.7) for weights in (np.ones(5), np.arange(5.0))]
    made = [(defined(*given), *given) for given in functions]
    for _ in range(3):
        for jitted, k, weights in made:
            gradient_of(jitted, weights)(k)


def test_numbers_of_functions_defined_again_change_one_at_a_time():
    def line(slope, offset):
        return mpiad.jit(lambda x: slope * x + offset)

    for slope, offset in ((2.0, 3.0), (4.0, 3.0), (4.0, 5.0), (2.0, 5.0), (2.0, 3.0)):
        f = line(slope, offset)
        np.testing.assert_allclose(f(X), slope * X + offset, rtol=1e-15)
        bar = mpiad.grad(lambda x: anp.sum(f(x) ** 2))(X)  # noqa: B023
        np.testing.assert_allclose(bar, 2 * slope * (slope * X + offset), rtol=1e-15)


def test_numbers_that_python_decides_by_stay_constants(caplog):
    k = 0.5

    def f(x):
        return anp.sum(x * k if k > 1.0 else x * k**2)

    jitted = mpiad.jit(f, strict=True)
    for k in (0.5, 0.7, 1.5, 1.7, 0.7):  # noqa: B007
        for _ in range(2):
            np.testing.assert_allclose(jitted(X), f(X), rtol=1e-13)
            np.testing.assert_allclose(mpiad.grad(jitted)(X), k if k > 1.0 else k**2, rtol=1e-13)
    assert not caplog.records


def test_a_number_that_is_traced_has_its_derivative():
    """Around the jitted function, after calls with plain numbers."""

    def loss(k):
        return mpiad.jit(lambda x: anp.sum(anp.exp(-k * x)))(X)

    for k in (0.5, 0.6, 0.7):
        np.testing.assert_allclose(loss(k), np.exp(-k * X).sum(), rtol=1e-13)
        np.testing.assert_allclose(mpiad.grad(loss)(k), -(X * np.exp(-k * X)).sum(), rtol=1e-13)
        np.testing.assert_allclose(mpiad.hvp(loss)(k, 1.0), (X**2 * np.exp(-k * X)).sum(), rtol=1e-12)


def test_second_derivatives_keywords_and_other_types_of_a_number():
    k = 0.5

    def f(x, power=2):
        return anp.sum(anp.exp(-k * x) * x**power)

    jitted = mpiad.jit(f)
    for k in (0.5, 0.6, np.float64(0.7), 1, 0.8, np.float32(0.5), True, 0.9):  # noqa: B007
        np.testing.assert_allclose(jitted(X, power=3), f(X, 3), rtol=1e-6)
        found = mpiad.hvp(lambda x: jitted(x))(X, np.ones(5))
        np.testing.assert_allclose(found, np.exp(-k * X) * (2 - 4 * k * X + k**2 * X**2), rtol=1e-6, atol=1e-12)


def scan(x):
    return x * 2.0


def reduce(x):
    return x + 1.0


def test_names_of_communication_are_those_of_a_communicators_methods_only():
    """Functions, methods of others and functions of modules may be called as MPI's are, with a communicator in use."""
    comm = MPI.COMM_SELF
    domain = mpiad.Domain((5,), comm=comm)

    def gather(x):
        return x - 1.0

    def f(x):
        return gather(reduce(scan(x))) * np.add.reduce(WEIGHTS) + mpiad.mpi_allreduce(x, comm=comm) * comm.rank

    def fields(x):
        return domain.gather(domain.scatter(x)) * comm.size

    for fun in (f, fields):
        np.testing.assert_allclose(mpiad.jit(fun, strict=True)(X), fun(X), rtol=1e-14)


@pytest.mark.parametrize("fun", [
    lambda x, comm=MPI.COMM_SELF: comm.allreduce(x),
    lambda x, comms=[MPI.COMM_SELF]: comms[0].allreduce(x),
    lambda x, comms={"one": MPI.COMM_SELF}: [c.allreduce(x) for c in comms.values()][0],
    lambda x, send=MPI.COMM_SELF: (lambda given: given.bcast(x))(send),
])  # fmt: skip
def test_communicators_under_other_names_communicate_still(fun):
    with pytest.raises(Unknown, match="calls of mpi4py aren't compiled"):
        watch_of(fun)


@pytest.mark.parametrize("name", ["dot", "matmul", "tensordot", "vdot"])
@pytest.mark.parametrize("module", [anp, np], ids=["autograd", "numpy"])
def test_functions_of_libraries_do_not_change(module, name):
    """If they did, each call would be traced, and the last one of these interpreted."""
    fun = getattr(module, name)
    jitted = mpiad.jit(lambda x: fun(x, x) if name != "tensordot" else fun(x, x, 1), strict=True)
    for _ in range(40):
        np.testing.assert_allclose(jitted(X), X @ X, rtol=1e-14)


def rank_of(x):
    given = x * FACTOR
    return given * (lambda comms: comms[0].bcast(1.0))([MPI.COMM_SELF]) + inner(x)


class Noise:
    def scale(self):
        return 2.0

    source = RANDOM

    def value(self, x):
        return self.scale() * x + self.source.standard_normal()


def of_noise(x):
    noise = Noise()
    return noise.value(x)


def in_a_container(x):
    return x * NEST[0](x) * NEST[1]


NEST = [inner, RANDOM]


@pytest.mark.parametrize(("fun", "place", "line"), [
    (rank_of, "bcast in rank_of", None),
    (lambda x: x + rank_of(x), "bcast in rank_of", 0),
    (of_noise, "Noise.source", 1),
    (lambda x: of_noise(x), "Noise.source", 0),
    (in_a_container, "NEST in in_a_container", None),
    (lambda x: (x
                + draws_from_scipy(x)), "NOISE.rvs in draws_from_scipy", 1),
    (mpiad.jit(lambda x: [draws(y) for y in x]), "RANDOM.standard_normal in draws", 0),
    (lambda x: x * Hidden().value, "COUNT in Hidden.value", 0),
])  # fmt: skip
def test_the_message_names_the_place_and_the_users_line(fun, place, line):
    """The line in the function that is compiled, counted from its first one, if another function reads the object."""
    with pytest.raises(Unknown) as caught:
        watch_of(fun)
    (found, _, rest), fun = str(caught.value).partition(":"), getattr(fun, "fun", fun)
    assert found == place
    if line is None:
        assert "reached from" not in rest
    else:
        assert rest.endswith(f", reached from {fun.__qualname__}, line {fun.__code__.co_firstlineno + line}")
