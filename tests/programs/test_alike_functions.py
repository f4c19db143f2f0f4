"""Functions that are defined, jitted or differentiated again in each call have their programs in common."""

import gc
import threading
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import forget_programs
from mpi4py import MPI

import mpiad
from mpiad.inverse import ShiftInvariantMap
from mpiad.linalg import newton, solve
from mpiad.programs import function, program_cache, recorder
from mpiad.programs.compiled_forms import compiled_form
from mpiad.timestepping import scan

# Each rank computes by itself.
value_and_grad, grad, hvp = (partial(of, comm=MPI.COMM_SELF) for of in (mpiad.value_and_grad, mpiad.grad, mpiad.hvp))
X = np.linspace(0.2, 1.0, 7)


@pytest.fixture
def traces(monkeypatch):
    """Return the traces that are made."""
    made, enter = [], recorder.Recorder.__enter__

    def noted(self):
        made.append(self)
        return enter(self)

    monkeypatch.setattr(recorder.Recorder, "__enter__", noted)
    return made


def step(u, k, nu):
    return u + nu * (anp.roll(u, 1) - 2 * u + anp.roll(u, -1))


def matvec(u, a):
    return (2.5 + a) * u - anp.roll(u, 1) - anp.roll(u, -1)


def residual(u, a):
    return u + 0.1 * anp.sin(u) - a * X


class Model:
    def __init__(self, nu):
        self.nu = nu

    def step(self, u, k, rate=0.3):
        return u + self.nu * rate * anp.sin(u)

    @mpiad.jit
    def compiled_step(self, u, k):
        return u + self.nu * anp.sin(u)


MODEL, FIELD = Model(0.25), np.sin(3 * X)


def local(x):
    scale, power = 0.7, (2, 3)

    @mpiad.jit
    def inner(u, *, shift=0.5):
        return anp.sum(scale * u ** power[1] + shift * anp.tanh(FIELD * u))

    return inner(x)


def around(f):
    return lambda x: 2.0 * f(x)


def objective(x):
    return anp.sum(anp.tanh(x) ** 2)


LOSSES = {
    "loop": lambda x: anp.sum(scan(mpiad.jit(step), x, 12, 0.1) ** 2),
    "loop with checkpoints": lambda x: anp.sum(scan(mpiad.jit(step), x, 12, 0.1, checkpoints=3) ** 2),
    "method in a loop": lambda x: anp.sum(scan(mpiad.jit(MODEL.step), x, 12) ** 2),
    "jitted method in a loop": lambda x: anp.sum(scan(MODEL.compiled_step, x, 12) ** 2),
    "partial in a loop": lambda x: anp.sum(scan(mpiad.jit(partial(step, nu=0.1)), x, 12) ** 2),
    "partial of a jitted one": lambda x: anp.sum(scan(partial(mpiad.jit(step), nu=0.1), x, 12) ** 2),
    "partial of a jitted method": lambda x: anp.sum(scan(partial(MODEL.compiled_step), x, 12) ** 2),
    "lambda in a loop": lambda x: anp.sum(scan(lambda u, k: 0.9 * mpiad.jit(around(anp.sin))(u), x, 12) ** 2),
    "solve": lambda x: anp.sum(solve(mpiad.jit(matvec), FIELD, anp.sum(x)) ** 2),
    "newton": lambda x: anp.sum(newton(mpiad.jit(residual), np.zeros(7), anp.sum(x)) ** 2),
    "local function": local,
    "jitted function in a closure": lambda x: mpiad.jit(around(mpiad.jit(around(objective))))(x),
}
FORMS = {
    "value_and_grad of jit": lambda x: value_and_grad(mpiad.jit(objective))(x),
    "jit of value_and_grad": lambda x: mpiad.jit(value_and_grad(objective))(x),
    "jit of grad": lambda x: mpiad.jit(grad(objective))(x),
    "jit of hvp": lambda x: mpiad.jit(hvp(objective))(x, FIELD),
    "jit of a gradient of a jitted lambda": lambda x: mpiad.jit(grad(mpiad.jit(around(objective))))(x),
    "callable object": lambda x: mpiad.jit(CALLABLE)(x),
}


class Callable:
    def __call__(self, x):
        return objective(x)


CALLABLE = Callable()


@pytest.mark.parametrize("kind", [*LOSSES, *FORMS])
def test_each_is_compiled_once(kind, traces, monkeypatch):
    """Values and derivatives are those of interpreted functions."""
    call = FORMS.get(kind) or value_and_grad(LOSSES[kind])
    for _ in range(3):  # a solve is interpreted before it is compiled
        first = call(X)
    traces.clear()
    for _ in range(3):
        found = call(X)
        for a, b in zip(mpiad.pytrees.flatten(found)[0], mpiad.pytrees.flatten(first)[0], strict=True):
            np.testing.assert_array_equal(a, b)
    assert not traces
    forget_programs()
    monkeypatch.setattr(mpiad, "jit", lambda fun: fun)
    monkeypatch.setattr(Model, "compiled_step", Model.compiled_step.fun)
    for a, b in zip(mpiad.pytrees.flatten(call(X))[0], mpiad.pytrees.flatten(first)[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9)


def polynomial(u, a, b):
    return np.sum(a * u**2 + b * u)


NUMBERS = {
    "closure": lambda a, b: mpiad.jit(lambda u: anp.sum(a * u**2 + b * u)),
    "default": lambda a, b: mpiad.jit(lambda u, a=a, *, b=b: anp.sum(a * u**2 + b * u)),
    "keyword of a partial": lambda a, b: mpiad.jit(partial(lambda u, a, b: anp.sum(a * u**2 + b * u), a=a, b=b)),
    "argument of a partial": lambda a, b: mpiad.jit(partial(lambda a, u, b: anp.sum(a * u**2 + b * u), a, b=b)),
    "nested function": lambda a, b: mpiad.jit(around(lambda u: 0.5 * anp.sum(a * u**2 + b * u))),
    "jitted function": lambda a, b: mpiad.jit(around(mpiad.jit(lambda u: 0.5 * anp.sum(a * u**2 + b * u)))),
    "value and gradient": lambda a, b: lambda u: mpiad.jit(value_and_grad(lambda u: anp.sum(a * u**2 + b * u)))(u)[0],
    "derivative of a jitted function": lambda a, b: (
        lambda u: value_and_grad(mpiad.jit(lambda u: anp.sum(a * u**2 + b * u)))(u)[0]
    ),
    "arrays": lambda a, b: (lambda a, b: mpiad.jit(lambda u: anp.sum(a * u**2 + b * u)))(a * np.ones(7), np.full(7, b)),
}


@pytest.mark.unguarded
@pytest.mark.parametrize("kind", NUMBERS)
def test_changing_numbers_become_arguments(kind, traces):
    """Two traces for each number that changes at most; bits of the numbers count, so that zeros have signs."""
    make = NUMBERS[kind]
    for k in range(40):
        a, b = 0.1 + 0.3 * k, 2.0 - k * (k > 20)
        assert make(a, b)(X) == pytest.approx(polynomial(X, a, b), rel=1e-13)
    assert len(traces) <= 8 and traces[-1].exact is False
    for a in (0.0, -0.0):
        assert np.signbit(mpiad.jit(lambda u: anp.copysign(u, a))(X)).all() == np.signbit(a)  # noqa: B023


def test_numbers_on_which_a_function_branches_are_constants(traces):
    def make(nu):
        return mpiad.jit(lambda u: anp.sum(u * nu) if nu > 1 else anp.sum(u**2 + nu))

    for _ in range(4):
        for nu in (0.5, 1.5):
            assert make(nu)(X) == pytest.approx(np.sum(X * nu) if nu > 1 else np.sum(X**2 + nu), rel=1e-14)
    count = len(traces)
    for nu in (0.5, 1.5):
        make(nu)(X)
    assert len(traces) == count <= 6


def test_each_function_has_its_own_variables():
    """They are read in each call, also after functions that are alike have other ones."""

    def make(field, of):
        offset = 1.0
        jitted = mpiad.jit(lambda u: of(u * field) + offset)

        def change(value, other):
            nonlocal offset, of
            offset, of = value, other

        return jitted, change

    one, change_one = make(X, anp.sin)
    two, change_two = make(X, anp.sin)
    three, _ = make(X + 1, anp.sin)
    for f, fields, of, offset in ((one, X, np.sin, 1), (two, X, np.sin, 1), (three, X + 1, np.sin, 1)):
        np.testing.assert_allclose(f(X), of(X * fields) + offset, rtol=1e-14)
    change_one(3.0, anp.cos)
    np.testing.assert_allclose(one(X), np.cos(X * X) + 3, rtol=1e-14)
    np.testing.assert_allclose(two(X), np.sin(X * X) + 1, rtol=1e-14)
    change_two(4.0, anp.cos)
    np.testing.assert_allclose(value_and_grad(lambda u: anp.sum(two(u)))(X)[1], -X * np.sin(X * X), rtol=1e-12)
    np.testing.assert_allclose(one(X), np.cos(X * X) + 3, rtol=1e-14)


def test_solvers_use_the_functions_variables_of_their_call():
    """Programs that solvers derive from a jitted function are those of functions that are alike."""

    def root(weight, matrix, change):
        compiled = mpiad.jit(lambda u: matrix(u) - weight)
        found = newton(compiled, np.zeros(7))
        if change:
            weight, matrix = 2 * weight, lambda u: 4.0 * u  # the variables of `compiled`
            found = newton(compiled, np.zeros(7))
        return found

    def double(u):
        return 2.0 * u

    for change, factor in ((False, 1), (True, 1), (False, 1), (True, 1)):
        np.testing.assert_allclose(root(X, double, change), X / 2 * factor, rtol=1e-8)


def test_traced_variables_have_derivatives(traces):
    def loss(a):
        return mpiad.jit(lambda u: anp.sum(anp.sin(a * u)))(X)

    for _ in range(3):
        value, gradient = value_and_grad(loss)(0.7)
        assert gradient == pytest.approx(np.sum(np.sin((0.7 + 1e-30j) * X)).imag / 1e-30, rel=1e-13)
        assert value == pytest.approx(np.sum(np.sin(0.7 * X)), rel=1e-14)
    count = len(traces)
    value_and_grad(loss)(0.8)
    assert len(traces) == count
    assert hvp(loss)(0.7, 1.0) == pytest.approx(np.sum(-(X**2) * np.sin(0.7 * X)), rel=1e-12)


def test_functions_that_change_variables_have_programs_of_their_own(caplog):
    def counter():
        calls = 0

        def counted(u):
            nonlocal calls
            calls += 1
            return u + calls

        return mpiad.jit(counted), lambda: calls

    for _ in range(2):
        jitted, count = counter()
        for k in range(1, 4):
            before = count()
            np.testing.assert_array_equal(jitted(X), X + count())
            assert count() > before or k > 1


def test_options_and_code_are_parts_of_the_key():
    third = mpiad.jit(lambda u: u / 3.0, exact=True)
    np.testing.assert_array_equal(third(X), X / 3.0)
    refused = lambda u: float(anp.sum(u)) * u  # noqa: E731
    mpiad.jit(refused)(X)
    with pytest.raises(TypeError, match="can't be compiled"):
        mpiad.jit(refused, strict=True)(X)

    def made(k):
        def f(u, by=2.0):
            return by * u + k

        return f

    one, two = made(1), made(1)
    first, second = mpiad.jit(one), mpiad.jit(two)
    np.testing.assert_array_equal(first(X), second(X))
    two.__defaults__ = (5.0,)
    np.testing.assert_array_equal(second(X), 5 * X + 1)
    two.__code__ = (lambda k: lambda u, by=2.0: by * u - k)(1).__code__
    np.testing.assert_array_equal(second(X), 5 * X - 1)
    np.testing.assert_array_equal(first(X), 2 * X + 1)


def test_many_shapes_of_a_function_that_is_jitted_again_are_compiled(monkeypatch):
    monkeypatch.setattr(program_cache, "MAX_TRACES", 4)
    for n in range(1, 12):
        jitted = mpiad.jit(objective)
        assert jitted(np.ones(n)) == pytest.approx(n * np.tanh(1) ** 2) and not jitted.is_interpreted


THIRDS = [k % 3 == 0 for k in range(40)]


def alternating(u, k, a):
    u = u - 0.01 * a * anp.sin(u)
    return u * (1 + a * anp.mean(u)) if THIRDS[k] else u


def deciding(u, a):
    return a * u if u[0] > a else u + a


def opening(u, a):
    return a * u if open else u


SINE = mpiad.jit(anp.sin)
REFUSED = {
    "limit of traces": lambda x, a: scan(mpiad.jit(alternating), x, 40, a),
    "limit of traces, a closure": lambda x, a: scan(mpiad.jit(lambda u, k: alternating(u, k, a)), x, 40),
    "limit of traces, a compiled step": lambda x, a: scan(lambda u, k: SINE(alternating(u, k, a)), x, 40),
    "trace": lambda x, a: mpiad.jit(deciding)(x, a),
    "trace, a closure": lambda x, a: mpiad.jit(lambda u: deciding(u, a))(x),
    "reading": lambda x, a: mpiad.jit(opening)(x, a),
    "reading, a closure": lambda x, a: mpiad.jit(lambda u: opening(u, a))(x),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_compiled_is_traced_and_warned_about_as_one_function(kind, traces, caplog):
    """Values and derivatives with respect to the array and the number are those of complex steps."""
    forget_programs()

    def loss(x, a):
        return anp.sum(REFUSED[kind](x, a) ** 2)

    def expected(x, a):
        if kind == "limit of traces, a compiled step":
            for k in range(40):
                x = np.sin(alternating(x, k, a))
        elif "limit" in kind:
            for k in range(40):
                x = alternating(x, k, a)
        else:
            x = deciding(x, a) if "trace" in kind else opening(x, a)
        return np.sum(x**2)

    for k in range(44):
        a, known = 0.1 + 0.001 * k, len(traces)
        value, gradient = value_and_grad(partial(loss, a=a))(X)
        assert loss(X, a) == pytest.approx(value, rel=1e-13) and value == pytest.approx(expected(X, a), rel=1e-12)
        assert len(traces) == known or k < 40
    steps = [expected(X + 1e-30j * row, a).imag / 1e-30 for row in np.eye(7)]
    np.testing.assert_allclose(gradient, steps, rtol=1e-10, atol=1e-14)
    assert len(caplog.records) == 1 and "isn't compiled" in caplog.text


class Opening:
    def __init__(self):
        self.factor = 2.0 if open else 3.0

    def scaled(self, x):
        return self.factor * x


class Deciding:
    def scaled(self, x):
        return x if x[0] > 0 else -x


class Doubling:
    factor = 2.0

    def scaled(self, x):
        return self.factor * x


KIND = Doubling
DERIVATIVES = {
    "value": lambda fun: fun(X),
    "gradient": lambda fun: value_and_grad(fun)(X)[1],
    "product": lambda fun: mpiad.jvp(fun, X, np.ones(7))[1],
    "second": lambda fun: hvp(fun)(X, np.ones(7)),
}
SQUARES = {"value": np.sum(4 * X**2), "gradient": 8 * X, "product": np.sum(8 * X), "second": np.full(7, 8.0)}


@pytest.mark.parametrize("bad", [Opening, Deciding])
@pytest.mark.parametrize("again", [False, True], ids=["one function", "defined again"])
@pytest.mark.parametrize("of", DERIVATIVES)
def test_a_reason_holds_for_the_objects_for_which_it_was_found(of, again, bad, traces, monkeypatch):
    def made():
        return mpiad.jit(lambda x: anp.sum(KIND().scaled(x) ** 2), strict=True)

    jitted = made()
    for _ in range(2):
        for kind in (bad, Doubling):
            monkeypatch.setitem(globals(), "KIND", kind)
            jitted = made() if again else jitted
            if kind is Doubling:
                np.testing.assert_allclose(DERIVATIVES[of](jitted), SQUARES[of], rtol=1e-12)
                known = len(traces)
                DERIVATIVES[of](jitted)
                assert len(traces) == known
            elif of != "second":
                with pytest.raises(TypeError, match="can't be compiled: .*(open|Deciding|decide|control)"):
                    DERIVATIVES[of](jitted)


def test_a_reason_for_the_step_of_a_loop_holds_for_its_objects(monkeypatch):
    step = lambda u, k: SINE(KIND().scaled(u))  # noqa: E731
    for kind in (Deciding, Doubling, Deciding, Doubling):
        monkeypatch.setitem(globals(), "KIND", kind)
        for _ in range(2):
            np.testing.assert_allclose(scan(step, X, 8), run_of_sines(kind, X), rtol=1e-13)
            gradient = value_and_grad(lambda x: anp.sum(scan(step, x, 8) ** 2))(X)[1]
        steps = [np.sum(run_of_sines(kind, X + 1e-30j * row) ** 2).imag / 1e-30 for row in np.eye(7)]
        np.testing.assert_allclose(gradient, steps, rtol=1e-11)
        assert compiled_form(step, calls_jitted=True).jitted.is_compiled == (kind is Doubling)


def run_of_sines(kind, u):
    for _ in range(8):
        u = np.sin(kind().scaled(u))
    return u


@pytest.mark.parametrize("traced", [False, True])
def test_a_thousand_closures_take_bounded_memory(traced):
    """Neither arrays, nor objects that hold them, nor the tapes of traced values."""
    gc.collect()
    alive = 0

    class Field(np.ndarray):
        def __del__(self):
            nonlocal alive
            alive -= 1

    class Owner:
        def __init__(self, k):
            nonlocal alive
            alive += 1
            self.field = np.full(3, float(k)).view(Field)

    def call(k, a):
        owner = Owner(k)
        return anp.sum(mpiad.jit(lambda u: u * a * len(FIELD) + (owner is None))(X))

    for k in range(1000 if not traced else 100):
        (grad(partial(call, k)) if traced else partial(call, k))(0.5 + k)
    gc.collect()
    assert len(function._templates.known) <= 64 and alive <= 8


def test_threads_that_define_the_same_function_again():
    found = {}

    def run(shift):
        def loss(u):
            field, other = X + shift, float(shift)
            return anp.sum(scan(mpiad.jit(lambda u, k: 0.5 * u * field + other), u, 5) ** 2)

        found[shift] = [value_and_grad(loss)(X) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(shift,)) for shift in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for shift, results in found.items():
        u = X + 1j * 1e-30 * np.eye(7)
        for _ in range(5):
            u = 0.5 * u * (X + shift) + shift
        for value, gradient in results:
            assert value == pytest.approx(np.sum(u[0].real ** 2), rel=1e-12)
            np.testing.assert_allclose(gradient, np.sum(u**2, axis=1).imag / 1e-30, rtol=1e-11)


def test_a_map_of_a_step_that_is_jitted_again(traces):
    def made():
        return ShiftInvariantMap(
            mpiad.jit(lambda u, k, m: 0.5 * u + m), lambda u: u, np.zeros(1), np.zeros(1), 3, interval=2, comm=MPI.COMM_SELF
        )

    for _ in range(2):
        made()
    traces.clear()
    np.testing.assert_allclose(np.ravel(made()(np.ones((3, 1)))), [1.5, 1.875, 1.96875])
    assert not traces


@pytest.mark.unguarded
def test_numbers_of_a_compiled_function_inside_of_another_one(traces):
    """The variable of an enclosing function changes between calls of the outer function, which is made once."""
    rate = 1.0
    decayed = mpiad.jit(lambda x: anp.sum(anp.exp(-rate * x)))
    slope = mpiad.jit(value_and_grad(lambda x: 2.0 * decayed(x)))
    for rate in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        known = len(traces)
        value, gradient = slope(X)
        np.testing.assert_allclose(value, 2 * np.sum(np.exp(-rate * X)), rtol=1e-13)
        np.testing.assert_allclose(gradient, -2 * rate * np.exp(-rate * X), rtol=1e-13)
    assert len(traces) == known


@pytest.mark.serial
def test_a_warning_if_each_call_reads_a_new_list(caplog):
    def loss(u, rate):
        rates = [rate]
        return anp.sum(mpiad.jit(lambda u: rates[0] * u**2)(u))

    for rate in range(1, 20):
        assert loss(np.ones(2), 0.5 * rate) == rate
    (record,) = caplog.records
    assert "is traced each time it is jitted, since it reads a list, dict or object" in record.message
