"""Hyperbolas through three gradients, beside functions whose gradients are hyperbolas, and others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpiad.optimize.sharded.rational_model import Attempts, Pair, are_followed, misfit, way

pytestmark = pytest.mark.serial


def pairs_of(gradient: Callable[[np.ndarray], np.ndarray], points: np.ndarray) -> tuple[np.ndarray, list[Pair]]:
    """Return the gradient at the last of the points, and the pairs between them, the newest first."""
    found = [gradient(x) for x in points]
    steps = list(zip(np.diff(points, axis=0), np.diff(found, axis=0)))
    return found[-1], [Pair(s, y) for s, y in reversed(steps)]


def test_zeros_are_the_minimisers_of_log_barriers() -> None:
    rng = np.random.default_rng(1)
    c, p = rng.uniform(1.0, 100.0, 50), rng.normal(size=50)  # Σ c x - log(x - p)
    points = p + 10.0 ** rng.uniform(-2.0, 2.0, (4, 50)) / c
    g, pairs = pairs_of(lambda x: c - 1.0 / (x - p), points)
    np.testing.assert_allclose(points[-1] + way(g, *pairs[:2], 1.0), p + 1.0 / c, rtol=1e-6, atol=1e-8)
    missed, changed = misfit(g, *pairs)
    assert missed <= 1e-12 * changed and are_followed(-1.0, missed, changed)


# Gradients on x > 0, and their zeros.
ENDED = [
    (lambda x: 7.0 - 1.0 / x**2, 7.0**-0.5), (lambda x: 3.0 + x - 1.0 / x, (13.0**0.5 - 3.0) / 2.0),
    (lambda x: 2.0 - x**-0.5, 0.25), (lambda x: np.log(x) + 1.0, np.exp(-1.0)),
]  # fmt: skip


@pytest.mark.parametrize(("gradient", "zero"), ENDED)
def test_zeros_are_nearer_than_those_of_lines(gradient: Callable, zero: float) -> None:
    points = np.sort(np.random.default_rng(2).uniform(0.5, 9.0, (4, 200)), axis=0)[::-1]  # towards the end of the domain
    g, pairs = pairs_of(gradient, points)
    there, line = points[-1] + way(g, *pairs[:2], 1.0), points[-1] - g * pairs[0].step / pairs[0].change
    assert np.all(np.abs(there - zero) <= np.abs(line - zero))
    assert np.median(np.abs(there - zero)) < 0.9 * np.median(np.abs(line - zero))
    assert np.sum(there <= 0.0) < np.sum(line <= 0.0)


def test_straight_gradients_have_the_zeros_of_lines() -> None:
    points = np.array([[1.0, 5.0], [2.0, 3.0], [4.0, 2.5]])
    g, pairs = pairs_of(lambda x: np.array([2.0, 3.0]) * (x - 1.5), points)
    np.testing.assert_allclose(points[-1] + way(g, *pairs, 1.0), 1.5)


def test_variables_that_tell_nothing_go_down() -> None:
    # No step, no change, a change downwards, and a gradient of zero.
    g, s, y = np.array([2.0, -2.0, 3.0, 0.0]), np.array([0.0, 1.0, 1.0, 1.0]), np.array([1.0, 0.0, -1.0, 1.0])
    with np.errstate(all="ignore"):
        there = way(g, Pair(s, y), Pair(s, y), 0.5)
    np.testing.assert_array_equal(there, [-1.0, 1.0, -1.5, 0.0])


def test_zeros_beyond_the_pole_are_left_alone() -> None:
    # (1 + t) / (1 + 2 t) falls, its pole lies between here and its zero.
    points = np.array([[-0.25], [-0.1], [0.0]])
    g, pairs = pairs_of(lambda t: (1.0 + t) / (1.0 + 2.0 * t), points)
    np.testing.assert_array_equal(way(g, *pairs, 0.125), [-0.125])


def test_every_way_leads_down() -> None:
    rng = np.random.default_rng(3)
    g, pairs = rng.normal(size=1000), [Pair(*rng.normal(size=(2, 1000))) for _ in range(2)]
    with np.errstate(all="ignore"):
        assert np.all(g * way(g, *pairs, 0.3) < 0.0)


def test_steps_within_rounding_make_no_poles() -> None:
    points = 300.0 * (1.0 + 1e-15 * np.array([0.0, 1.0, 3.0, 8.0])[:, None] * np.ones(40)) / np.linspace(1.0, 2.0, 40)
    g, pairs = pairs_of(lambda x: 1.0 - 1.0 / x, points)
    with np.errstate(all="ignore"):
        there = way(g, *pairs[:2], 0.25)
        rises = pairs[0].change / pairs[0].step
        line = np.where((rises > 0.0) & np.isfinite(rises), rises, 4.0)
    np.testing.assert_array_equal(there, -g / line)


def test_coupled_variables_are_seen_by_their_misfit() -> None:
    rng = np.random.default_rng(4)
    rows = np.abs(rng.normal(size=(60, 20)))
    points = rng.uniform(0.5, 3.0, (4, 20))
    g, pairs = pairs_of(lambda x: 5.0 - rows.T @ (1.0 / (rows @ x)), points)
    assert not are_followed(-1.0, *misfit(g, *pairs))


@pytest.mark.parametrize("numbers", [(0.0, 0.0, 1.0), (-np.inf, 0.0, 1.0), (np.nan, 0.0, 1.0), (-1.0, np.nan, 1.0)])
def test_ways_that_lead_nowhere_are_not_followed(numbers: tuple) -> None:
    assert are_followed(-1.0, 0.03, 1.0) and not are_followed(-1.0, 0.05, 1.0)
    assert not are_followed(*numbers)


def test_attempts_grow_rarer_while_they_fail() -> None:
    attempts, tried = Attempts(), []
    for _ in range(20):
        attempts.count(True)
        tried.append(attempts.due(10))
        attempts.note(tried[-1], False)
    assert not any(tried)  # no trial point was outside yet
    attempts.at_edge = True
    for k in range(20):
        attempts.count(k != 9)  # a step without curvature
        tried.append(attempts.due(10))
        attempts.note(tried[-1], k > 14)
    assert list(np.flatnonzero(tried[20:])) == [0, 1, 3, 6, 13, 18, 19]


def test_misfit_has_no_scale() -> None:
    rng = np.random.default_rng(5)
    scale = 10.0 ** rng.uniform(-3.0, 3.0, 30)  # x = scale z
    points = rng.uniform(0.5, 3.0, (4, 30))
    g, pairs = pairs_of(lambda z: 1.0 + z - 1.0 / z**2, points)
    scaled = pairs_of(lambda x: (1.0 + x / scale - scale**2 / x**2) / scale, points * scale)
    np.testing.assert_allclose(misfit(scaled[0], *scaled[1]), misfit(g, *pairs), rtol=1e-6)
