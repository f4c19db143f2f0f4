"""Kernels come back to Python while they are at work: their numbers don't depend on it, and an interrupt ends a solve."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from weakref import WeakKeyDictionary

import autograd
import autograd.numpy as np
import numpy as onp
import pytest

from mpiad.ensemble import (
    RK4,
    EnsembleProblem,
    EnsembleThreads,
    EnsembleVectorized,
    ODEProblem,
    Tsit5,
    remake,
    solve,
)
from mpiad.ensemble.compiled import kernel_solver, work_shares

# Kernels are compiled here, which takes long on a busy machine. An interrupt that didn't come through is met by the limit.
pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]

N = 83
U0 = onp.random.default_rng(5).uniform(0.5, 2.0, (N, 2))
OWN = onp.linspace(1.0, 3.0, N)
SHARED = onp.array([0.1])
WAYS = [EnsembleVectorized(), EnsembleThreads(2)]


def swing(u, p, t):
    own, shared = p
    return [u[1], -own * u[0] - shared[0] * u[1]]


def ensemble(u0=U0, own=OWN, shared=SHARED):
    base = ODEProblem(swing, u0[0], (0.0, 3.0), (own[0], shared))
    return EnsembleProblem(base, lambda prob, i, repeat: remake(prob, u0=u0[i - 1], p=(own[i - 1], shared)))


def states(backend, **more):
    return solve(ensemble(), Tsit5(), backend, trajectories=N, compile=True, rtol=1e-6, **more)


def differentiated(backend, dt=0.1):
    """Return a function of a solution and its gradient, by the steps that are recorded."""

    def loss(u0, own, shared):
        sol = solve(
            ensemble(u0, own, shared), RK4(), backend, trajectories=N, compile=True, dt=dt, saveat=[0.7, 1.9],
            gradient="adjoint",
        )  # fmt: skip
        return np.sum(sol.u**2) + np.sum(sol.u_end**3)

    return autograd.value_and_grad(lambda given: loss(*given))((U0, OWN, SHARED))


@pytest.fixture
def calls(monkeypatch):
    """Count how often kernels are called, by the numbers that say where they leave off: 6 forward, 4 in reverse."""
    counted, call = Counter(), work_shares.Paced.__call__

    def counting(self, *given):
        counted[len(self._state)] += 1
        call(self, *given)

    monkeypatch.setattr(work_shares.Paced, "__call__", counting)
    monkeypatch.setattr(work_shares, "_turns_of", WeakKeyDictionary())
    return counted


def one_turn_each(monkeypatch):
    monkeypatch.setattr(work_shares, "_turns_of", WeakKeyDictionary())
    monkeypatch.setattr(work_shares, "_FIRST", 1)
    monkeypatch.setattr(work_shares, "_SECONDS", 0.0)


def written(tape):
    return tape.first, tape.stop, tape.rows.tobytes(), tape.previous.tobytes()


def test_a_call_for_each_turn_changes_no_bit(calls, monkeypatch):
    tapes, tape = [], kernel_solver.Tape
    monkeypatch.setattr(kernel_solver, "Tape", lambda *given: tapes.append(written(made := tape(*given))) or made)
    whole, gradient = differentiated(WAYS[0])
    plain = states(WAYS[0])
    first, few = tapes[:], dict(calls)
    tapes.clear()
    one_turn_each(monkeypatch)
    monkeypatch.setattr(kernel_solver, "_BLOCK", 2)
    again, same = differentiated(WAYS[0])
    assert calls[6] > few[6] + 90 and calls[4] > few[4] + 90
    assert tapes == first[: len(tapes)] and any(rows for _, _, rows, _ in tapes)
    assert again == whole
    for a, b in zip(same, gradient):
        assert a.tobytes() == b.tobytes()
    for backend in (WAYS[0], EnsembleThreads(3)):
        cut = states(backend)
        for name in ("u_end", "t_reached", "naccept", "nreject"):
            assert getattr(cut, name).tobytes() == getattr(plain, name).tobytes(), name


def test_turns_are_as_many_as_fit_into_the_time(monkeypatch):
    monkeypatch.setattr(work_shares, "_turns_of", WeakKeyDictionary())
    clock = [0.0]
    monkeypatch.setattr(work_shares.time, "perf_counter", lambda: clock[0])
    taken = []

    def kernel(state, left, seconds):
        taken.append(int(state[-1]))
        clock[0] += seconds * (state[-1] - left)
        state[-1] = left

    state = onp.zeros(3, int)
    paced = work_shares.Paced(kernel, state)
    for left, seconds in ((0, 1e-6), (0, 1e-6), (0, 1e-6), (0, 4e-6), (9, 1.0), (0, 4e-6)):
        paced(state, left, seconds)
    # From the few of the first call by factors of 64 at most; what ended by itself says nothing.
    assert taken == [64, 4096, 100_000, 100_000, 25_000, 25_000]
    work_shares.Paced(kernel, state)(state, 0, 1000.0)  # a process that was stopped
    assert taken[6] == 25_000 and work_shares._turns_of[kernel] == 25_000 // 64


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", WAYS, ids=["alone", "threads"])
def test_an_interrupt_ends_an_endless_solve_and_the_next_one_is_right(backend, calls):
    def interrupt():
        while not calls[6]:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    reference = states(backend)  # compiles
    calls.clear()
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        states(backend, dtmax=1e-13, max_steps=10**14)
    thread.join()
    # Nobody is at work any more.
    count = calls[6]
    time.sleep(0.3)
    assert calls[6] == count > 1
    assert states(backend).u_end.tobytes() == reference.u_end.tobytes()


@pytest.mark.few(1)
@pytest.mark.parametrize(("numbers", "backend"), [
    pytest.param(6, WAYS[0], id="forward-alone"),
    pytest.param(4, WAYS[1], id="reverse-threads"),
    pytest.param(6, WAYS[1], id="forward-threads", marks=pytest.mark.thorough),
    pytest.param(4, WAYS[0], id="reverse-alone", marks=pytest.mark.thorough),
])  # fmt: skip
def test_an_interrupt_while_steps_are_recorded_or_read(numbers, backend, calls, monkeypatch):
    monkeypatch.setattr("mpiad.ensemble.compiled.work_shares._LEAST", 10)
    one_turn_each(monkeypatch)
    _, reference = differentiated(backend, dt=0.01)
    whole = calls[numbers]
    calls.clear()
    call, interrupts = work_shares.Paced.__call__, iter([signal.SIGINT])

    def interrupting(self, *given):
        call(self, *given)
        # Of two threads, each may see the count only after the other one has increased it beyond 40.
        if len(self._state) == numbers and calls[numbers] >= 40:
            for interrupt in interrupts:
                os.kill(os.getpid(), interrupt)
            time.sleep(0.001)  # the threads work until the main thread has received the interrupt

    with monkeypatch.context() as patch:
        patch.setattr(work_shares.Paced, "__call__", interrupting)
        with pytest.raises(KeyboardInterrupt):
            differentiated(backend, dt=0.01)
    assert 40 <= calls[numbers] < whole / 2
    _, gradient = differentiated(backend, dt=0.01)
    for a, b in zip(gradient, reference):
        onp.testing.assert_allclose(a, b, rtol=1e-12)
