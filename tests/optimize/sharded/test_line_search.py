"""The line search beside SciPy's port of MINPACK's, step by step, and where SciPy's has no answer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from scipy.optimize._dcsrch import DCSRCH

from mpiad.optimize.sharded.line_search import LineSearch

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
