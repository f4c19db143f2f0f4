"""The line search beside SciPy's port of MINPACK's, step by step, and where SciPy's has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize._dcsrch import DCSRCH, dcstep

from mpiad.optimize.sharded.lbfgs import LineSearch, Sample, next_step

pytestmark = pytest.mark.serial

LINES: dict[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    # The first three of Moré and Thuente's own examples.
    "bowl": (lambda a: -a / (a * a + 2.0), lambda a: (a * a - 2.0) / (a * a + 2.0) ** 2),
    "steep": (
        lambda a: (a + 0.004) ** 5 - 2.0 * (a + 0.004) ** 4,
        lambda a: 5.0 * (a + 0.004) ** 4 - 8.0 * (a + 0.004) ** 3,
    ),
    "cosine": (lambda a: math.cos(3.0 * a) / 3.0 - a, lambda a: -math.sin(3.0 * a) - 1.0),
    "quartic": (lambda a: (a - 2.0) ** 4 + a, lambda a: 4.0 * (a - 2.0) ** 3 + 1.0),
    "wavy": (lambda a: (a - 3.0) ** 2 + math.sin(9.0 * a), lambda a: 2.0 * (a - 3.0) + 9.0 * math.cos(9.0 * a)),
}


@pytest.mark.parametrize("first", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("name", LINES)
def test_steps_are_those_of_minpack(name: str, first: float) -> None:
    value, slope = LINES[name]
    if slope(0.0) >= 0.0:
        value, slope = (lambda a: LINES[name][0](-a)), (lambda a: -LINES[name][1](-a))
    expected: list[float] = []

    def noted(a: float) -> float:
        expected.append(a)
        return value(a)

    minpack = DCSRCH(noted, slope, 1e-3, 0.9, 0.1, 0.0, 1e10)
    minpack(first, phi0=value(0.0), derphi0=slope(0.0), maxiter=20)
    search, steps = LineSearch(value(0.0), slope(0.0), first), []
    for _ in range(len(expected)):
        steps.append(search.step)
        if search.accepts(value(search.step), slope(search.step)) or search.stuck:
            break
    assert steps == pytest.approx(expected, rel=1e-9)


def test_backs_away_and_never_returns() -> None:
    search, steps = LineSearch(0.0, -1.0, 1.0), []
    for _ in range(30):
        steps.append(search.step)
        if search.step >= 0.01:  # the domain ends here
            search.back_away()
        elif search.accepts(-search.step, -1.0) or search.stuck:
            break
    assert steps[-1] < 0.01 and sum(step >= 0.01 for step in steps) < 10
    lowest = min(step for step in steps if step >= 0.01)
    assert all(step < lowest for step in steps[steps.index(lowest) + 1 :])


def test_slopes_decide_where_values_are_rounded() -> None:
    assert LineSearch(1.0, -1e-9, 1.0).accepts(1.0 + 2e-16, -5e-10)
    assert not LineSearch(1.0, -1e-9, 1.0).accepts(1.0 + 2e-16, 5e-9)
    assert not LineSearch(1.0, -1e-9, 1.0).accepts(1.0 + 1e-6, -5e-10)


def test_safeguarded_steps_are_those_of_minpack_in_all_cases() -> None:
    rng, cases = np.random.default_rng(4), set()
    for _ in range(4000):
        # The trial lies inside the interval, and the best end's slope points at it.
        best_step, far = rng.uniform(0.0, 2.0), rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 2.0)
        bracketed = bool(rng.integers(2)) or far < 0.0
        best = Sample(best_step, rng.normal(), -np.sign(far) * rng.exponential())
        other = Sample(best_step + far, best.value + rng.exponential(), rng.normal())
        trial = Sample(best_step + far * rng.uniform(0.05, 0.95), best.value + 0.5 * rng.normal(), rng.normal())
        low, high = (min(best.step, other.step), max(best.step, other.step)) if bracketed else (best.step, 9.0)
        if trial.value > best.value:
            cases.add(1)
        elif trial.slope * best.slope < 0.0:
            cases.add(2)
        else:
            cases.add((3 if abs(trial.slope) < abs(best.slope) else 4, bracketed))
        ends = (best.step, best.value, best.slope, other.step, other.value, other.slope)
        expected = dcstep(*ends, trial.step, trial.value, trial.slope, bracketed, low, high)[6]
        assert next_step(best, other, trial, bracketed, low, high) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(cases) == 6
