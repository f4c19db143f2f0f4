"""Gradients of loops with checkpoints that machine code runs, beside the same loop in plain NumPy by complex steps."""

from itertools import takewhile

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.programs import scheduled_calls
from mpiad.timestepping import CheckpointSchedule, scan
from mpiad.timestepping.checkpoints import Keep, Reverse, actions
from mpiad.transport.core.channels import is_watched

pytestmark = pytest.mark.interpreted  # the steps are compiled, what is around them isn't
COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
BEFORE, AFTER = (RANK - 1) % SIZE, (RANK + 1) % SIZE
COUNTS = [3 + rank % 2 for rank in range(SIZE)]
FIRST = sum(COUNTS[:RANK])
MINE = slice(FIRST, FIRST + COUNTS[RANK])
rng = np.random.default_rng(8)
# Watched calls are Python's, and so are messages with Open MPI.
HAS_COMMANDS = not is_watched() and MPI.get_vendor()[0] == "MPICH"
START, RATES = rng.standard_normal(sum(COUNTS)), np.array([0.3, -0.2, 0.1])


@pytest.fixture
def by_commands(monkeypatch):
    """The numbers of gradients that commands have computed, as a list of ones."""
    done, backward = [], scheduled_calls.ScheduledCalls.backward

    def counted(calls, *args):
        done.append(1)
        return backward(calls, *args)

    monkeypatch.setattr(scheduled_calls.ScheduledCalls, "backward", counted)
    return done


def from_neighbours(u):
    """The neighbours' entries before and after those of this rank, by an exchange and by nonblocking messages."""
    if SIZE == 1:
        return u[-1:], u[:1]
    before = mpiad.mpi_exchange(u[-1:], dest=AFTER, source=BEFORE, tag=1)
    requests = [mpiad.mpi_irecv(u[:1], AFTER, tag=2), mpiad.mpi_isend(u[:1], BEFORE, tag=2)]
    return before, mpiad.mpi_waitall(requests)[0]


def step(state, k, force, rates):
    """A cyclic permutation of arrays, one of which stays; the flux of neighbours; a sum over ranks; the step's number."""
    u, older, weights = state
    before, after = from_neighbours(u)
    p = anp.concatenate([before, u, after])
    total = mpiad.mpi_allreduce(anp.sum(u * weights))
    new = u + rates[0] * (p[2:] + p[:-2] - 2 * u) + rates[1] * older * weights + 0.01 * (k + 1) * force
    return new + rates[2] * anp.sin(total), u, weights


def whole(start, forces, rates, steps):
    """The loss of all ranks in one process, also of complex numbers."""
    weights = np.cos(np.arange(len(START)))
    u, older, total = start, start**2, 0.0
    for k in range(steps):
        around = np.roll(u, 1) + np.roll(u, -1) - 2 * u
        new = u + rates[0] * around + rates[1] * older * weights + 0.01 * (k + 1) * forces[k]
        u, older = new + rates[2] * np.sin(np.sum(u * weights)), u
        total = total + np.sum(np.sin(u * older)) + np.sum(u[: COUNTS[0]] ** 3)
    return total + np.sum(u**2 * older)


def observed(state, k, rates):
    """A number per rank, and for rank 0 another one; arrays that are the state itself among the results."""
    u, older, _ = state
    return anp.sum(anp.sin(u * older)), u**3 if RANK == 0 else u


def loss_of(advance, observe, steps, checkpoints):
    def loss(x):
        u, forces, rates = x
        state = u, u**2, np.cos(np.arange(len(START)))[MINE]
        (u, older, _), (sines, seen) = scan(
            advance, state, steps, rates, inputs=forces, observe=observe, checkpoints=checkpoints
        )
        return anp.sum(sines) + (anp.sum(seen) if RANK == 0 else 0 * anp.sum(seen)) + anp.sum(u**2 * older)

    return loss


def slopes(x, gradient, steps):
    """Directional derivatives with respect to each argument by the gradient, and by complex steps of the whole."""
    along = [np.cos(3 * part + 1) for part in x]
    cut = along[0][MINE], along[1][:, MINE], along[2]
    found = [COMM.allreduce(np.sum(g * v)) for g, v in zip(gradient, cut)]
    zeros = [np.zeros_like(part) for part in x]
    moved = [[*zeros[:k], v, *zeros[k + 1 :]] for k, v in enumerate(along)]
    expected = [whole(*[a + 1e-30j * b for a, b in zip(x, v)], steps).imag / 1e-30 for v in moved]
    return found, expected


def arguments(steps):
    return START, np.random.default_rng(2).standard_normal((steps, len(START))), RATES


SCHEDULES = [1, 4, 100, CheckpointSchedule(2, recorded=5), CheckpointSchedule(1, recorded=40)]


@pytest.mark.few(4)
@pytest.mark.parametrize("steps", [1, 11, 40])
@pytest.mark.parametrize("checkpoints", SCHEDULES, ids=str)
def test_values_and_gradients(checkpoints, steps, by_commands):
    """The later gradients are computed by commands, at other arguments than those with which they were made."""
    advance, observe = mpiad.jit(step, strict=True), mpiad.jit(observed, strict=True)
    gradient = mpiad.value_and_grad(loss_of(advance, observe, steps, checkpoints), objective="sum")
    for factor in (1.0, 0.9, 1.1, 0.8, 1.2, 0.7):
        x = [factor * part for part in arguments(steps)]
        value, found = gradient((x[0][MINE], x[1][:, MINE], x[2]))
        np.testing.assert_allclose(value, whole(*x, steps), rtol=1e-12)
        products, expected = slopes(x, found, steps)
        np.testing.assert_allclose(products, expected, rtol=1e-10, atol=1e-12)
    assert len(by_commands) >= 2 * HAS_COMMANDS


@pytest.mark.few(1)
@pytest.mark.parametrize("compiled", ["loss", "gradient"])
def test_within_compiled_functions(compiled, by_commands):
    loss = loss_of(step, observed, 40, 4)
    if compiled == "loss":
        gradient = mpiad.value_and_grad(mpiad.jit(loss, strict=True), objective="sum")
    else:
        gradient = mpiad.jit(mpiad.value_and_grad(loss, objective="sum"), strict=True)
    for factor in (1.0, 0.9, 1.1, 0.8, 1.2, 0.7):
        x = [factor * part for part in arguments(40)]
        value, found = gradient((x[0][MINE], x[1][:, MINE], x[2]))
        np.testing.assert_allclose(value, whole(*x, 40), rtol=1e-12)
        np.testing.assert_allclose(*slopes(x, found, 40), rtol=1e-10, atol=1e-12)
    assert len(by_commands) >= 2 * HAS_COMMANDS


@pytest.mark.mpi(min_size=2)
def test_beside_a_rank_that_interprets_its_steps(by_commands):
    """Ranks with and without commands make the same communications in the same order."""
    plain = SIZE - 1 == RANK
    advance, observe = (step, observed) if plain else (mpiad.jit(step, strict=True), mpiad.jit(observed, strict=True))
    gradient, x = mpiad.value_and_grad(loss_of(advance, observe, 11, 3), objective="sum"), arguments(11)
    for _ in range(5):
        value, found = gradient((x[0][MINE], x[1][:, MINE], x[2]))
        np.testing.assert_allclose(value, whole(*x, 11), rtol=1e-12)
        np.testing.assert_allclose(*slopes(x, found, 11), rtol=1e-10)
    assert bool(by_commands) == (HAS_COMMANDS and not plain)


def test_two_loops_of_one_step_in_one_loss(by_commands):
    """The second loop begins before the reverse pass of the first one, and needs memory of its own."""
    advance, observe = mpiad.jit(step, strict=True), mpiad.jit(observed, strict=True)
    loss, x = loss_of(advance, observe, 11, 2), arguments(11)
    both = mpiad.value_and_grad(lambda x: loss(x) + loss((anp.sin(x[0]), *x[1:])), objective="sum")
    for _ in range(5):
        value, found = both((x[0][MINE], x[1][:, MINE], x[2]))
        np.testing.assert_allclose(value, whole(*x, 11) + whole(np.sin(x[0]), *x[1:], 11), rtol=1e-12)
        along = [np.cos(3 * part + 1) for part in x]
        z = [a + 1e-30j * b for a, b in zip(x, along)]
        expected = (whole(*z, 11) + whole(np.sin(z[0]), *z[1:], 11)).imag / 1e-30
        product = sum(np.sum(g * v) for g, v in zip(found, (along[0][MINE], along[1][:, MINE], along[2])))
        np.testing.assert_allclose(COMM.allreduce(product), expected, rtol=1e-10)
    assert len(by_commands) >= 4 * HAS_COMMANDS


@pytest.mark.serial
@pytest.mark.parametrize("most", [2000, 20])
def test_long_loops_have_no_commands(most, by_commands, monkeypatch):
    """The number of calls grows faster than that of steps."""
    monkeypatch.setattr(scheduled_calls, "_MOST_COMMANDS", most)
    step = mpiad.jit(lambda u, k: 0.999 * u, strict=True)
    gradient = mpiad.value_and_grad(lambda u: anp.sum(scan(step, u, 40, checkpoints=1) ** 2), objective="sum")
    for _ in range(4):
        value, slope = gradient(START)
    np.testing.assert_allclose(value, 0.999**80 * np.sum(START**2), rtol=1e-12)
    np.testing.assert_allclose(slope, 2 * 0.999**80 * START, rtol=1e-12)
    assert bool(by_commands) == (not is_watched() and most == 2000)  # with each MPI: the step sends no messages


@pytest.mark.skipif(not HAS_COMMANDS, reason="there are no commands")
def test_what_a_step_repeats_otherwise_is_reported(monkeypatch):
    """After the forward run the stored last state is changed, as by a step with random numbers."""
    advance = mpiad.jit(lambda u, k, a: u + a * anp.sin(u), strict=True)
    gradient = mpiad.value_and_grad(lambda u: anp.sum(scan(advance, u, 7, 0.1, checkpoints=2) ** 2), objective="sum")
    for _ in range(5):
        gradient(START)
    forward = scheduled_calls.ScheduledCalls.forward

    def disturbed(calls, leaves):
        values = forward(calls, leaves)
        calls._results[0][2] += 1e-3
        return values

    monkeypatch.setattr(scheduled_calls.ScheduledCalls, "forward", disturbed)
    with pytest.raises(
        RuntimeError, match=r"test_scheduled_loop.py:\d+ doesn't depend .* the state after step 6 changed by 1"
    ):
        gradient(START)
    monkeypatch.undo()
    expected = gradient(START)
    np.testing.assert_array_equal(gradient(START)[1], expected[1])


def by_hand(advance, steps, u, *params):
    """The loop as Python runs it."""
    for k in range(steps):
        u = advance(u, k, *params)
    return u


@pytest.mark.few(5)
@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("start", [0.3, START], ids=["number", "array"])
def test_states_and_parameters_of_other_kinds(start, dtype, by_commands):
    """Numbers as states and parameters, complex ones and those in single precision, beside the loop that Python runs."""
    u, rate = np.array(start * (1 + 0.5j if np.dtype(dtype).kind == "c" else 1), dtype)[()], dtype(0.2)

    def advance(u, k, rate):
        return u + rate * anp.sin(u) * (1 + 0.1 * anp.cos(0.3 * k)).astype(dtype)

    def loss(run):
        return lambda x: anp.sum(anp.abs(run(x)) ** 2)

    step = mpiad.jit(advance, strict=True)
    expected = mpiad.value_and_grad(loss(lambda x: by_hand(advance, 9, *x)), objective="sum")((u, rate))
    gradient = mpiad.value_and_grad(loss(lambda x: scan(step, x[0], 9, x[1], checkpoints=2)), objective="sum")
    for _ in range(5):
        value, slopes = gradient((u, rate))
    tolerance = 50 * np.finfo(dtype).eps
    np.testing.assert_allclose(value, expected[0], rtol=tolerance)
    for found, right in zip(slopes, expected[1]):
        assert (found.dtype, np.shape(found)) == (right.dtype, np.shape(right))
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance * np.max(np.abs(right)))
    assert len(by_commands) >= 2 * HAS_COMMANDS


def test_halos_of_large_blocks(by_commands):
    """Blocks beyond 4 KiB, whose temporary arrays share memory, and which exchange halos in place."""
    domain = mpiad.Domain((37, 41), periodic=(True, False))
    mine = domain.owned
    u0 = np.random.default_rng(3).standard_normal((37, 41))[mine]
    c = 0.1 + 0.05 * np.random.default_rng(4).random((37, 41))[mine]

    def advance(state, k, c):
        u, v = state
        p = domain.exchange(u)
        around = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u
        v = v + c * around - 0.01 * u**3
        return u + v, v

    def loss(run):
        return lambda x: anp.sum(anp.tanh(run((x[0], 0 * x[0]), x[1])[0]) ** 2)

    expected = mpiad.value_and_grad(loss(lambda state, c: by_hand(advance, 12, state, c)), objective="sum")((u0, c))
    step = mpiad.jit(advance, strict=True)
    gradient = mpiad.value_and_grad(loss(lambda state, c: scan(step, state, 12, c, checkpoints=3)), objective="sum")
    for _ in range(5):
        value, slopes = gradient((u0, c))
    np.testing.assert_allclose(value, expected[0], rtol=1e-13)
    for found, right in zip(slopes, expected[1]):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-13 * np.max(np.abs(right)))
    assert len(by_commands) >= 2 * HAS_COMMANDS


@pytest.mark.serial
@pytest.mark.parametrize("checkpoints", [1, 3, CheckpointSchedule(2, recorded=4)], ids=str)
def test_states_whose_parts_change_places(checkpoints, by_commands):
    """Results that are arguments themselves, in the state and in what is observed, beside plain NumPy."""
    step = mpiad.jit(lambda state, k: (state[1], 0.9 * state[2], state[0]), strict=True)
    parts = tuple(np.random.default_rng(6).standard_normal((3, 5)))

    def run(state, multiply):
        seen = []
        for _ in range(9):
            a, b, c = state
            state = b, multiply * c, a
            seen.append(state)
        return state, [np.array(part) for part in zip(*seen)]

    def loss(state):
        last, seen = scan(step, state, 9, observe=lambda state, k: state, checkpoints=checkpoints)
        return sum(anp.sum((j + 1) * part**2) for j, part in enumerate((*last, *seen)))

    last, seen = run(parts, 0.9)
    expected = sum(np.sum((j + 1) * part**2) for j, part in enumerate((*last, *seen)))
    gradient = mpiad.value_and_grad(loss, objective="sum")
    for _ in range(5):
        value, slopes = gradient(parts)
        np.testing.assert_allclose(value, expected, rtol=1e-14)
    # The loss is a sum of multiples of squares of the entries.
    for j, (part, slope) in enumerate(zip(parts, slopes)):
        alone = [part if i == j else 0 * part for i in range(3)]
        last, seen = run(alone, 0.9)
        of_part = sum(np.sum((i + 1) * x**2) for i, x in enumerate((*last, *seen)))
        np.testing.assert_allclose(np.sum(slope * part), 2 * of_part, rtol=1e-13)
    assert len(by_commands) >= 2 * HAS_COMMANDS


LARGE = 40_000  # entries of a state, of which a part is compared after each segment


def large_step(state, k, force, rates):
    """Two fields of which one is stored in the other's place, a force per entry, and messages of single entries."""
    u, v = state
    before, after = from_neighbours(u)
    p = anp.concatenate([before, u, after])
    v = v + rates[0] * (p[2:] + p[:-2] - 2 * u) + force
    return u + rates[1] * anp.sin(v), v


def large_whole(start, forces, rates):
    """The loss of all ranks in one process, also of complex numbers."""
    u, v, total = start, 0.5 * start, 0.0
    for force in forces:
        v = v + rates[0] * (np.roll(u, 1) + np.roll(u, -1) - 2 * u) + force
        u = u + rates[1] * np.sin(v)
        total = total + np.sum(u[::LARGE] * v[1::LARGE])
    return total + np.sum(u**2 * v)


@pytest.mark.few(4)
@pytest.mark.parametrize("steps", [1, 4, 11, 30])
@pytest.mark.parametrize("checkpoints", [1, 4, CheckpointSchedule(2, recorded=5)], ids=str)
def test_states_that_calls_read_and_write_in_place(checkpoints, steps, by_commands):
    """Large states, inputs and parameters, in segments of several lengths, with directional derivatives of each."""
    generator = np.random.default_rng(9)
    start, forces = 0.1 * generator.standard_normal(SIZE * LARGE), 0.1 * generator.standard_normal((steps, SIZE * LARGE))
    rates, mine = np.array([0.2, 0.3]), slice(RANK * LARGE, (RANK + 1) * LARGE)

    def loss(x):
        u, forces, rates = x
        observe = lambda state, k, rates: state[0][0] * state[1][1]  # noqa: E731
        (u, v), seen = scan(advance, (u, 0.5 * u), steps, rates, inputs=forces, observe=observe, checkpoints=checkpoints)
        return anp.sum(seen) + anp.sum(u**2 * v)

    advance = mpiad.jit(large_step, strict=True)
    gradient = mpiad.value_and_grad(loss, objective="sum")
    for factor in (1.0, 0.9, 1.1, 0.8):
        x = [factor * part for part in (start, forces, rates)]
        value, found = gradient((x[0][mine], x[1][:, mine], x[2]))
        np.testing.assert_allclose(value, large_whole(*x), rtol=1e-11)
    for k, along in enumerate([np.cos(start), np.sin(forces), np.array([1.0, -2.0])]):
        moved = [part + 1e-30j * along if i == k else part for i, part in enumerate(x)]
        cut = along[mine] if k == 0 else along[:, mine] if k == 1 else along
        product = COMM.allreduce(np.sum(found[k] * cut))
        np.testing.assert_allclose(product, large_whole(*moved).imag / 1e-30, rtol=1e-10)
    assert len(by_commands) >= 1 * HAS_COMMANDS


@pytest.mark.serial
@pytest.mark.parametrize("most, has_commands", [(None, not is_watched()), (1 << 20, False)])
def test_large_loops_keep_no_memory_between_gradients(most, has_commands, by_commands, monkeypatch):
    """Python runs the calls of loops that would have to keep more than a maximum."""
    if most is not None:
        monkeypatch.setattr(scheduled_calls, "_MOST", most)
    step, start = mpiad.jit(lambda u, k: 0.999 * u, strict=True), np.ones(LARGE)
    gradient = mpiad.value_and_grad(lambda u: anp.sum(scan(step, u, 21, checkpoints=2) ** 2))
    for _ in range(4):
        value, slope = gradient(start)
    np.testing.assert_allclose(value, 0.999**42 * LARGE, rtol=1e-12)
    np.testing.assert_allclose(slope, 2 * 0.999**42 * start, rtol=1e-12)
    assert bool(by_commands) == has_commands


@pytest.mark.serial
@pytest.mark.skipif(not HAS_COMMANDS, reason="watched")
def test_changed_inputs_are_reported_by_each_part_of_a_state(by_commands):
    """The forces of the step before a stored state change between the forward run and the reverse pass."""
    steps, schedule = 12, CheckpointSchedule(2, recorded=2)
    forward = takewhile(lambda action: not isinstance(action, Reverse), actions(steps, schedule))
    stored = {action.number for action in forward if isinstance(action, Keep)} - {0}
    forces = np.zeros((steps, LARGE))
    step = mpiad.jit(lambda u, k, force: u + 0.1 * anp.sin(u) + force, strict=True)

    def loss(u, change):
        u = scan(step, u, steps, inputs=forces, checkpoints=schedule)
        if change is not None:
            forces[change] += 1e-3
        return anp.sum(u**2)

    start = np.linspace(0.0, 1.0, LARGE)
    for _ in range(4):
        mpiad.grad(loss)(start, None)
    for number in stored:
        forces[...] = 0.0
        with pytest.raises(RuntimeError, match=f"the state after step {number - 1} changed by"):
            mpiad.grad(loss)(start, number - 1)
    assert stored and len(by_commands) == 1 + len(stored)


def hashed(u, k):
    """A step with a pseudo-random number of the step, whose product is above 2⁶³ in some steps."""
    h = k * 2654435761 % 2**32
    return 0.9 * u + 1e-3 * (h * h // 2**16 % 1000) * anp.sin(u)


def power(u, k):
    """A step whose number is above 2⁶³ in the middle of the loop only."""
    w = (k * (13 - k)) ** 3
    return 0.9 * u + 1e-3 * (w * w * w * w % 1000) * anp.sin(u)


@pytest.mark.parametrize("recorded", [1, 2])
@pytest.mark.parametrize("advance, steps", [(hashed, 15), (hashed, 29), (power, 14)])
def test_numbers_that_overflow_in_some_steps_are_those_of_python(advance, steps, recorded):
    """Python's integers have any size, which machine code's have not."""
    step, start = mpiad.jit(advance), np.array([0.3, 0.5]) + RANK
    loss = lambda u: anp.sum(scan(step, u, steps, checkpoints=CheckpointSchedule(2, recorded=recorded)) ** 2)  # noqa: E731
    expected, along = start + 1e-30j * np.cos(start), np.cos(start)
    for k in range(steps):
        expected = advance(expected, k)
    expected = np.sum(expected**2)
    for _ in range(5):
        value, gradient = mpiad.value_and_grad(loss, comm=MPI.COMM_SELF)(start)
        np.testing.assert_allclose(value, expected.real, rtol=1e-13)
        np.testing.assert_allclose(gradient @ along, expected.imag / 1e-30, rtol=1e-12)


@pytest.mark.parametrize("advance, error", [(lambda u, k: u + 3 / (7 - k), ZeroDivisionError)])
def test_errors_of_numbers_in_some_steps_are_raised_in_each_gradient(advance, error):
    step = mpiad.jit(lambda u, k: 0.8 * u + 0.1 * anp.tanh(advance(u, k)))
    schedule = CheckpointSchedule(2, recorded=2)
    gradient = lambda n: mpiad.grad(lambda u: anp.sum(scan(step, u, n, checkpoints=schedule) ** 2), comm=MPI.COMM_SELF)  # noqa: E731
    gradient(4)(np.ones(2))
    for _ in range(5):
        with pytest.raises(error):
            gradient(14)(np.ones(2))


def test_loops_of_many_lengths_have_commands(by_commands):
    step, lengths = mpiad.jit(lambda u, k, p: u + 0.1 * p * anp.sin(u)), range(10, 20)

    def loss(u, p):
        return sum(anp.sum(scan(step, u, n, p, checkpoints=2) ** 2) for n in lengths)

    def expected(u, p):
        total = 0.0
        for n in lengths:
            v = u
            for _ in range(n):
                v = v + 0.1 * p * np.sin(v)
            total += np.sum(v**2)
        return total

    for k in range(5):
        by_commands.clear()
        u, p = np.array([0.3, 0.5 + RANK]), 0.2 + 0.1 * k
        found = mpiad.grad(loss, 1, comm=MPI.COMM_SELF)(u, p)
        np.testing.assert_allclose(found, expected(u, p + 1e-30j).imag / 1e-30, rtol=1e-12)
    assert len(by_commands) == (0 if is_watched() else len(lengths))


def test_commands_that_take_long_let_interrupts_arrive(monkeypatch):
    """By a clock that advances by a second at each look."""
    step, together = mpiad.jit(lambda u, k: 0.9 * u + 0.1 * anp.sin(u)), []
    run = scheduled_calls.Commands.run

    def counted(commands, start, end):
        call = mpiad.compiling.commands._CALL
        together.append(sum(kind == call for kind, *_ in commands._rows[start:end]))
        return run(commands, start, end)

    monkeypatch.setattr(scheduled_calls.time, "perf_counter", iter(range(10**9)).__next__)
    monkeypatch.setattr(scheduled_calls.Commands, "run", counted)
    for _ in range(5):
        mpiad.grad(lambda u: anp.sum(scan(step, u, 30, checkpoints=3) ** 2), comm=MPI.COMM_SELF)(np.ones(3))
    assert not HAS_COMMANDS or together[-1] == 1


@pytest.mark.parametrize("advance", [lambda f: f, mpiad.jit])
def test_parameters_that_are_no_arrays(advance):
    def relax(u, k, rate, scheme, flag, nothing):
        return u + rate * anp.sin(u) if scheme == "euler" and flag and nothing is None else u

    loss = lambda rate: anp.sum(scan(step, np.ones(3), 9, rate, "euler", True, None, checkpoints=2) ** 2)  # noqa: E731
    step, u, rate = advance(relax), 1.0 + 0j, 0.1 + 1e-30j
    for _ in range(9):
        u = u + rate * np.sin(u)
    for _ in range(5):
        np.testing.assert_allclose(mpiad.grad(loss, comm=MPI.COMM_SELF)(0.1), (3 * u**2).imag / 1e-30, rtol=1e-12)


def numbered(u, k, force, constants, order, a):
    """A step with constants that aren't arrays, an array of indices, and entries of an array of integers."""
    name, scale = constants["name"], 1.0 if constants["scale"] is None else 0.0
    return u + 0.1 * a * anp.sin(u[order]) * scale + 0.01 * force * (2.0 if name == "upwind" and constants["on"] else 0.0)


@pytest.mark.serial
@pytest.mark.skipif(not HAS_COMMANDS, reason="watched")
def test_constants_indices_and_integers_among_the_arguments(by_commands):
    start, forces, order = np.linspace(0.1, 1.0, 5), np.arange(40) % 5, np.array([3, 4, 1, 0, -3])
    advance = mpiad.jit(numbered, strict=True)

    def plain(a, forces, order, name):
        u = start.astype(complex)
        for k in range(40):
            u = u + 0.1 * a * np.sin(u[order]) + 0.01 * forces[k] * (2.0 if name == "upwind" else 0.0)
        return np.sum(u**3)

    for name in ("upwind", "central"):
        constants = {"name": name, "scale": None, "on": True}

        def loss(a, forces, order, constants=constants):
            return anp.sum(scan(advance, start, 40, constants, order, a, inputs=forces, checkpoints=4) ** 3)

        for call in range(5):  # the array of indices is checked in each gradient, and may differ
            given = forces + call, np.roll(order, call)
            value, slope = mpiad.value_and_grad(loss)(0.7, *given)
            np.testing.assert_allclose(value, plain(0.7, *given, name).real, rtol=1e-12)
            np.testing.assert_allclose(slope, plain(0.7 + 1e-30j, *given, name).imag / 1e-30, rtol=1e-11)
        with pytest.raises(IndexError):
            mpiad.value_and_grad(loss)(0.7, forces, order + 4)
    assert len(by_commands) == 2 * 2


@pytest.mark.serial
@pytest.mark.skipif(not HAS_COMMANDS, reason="watched")
@pytest.mark.parametrize("special", [3, 5, 10, 37])
def test_steps_that_branch_on_their_number(special, by_commands):
    """Commands call the programs of all branches."""
    start, rates = np.linspace(0.1, 1.0, 5), {"low": 0.7}

    def stepped(u, k, a, sin):
        return u * 0.99 if k % special == 0 else u + 0.1 * a * rates["low"] * sin(u)

    def plain(a):
        u = start.astype(complex)
        for k in range(90):
            u = stepped(u, k, a, np.sin)
        return np.sum(u**2)

    advance = mpiad.jit(lambda u, k, a: stepped(u, k, a, anp.sin), strict=True)
    gradient = mpiad.value_and_grad(lambda a: anp.sum(scan(advance, start, 90, a, checkpoints=6) ** 2))
    for low in (0.7, 0.5):
        rates["low"] = low
        for _ in range(5):
            value, slope = gradient(0.8)
            np.testing.assert_allclose(value, plain(0.8).real, rtol=1e-12)
            np.testing.assert_allclose(slope, plain(0.8 + 1e-30j).imag / 1e-30, rtol=1e-11)
    assert len(by_commands) == 2 * 2
