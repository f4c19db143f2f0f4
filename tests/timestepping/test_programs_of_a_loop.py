"""How many programs a loop compiles: one for its first gradient, also if parts of the state are constants at first."""

import math
import sys

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad import extend
from mpiad.programs.replay import Replays
from mpiad.timestepping import scan, snapshots, stepping

COMM = MPI.COMM_WORLD
AFTER, BEFORE = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
STEPS, CELLS = 24, 5
ALL = np.random.default_rng(3).standard_normal((COMM.size, CELLS))
START, WEIGHTS = ALL[COMM.rank], np.cos(np.arange(CELLS)) * (COMM.rank + 1)


@pytest.fixture
def programs(monkeypatch):
    """The programs that have been compiled."""
    made, init = [], Replays.__init__
    monkeypatch.setattr(Replays, "__init__", lambda self, schedule: (made.append(self), init(self, schedule))[1])
    return made


def step(state, k, a):
    """A wave whose speed depends on the field, with a step size of its own: all parts depend on all others after a step."""
    u, v, t = state
    dt = 0.1 / (1.0 + mpiad.mpi_allreduce(anp.sum(u**2)) / 50.0)
    low = mpiad.mpi_exchange(u[-1:], dest=AFTER, source=BEFORE)
    v = v + dt * a * (anp.concatenate([low, u[:-1]]) - u) + 0.01 * anp.sin(t)
    return u + dt * v, v, t + dt


def whole(u, a):
    """The same loop of all ranks together, with NumPy; u: the rows of the ranks."""
    v, t = np.zeros_like(u), 0.0
    for _ in range(STEPS):
        dt = 0.1 / (1.0 + np.sum(u**2) / 50.0)
        v = v + dt * a * (np.roll(u, 1) - u) + 0.01 * np.sin(t)
        u, t = u + dt * v, t + dt
    weights = np.cos(np.arange(CELLS)) * np.arange(1, COMM.size + 1)[:, None]
    return np.sum(weights * u**2) + np.sum(v**3) + COMM.size * t**2


def loss_of(advance, t):
    def loss(u, a):
        u, v, t_end = scan(advance, (u, np.zeros(CELLS), t), STEPS, a)
        return anp.sum(WEIGHTS * u**2) + anp.sum(v**3) + t_end**2

    return loss


@pytest.mark.few(3)
@pytest.mark.parametrize("t", [0.0, np.zeros(()), np.float64(0.0)], ids=["number", "array", "scalar"])
def test_the_first_gradient_has_one_program(t, programs):
    gradient = mpiad.value_and_grad(loss_of(mpiad.jit(step, strict=True), t), (0, 1), shared=(False, True), objective="sum")
    for a in (0.7, 0.9):
        value, (of_u, of_a) = gradient(START, a)
        np.testing.assert_allclose(value, whole(ALL, a), rtol=1e-12)
        np.testing.assert_allclose(of_a, whole(ALL, a + 1e-30j).imag / 1e-30, rtol=1e-11)
        along = np.sin(1.0 + np.arange(ALL.size)).reshape(ALL.shape)
        found = COMM.allreduce(np.sum(of_u * along[COMM.rank]))
        np.testing.assert_allclose(found, whole(ALL + 1e-30j * along, a).imag / 1e-30, rtol=1e-11)
    assert len(programs) == 1


@pytest.mark.serial
@pytest.mark.parametrize("plain", [False, True])
def test_a_time_that_has_no_derivative(plain, programs):
    def step(state, k, a):
        u, t = state
        sine = anp.sin(t) if not plain else math.sin(t)  # which isn't compiled
        return u * (1.0 + 0.1 * a * sine), t + 0.1

    def loss(a):
        u, t = scan(advance, (np.ones(3), 0.0), STEPS, a)
        return anp.sum(u**2) * t

    def expected(a):
        return 3 * np.prod(1.0 + 0.1 * a * np.sin(0.1 * np.arange(STEPS))) ** 2 * 0.1 * STEPS

    advance = mpiad.jit(step, strict=not plain)
    value, slope = mpiad.value_and_grad(loss)(0.8)
    np.testing.assert_allclose([value, slope], [expected(0.8), expected(0.8 + 1e-30j).imag / 1e-30], rtol=1e-12)
    assert plain or len(programs) == 1


def _adds(state, k, a):
    u, t = state
    before = t
    t += 0.1  # which would change `before`, too, if t were an array
    return u * (1.0 + a * (t - before)), t


def _rounds(state, k, a):
    u, t = state
    return u * (1.0 + a * round(t, 1) * isinstance(t, float) * {t: 1.0}[t]), t + 0.1


@pytest.mark.serial
@pytest.mark.parametrize("step", [_adds, _rounds])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 33])
def test_numbers_in_the_state_do_not_change(step, around, steps):
    def last(advance, a):
        state = np.arange(3.0), 0.0
        for k in range(steps):
            state = advance(state, k, a)
        return np.sum(state[0] ** 2) * state[1]

    same = mpiad.jit(lambda u: u * 1.0)
    advance = (lambda state, k, a: step((same(state[0]), state[1]), k, a)) if around else mpiad.jit(step)

    def loss(a):
        u, t = scan(advance, (np.arange(3.0), 0.0), steps, a)
        return anp.sum(u**2) * t

    value, slope = mpiad.value_and_grad(loss)(0.8)
    np.testing.assert_allclose([loss(0.8), value], last(step, 0.8), rtol=1e-12)
    np.testing.assert_allclose(slope, last(step, 0.8 + 1e-30j).imag / 1e-30, rtol=1e-12)


def _writes(state, k, a):
    u, v = state
    v = v * 1.0
    v[0] += 0.1
    return u * a + v[0], v


def _interpolates(state, k, a):
    u, v = state
    return u * a + np.interp(v, [0.0, 1.0, 4.0], [0.0, 1.0, 2.0]), v + 0.1


@pytest.mark.serial
@pytest.mark.parametrize("step", [_writes, _interpolates])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_parts_without_a_derivative_stay_plain_if_the_step_needs_it(step, around, steps):
    def last(a):
        state = np.arange(3.0), np.array([1.0, 1.2, 1.4])
        for k in range(steps):
            state = step(state, k, a)
        return np.sum(state[0])

    same = mpiad.jit(lambda u: u * 1.0)
    advance = (lambda state, k, a: step((same(state[0]), state[1]), k, a)) if around else mpiad.jit(step)
    gradient = mpiad.value_and_grad(
        lambda a: anp.sum(scan(advance, (np.arange(3.0), np.array([1.0, 1.2, 1.4])), steps, a)[0])
    )
    for _ in range(2):
        value, slope = gradient(0.9)
        np.testing.assert_allclose(value, last(0.9), rtol=1e-12)
        np.testing.assert_allclose(slope, last(0.9 + 1e-30j).imag / 1e-30, rtol=1e-12)


@pytest.mark.serial
def test_numbers_beside_single_precision_stay_numbers():
    advance = mpiad.jit(
        lambda state, k: (state[0] * anp.cos(0.1 * state[0]) + 0.01 * state[1], state[1] + 0.1), strict=True
    )
    u, t = scan(advance, (np.linspace(0.1, 1.0, 4, dtype=np.float32), 0.0), 5)
    expected, time = np.linspace(0.1, 1.0, 4, dtype=np.float32), 0.0
    for _ in range(5):
        expected, time = expected * np.cos(np.float32(0.1) * expected) + 0.01 * time, time + 0.1
    assert u.dtype == np.float32
    np.testing.assert_allclose(u, expected, rtol=1e-6)
    np.testing.assert_allclose(t, time)


@pytest.mark.serial
def test_the_length_of_a_program_is_known_before_the_first_step(programs):
    """No program of a single step is compiled; later loops have the same length, so that commands can run them."""
    advance = mpiad.jit(lambda u, k, a: u + 0.1 * a * anp.sin(u), strict=True)
    for _ in range(3):
        mpiad.grad(lambda a: anp.sum(scan(advance, np.ones(4), 20, a)))(0.5)
    assert len(programs) == 1
    scan(advance, np.ones(4), 20, 0.5)
    assert len(programs) == 2


@pytest.mark.serial
@pytest.mark.parametrize("steps", [20, 100])
def test_a_second_gradient_is_one_node_also_if_parts_of_the_state_are_constants(steps, monkeypatch):
    advance = mpiad.jit(lambda state, k, a: (state[0] * (1.0 + 0.01 * a * anp.sin(state[1])), state[1] + 0.1), strict=True)
    gradient = mpiad.grad(lambda a: anp.sum(scan(advance, (np.ones(3), 0.0), steps, a)[0]))
    first, calls, called = gradient(0.5), [], mpiad.programs.Jitted.__call__
    monkeypatch.setattr(mpiad.programs.Jitted, "__call__", lambda *args: (calls.append(args), called(*args))[1])
    assert gradient(0.5) == first
    assert not calls


@pytest.mark.serial
@pytest.mark.parametrize("around", [False, True])
def test_steps_that_are_interpreted_draw_one_random_number_each(around):
    numbers, same = np.random.default_rng(3), mpiad.jit(lambda u: u * 1.0)
    advance = (lambda u, k: same(u) + numbers.random()) if around else mpiad.jit(lambda u, k: u + numbers.random())
    expected = np.sum(np.random.default_rng(3).random(5))
    np.testing.assert_allclose(scan(advance, np.zeros(2), 5), expected, rtol=1e-14)


@pytest.mark.unguarded
@pytest.mark.parametrize("length", [1, 10])
@pytest.mark.parametrize("evaluated_before", [False, True])
@pytest.mark.parametrize("kind", ["operator", "gather"])
def test_a_step_whose_trace_needs_a_run_is_compiled_in_gradients(kind, evaluated_before, length):
    """With respect to a parameter only: the state is a constant in the first step, and traced in the others."""
    double = extend.custom_operator(lambda r: 2.0 * r)
    extend.defadjoint(double, lambda y: double(y))

    def summed(u):
        return double(u) if kind == "operator" else mpiad.mpi_scatter(mpiad.mpi_gather(2.0 * u))

    def step(u, k, a):
        for _ in range(60):  # too long for a program of several steps
            u = u - a * summed(anp.sin(u))
        return u

    def plain(a):
        u = START.astype(complex)
        for _ in range(60 * length):
            u = u - a * 2.0 * np.sin(u)
        return COMM.allreduce(np.sum(u**2))

    jitted, frames = mpiad.jit(step, strict=True), []
    loss = lambda a: mpiad.mpi_allreduce(anp.sum(scan(jitted, START, length, a) ** 2))  # noqa: E731
    if evaluated_before:
        loss(0.001)
    gradient = mpiad.grad(loss, shared=True)
    for k in range(5):
        sys.setprofile(lambda frame, event, _: frames.append(frame.f_code) if event == "call" else None)
        try:
            made = gradient(0.001)
        finally:
            sys.setprofile(None)
        assert made == pytest.approx(plain(0.001 + 1e-30j).imag / 1e-30, rel=1e-12)
        assert k < 2 or step.__code__ not in frames
        frames.clear()


@pytest.mark.serial
@pytest.mark.parametrize("period", [3, 5, 7, 16])
def test_programs_have_a_multiple_of_the_period_of_the_branches(period, programs):
    def stepped(u, k, a, sin):
        return u + 0.1 * a * sin(u) if k % period else u * 0.9

    def plain(a):
        u = np.full(4, 0.5, complex)
        for k in range(96):
            u = stepped(u, k, a, np.sin)
        return np.sum(u)

    advance = mpiad.jit(lambda u, k, a: stepped(u, k, a, anp.sin), strict=True)
    gradient = mpiad.value_and_grad(lambda a: anp.sum(scan(advance, np.full(4, 0.5), 96, a)))
    for _ in range(2):
        value, slope = gradient(0.8)
        np.testing.assert_allclose([value, slope], [plain(0.8).real, plain(0.8 + 1e-30j).imag / 1e-30], rtol=1e-12)
    lengths = {key[2] for key in advance._derived if type(key) is tuple}
    assert all(length % period == 0 for length in lengths - {1})
    assert len(programs) <= 1 + 2  # the remaining steps have one program per branch


@pytest.mark.serial
def test_states_are_not_copied_if_programs_contain_the_observation(monkeypatch):
    """The observation is never compiled alone; only the first state is copied, which is the caller's array."""
    copies, copy_of = [], stepping.copy_of
    for module in (stepping, snapshots, sys.modules["mpiad.timestepping.scan"]):
        monkeypatch.setattr(module, "copy_of", lambda leaf: copies.append(np.shape(leaf)) or copy_of(leaf))
    advance, start = mpiad.jit(lambda u, k, c: u + c * anp.sin(u)), np.linspace(0.0, 1.0, 3000)

    def loss(c):
        last, seen = scan(advance, start, 12, c, observe=lambda u, k, c: u[0] + u[-1], checkpoints=3)
        return anp.sum(last**2) + anp.sum(seen)

    u, expected = start + 0j, 0.0
    for _ in range(12):
        u = u + (0.1 + 1e-30j) * np.sin(u)
        expected = expected + u[0] + u[-1]
    expected = (expected + np.sum(u**2)).imag / 1e-30
    for _ in range(2):
        copies.clear()
        np.testing.assert_allclose(mpiad.grad(loss)(0.1), expected, rtol=1e-12)
    assert copies == [start.shape]
