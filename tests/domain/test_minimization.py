"""Minimisation over a block on each rank, against the whole grid's solution; blocks that are the root's variable."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad import Domain
from mpiad.errors import WorkerError
from mpiad.linalg import solve_elliptic

COMM = MPI.COMM_WORLD
SHAPE = (7, 5)


def wanted() -> np.ndarray:
    return np.random.default_rng(3).normal(size=SHAPE)


def smoothed(target: np.ndarray) -> np.ndarray:
    """Return the minimiser of |u - target|² + 2 |∇u|² on the whole grid, from its normal equations."""
    differences = [np.diff(np.eye(n), axis=0) for n in SHAPE]
    along = [d.T @ d for d in differences]
    matrix = np.eye(target.size) + 2.0 * (np.kron(along[0], np.eye(SHAPE[1])) + np.kron(np.eye(SHAPE[0]), along[1]))
    return np.linalg.solve(matrix, target.reshape(-1)).reshape(SHAPE)


@pytest.mark.not_on(3)
def test_blocks_are_those_of_the_whole_solution(rank: int, size: int) -> None:
    domain = Domain(SHAPE)
    target, expected = wanted()[domain.owned], smoothed(wanted())[domain.owned]

    def roughness(u: Any) -> Any:
        padded = domain.exchange(u, "edge")
        return anp.sum((u - padded[:-2, 1:-1]) ** 2) + anp.sum((u - padded[1:-1, :-2]) ** 2)

    def local(u: Any) -> Any:
        return anp.sum((u - target) ** 2) + 2.0 * roughness(u)

    calls = []
    exact = {"gtol": 1e-9, "ftol": 0}
    by_sum = domain.minimize(
        local, np.zeros(domain.local_shape), objective="sum", options=exact, callback=lambda u: calls.append(u.shape)
    )
    np.testing.assert_allclose(by_sum.x, expected, atol=1e-8)
    assert set(calls) == {domain.local_shape} and by_sum.success
    nest = {"u": np.zeros(domain.local_shape), "name": "smooth"}
    by_root = domain.minimize(
        lambda v, weight: weight * mpiad.mpi_allreduce(local(v["u"])), nest, args=(2.0,), method="l-bfgs-SHARDED",
        options=exact,
    )  # fmt: skip
    np.testing.assert_allclose(by_root.x["u"], expected, atol=1e-8)
    np.testing.assert_allclose(by_root.fun, 2.0 * by_sum.fun)
    # Held above zero, as a sum of squares in each cell by itself.
    above = domain.minimize(
        lambda u: domain.sum((u - target) ** 2), np.ones(domain.local_shape), options=exact,
        bounds=[(0.0, None)] * target.size,
    )  # fmt: skip
    np.testing.assert_allclose(above.x, np.maximum(target, 0.0), atol=1e-8)


def test_communicator_is_the_domain_s(rank: int, size: int) -> None:
    group = COMM.Split(rank % 2, rank)
    domain = Domain(6, comm=group)
    (x,) = domain.coordinates()
    result = domain.minimize(lambda u: domain.sum((u - x - rank % 2) ** 2), np.zeros(domain.local_shape))
    np.testing.assert_allclose(result.x, x + rank % 2, atol=1e-4)


def test_what_is_no_block_is_refused_on_all_ranks(rank: int, size: int) -> None:
    domain, last = Domain(9), rank == size - 1
    good = np.zeros(domain.local_shape)

    def fun(u: Any) -> Any:
        return domain.sum(u**2)

    sharded = "L-BFGS-sharded"
    for kind, words, x0, method in (
        (ValueError, r"Domain.minimize: method .*'L-BFGS-sharded'.*got 'BFGS'", good, "BFGS" if last else sharded),
        (ValueError, r"Domain.minimize: .*owns", np.zeros(99) if last else good, sharded),
        (TypeError, r"Domain.minimize: expected an array .*got float", [good, 1.0 if last else good], sharded),
        (ValueError, r"minimize: method must be", good, "CG-sharded"),
    ):
        with pytest.raises(kind, match=words):
            domain.minimize(fun, x0, method=method)
    assert domain.minimize(fun, good + 1.0).success


@pytest.mark.not_on(4)
@pytest.mark.mpi(min_size=2)
def test_the_root_s_variable_is_no_block(rank: int, size: int) -> None:
    domain = Domain((2 * size, 3), dims=(size, 1))
    laplacian = domain.laplacian()
    one, two = np.zeros(domain.local_shape), np.zeros((2, *domain.local_shape))
    for call, fun, x0 in (
        ("Domain.exchange", lambda u: anp.sum(domain.exchange(u)), one),
        ("Domain.exchange", lambda v: anp.sum(domain.exchange([one, v["u"]])[1]), {"u": one, "n": 1.0}),
        ("Domain.sum", lambda u: domain.sum(u[1] + domain.sum(u[0])), two),
        ("Domain.gather", lambda u: anp.sum(domain.gather(u.reshape(domain.local_shape))), np.zeros(one.size)),
        ("Stencil", lambda u: anp.sum(laplacian(u)), one),
        ("linalg.solve_elliptic", lambda u: anp.sum(solve_elliptic(domain, u, one)), one + 1.0),
    ):
        for method in ("L-BFGS", "Newton-CG"):
            with pytest.raises(WorkerError, match=rf"ValueError: {call}: expected a block .* domain\.minimize\(fun, x0\)"):
                mpiad.minimize(fun, x0, method=method)
    with pytest.raises(WorkerError, match="Domain.dot: expected a block"):
        mpiad.mpi_optimize(lambda u: domain.dot(one, u), lambda u: u, one)
    with pytest.raises(WorkerError, match="Domain.interpolate: expected a block"):
        mpiad.optimize.least_squares(lambda u: domain.interpolate(u, [[0.0, 0.0]]), one if rank == 0 else None)


@pytest.mark.not_on(4)
def test_blocks_that_are_not_the_root_s_variable_are_taken(rank: int, size: int, caplog: pytest.LogCaptureFixture) -> None:
    domain, alone = Domain(2 * size), Domain(4, comm=MPI.COMM_SELF)
    (x,) = domain.coordinates()
    (whole,) = Domain(2 * size, comm=MPI.COMM_SELF).coordinates()
    cut = mpiad.minimize(lambda u: domain.sum((u[domain.owned] - x) ** 2), np.zeros(2 * size))
    np.testing.assert_allclose(cut.x, whole, atol=1e-4)
    dealt = mpiad.minimize(lambda u: domain.sum((domain.scatter(u) - x) ** 2), np.zeros(2 * size))
    np.testing.assert_allclose(dealt.x, whole, atol=1e-4)
    assert not caplog.records
    # One block for all ranks: each of its two entries is as near as can be to every second one of the grid.
    tiled = mpiad.minimize(lambda u: domain.sum(u - x) * 0.0 + domain.sum((u - x) ** 2), np.zeros(2))
    np.testing.assert_allclose(tiled.x, whole.reshape(size, 2).mean(axis=0), atol=1e-4)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (rank == 0 and size > 1) and all("domain.minimize(fun, x0)" in text for text in said)
    own = mpiad.minimize(lambda u: alone.sum((u - rank) ** 2), np.zeros(4), objective="sum")
    np.testing.assert_allclose(own.x, (size - 1) / 2, atol=1e-4)
    # After a solve its variables are arrays like others.
    assert np.isfinite(domain.sum(mpiad.minimize(lambda u: anp.sum(u**2), np.ones(2)).x))
