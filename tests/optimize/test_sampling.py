"""Ensembles of walkers on the root, whose posterior all ranks evaluate, against a long chain of another sampler."""

from __future__ import annotations

from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from scipy.linalg import solveh_banded

import mpiad

WORLD = MPI.COMM_WORLD
TRUTH = np.array([0.0, 0.5, -0.5, 0.2])
FACES = np.repeat(np.arange(4), [8, 8, 8, 9])  # four materials of a rod of 32 cells with cold ends
DIFFERENCES = 33.0 * (np.eye(33, 32) - np.eye(33, 32, -1))
SOURCES = [20.0 * np.exp(-(((np.arange(32) - 10 - 10 * k) / 3.0) ** 2)) for k in range(2)]
# Of a random walk of 400,000 steps in one process, with the tridiagonal systems below. Its Monte-Carlo errors are below 1 %
# of the standard deviations.
MEAN, DEVIATION = np.array([-0.00235, 0.69094, -0.53409, 0.15398]), np.array([0.03419, 0.18687, 0.09339, 0.04863])


def by_bands(theta: np.ndarray, source: np.ndarray) -> np.ndarray:
    k = np.exp(theta)[FACES] * 33.0**2
    bands = np.zeros((2, 32))
    bands[1], bands[0, 1:] = k[:-1] + k[1:], -k[1:-1]
    return solveh_banded(bands, source)


DATA = [by_bands(TRUTH, each)[3::4] + 0.02 * np.random.default_rng(k).normal(size=8) for k, each in enumerate(SOURCES)]


def log_density(theta: Any, comm: Any = WORLD) -> Any:
    """Return the log density of the posterior; each rank computes some of the experiments."""
    misfit = 0.0
    for k in range(comm.rank, 2, comm.size):
        matrix = DIFFERENCES.T @ (anp.exp(theta)[FACES][:, None] * DIFFERENCES)
        misfit = misfit + anp.sum((anp.linalg.solve(matrix, SOURCES[k])[3::4] - DATA[k]) ** 2)
    return -0.5 * mpiad.mpi_allreduce(misfit, comm=comm) / 0.02**2 - 0.5 * anp.sum(theta**2)


def in_one_process(theta: np.ndarray) -> float:
    misfit = sum(np.sum((by_bands(theta, source)[3::4] - data) ** 2) for source, data in zip(SOURCES, DATA))
    return -0.5 * misfit / 0.02**2 - 0.5 * float(theta @ theta)


def gradient_in_one_process(theta: np.ndarray) -> np.ndarray:
    """Return the gradient by the adjoint equations: each face contributes k (D u) (D λ) to its material."""
    gradient = -theta
    for source, data in zip(SOURCES, DATA):
        u, residual = by_bands(theta, source), np.zeros(32)
        residual[3::4] = (u[3::4] - data) / 0.02**2
        faces = np.exp(theta)[FACES] * (DIFFERENCES @ u) * (DIFFERENCES @ by_bands(theta, residual))
        gradient = gradient + np.bincount(FACES, faces)
    return gradient


def walk(f: Any, steps: int) -> np.ndarray:
    """Return the samples of 16 walkers; each half moves along lines to the other one (Goodman and Weare, 2010)."""
    random = np.random.default_rng(7)
    walkers = TRUTH + 0.1 * random.normal(size=(16, 4))
    density, samples = f.map(walkers), []
    for _ in range(steps):
        for half, other in ((slice(0, 8), slice(8, 16)), (slice(8, 16), slice(0, 8))):
            stretch = (1.0 + random.random(8)) ** 2 / 2.0
            partners = walkers[other][random.integers(8, size=8)]
            proposals = partners + stretch[:, None] * (walkers[half] - partners)
            proposed = f.map(proposals)
            accepted = np.log(random.random(8)) < 3.0 * np.log(stretch) + proposed - density[half]
            walkers[half] = np.where(accepted[:, None], proposals, walkers[half])
            density[half] = np.where(accepted, proposed, density[half])
        samples.append(walkers.copy())
    return np.array(samples)


def test_density_and_gradient(rank: int, size: int) -> None:
    def program(f: Any) -> None:
        for theta in TRUTH + 0.3 * np.random.default_rng(3).normal(size=(3, 4)):
            value, gradient = f.value_and_gradient(theta)
            assert value == pytest.approx(in_one_process(theta), rel=1e-12)
            expected = gradient_in_one_process(theta)
            assert np.max(np.abs(gradient - expected)) < 1e-12 * np.max(np.abs(expected))

    mpiad.drive(program, log_density)


@pytest.mark.parametrize("groups", [None, 2])
def test_the_same_chain_when_repeated(groups: int | None, rank: int, size: int) -> None:
    def repeated(f: Any) -> np.ndarray:
        chain = walk(f, 20)
        assert np.array_equal(walk(f, 20), chain)
        return chain

    if groups is not None and size % groups:
        return
    chain = mpiad.drive(repeated, log_density, groups=groups)
    alone = mpiad.drive(lambda f: walk(f, 20), partial(log_density, comm=MPI.COMM_SELF), comm=MPI.COMM_SELF)
    if rank == 0:
        np.testing.assert_allclose(chain, alone, rtol=1e-9)


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_posterior_of_a_long_chain(rank: int, size: int) -> None:
    samples = mpiad.drive(lambda f: walk(f, 700), log_density)
    if rank == 0:
        samples = samples[100:].reshape(-1, 4)  # 9,600 samples with an autocorrelation time of about 50
        assert np.max(np.abs(samples.mean(axis=0) - MEAN) / DEVIATION) < 4.0 / np.sqrt(192.0)
        assert np.max(np.abs(samples.std(axis=0) / DEVIATION - 1.0)) < 4.0 / np.sqrt(384.0)
