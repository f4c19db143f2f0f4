"""Sparse matrices on devices: products, solves and derivatives as on the host, and what each of them copies."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse as sp
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad.device import to_device, to_host
from mpiad.differentiation.segment_sum import Segments
from mpiad.linalg import AdditiveSchwarz, DistributedMatrix
from mpiad.linalg.distributed_matrix import GatheredFactors

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()
_N = 37


def _whole(dtype=float, seed=0):
    """A matrix with rows of very different lengths, one of them empty and one full."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((_N, _N)) * (rng.random((_N, _N)) < 0.15)
    dense[5], dense[11], dense[:, 20] = 0.0, rng.standard_normal(_N), rng.standard_normal(_N)
    if np.dtype(dtype).kind == "c":
        dense = dense * (1.0 + 0.5j * rng.standard_normal(dense.shape))
    return dense.astype(dtype)


def _counts():
    """Rows of each rank: uneven, none on the last of four."""
    parts = np.arange(_SIZE, 0, -1) if _SIZE < 4 else np.array([9, 4, 1, *[0] * (_SIZE - 3)])
    counts = parts * (_N // parts.sum())
    counts[0] += _N - counts.sum()
    return counts.tolist()


def _divided(whole, put):
    a = DistributedMatrix.from_scipy(sp.csr_matrix(whole), counts=_counts())
    return a.with_values(put(a.values))


def _part(a, dtype, lead=(), seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*lead, _N))
    x = x + 1j * rng.standard_normal(x.shape) if np.dtype(dtype).kind == "c" else x
    return x.astype(dtype), x.astype(dtype)[..., a.owned_columns]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
@pytest.mark.parametrize("lead", [(), (3,), (2, 0)])
def test_products(dtype, lead):
    whole = _whole(dtype)
    a = _divided(whole, on_device)
    x, mine = _part(a, dtype, lead)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for matrix, product in ((whole, a.matvec), (whole.T, a.rmatvec)):
        found = product(on_device(mine))
        assert type(found) is DeviceArray and found.dtype == dtype and found.shape == mine.shape
        np.testing.assert_allclose(on_host(found), (x @ matrix.T)[..., a.owned_rows], **close)


def test_a_matrix_that_is_not_square():
    whole = _whole()[:, : _N - 6]
    a = DistributedMatrix.from_scipy(sp.csr_matrix(whole))
    there = a.with_values(on_device(a.values))
    x, y = np.random.default_rng(2).standard_normal(_N - 6), np.random.default_rng(3).standard_normal(_N)
    found = there @ on_device(x[a.owned_columns])
    np.testing.assert_allclose(on_host(found), (whole @ x)[a.owned_rows], 1e-12, 1e-12)
    found = there.T @ on_device(y[a.owned_rows])
    np.testing.assert_allclose(on_host(found), (whole.T @ y)[a.owned_columns], 1e-12, 1e-12)


def _losses(lead):
    """One loss of values and x, for a matrix and vectors on either side."""
    whole = _whole()
    a = _divided(whole, np.asarray)
    x, mine = _part(a, float, lead)

    def loss(values, x):
        b = a.with_values(values)
        return anp.sum(anp.sin(b.matvec(x)) * anp.cos(b.rmatvec(x))) + anp.sum(b.diagonal() ** 3)

    return loss, a.values, mine


def _alike(there, here, **close):
    for found, known in zip(there, here):
        assert type(found) is DeviceArray and found.dtype == known.dtype
        np.testing.assert_allclose(on_host(found), known, **{"rtol": 1e-11, "atol": 1e-11, **close})


@pytest.mark.parametrize("lead", [(), (2,)])
def test_derivatives_by_values_and_vectors(lead):
    loss, values, x = _losses(lead)
    settings = {"argnum": (0, 1), "objective": "sum"}
    known = mpiad.value_and_grad(loss, **settings)(values, x)
    found = mpiad.value_and_grad(loss, **settings)(on_device(values), on_device(x))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-12)
    _alike(found[1], known[1])
    along = np.cos(values), np.sin(x)
    moved = [
        mpiad.jvp(lambda both: loss(*both), [put(values), put(x)], [put(v) for v in along])[1]
        for put in (on_device, np.asarray)
    ]
    np.testing.assert_allclose(on_host(moved[0]), moved[1], rtol=1e-11)


def test_second_derivatives():
    loss, values, x = _losses(())
    both = lambda pair: loss(*pair)  # noqa: E731
    along = [np.cos(values), np.sin(x)]
    known = mpiad.hvp(both, objective="sum")([values, x], along)
    found = mpiad.hvp(both, objective="sum")([on_device(values), on_device(x)], [on_device(v) for v in along])
    _alike(found, known, rtol=1e-10)


def _system(put):
    whole = _whole() + 12 * np.eye(_N)
    a = _divided(whole, np.asarray)
    return a, put(a.values), put(_part(a, float)[1])


@pytest.mark.parametrize("settings", [{"method": "gmres"}, {"method": "bicgstab"}, {"method": "direct"}], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
def test_solutions_and_their_derivatives(settings, turned):
    def run(put):
        a, values, b = _system(put)

        def loss(values, b):
            matrix = a.with_values(values)
            return anp.sum(anp.tanh((matrix.T if turned else matrix).solve(b, rtol=1e-12, **settings)))

        return mpiad.value_and_grad(loss, (0, 1), objective="sum")(values, b)

    known, found = run(np.asarray), run(on_device)
    np.testing.assert_allclose(found[0], known[0], rtol=1e-9)
    _alike(found[1], known[1], rtol=1e-8, atol=1e-9)


def test_tangents_and_second_derivatives_of_solutions():
    def run(put):
        a, values, b = _system(put)
        along = [put(np.cos(on_host(values))), put(np.sin(on_host(b)))]

        def loss(both):
            return anp.sum(anp.tanh(a.with_values(both[0]).solve(both[1], rtol=1e-12)))

        return mpiad.jvp(loss, [values, b], along)[1], *mpiad.hvp(loss, objective="sum")([values, b], along)

    for found, known in zip(run(on_device), run(np.asarray)):
        np.testing.assert_allclose(on_host(found), known, 1e-8, 1e-9)


def test_factors_of_the_whole_copy_residuals_down_and_corrections_up():
    a, values, b = _system(np.asarray)
    there = a.with_values(on_device(values))
    transfers.reset()
    factors = GatheredFactors(there)  # of method="direct"
    assert (transfers.h2d, transfers.d2h, transfers.d2h_bytes) == (0, 1, values.nbytes)
    for mine, host in ((factors, GatheredFactors(a)), (factors.T, GatheredFactors(a).T)):
        r = on_device(b)
        transfers.reset()
        found = mine(r)
        assert (transfers.h2d, transfers.h2d_bytes) == (transfers.d2h, transfers.d2h_bytes) == (1, b.nbytes)
        np.testing.assert_allclose(on_host(found), host(b), 1e-13, 1e-13)


@pytest.mark.parametrize("settings", [{}, {"overlap": 0, "coarse": False}, {"restricted": True}], ids=str)
def test_additive_schwarz_copies_residuals_down_and_corrections_up(settings):
    a, values, b = _system(np.asarray)
    there = a.with_values(on_device(values))
    transfers.reset()
    precondition = AdditiveSchwarz(there, **settings)
    assert transfers.h2d == 0 and transfers.d2h == 1 and transfers.d2h_bytes == values.nbytes
    known = AdditiveSchwarz(a, **settings)
    for mine, host in ((precondition, known), (precondition.T, known.T)):
        r = on_device(b)
        transfers.reset()
        found = mine(r)
        assert transfers.h2d == transfers.d2h == 1 and transfers.h2d_bytes == transfers.d2h_bytes == b.nbytes
        np.testing.assert_allclose(on_host(found), host(b), 1e-13, 1e-13)
    u = there.solve(on_device(b), preconditioner=precondition, rtol=1e-12)
    np.testing.assert_allclose(on_host(u), a.solve(b, preconditioner=known, rtol=1e-12), 1e-9, 1e-11)


@pytest.mark.serial
def test_a_product_copies_indices_once_and_nothing_more():
    a = _divided(_whole(), on_device)
    x = on_device(_part(a, float)[1])
    mpiad.grad(lambda v, x: anp.sum(a.with_values(v).matvec(x) ** 2), (0, 1))(a.values, x)
    transfers.reset()
    a.matvec(x), a.rmatvec(x)
    assert transfers.copies == 0
    mpiad.grad(lambda v, x: anp.sum(a.with_values(v).matvec(x) ** 2), (0, 1))(a.values, x)
    assert (transfers.h2d, transfers.d2h, transfers.d2h_bytes) == (0, 1, 8)  # J


def test_a_product_copies_its_messages_alone():
    a = _divided(_whole(), on_device)
    x = on_device(_part(a, float)[1])
    a.matvec(x)
    ghosts = a._pattern.ghosts
    transfers.reset()
    a.matvec(x)
    assert transfers.h2d == bool(ghosts.sources) and transfers.d2h == bool(ghosts.destinations)
    assert transfers.h2d_bytes == 8 * ghosts.n_needed


def test_values_copied_inside_the_function():
    """Parameters on the host, the system on the device: gradients come back to the host."""
    a, values, b = _system(np.asarray)

    def loss(values, b):
        u = a.with_values(to_device(values, like=on_device(0.0))).solve(to_device(b, like=on_device(0.0)), rtol=1e-12)
        return anp.sum(to_host(u) ** 2)

    known = mpiad.grad(lambda v, b: anp.sum(a.with_values(v).solve(b, rtol=1e-12) ** 2), (0, 1), objective="sum")(values, b)
    found = mpiad.grad(loss, (0, 1), objective="sum")(values, b)
    for mine, host in zip(found, known):
        assert type(mine) is np.ndarray
        np.testing.assert_allclose(mine, host, 1e-8, 1e-9)


def test_arrays_in_two_places_are_refused_on_all_ranks():
    a, values, b = _system(np.asarray)
    there = a.with_values(on_device(values))
    with pytest.raises(TypeError, match="matvec: x and values must be on one device, but x is .* on device 0"):
        a.matvec(on_device(b))
    with pytest.raises(TypeError, match="rmatvec: x and values .* x is ndarray on the host and values .* on device 0"):
        there.rmatvec(b)
    # One rank's mistake is everyone's error where a solve begins.
    mixed = there if _RANK == 0 else a
    with pytest.raises(TypeError, match="solve: x and values must be on one device.*to_device and to_host"):
        mixed.solve(b)
    integers = on_device(np.ones(len(b), int))
    with pytest.raises(TypeError, match="expected an array of floats of shape .*, but got an array of dtype int64"):
        there.matvec(integers)


@pytest.mark.serial
@pytest.mark.parametrize("segments", [[], [0, 0, 0], [3, 1, 1, 3, 1, 4, 1, 1, 1, 1], list(range(9))], ids=str)
def test_segment_sums(segments):
    segments = np.array(segments, np.int64)
    entries = np.random.default_rng(0).standard_normal((2, len(segments) + 1))
    entries[:, -1] = 0.0
    known = np.stack([np.bincount(segments, row, 9) for row in entries[:, :-1]])
    found = Segments(segments, 9).of_padded(on_device(entries))
    np.testing.assert_allclose(on_host(found), known, 1e-14, 1e-14)
