"""Functions of many variables with known minima, from the collections that optimisers are tested on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import autograd.numpy as anp
import numpy as np

__all__ = ["PROBLEMS", "Known"]


class Known(NamedTuple):
    """A function of the whole vector, where to start, and the value at the minimum where a formula gives it."""

    fun: Callable[[Any], Any]
    start: np.ndarray
    lowest: float | None


def rosenbrock(x: Any) -> Any:
    return anp.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1.0 - x[:-1]) ** 2)


def beale(x: Any) -> Any:
    return sum((c - x[0] * (1.0 - x[1] ** (k + 1))) ** 2 for k, c in enumerate((1.5, 2.25, 2.625)))


def powell_singular(x: Any) -> Any:
    a, b, c, d = x[0], x[1], x[2], x[3]
    return (a + 10.0 * b) ** 2 + 5.0 * (c - d) ** 2 + (b - 2.0 * c) ** 4 + 10.0 * (a - d) ** 4


def wood(x: Any) -> Any:
    a, b, c, d = x[0], x[1], x[2], x[3]
    return (
        100.0 * (b - a**2) ** 2 + (1.0 - a) ** 2 + 90.0 * (d - c**2) ** 2 + (1.0 - c) ** 2
        + 10.0 * (b + d - 2.0) ** 2 + 0.1 * (b - d) ** 2
    )  # fmt: skip


def brown_almost_linear(x: Any) -> Any:
    n = len(x)
    return anp.sum((x[:-1] + anp.sum(x) - (n + 1)) ** 2) + (anp.prod(x) - 1.0) ** 2


_SCALES = np.logspace(0.0, 6.0, 1000)


def ill_conditioned(x: Any) -> Any:
    return 0.5 * anp.sum(_SCALES * (x - 1.0) ** 2)


_RNG = np.random.default_rng(5)
_TABLE = _RNG.normal(size=(300, 20)) * np.logspace(-0.5, 0.5, 20)
_LABELS = np.sign(_TABLE @ _RNG.normal(size=20) + _RNG.normal(size=300))


def logistic(x: Any) -> Any:
    return anp.mean(anp.logaddexp(0.0, -_LABELS * (_TABLE @ x))) + 1e-3 * anp.sum(x**2)


_CELLS = np.loadtxt(Path(__file__).parent / "data" / "breast_cancer.csv", delimiter=",")
_BENIGN = 2.0 * _CELLS[:, -1] - 1.0
_MEASURED = np.column_stack([(_CELLS[:, :-1] - _CELLS[:, :-1].mean(0)) / _CELLS[:, :-1].std(0), np.ones(len(_CELLS))])


def breast_cancer(x: Any) -> Any:
    return anp.mean(anp.logaddexp(0.0, -_BENIGN * (_MEASURED @ x))) + 1e-3 * anp.sum(x**2)


PROBLEMS = {
    "rosenbrock-2": Known(rosenbrock, np.tile([-1.2, 1.0], 1), 0.0),
    "rosenbrock-10": Known(rosenbrock, np.tile([-1.2, 1.0], 5), 0.0),
    "rosenbrock-100": Known(rosenbrock, np.tile([-1.2, 1.0], 50), 0.0),
    "rosenbrock-1000": Known(rosenbrock, np.tile([-1.2, 1.0], 500), 0.0),
    "beale": Known(beale, np.array([1.0, 1.0]), 0.0),
    "powell": Known(powell_singular, np.array([3.0, -1.0, 0.0, 1.0]), 0.0),
    "wood": Known(wood, np.array([-3.0, -1.0, -3.0, -1.0]), 0.0),
    "brown": Known(brown_almost_linear, np.full(10, 0.5), 0.0),
    "quadratic": Known(ill_conditioned, np.zeros(1000), 0.0),
    "breast-cancer": Known(breast_cancer, np.zeros(31), None),
    "logistic": Known(logistic, np.zeros(20), None),
}
