"""Steps whose results depend on more than their arguments, so that the gradient would repeat other steps."""

import time

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import on_device

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan
from mpiad.timestepping.snapshots import checksum

STEPS = 20
SCHEDULES = [1, 4, STEPS, CheckpointSchedule(1, 3), CheckpointSchedule(4, recorded=5)]
LOSSY = [CheckpointSchedule(4, dtype="float32"), CheckpointSchedule(4, compress=True)]


def _noise():
    rng = np.random.default_rng(0)
    return lambda u, k, c: u * c * (1.0 + 0.1 * rng.standard_normal())


def _clock():
    start = time.perf_counter()
    return lambda u, k, c: u * c + 1e3 * (time.perf_counter() - start)


def _counter():
    calls = []

    def step(u, k, c):
        calls.append(k)
        return u * (c if len(calls) <= STEPS else 1.01 * c)

    return step


def _late_counter():
    """Repeat the steps as they were, until the last few calls."""
    calls = []

    def step(u, k, c):
        calls.append(k)
        return u * (c if len(calls) <= 2.2 * STEPS else 1.01 * c)

    return step


def _permutation():
    rng = np.random.default_rng(0)
    return lambda u, k, c: (c * u)[rng.permutation(len(u))]


def _gradient(step, start, schedule, observe=None):
    def loss(c):
        found = scan(step, start, STEPS, c, observe=observe, checkpoints=schedule)
        return anp.sum(found if observe is None else found[1])

    return mpiad.grad(loss)(0.9)


@pytest.mark.serial
@pytest.mark.parametrize("schedule", [*SCHEDULES, *LOSSY])
@pytest.mark.parametrize("make", [_noise, _clock, _counter, _permutation])
@pytest.mark.parametrize("size", [5, 3000])
def test_steps_with_other_results_are_an_error_that_names_the_line(make, schedule, size):
    step = make()
    place = rf"test_repeated_steps\.py:{step.__code__.co_firstlineno} doesn't depend on its arguments alone"
    with pytest.raises(RuntimeError, match=f"{place}: the state after step {STEPS - 1} changed"):
        _gradient(step, np.linspace(1.0, 2.0, size), schedule)


@pytest.mark.serial
@pytest.mark.parametrize("schedule", [CheckpointSchedule(2), CheckpointSchedule(4), CheckpointSchedule(1, 3)])
def test_a_step_that_changes_late_is_noticed_too(schedule):
    with pytest.raises(RuntimeError, match="the state after step [0-9]+ changed"):
        _gradient(_late_counter(), np.ones(5), schedule)


@pytest.mark.serial
@pytest.mark.parametrize("schedule", [*SCHEDULES, *LOSSY])
@pytest.mark.parametrize("size", [1, 3000])
def test_observations_are_compared(schedule, size):
    rng = np.random.default_rng(0)

    def observe(u, k, c):
        return u * rng.standard_normal() if k == 3 else u

    line = observe.__code__.co_firstlineno
    with pytest.raises(RuntimeError, match=rf"test_repeated_steps\.py:{line} .*the observed values after step 3 changed"):
        _gradient(lambda u, k, c: u * c, np.ones(size), schedule, observe)


@pytest.mark.serial
def test_compiled_steps_and_device_arrays_are_compared():
    calls = []

    def observe(u, k, c):  # interpreted, beside a compiled step
        calls.append(k)
        return u if len(calls) <= STEPS else 1.001 * u

    with pytest.raises(RuntimeError, match="the observed values after step 1[69] changed"):
        _gradient(mpiad.jit(lambda u, k, c: u * c), np.ones(500), 4, observe)
    for size in (5, 500):
        with pytest.raises(RuntimeError, match="the state after step 19 changed"):
            _gradient(_noise(), on_device(np.ones(size)), 4)


@pytest.mark.serial
@pytest.mark.parametrize("index", [0, 111_111, -1])
@pytest.mark.parametrize("steps", [range(STEPS), [STEPS - 1]])
@pytest.mark.parametrize("size", [20_011, 300_000])
def test_one_entry_of_a_large_state_is_enough(index, steps, size):
    """Of states with more than 2,048 entries, only a part is compared after each step, but all are after the last one."""
    rng, chosen = np.random.default_rng(0), np.zeros(size)
    chosen[index % size] = 0.01
    with pytest.raises(RuntimeError, match="the state after step 19 changed"):
        _gradient(lambda u, k, c: u * c + chosen * (rng.normal() if k in steps else 0.0), np.ones(size), 4)


@pytest.mark.serial
@pytest.mark.parametrize("size", [2_111, 20_011, 300_000])
def test_all_entries_of_a_large_state_are_compared_within_some_steps(size):
    """The parts that are compared after 17 consecutive steps contain each entry: none is left out forever."""
    state, steps = np.random.default_rng(1).normal(size=size), range(17)
    sums = [checksum(state, step) for step in steps]
    for index in np.random.default_rng(2).choice(size, 100, replace=False):
        changed = state.copy()
        changed[index] += 1e-3
        assert any(not np.array_equal(checksum(changed, step), kept) for step, kept in zip(steps, sums))


@pytest.mark.serial
def test_second_derivatives_and_further_reverse_passes_are_compared():
    with pytest.raises(RuntimeError, match="arguments alone"):
        mpiad.hvp(lambda c: anp.sum(scan(_noise(), np.ones(3), STEPS, c, checkpoints=4)))(0.9, 1.0)
    calls = []

    def step(u, k, c):
        calls.append(k)
        return u * (c if len(calls) <= 100 else 0.5 * c)

    pull, _ = mpiad.make_vjp(lambda c: scan(step, 1.0, STEPS, c, checkpoints=4))(0.9)
    assert pull(1.0) == pytest.approx(STEPS * 0.9 ** (STEPS - 1))
    with pytest.raises(RuntimeError, match="arguments alone"):
        for _ in range(3):
            pull(1.0)


@pytest.mark.each_value
@pytest.mark.serial
@pytest.mark.parametrize("schedule", [*SCHEDULES, *LOSSY])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_reproducible_random_numbers_are_right(schedule, compiled, scale):
    """Generators that are made in the step, and rounding errors in a leaf of zeros; the gradient has a closed form."""
    if getattr(schedule, "dtype", None):
        scale = 1.0
    decay = mpiad.jit(lambda u, c, noise: u * (c + noise)) if compiled else lambda u, c, noise: u * (c + noise)

    def step(u, k, c):
        noise = 0.1 * np.random.default_rng(k).standard_normal()
        return {"u": decay(u["u"], c, noise), "rest": (u["u"] * 0.1 + u["u"] * 0.2) - u["u"] * 0.3}

    start = {"u": scale * np.linspace(1.0, 2.0, 300), "rest": np.zeros(300)}
    found = mpiad.grad(lambda c: anp.sum(scan(step, start, STEPS, c, checkpoints=schedule)["u"]))(0.9)
    factors = 0.9 + 0.1 * np.array([np.random.default_rng(k).standard_normal() for k in range(STEPS)])
    exact = np.sum(start["u"]) * np.prod(factors) * np.sum(1.0 / factors)
    assert found == pytest.approx(exact, rel=1e-3 if getattr(schedule, "compress", False) else 1e-5)


@pytest.mark.serial
def test_a_step_may_reuse_its_buffer():
    buffer = np.empty(4)

    def step(u, k, c):
        out = u * c
        if isinstance(out, np.ndarray):
            buffer[:] = out
            return buffer
        return out

    assert _gradient(step, np.ones(4), 3) == pytest.approx(4 * STEPS * 0.9 ** (STEPS - 1))


@pytest.mark.parametrize("failing", [0, -1])
def test_one_rank_s_random_numbers_do_not_make_the_others_wait(rank, size, failing):
    """The rank raises after the reverse pass, in which the ranks communicate."""
    failing %= size
    rng = np.random.default_rng(0)

    def step(u, k, c):
        shared = mpiad.mpi_allreduce(u) / size
        return shared * c * (1.0 + 0.1 * rng.standard_normal()) if rank == failing else shared * c

    loss = lambda c: anp.sum(scan(step, np.ones(3), 9, c, checkpoints=3))  # noqa: E731
    # The state of all ranks depends on that of the failing one.
    with pytest.raises(RuntimeError, match="arguments alone"):
        mpiad.grad(loss)(0.9)
    mpiad.reset()
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.serial
def test_steps_that_amplify_the_rounding_of_compressed_states_are_no_error():
    """Small values, from differences of a field that is rough elsewhere: rounded by 5e-5 of the field's largest entry."""
    u = 1 + 1e-3 * np.random.default_rng(0).standard_normal(400)
    u[:200] = np.sign(u[200:] - 1)
    away = np.arange(400) // 50 == 6

    def step(state, k, a):
        u = state[0]
        return u + a * away * (anp.roll(u, 1) - 2 * u + anp.roll(u, -1)), 20 * away * (anp.roll(u, -1) - u)

    def loss(a):
        return anp.sum(scan(step, (u, 0 * u), 20, a, checkpoints=CheckpointSchedule(memory=3, compress=True))[1] ** 2)

    state = u, 0 * u
    for k in range(20):
        state = step(state, k, 0.1 + 1e-30j)
    exact = np.sum(state[1] ** 2).imag / 1e-30
    assert 1e-9 < abs(mpiad.grad(loss)(0.1) / exact - 1) < 0.02


def _kept_in(way):
    """A loop whose steps keep squares of the state, and the function that adds them up."""
    squares, box, last = [], 0.0, {}

    class Box:
        total = 0.0

    def keep(value, k):
        nonlocal box
        if way == "list":
            squares.append(value)
        elif way == "dict":
            last[k] = value
        elif way == "attribute":
            Box.total = Box.total + value
        else:
            box = value if k == 0 else box + value

    def total():
        return {"list": sum(squares), "dict": sum(last.values()), "attribute": Box.total, "variable": box}[way]

    return keep, total


@pytest.mark.parametrize("where", ["step", "observe", "around a compiled step"])
@pytest.mark.parametrize("way", ["list", "dict", "attribute", "variable"])
def test_what_steps_keep_is_no_constant(way, where, rank):
    """Without checkpoints its derivative is exact; with checkpoints its use is an error, if a derivative is asked for."""
    shrink = mpiad.jit(lambda u: 0.9 * u) if where == "around a compiled step" else lambda u: 0.9 * u

    def loss(u, checkpoints):
        keep, total = _kept_in(way)

        def step(u, k):
            u = shrink(u)
            if where != "observe":
                keep(anp.sum(u**2), k)
            return u

        def observe(u, k):
            keep(anp.sum(u**2), k)
            return u[0]

        scan(step, u, 3, checkpoints=checkpoints, observe=observe if where == "observe" else None)
        return mpiad.mpi_allreduce(total())

    u = np.arange(1.0, 4.0) + rank
    factor = 0.9**2 + 0.9**4 + 0.9**6
    np.testing.assert_allclose(mpiad.grad(lambda u: loss(u, None))(u), 2 * factor * u, rtol=1e-14)
    np.testing.assert_allclose(loss(u, 2), factor * mpiad.mpi_allreduce(np.sum(u**2)), rtol=1e-14)
    for derivative in (mpiad.value_and_grad, mpiad.hvp, lambda fun: lambda u, *v: mpiad.jvp(fun, u, u)):
        with pytest.raises(RuntimeError, match=r"test_repeated_steps.py:\d+ keeps a value .* Return it from observe="):
            derivative(lambda u: loss(u, 2))(*[u] * (2 if derivative is mpiad.hvp else 1))


@pytest.mark.serial
def test_plain_values_may_be_kept():
    """For a picture: `stop_gradient` gives numbers, also in the steps that the gradient repeats."""
    seen = []

    def step(u, k, c):
        seen.append((k, float(mpiad.stop_gradient(anp.max(u)))))
        return c * u

    u = np.array([1.0, 3.0])
    gradient = mpiad.grad(lambda c: anp.sum(scan(step, u, 4, c, checkpoints=2)))(0.5)
    assert gradient == pytest.approx(4 * 4 * 0.5**3)
    assert sorted(set(seen)) == [(k, 3 * 0.5**k) for k in range(4)]


@pytest.mark.serial
@pytest.mark.parametrize("schedule", LOSSY)
def test_rounding_where_a_wave_arrives_is_no_error(schedule):
    """There the field was at rest, and rounding errors are large compared with its entries."""
    n, steps = 100, 60
    along = (np.arange(n) - n // 2) ** 2
    hump = np.exp(-(along[:, None] + along) / 9.0)

    def advance(np):
        def step(state, k, c):
            before, now = state
            around = sum(np.roll(now, s, axis) for s in (1, -1) for axis in (0, 1))
            return now, 2 * now - before + c * (around - 4 * now)

        return step

    wave = mpiad.jit(advance(anp), strict=True)
    observe = lambda state, k, c: state[1] ** 2  # noqa: E731

    def loss(c):
        (_, last), seen = scan(wave, (hump, hump), steps, c, observe=observe, checkpoints=schedule)
        return anp.sum(last**2) + anp.sum(seen)

    state, exact = (hump, hump), 0.0
    for k in range(steps):
        state = advance(np)(state, k, 0.25 + 1e-30j)
        exact += np.sum(state[1] ** 2)
    exact = (exact + np.sum(state[1] ** 2)).imag / 1e-30
    assert mpiad.grad(loss)(0.25) == pytest.approx(exact, rel=1e-3 if schedule.compress else 1e-5)
