"""The published problems of sampling: their densities, derivatives and priors, and the effective sample size."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mpiad
from mpiad.errors import ConvergenceError

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
PUBLISHED = json.loads((EXAMPLES / "data" / "aristoff_bangerth.json").read_text())

pytestmark = pytest.mark.serial  # the problems are local to a rank


def example(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.parametrize("number", range(10))
def test_published_log_densities(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    membrane = example(monkeypatch, "membrane_posterior").Membrane()
    m = np.log(PUBLISHED["coefficients"][number]).reshape(8, 8)
    likelihood, posterior = -membrane.misfit(m), -membrane.cost(m)
    np.testing.assert_allclose(likelihood, PUBLISHED["log_likelihoods"][number], rtol=1e-9)
    np.testing.assert_allclose(posterior - likelihood, PUBLISHED["log_priors"][number], rtol=1e-9)


def test_derivatives_of_the_membrane(monkeypatch: pytest.MonkeyPatch) -> None:
    membrane = example(monkeypatch, "membrane_posterior").Membrane()
    random = np.random.default_rng(0)
    m, v, w = 0.5 * random.normal(size=(8, 8)), random.normal(size=(8, 8)), random.normal(size=(13, 13))
    _, gradient = mpiad.value_and_grad(membrane.cost)(m)
    difference = (membrane.cost(m + 1e-5 * v) - membrane.cost(m - 1e-5 * v)) / 2e-5
    np.testing.assert_allclose(np.sum(gradient * v), difference, rtol=1e-7)
    kept = mpiad.linearize(membrane.residuals)(m)
    np.testing.assert_allclose(np.sum(kept.jvp(v) * w), np.sum(v * kept.vjp(w)), rtol=1e-10)


def test_conduction_with_given_values(monkeypatch: pytest.MonkeyPatch) -> None:
    # Layers of two materials in series: the flux is 1 / (1/2 κ₁ + 1/2 κ₂), and u is linear in each.
    conduction = example(monkeypatch, "membrane_posterior").Conduction
    height = np.linspace(0.0, 1.0, 9)[:, None] * np.ones(9)
    layers = conduction((height == 0.0) | (height == 1.0), height)
    kappa = np.repeat([1.0, 4.0], 4)[:, None] * np.ones(8)
    u = layers.solution(kappa)
    np.testing.assert_allclose(u[4], 0.8, rtol=1e-12)
    np.testing.assert_allclose(-layers.flux(kappa, height == 0.0), 1.6, rtol=1e-12)
    with pytest.raises(ConvergenceError, match="positive definite"):
        layers.solution(-kappa)


@pytest.mark.thorough
def test_prior_of_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    prior = example(monkeypatch, "poisson_posterior").RotatedBilaplacian(mpiad.Domain((33, 33)))
    random = np.random.default_rng(1)
    v, w, unit = random.normal(size=(33, 33)), random.normal(size=(33, 33)), np.zeros((33, 33))
    unit[5, 20] = 1.0
    np.testing.assert_allclose(prior.solve(prior.apply(v)), v, atol=1e-9)
    np.testing.assert_allclose(np.sum(w * prior.solve(v)), np.sum(v * prior.solve(w)), rtol=1e-10)
    np.testing.assert_allclose(prior.solve(unit)[5, 20], prior.variance[5, 20], rtol=1e-10)
    samples = np.stack([prior.sample(seed) for seed in range(400)])
    np.testing.assert_allclose(samples.var(axis=0).mean() / prior.variance.mean(), 1.0, atol=0.2)
    np.testing.assert_allclose(prior.matrix.toarray(), assembled(32), atol=1e-12)


def assembled(cells: int) -> np.ndarray:
    """Return the matrix of δ - γ∇·(Θ∇) with the tutorial's Robin condition, element by element, by Gauss's quadrature."""
    h, theta, robin = 1 / cells, np.array([[1.25, 0.75], [0.75, 1.25]]), np.sqrt(0.1 * 0.5) / 1.42
    element, corners = np.zeros((4, 4)), [(0, 0), (0, 1), (1, 1), (1, 0)]
    for y, x in np.ndindex(2, 2):
        p, q = (0.5 + (2 * k - 1) / np.sqrt(12) for k in (y, x))
        values = np.array([(p if j else 1 - p) * (q if i else 1 - q) for j, i in corners])
        slopes = np.array([((2 * j - 1) * (q if i else 1 - q), (2 * i - 1) * (p if j else 1 - p)) for j, i in corners]) / h
        element += h**2 / 4 * (0.1 * slopes @ theta @ slopes.T + 0.5 * np.outer(values, values))
    matrix, numbers = np.zeros(((cells + 1) ** 2,) * 2), np.arange((cells + 1) ** 2).reshape(cells + 1, cells + 1)
    for y, x in np.ndindex(cells, cells):
        nodes = [numbers[y + j, x + i] for j, i in corners]
        matrix[np.ix_(nodes, nodes)] += element
    for side in (numbers[0], numbers[-1], numbers[:, 0], numbers[:, -1]):
        for ends in zip(side[:-1], side[1:]):
            matrix[np.ix_(ends, ends)] += robin * h / 6 * np.array([[2, 1], [1, 2]])
    return matrix


def test_gradient_of_the_tutorial(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = example(monkeypatch, "poisson_posterior").Tutorial(3)
    v, (value, gradient) = problem.prior.sample(8), mpiad.value_and_grad(problem.misfit)(problem.truth)
    difference = (problem.misfit(problem.truth + 1e-5 * v) - problem.misfit(problem.truth - 1e-5 * v)) / 2e-5
    np.testing.assert_allclose(np.sum(gradient * v), difference, rtol=1e-6)
    assert abs(value - 150) < 5 * np.sqrt(150)  # half of χ² with 300 degrees of freedom


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.95])
def test_effective_size_of_an_autoregressive_chain(monkeypatch: pytest.MonkeyPatch, rho: float) -> None:
    effective_size = example(monkeypatch, "poisson_posterior").effective_size
    noise, chain = np.random.default_rng(2).standard_normal(100_000), np.zeros(100_000)
    for k in range(1, len(chain)):
        chain[k] = rho * chain[k - 1] + noise[k]
    np.testing.assert_allclose(effective_size(chain), len(chain) * (1 - rho) / (1 + rho), rtol=0.1)
