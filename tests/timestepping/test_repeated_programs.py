"""Loops that run a short program many times, beside the same loop written out with plain autograd and messages."""

import sys

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.programs.repeated_calls import RepeatedProgram
from mpiad.pytrees import flatten
from mpiad.timestepping import CheckpointSchedule, scan, stepping
from mpiad.timestepping.checkpoints import Reverse, actions, schedule_of

COMM = MPI.COMM_WORLD
STEPS, CELLS = 23, 4
AFTER, BEFORE = (COMM.rank + 1) % COMM.size, (COMM.rank - 1) % COMM.size
RNG = np.random.default_rng(7 + COMM.rank)
START, FORCES, SPEED = RNG.standard_normal(CELLS), RNG.standard_normal((STEPS, 2)), 1.0 + RNG.random(CELLS)


def advance(u, k, force, speed, a):
    low = mpiad.mpi_exchange(u[-1:], dest=AFTER, source=BEFORE)
    left = anp.concatenate([low, u[:-1]])
    new = u - 0.1 * a * speed * (u - left) + 0.02 * anp.sin(u * (k + 1))
    return new + anp.concatenate([force, 0.0 * force])


def observed(u, k, speed, a):
    return u[1:3] * a, anp.sum(u**2) * (k + 1.0)


step = mpiad.jit(advance, strict=True)


def looped(u, forces, speed, a, checkpoints=None):
    last, (rows, energies) = scan(
        lambda u, k, force, speed, a: step(u, k, force, speed, a), u, STEPS, speed, a, inputs=forces, observe=observed,
        checkpoints=checkpoints,
    )  # fmt: skip
    return anp.sum(anp.tanh(last)) + anp.sum(rows**2) + anp.sum(anp.log(1.0 + energies))


def written_out(u, forces, speed, a):
    rows, energies = [], []
    for k in range(STEPS):
        u = advance(u, k, forces[k], speed, a)
        row, energy = observed(u, k, speed, a)
        rows.append(row)
        energies.append(energy)
    return anp.sum(anp.tanh(u)) + anp.sum(anp.stack(rows) ** 2) + anp.sum(anp.log(1.0 + anp.stack(energies)))


@pytest.fixture
def repetitions(monkeypatch):
    """The numbers of calls that were repeated together, and of their steps; programs have at most four steps."""
    found = []
    for name, run in [(name, getattr(RepeatedProgram, name)) for name in ("called", "recorded")]:

        def noted(program, first, calls, *rest, run=run):
            made = run(program, first, calls, *rest)
            if made is not None:
                found.append((calls, program.steps))
            return made

        monkeypatch.setattr(RepeatedProgram, name, noted)
    monkeypatch.setattr(stepping, "_MAX_STEPS", 4)
    return found


@pytest.mark.few(2)
@pytest.mark.each_value
@pytest.mark.parametrize("checkpoints", [None, 3, CheckpointSchedule(2, recorded=9)])
@pytest.mark.parametrize("argnum", [0, 3, (1, 2), (0, 1, 2, 3)])
def test_gradients(repetitions, argnum, checkpoints):
    args = START, FORCES, SPEED, 0.7
    expected = mpiad.value_and_grad(written_out, argnum, objective="sum")(*args)
    gradient = mpiad.value_and_grad(lambda *args: looped(*args, checkpoints), argnum, objective="sum")
    for _ in range(3):
        repetitions.clear()
        value, found = gradient(*args)
    np.testing.assert_allclose(value, expected[0], rtol=1e-13)
    pairs = zip(found, expected[1]) if isinstance(argnum, tuple) else [(found, expected[1])]
    for ours, other in pairs:
        np.testing.assert_allclose(ours, other, rtol=1e-11, atol=1e-13)
    if checkpoints is None:
        # The first program starts from a state that is constant unless it is a variable; two steps run one by one.
        assert repetitions[0] in [(7, 3), (6, 3)]
        assert repetitions[1:] == [(1, 1)] * 2


@pytest.mark.serial
@pytest.mark.unguarded
def test_calls_of_python_per_block():
    """Programs are prepared once per pass, so that blocks of steps that are run again and reversed take few calls."""
    local, called, blocks = mpiad.jit(lambda u, a: u * (1.0 - 0.1 * a) + 0.01 * anp.sin(u), strict=True), [], []
    for steps in (24, 120):
        gradient = mpiad.grad(lambda u, n=steps: anp.sum(scan(lambda u, k, a: local(u, a), u, n, 0.5, checkpoints=4)))
        for _ in range(3):
            gradient(START)
        frames = []
        sys.setprofile(lambda frame, event, _, frames=frames: frames.append(frame.f_code) if event == "call" else None)
        try:
            gradient(START)
        finally:
            sys.setprofile(None)
        called.append(len(frames))
        blocks.append(sum(isinstance(action, Reverse) for action in actions(steps, schedule_of(4, steps))))
    assert blocks == [6, 30]
    assert called[1] - called[0] <= 100 * (blocks[1] - blocks[0])


@pytest.mark.one_rank
@pytest.mark.few(1)
@pytest.mark.parametrize("checkpoints", [None, 3])
def test_values_and_other_derivatives(repetitions, checkpoints):
    args, v = (START, FORCES, SPEED, 0.7), (RNG.standard_normal(CELLS), 0.3)
    loop = lambda u, a: looped(u, FORCES, SPEED, a, checkpoints)  # noqa: E731
    plain = lambda u, a: written_out(u, FORCES, SPEED, a)  # noqa: E731
    for _ in range(3):
        repetitions.clear()
        np.testing.assert_allclose(looped(*args, checkpoints), written_out(*args), rtol=1e-13)
        # The first program of a process is known after its first call only.
        assert {(7, 3), (6, 3)} & set(repetitions) or checkpoints is not None
        for product in (
            lambda f: mpiad.jvp(lambda x: f(*x), (START, 0.7), v),
            lambda f: mpiad.hvp(f, (0, 1), objective="sum")(START, 0.7, v),
        ):
            for ours, other in zip(flatten(product(loop))[0], flatten(product(plain))[0], strict=True):
                np.testing.assert_allclose(ours, other, rtol=1e-10)
