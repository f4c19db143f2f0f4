"""Loops whose step is a lambda, closure or method around jitted functions, beside the same loop written out."""

import logging

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import forget_programs
from mpi4py import MPI

import mpiad
from mpiad.programs import compiled_forms
from mpiad.timestepping import scan
from mpiad.timestepping.scan import Loop
from mpiad.timestepping.stepping import UserStepping

pytestmark = pytest.mark.interpreted  # the steps are compiled, what is around them isn't
COMM = MPI.COMM_WORLD
STEPS, CELLS = 23, 12
DOMAIN = mpiad.Domain((CELLS,), periodic=True)
FORCES = np.random.default_rng(3).standard_normal((STEPS, 2))


def flux(u, a):
    p = DOMAIN.exchange(u)
    return u + 0.1 * a * (p[2:] + p[:-2] - 2 * u) + 0.01 * anp.sin(u)


jitted = mpiad.jit(flux, strict=True)


@pytest.fixture
def lengths(monkeypatch):
    """The numbers of steps that ran together."""
    found, run = [], UserStepping.run

    def noted(self, span, args):
        found.append(span.stop - span.first)
        return run(self, span, args)

    monkeypatch.setattr(UserStepping, "run", noted)
    return found


class Model:
    """Methods around jitted functions, and a jitted method."""

    def __init__(self, function):
        self.function, self.rate = function, 0.8

    def step(self, u, k, force, a):
        return self.function(u, a) * self.rate + force[0]

    @mpiad.jit
    def jitted_step(self, u, k, force, a):
        return flux(u, a) * self.rate + force[0]


MODEL = Model(jitted)


def _renamed(j):
    return lambda u, k, force, a: j(a=a, u=u) * 0.8 + force[0]


def _packed(j):
    def helper(parts):
        return j(*parts)

    return lambda u, k, force, a: helper((u, a)) * 0.8 + force[0] + 0.0 * k


def _with_local_array(j):
    """An array and a number that are new in each loop."""
    half, rate = np.full(len(FORCES[0]), 0.5), float(np.sqrt(0.64))
    return lambda u, k, force, a: j(u, a) * (half[0] + half[1]) * rate + force[0]


KINDS = {
    "renamed": (_renamed, lambda u, k, a: u[:1] * k),
    "packed": (_packed, lambda u, k, a: {"first": u[0], "sum": anp.sum(u**2)}),
    "local array": (_with_local_array, mpiad.jit(lambda u, k, a: anp.cos(u) * a)),
    "method": (lambda j: MODEL.step, lambda u, k, a: DOMAIN.sum(u**2)),
    "jitted method": (lambda j: MODEL.jitted_step, None),
}


def _loop(make, observe, checkpoints):
    """Return a function of (u, forces, a) that makes its step anew, as a lambda inside of a loss is made anew."""

    def loss(x):
        u, forces, a = x
        found = scan(make(jitted), u, STEPS, a, inputs=forces, observe=observe, checkpoints=checkpoints)
        last, seen = found if observe is not None else (found, [])
        return anp.sum(last**2) + sum(anp.sum(anp.sin(leaf)) for leaf in (seen.values() if type(seen) is dict else [seen]))

    return loss


def _written_out(observe):
    look = getattr(observe, "fun", observe)

    def loss(x):
        u, forces, a = x
        total = 0.0
        for k in range(STEPS):
            u = flux(u, a) * 0.8 + forces[k][0]
            seen = {} if look is None else look(u, k, a)
            total = total + sum(anp.sum(anp.sin(leaf)) for leaf in (seen.values() if type(seen) is dict else [seen]))
        return anp.sum(u**2) + total

    return loss


@pytest.mark.few(2)
@pytest.mark.each_value
@pytest.mark.parametrize("checkpoints", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_derivatives_are_those_of_the_loop_written_out(kind, checkpoints, lengths):
    make, observe = KINDS[kind]
    u = np.linspace(0.2, 1.0, CELLS)[DOMAIN.owned[0]]
    x, v = (u, FORCES, 0.7), (np.cos(u), 0.1 * FORCES, -0.3)
    loop, expected = _loop(make, observe, checkpoints), _written_out(observe)
    value, gradient = mpiad.value_and_grad(expected, objective="sum")(x)
    tangent = mpiad.jvp(expected, x, v)[1]
    for number in range(4):
        lengths.clear()
        found = mpiad.value_and_grad(loop, objective="sum")(x)
        if number == 2:  # the fourth one may be run by machine code
            assert len(lengths) < 0.5 * sum(lengths)
        np.testing.assert_allclose(found[0], value, rtol=1e-12)
        for a, b in zip(found[1], gradient):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(mpiad.jvp(loop, x, v)[1], tangent, rtol=1e-11)


def _lambdas_of_values(checkpoints):
    """A loop whose lambda holds an array, and one that doesn't exist at the next call."""

    def loop(a, w):
        return scan(lambda u, k: jitted(u, a) * w, 1.0 + 0 * w, STEPS, checkpoints=checkpoints)

    return loop


@pytest.mark.serial
@pytest.mark.parametrize("checkpoints", [None, 3])
def test_variables_of_enclosing_functions_may_change(checkpoints, lengths):
    loop = _lambdas_of_values(checkpoints)
    for a, w in [
        (0.1, 0.9),
        (0.2, 0.9),
        (0.2, 0.8),
        (0.3, 0.7),
        (0.4, 0.6),
        (0.1, 0.9),
        *[(a / 20, 0.5) for a in range(12)],
    ]:
        lengths.clear()
        u = np.ones(CELLS)
        for _ in range(STEPS):
            u = flux(u, a) * (w + np.arange(CELLS) / 99)
        np.testing.assert_allclose(loop(a, w + np.arange(CELLS) / 99), u, rtol=1e-12)
    assert len(lengths) < 0.5 * STEPS


@pytest.mark.serial
def test_derivatives_with_respect_to_variables_of_enclosing_functions():
    loop = _lambdas_of_values(None)

    def written_out(a, w):
        u = 1.0 + 0 * w
        for _ in range(STEPS):
            u = flux(u, a) * w
        return u

    w = np.linspace(0.7, 1.0, CELLS)
    for a in (0.2, 0.5, 0.6):
        found = mpiad.grad(lambda a, w: anp.sum(loop(a, w) ** 2), (0, 1))(a, w)
        expected = mpiad.grad(lambda a, w: anp.sum(written_out(a, w) ** 2), (0, 1))(a, w)
        for x, y in zip(found, expected):
            np.testing.assert_allclose(x, y, rtol=1e-11)


def _expected(steps=STEPS):
    u = np.ones(len(range(CELLS)[DOMAIN.owned[0]]))
    states = []
    for _ in range(steps):
        u = flux(u, 0.5)
        states.append(u)
    return states


def test_an_observation_with_effects_is_called_by_python_after_each_step(caplog, lengths):
    """Its states are those of the program of several steps."""
    seen, start = [], np.ones_like(_expected()[0])

    def observe(u, k):
        seen.append((k, u.copy()))
        return u[:2]

    for checkpoints in (None, 4):
        for _ in range(3):
            seen.clear()
            lengths.clear()
            last, rows = scan(lambda u, k: jitted(u, 0.5), start, STEPS, observe=observe, checkpoints=checkpoints)
            assert [k for k, _ in seen] == list(range(STEPS))
            np.testing.assert_allclose([u for _, u in seen], _expected(), rtol=1e-13)
            np.testing.assert_allclose(rows, np.array(_expected())[:, :2], rtol=1e-13)
            np.testing.assert_allclose(last, _expected()[-1], rtol=1e-13)
        assert max(lengths) > 1
    line = observe.__code__.co_firstlineno
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(texts) == 1
    assert f"test_functions_around_jitted.py:{line}" in texts[0]


def test_an_observation_that_is_not_compiled_is_called_by_python(caplog, lengths):
    def observe(u, k):
        return u[:2] if float(u.sum()) > 0 else -u[:2]

    with caplog.at_level("INFO", "mpiad"):
        for _ in range(3):
            lengths.clear()
            found = scan(lambda u, k: jitted(u, 0.5), np.ones_like(_expected()[0]), STEPS, observe=observe)[1]
            np.testing.assert_allclose(found, np.array(_expected())[:, :2], rtol=1e-13)
    assert max(lengths) > 1
    warnings = [record.getMessage() for record in caplog.records if "isn't compiled" in record.getMessage()]
    assert len(warnings) == 1
    assert f"test_functions_around_jitted.py:{observe.__code__.co_firstlineno}" in warnings[0]


def test_messages_of_an_observation_follow_those_of_its_step(lengths):
    """The programs of the ranks have different lengths, so an observation that communicates must follow a single step."""
    seen, work = [], 60 * COMM.rank

    @mpiad.jit
    def step(u):
        total = mpiad.mpi_allreduce(anp.sum(u))
        for _ in range(work):
            u = u + anp.sin(u) * 1e-3
        return 0.9 * u + 0.01 * total

    def observe(u, k):
        seen.append(float(mpiad.mpi_allreduce(u[0])))
        return u[:1]

    u = np.arange(3.0) + COMM.rank
    for _ in range(3):
        seen.clear()
        scan(lambda u, k: step(u), u, STEPS, observe=observe)
    assert max(lengths) == 1
    expected, blocks = [], [np.arange(3.0) + rank for rank in range(COMM.size)]
    for _ in range(STEPS):
        total = sum(block.sum() for block in blocks)
        for rank, block in enumerate(blocks):
            for _ in range(60 * rank):
                block += np.sin(block) * 1e-3
            block[:] = 0.9 * block + 0.01 * total
        expected.append(sum(block[0] for block in blocks))
    np.testing.assert_allclose(seen, expected, rtol=1e-12)


def _observed(u, a):
    rows = []
    for k in range(STEPS):
        u = flux(u, a)
        rows.append(u[:2] * k)
    return anp.stack(rows)


@pytest.mark.thorough
def test_one_rank_may_interpret(lengths):
    """The others run the same messages in programs of several steps."""

    def step(u, k, a):
        new = jitted(u, a)
        if COMM.rank == 1 and float(mpiad.stop_gradient(new)[0]) > 1e9:  # a decision that can't be compiled
            return 0 * new
        return new

    u = np.ones_like(_expected()[0])
    for _ in range(3):
        found = mpiad.grad(lambda a: anp.sum(scan(step, u, STEPS, a, checkpoints=4)), objective="sum")(0.5)

    def plain(a):
        v = u
        for _ in range(STEPS):
            v = flux(v, a)
        return anp.sum(v)

    np.testing.assert_allclose(found, mpiad.grad(plain, objective="sum")(0.5), rtol=1e-10)
    # Several directions at once: the messages of a block of steps are those of all ranks.
    v = np.array([1.0, -0.5, 2.0])
    loop = mpiad.linearize(lambda a: scan(step, u, STEPS, a, observe=lambda u, k, a: u[:2] * k, checkpoints=4)[1])(0.5)
    for _ in range(3):
        products = loop.jvp(v, batch=True)
    _, expected = mpiad.jvp(lambda a: _observed(u, a), 0.5, 1.0)
    np.testing.assert_allclose(products, v[:, None, None] * expected, rtol=1e-11)


@pytest.mark.serial
def test_a_step_with_effects_runs_in_python(caplog, capsys, lengths):
    calls = []
    for step in (lambda u, k: (calls.append(k), jitted(u, 0.5))[1], lambda u, k: (print(k), jitted(u, 0.5))[1]):
        for _ in range(2):
            np.testing.assert_allclose(scan(step, np.ones(CELLS), STEPS), _expected()[-1], rtol=1e-13)
        assert f"test_functions_around_jitted.py:{step.__code__.co_firstlineno}" in caplog.records[-1].getMessage()
    assert calls == [*range(STEPS)] * 2
    assert capsys.readouterr().out.split() == [str(k) for k in [*range(STEPS)] * 2]
    assert set(lengths) == {1}
    assert len(caplog.records) == 2


@pytest.mark.serial
def test_a_plain_step_stays_interpreted_and_the_advice_is_given_once(caplog):
    caplog.set_level("INFO", "mpiad")
    calls = []

    def step(u, k):
        calls.append(k)
        return 0.5 * u

    scan(step, np.ones(2), 50)
    assert not caplog.records
    for _ in range(2):
        assert scan(step, np.ones(2), 51)[0] == 0.5**51
    assert calls == [*range(50), *range(51), *range(51)]
    (record,) = caplog.records
    assert "mpiad.jit" in record.getMessage()
    assert f"test_functions_around_jitted.py:{step.__code__.co_firstlineno}" in record.getMessage()


@pytest.mark.few(2)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpoints", [None, 3])
def test_a_step_with_many_calls_of_jitted_functions_is_not_compiled_by_itself(caplog, monkeypatch, checkpoints, compiled):
    """Unless the user compiles it: they would all become parts of one program."""
    monkeypatch.setattr(compiled_forms, "_MOST_OPERATIONS", 20)
    forget_programs()
    pull = mpiad.jit(lambda u, a: u + 0.01 * anp.sin(a * u), strict=True)

    def pulled(u, k, a):
        for j in range(12):
            u = pull(u, a * (j + 1))
        return DOMAIN.exchange(u)[2:] * 0.5 + 0.5 * u

    def loss(a):
        return DOMAIN.sum(scan(mpiad.jit(pulled) if compiled else pulled, start, 7, a, checkpoints=checkpoints) ** 2)

    def whole(a):
        u = np.linspace(-1.0, 1.0, CELLS)
        for _ in range(7):
            for j in range(12):
                u = u + 0.01 * np.sin(a * (j + 1) * u)
            u = np.roll(u, -1) * 0.5 + 0.5 * u
        return np.sum(u**2)

    start = np.linspace(-1.0, 1.0, CELLS)[DOMAIN.owned]
    value, gradient = mpiad.value_and_grad(loss, shared=True)(0.01)
    assert value == pytest.approx(whole(0.01), rel=1e-12)
    assert gradient == pytest.approx(whole(0.01 + 1e-30j).imag / 1e-30, rel=1e-11)
    warnings = [record.getMessage() for record in caplog.records if "more than 20 operations" in record.getMessage()]
    # Ranks 0, 1, 2 and the last one warn.
    assert len(warnings) == (0 if compiled else 1) and all("pulled at " in text for text in warnings)


@pytest.mark.serial
def test_states_of_other_shapes_are_an_error():
    for _ in range(2):
        with pytest.raises(ValueError, match="step must return a state like its argument u"):
            scan(lambda u, k: jitted(u, 0.5)[:-1], np.ones(CELLS), 60)


@pytest.mark.serial
def test_blocks_of_steps_are_linearized(monkeypatch):
    """Several directions at once: as many steps at a time as are recorded in a gradient."""
    blocks, linearized = [], Loop.linearized

    def noted(self, block, leaves, active):
        blocks.append(block)
        return linearized(self, block, leaves, active)

    monkeypatch.setattr(Loop, "linearized", noted)
    u, directions = np.linspace(0.2, 1.0, CELLS), np.random.default_rng(0).standard_normal((3, STEPS, 2))

    def loop(f):
        step = lambda u, k, f: jitted(u, f[0]) + f[1]  # noqa: E731
        return scan(step, u, STEPS, inputs=f, observe=lambda u, k: u**2, checkpoints=4)

    def written_out(f):
        v, rows = u, []
        for k in range(STEPS):
            v = flux(v, f[k][0]) + f[k][1]
            rows.append(v**2)
        return v, anp.stack(rows)

    last, rows = mpiad.linearize(loop)(FORCES).jvp(directions, batch=True)
    for k, direction in enumerate(directions):
        expected = mpiad.jvp(written_out, FORCES, direction)[1]
        np.testing.assert_allclose(last[k], expected[0], rtol=1e-10)
        np.testing.assert_allclose(rows[k], expected[1], rtol=1e-10)
    assert blocks == [(k, min(k + 4, STEPS)) for k in range(0, STEPS, 4)]


@pytest.mark.serial
def test_loops_that_only_forward_mode_has_run_have_several_steps_in_a_program(lengths):
    advance = mpiad.jit(lambda u, k, a: anp.sin(u) * a)
    for _ in range(2):
        lengths.clear()
        tangent = mpiad.jvp(lambda a: scan(advance, np.ones(3), STEPS, a), 0.9, 1.0)[1]
    assert len(lengths) < 0.5 * STEPS
    u, du = np.ones(3), np.zeros(3)
    for _ in range(STEPS):
        u, du = np.sin(u) * 0.9, np.cos(u) * du * 0.9 + np.sin(u)
    np.testing.assert_allclose(tangent, du, rtol=1e-13)


@pytest.mark.few(2)
@pytest.mark.parametrize("checkpoints", [None, 3])
@pytest.mark.parametrize("around", [False, True])
def test_loops_of_one_step_with_states_of_other_shapes_and_dtypes(around, checkpoints, rank):
    jitted = mpiad.jit(lambda u, k, c: (c * u + mpiad.mpi_allreduce(anp.sum(u)) / 8).astype(u.dtype))
    step = (lambda u, k, c: jitted(u, k, 0.5 * c)) if around else jitted

    def whole(c, us):
        for _ in range(6):
            us = [(0.5 * c if around else c) * u + sum(map(np.sum, us)) / 8 for u in us]
        return sum(np.sum(u**2) for u in us)

    for dtype, n, tolerance in ((float, 2, 1e-13), (float, 3, 1e-13), (np.float32, 3, 1e-5), (float, 2, 1e-13)):
        starts = [np.linspace(1.0, 2.0, n + k).astype(dtype) for k in range(MPI.COMM_WORLD.size)]

        def loss(c, start=starts[rank]):
            return mpiad.mpi_allreduce(anp.sum(scan(step, start, 6, c, checkpoints=checkpoints) ** 2))

        value, gradient = mpiad.value_and_grad(loss, shared=True)(0.9)
        exact = [start.astype(float) for start in starts]
        np.testing.assert_allclose(value, whole(0.9, exact), rtol=tolerance)
        np.testing.assert_allclose(gradient, whole(0.9 + 1e-30j, exact).imag / 1e-30, rtol=tolerance)


def test_steps_that_change_the_shape_are_refused_in_each_call():
    step = mpiad.jit(lambda u, k: 0.5 * u * np.ones(3))
    scan(step, np.ones(3), 2)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"shape \(1,\), but step 0 returned .* shape \(3,\)"):
            scan(step, np.ones(1), 2)
