"""Loops of compiled steps, several of which run as one program, beside the whole problem in one process."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan

pytestmark = pytest.mark.interpreted  # the steps are compiled, what is around them isn't
COMM = MPI.COMM_WORLD
CELLS, STEPS = 13, 37
DOMAIN = mpiad.Domain((CELLS,), periodic=True)
rng = np.random.default_rng(5)
START, FORCE, RATES = rng.standard_normal(CELLS), rng.standard_normal((STEPS, CELLS)), np.array([0.2, -0.3])


def step(state, k, force, rates):
    """A flux with the neighbours, a cubic sink and a force; the second array holds the state before."""
    u, before = state["u"], state["before"]
    p = DOMAIN.exchange(u)
    around = p[2:] + p[:-2] - 2 * u
    return {"u": u + rates[0] * around + 0.01 * rates[1] * u**3 - 0.1 * before + force * 0.1 / (k + 1), "before": u}


def energy(state, k, rates):
    return {"squares": DOMAIN.sum(state["u"] ** 2), "times": state["u"][:1] * (k + 1)}


def loss(scanned):
    """Σ over ranks of something of all that is observed, and of the last state."""
    last, seen = scanned
    return anp.sum(seen["squares"] ** 2) / COMM.size + anp.sum(anp.sin(seen["times"])) + anp.sum(last["before"] ** 3)


def whole(start, forces, rates):
    """The same on all cells in one process, for complex numbers too."""
    u, before, total = start, start, 0.0
    firsts = [part.start for part in COMM.allgather(DOMAIN.owned[0])]
    for k in range(STEPS):
        around = np.roll(u, 1) + np.roll(u, -1) - 2 * u
        u, before = u + rates[0] * around + 0.01 * rates[1] * u**3 - 0.1 * before + forces[k] * 0.1 / (k + 1), u
        total = total + np.sum(u**2) ** 2 + np.sum(np.sin(u[firsts] * (k + 1)))
    return total + np.sum(before**3)


def derivative(*directions):
    """Of the whole, by a complex step."""
    return whole(*[x + 1e-30j * d for x, d in zip((START, FORCE, RATES), directions)]).imag / 1e-30


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "checkpoints", [None, 5, CheckpointSchedule(3, recorded=6), CheckpointSchedule(2, recorded=20)], ids=str
)
def test_values_and_derivatives(checkpoints):
    """The first gradient traces a step, or several; the third replays all. Each with respect to all that moves."""
    mine = DOMAIN.owned[0]
    advance, look = mpiad.jit(step, strict=True), mpiad.jit(energy, strict=True)

    def objective(x):
        state = {"u": x[0], "before": x[0]}
        return loss(scan(advance, state, STEPS, x[2], inputs=x[1], observe=look, checkpoints=checkpoints))

    x, along = (START[mine], FORCE[:, mine], RATES), (np.cos(START), np.sin(FORCE), np.array([0.7, 0.4]))
    v = along[0][mine], along[1][:, mine], along[2]
    both = mpiad.value_and_grad(objective, objective="sum")
    for _ in range(3):
        value, gradient = both(x)
        np.testing.assert_allclose(value, whole(START, FORCE, RATES), rtol=1e-12)
        # Rates are each rank's own copy: the derivative by the one number is that of all copies.
        products = [COMM.allreduce(np.sum(g * d)) for g, d in zip(gradient, v)]
        none = [np.zeros_like(d) for d in along]
        expected = [derivative(*none[:k], d, *none[k + 1 :]) for k, d in enumerate(along)]
        np.testing.assert_allclose(products, expected, rtol=1e-11)
        np.testing.assert_allclose(COMM.allreduce(mpiad.jvp(objective, x, v)[1]), derivative(*along), rtol=1e-11)
    assert any(key[0] is look.fun and made.operations for key, made in advance._derived.items())


@pytest.mark.thorough
@pytest.mark.serial
def test_the_length_of_programs_does_not_depend_on_what_runs_first():
    """Before the first gradient, the number of its operations is estimated."""
    lengths = []
    for gradient_first in (True, False):
        advance = mpiad.jit(lambda u, k: u + 0.1 * anp.sin(u) * anp.concatenate([u[1:], u[:1]]), strict=True)
        forward = lambda u: anp.sum(scan(advance, u, 300) ** 2)  # noqa: B023, E731
        gradient = mpiad.value_and_grad(forward, objective="sum")
        for fun in (gradient, forward) if gradient_first else (forward, gradient):
            for _ in range(3):
                fun(np.linspace(0.1, 1.0, 5))
        lengths.append(max(key[2] for key in advance._derived if type(key) is tuple))
    assert 0.5 < lengths[0] / lengths[1] < 2
    assert 1 < min(lengths)


def test_a_kept_record_of_a_short_loop_is_one_program():
    """The record of the first call is used by all products."""
    mine = DOMAIN.owned[0]
    advance = mpiad.jit(lambda u, k, a: step({"u": u, "before": u}, k, 0.0, anp.stack([a, a]))["u"], strict=True)
    linear = mpiad.linearize(lambda u, a: scan(advance, u, 5, a), (0, 1))(START[mine], 0.2)
    assert 5 in {key[2] for key in advance._derived if type(key) is tuple}

    def last(u, a):
        for _ in range(5):
            u = u + a * (np.roll(u, 1) + np.roll(u, -1) - 2 * u) + 0.01 * a * u**3 - 0.1 * u
        return u

    expected = last(START + 1e-30j * np.cos(START), 0.2 + 0.7e-30j).imag / 1e-30
    np.testing.assert_allclose(linear.jvp((np.cos(START)[mine], 0.7)), expected[mine], rtol=1e-12)
    weights = np.sin(3.0 * START)
    of_u, of_a = linear.vjp(weights[mine])
    product = COMM.allreduce(np.sum(of_u * np.cos(START)[mine]) + 0.7 * of_a)
    np.testing.assert_allclose(product, np.sum(weights * expected), rtol=1e-12)


@pytest.mark.serial
def test_a_step_that_is_run_with_inputs_and_without():
    advance, u = mpiad.jit(lambda u, k, force=0.5: anp.sin(u) * 0.9 + force * u, strict=True), np.linspace(0.1, 1.0, 5)
    for given in (None, FORCE[:8, :5], None, FORCE[:8, :5]):
        expected = u
        for force in [0.5] * 8 if given is None else given:
            expected = np.sin(expected) * 0.9 + force * expected
        np.testing.assert_allclose(scan(advance, u, 8, inputs=given), expected, rtol=1e-13)
    assert len([key for key, made in advance._derived.items() if made.operations]) > 1


def test_a_step_that_decides_by_its_number_runs_one_by_one(caplog):
    @mpiad.jit
    def alternating(u, k, a):
        return u * a if k % 2 else u + a

    gradient = mpiad.grad(lambda a: anp.sum(scan(alternating, np.ones(2), 9, a)), objective="sum")
    for a in (1.5, 0.5, 2.0, 1.1):
        assert abs(scan(alternating, np.ones(1), 3, a)[0] - ((1 + a) * a + a)) < 1e-14
        # u₉ = (((1 + a) a + a) a + …) + a
        powers = np.polynomial.Polynomial([1.0])
        for k in range(9):
            powers = powers * np.polynomial.Polynomial([0, 1]) if k % 2 else powers + np.polynomial.Polynomial([0, 1])
        np.testing.assert_allclose(gradient(a), 2 * powers.deriv()(a), rtol=1e-13)
    assert not caplog.records


def test_what_the_step_closes_over_is_read_anew():
    held = {"a": np.array([0.5])}
    advance = mpiad.jit(lambda u, k: held["a"] * u, strict=True)
    for a in (0.5, 0.9, 1.1, 0.9):
        held["a"][0] = a
        np.testing.assert_allclose(scan(advance, np.ones(3), 20), a**20, rtol=1e-13)
