"""Events whose roots coincide, or nearly do, in random programs whose solutions have closed forms.

A program is a list of blocks, each with components, a condition or a given time, and an affect of its own, so that what
happens at one time happens in any order. The first events of two blocks lie 0, 1e-16, 1e-15 or 1e-12 apart. The closed
forms are compared with SciPy's integration of the same programs.

    PROGRAMS=500 SEED=5 python -m pytest --thorough tests/ensemble/test_close_events.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import autograd.numpy as anp
import numpy as np
import pytest
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import (
    BS3,
    RK4,
    RK45,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    Tsit5,
    Vern7,
    solve,
)  # fmt: skip

pytestmark = pytest.mark.serial

APART = (0.0, 1e-16, 1e-15, 1e-12)
METHODS = (RK45(), Tsit5(), BS3(), Vern7(), RK4(), Rosenbrock23(), Rodas5P())
WAYS = {
    "serial": {"ensemblealg": EnsembleSerial(), "compile": False},
    "vectorized": {"ensemblealg": EnsembleVectorized(), "compile": False},
    "threads": {"ensemblealg": EnsembleThreads(2), "compile": False},
    "kernels": {"ensemblealg": EnsembleVectorized(), "compile": True},
}
END, FOUR = 2.0, 4  # of tspan; parameters of each block
COINCIDING = 1e-9  # roots that are closer to each other than this are one time for SciPy
CLOSE = 1e-8  # what is within this distance of a terminal event may come before it or after it
EXACT = 1e-5


class Block(NamedTuple):
    """Components that nothing else acts on; the functions take the block's own components and parameters."""

    width: int
    rate: Callable  # rate(u, p)
    condition: Callable | None  # None: a given time, p[1]
    direction: int
    affect: Callable | None
    terminal: bool
    start: Callable  # start(p): its initial state
    drawn: Callable  # drawn(rng, T): its parameters, with which its first event is at the time T
    exact: Callable  # exact(p, t): the times of its events, and its state at t


def ball(direction):
    """p: gravity, the height of the ground, the part of the speed that is kept, when it first is on the ground."""

    def exact(p, t):
        g, ground, keeps, time = p
        times, speed = [], g * time
        while time < t:
            times.append(time)
            speed *= keeps
            time += 2 * speed / g
        if not times:
            return [], [ground + g * (p[3] ** 2 - t**2) / 2, -g * t]
        since = t - times[-1]
        return times, [ground + speed * since - g * since**2 / 2, speed - g * since]

    return Block(
        2, lambda u, p: [u[1], 0 * u[0] - p[0]], lambda u, p, t: u[0] - p[1], direction,
        lambda u, p: [u[0], -p[2] * u[1]], False, lambda p: [p[1] + p[0] * p[3] ** 2 / 2, 0.0],
        lambda rng, T: [rng.uniform(2, 10), rng.choice([0.0, -3.0, 5.0]), rng.choice([0.8, 1.0]), T], exact,
    )  # fmt: skip


def ramp(direction, resets):
    """p: the rate, the threshold, nothing, when it is reached. It counts, and begins again at zero or goes on."""

    def exact(p, t):
        count = int(t > p[3]) if not resets else int(np.ceil(t / p[3] - 1))
        return [(k + 1) * p[3] for k in range(count)], [p[0] * (t - count * p[3] * resets), count]

    return Block(
        2, lambda u, p: [p[0] + 0 * u[0], 0 * u[1]], lambda u, p, t: u[0] - p[1], direction,
        lambda u, p: [0 * u[0] if resets else u[0], u[1] + 1], False, lambda p: [0.0, 0.0],
        lambda rng, T: [rate := rng.uniform(0.5, 2), rate * T, 0.0, T], exact,
    )  # fmt: skip


def decay(direction, resets):
    """p: the rate, the threshold, nothing, when it is reached. It counts, and begins again at one or goes on."""

    def exact(p, t):
        count = int(t > p[3]) if not resets else int(np.ceil(t / p[3] - 1))
        return [(k + 1) * p[3] for k in range(count)], [np.exp(-p[0] * (t - count * p[3] * resets)), count]

    return Block(
        2, lambda u, p: [-p[0] * u[0], 0 * u[1]], lambda u, p, t: u[0] - p[1], direction,
        lambda u, p: [0 * u[0] + 1 if resets else u[0], u[1] + 1], False, lambda p: [1.0, 0.0],
        lambda rng, T: [rate := rng.uniform(0.5, 2), np.exp(-rate * T), 0.0, T], exact,
    )  # fmt: skip


def clock(direction, terminal):
    """p: the rate, the threshold, nothing, when it is reached. It ends the trajectory there, or is only noted."""
    return Block(
        1, lambda u, p: [p[0] + 0 * u[0]], lambda u, p, t: u[0] - p[1], direction, None, terminal, lambda p: [0.0],
        lambda rng, T: [rate := rng.uniform(0.5, 2), rate * T, 0.0, T],
        lambda p, t: ([p[3]] * bool(p[3] < t), [p[0] * t]),
    )  # fmt: skip


def dose():
    """p: nothing, the given time, nothing, the same. It counts."""
    return Block(
        1, lambda u, p: [0 * u[0]], None, 0, lambda u, p: [u[0] + 1], False, lambda p: [0.0],
        lambda rng, T: [0.0, T, 0.0, T], lambda p, t: ([p[3]] * bool(p[3] < t), [float(p[3] < t)]),
    )  # fmt: skip


KINDS = [ball(-1), ball(0), dose(), clock(0, True), clock(1, True), clock(0, False), clock(1, False)]
KINDS += [kind(*more) for kind, up in ((ramp, 1), (decay, -1)) for more in ((up, True), (up, False), (0, False))]


class Programs(NamedTuple):
    """Programs of the same blocks, each with its parameters: one ensemble."""

    blocks: list[Block]
    p: np.ndarray  # shape (programs, blocks, FOUR)

    @property
    def first(self):
        """The first component of each block."""
        return np.cumsum([0, *[block.width for block in self.blocks]]).tolist()

    def own(self, b, u):
        """Return the components of block b."""
        return [u[c] for c in range(self.first[b], self.first[b + 1])]

    def event(self, b):
        """Return the event of block b, as a function of all."""
        block, mine = self.blocks[b], slice(FOUR * b, FOUR * (b + 1))

        def condition(u, p, t):
            return block.condition(self.own(b, u), p[mine], t)

        def affect(u, p, t):
            parts = [self.own(k, u) for k in range(len(self.blocks))]
            parts[b] = block.affect(parts[b], p[mine])
            return [c for part in parts for c in part]

        acts = None if block.affect is None else affect
        if block.condition is None:
            return Event(affect=acts, times=lambda p: [p[FOUR * b + 1]])
        return Event(condition, direction=block.direction, affect=acts, terminal=block.terminal)

    def solved(self, alg, way):
        """Return the solution by a method in a way."""
        blocks = self.blocks

        def f(u, p, t):
            return self.rate(u, [p[FOUR * b : FOUR * (b + 1)] for b in range(len(blocks))])

        u0 = [[c for block, own in zip(blocks, row) for c in block.start(own)] for row in self.p]
        problem = ODEProblem(f, np.array(u0[0]), (0.0, END))
        rtol = 1e-7 if isinstance(alg, BS3 | Rosenbrock23) else 1e-9  # of low order, they would take thousands of steps
        more = {"dt": 1 / 64} if isinstance(alg, RK4) else {"rtol": rtol, "atol": 0.01 * rtol}
        ensemble = EnsembleProblem(problem, u0=np.array(u0), p=self.p.reshape(len(self.p), -1))
        return solve(ensemble, alg, events=tuple(map(self.event, range(len(blocks)))), **more, **WAYS[way])

    def wrong(self, sol):
        """Return what is wrong in a solution, by programs."""
        found = []
        for i, row in enumerate(self.p):
            ends = [own[3] for block, own in zip(self.blocks, row) if block.terminal]
            end = min([END, *ends])
            code = "Terminated" if end < END else "Success"
            if sol.retcode[i] != code or abs(sol.t_reached[i] - end) > EXACT:
                found.append((i, f"{sol.retcode[i]} at {sol.t_reached[i]}, but {code} at {end}"))
                continue
            for b, (block, own) in enumerate(zip(self.blocks, row)):
                times = [t for e, t in sol.events.get(i, []) if e == b]
                known = [block.exact(own, t) for t in ((end - CLOSE, end + CLOSE) if end < END else (end,))]
                mine = sol.u_end[i, self.first[b] : self.first[b + 1]]
                if not any(agree(times, mine, *one) for one in known):
                    found.append((i, f"block {b}: {times}, {mine}, but {known}; events: {sol.events.get(i)}"))
        return found

    def rate(self, u, p):
        """Return the right-hand side; p: the parameters of each block."""
        parts = [block.rate(self.own(b, u), own) for b, (block, own) in enumerate(zip(self.blocks, p))]
        return [c for part in parts for c in part]

    def by_scipy(self, p):
        """Return the times of each block's events, the end, and the state, by SciPy, with a restart at each event.

        Roots that coincide, or are 1e-12 apart, differ by SciPy's rounding and integration errors. So at each root that it
        finds, all events take place whose conditions change sign between COINCIDING before it and COINCIDING after it; a
        given time is the condition `time - t`. The conditions are then zero but for errors, so SciPy integrates over
        COINCIDING without events before it looks for roots again. The state at a terminal event is the one after that.
        """
        conditions = [
            lambda t, u, b=b, block=block: block.condition(self.own(b, u), p[b], t) if block.condition else p[b][1] - t
            for b, block in enumerate(self.blocks)
        ]
        for condition, block in zip(conditions, self.blocks):
            condition.terminal, condition.direction = True, block.direction
        options = {"fun": lambda t, u: self.rate(u, p), "method": "DOP853", "rtol": 1e-12, "atol": 1e-14}
        t, u = 0.0, np.array([c for block, own in zip(self.blocks, p) for c in block.start(own)])
        times = [[] for _ in self.blocks]
        while True:
            part = solve_ivp(t_span=(t, END), y0=u, events=conditions, dense_output=True, **options)
            if part.status == 0:
                return times, END, part.y[:, -1]
            t, u, ends = part.t[-1], part.y[:, -1], False
            for b, (condition, block) in enumerate(zip(conditions, self.blocks)):
                before, after = (np.sign(condition(s, part.sol(s))) for s in (t - COINCIDING, t + COINCIDING))
                if before * after < 0 and block.direction in (0, after):
                    times[b].append(t)
                    ends |= block.terminal
                    if block.affect is not None:
                        u[self.first[b] : self.first[b + 1]] = block.affect(self.own(b, u), p[b])
            u = solve_ivp(t_span=(t, t + COINCIDING), y0=u, **options).y[:, -1]
            if ends:
                return times, t, u
            t += COINCIDING


def agree(times, state, expected_times, expected):
    same = len(times) == len(expected_times) and np.allclose(times, expected_times, rtol=0, atol=EXACT)
    return same and np.allclose(state, expected, rtol=0, atol=EXACT)


def drawn(seed):
    """Return programs of the same blocks, of each so many by how far pairs are apart."""
    rng = np.random.default_rng(seed)
    blocks = [KINDS[k] for k in rng.integers(len(KINDS), size=rng.integers(2, 5))]
    rows = []
    for apart in APART:
        first, second = rng.uniform(0.3, 0.9, 2)
        # In pairs: the third has a partner where there are four, else it comes with the first two.
        T = [first, first * (1 + apart), second if len(blocks) == 4 else first, second * (1 + apart)]
        rows.append([block.drawn(rng, time) for block, time in zip(blocks, T)])
    return Programs(blocks, np.array(rows))


@pytest.mark.limit(7200)
def test_random_programs(request):
    """With --thorough by all methods in all ways.

    Otherwise by two methods vectorized, by one in kernels, and by one in each other way in turn, trajectories in threads or
    one after the other, which take long.
    """
    thorough = request.config.getoption("thorough")
    count = int(os.environ.get("PROGRAMS") or (96 if thorough else 16))
    seed, wrong = int(os.environ.get("SEED") or 1), []
    for k in range(-(-count // len(APART))):
        programs = drawn([seed, k])
        left_out = "" if thorough else ("serial", "threads")[k % 2]
        for way in [way for way in WAYS if way != left_out]:
            # Four batches, by two methods each, have them all.
            methods = METHODS[2 * k % len(METHODS) :] + METHODS[: 2 * k % len(METHODS)]
            for alg in methods if thorough else methods[: 2 if way == "vectorized" else 1]:
                found = programs.wrong(programs.solved(alg, way))
                wrong += [f"{k} {type(alg).__name__} {way} {i}: {text}" for i, text in found]
    assert not wrong, f"{len(wrong)} of {count} programs, seed {seed}\n" + "\n".join(wrong)


def test_the_closed_forms_are_solutions_of_scipy(request):
    """On the programs of the test above, or on some of them without --thorough."""
    count = int(os.environ.get("PROGRAMS") or (500 if request.config.getoption("thorough") else 12))
    seed, in_time, in_state = int(os.environ.get("SEED") or 1), 0.0, 0.0
    for k in range(-(-count // len(APART))):
        programs = drawn([seed, k])
        for p in programs.p:
            times, end, state = programs.by_scipy(p)
            ends = [own[3] for block, own in zip(programs.blocks, p) if block.terminal]
            in_time = max(in_time, abs(end - min([END, *ends])))
            for b, (block, own) in enumerate(zip(programs.blocks, p)):
                known, exact = block.exact(own, min([END, *(time + COINCIDING for time in ends)]))
                assert len(times[b]) == len(known), f"{k}: block {b}: {times[b]}, but {known}"
                in_time = max([in_time, *np.abs(np.subtract(times[b], known))])
                in_state = max(in_state, *np.abs(state[programs.first[b] : programs.first[b + 1]] - exact))
    print(f"{count} programs, seed {seed}: largest differences {in_time:.1e} of a time, {in_state:.1e} of a state")
    assert in_time < 1e-10 and in_state < 1e-9


@pytest.mark.parametrize("alg", [RK45(), Rodas5P(), RK4()])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("span", [(0.0, 1.0), (1.0, 0.0)])
def test_roots_of_conditions_of_time_some_roundings_after_a_given_time(span, compiled, alg):
    # The root of `t - LOW - p[0]` is up to 3 floating-point numbers before or after the given time LOW + p[0].
    low, p = 0.3, np.random.default_rng(0).uniform(0.0, 0.2, (100, 1))
    add = lambda u, t, i: [u[j] + t if j == i else u[j] for j in range(2)]  # noqa: E731
    events = (
        Event(times=lambda p: [low + p[0]], affect=lambda u, p, t: add(u, t, 0)),
        Event(lambda u, p, t: t - low - p[0], affect=lambda u, p, t: add(u, t, 1)),
    )
    still = ODEProblem(lambda u, p, t: [0 * u[0], 0 * u[1]], [0.0, 0.0], span, np.zeros(1))
    more = {"dt": 0.125} if isinstance(alg, RK4) else {}

    def loss(p):
        sol = solve(EnsembleProblem(still, p=p), alg, events=events, compile=compiled, **more)
        assert [sorted(e for e, _ in sol.events[i]) for i in range(len(p))] == [[0, 1]] * len(p)
        return anp.sum(sol.u_end**2) + sum(time**2 for pairs in sol.events.values() for _, time in pairs)

    value, gradient = mpiad.value_and_grad(loss)(p)
    np.testing.assert_allclose(value, 4 * np.sum((low + p) ** 2), rtol=1e-12)
    np.testing.assert_allclose(gradient, 8 * (low + p), rtol=1e-12)
    np.testing.assert_allclose(mpiad.jvp(loss, p, np.ones_like(p))[1], 8 * np.sum(low + p), rtol=1e-12)
