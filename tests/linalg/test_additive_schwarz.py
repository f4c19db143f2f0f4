"""`AdditiveSchwarz` against its definition with dense matrices, and what it saves."""

import sys

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg
from transport_matrix import matrix

import mpiad
from mpiad.linalg import AdditiveSchwarz, DistributedMatrix

SHAPE = (8, 6)
N = 48


def divided(rank_rng, size):
    rng = rank_rng(100)
    whole = matrix(SHAPE, 1.0, 0.5 * rng.standard_normal(SHAPE), 0.01 * np.ones(SHAPE))
    # Uneven rows, some blocks of few.
    counts = np.diff([0, *np.sort(rng.choice(np.arange(4, N - 4), size - 1, replace=False)), N]).tolist()
    return whole, counts, DistributedMatrix.from_scipy(sp.csr_matrix(whole), counts=counts)


def dense(whole, counts, overlap, restricted, coarse):
    """Return the preconditioner as a matrix, part by part."""
    total, stops = np.zeros_like(whole), np.cumsum(counts)
    for stop, count in zip(stops, counts):
        own = np.arange(stop - count, stop)
        part = own
        for _ in range(overlap):
            part = np.union1d(part, np.flatnonzero(whole[part].any(axis=0)))
        inverse = np.linalg.inv(whole[np.ix_(part, part)])
        kept = np.isin(part, own) if restricted else np.ones(len(part), bool)
        total[np.ix_(part[kept], part)] += inverse[kept]
    if coarse:
        z = np.repeat(np.eye(len(counts)), counts, axis=0)
        total += z @ np.linalg.inv(z.T @ whole @ z) @ z.T
    return total


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("restricted", [False, True], ids=["", "restricted"])
@pytest.mark.parametrize("coarse", [False, True], ids=["", "coarse"])
def test_definition(rank_rng, rank, size, overlap, restricted, coarse):
    whole, counts, a = divided(rank_rng, size)
    expected = dense(whole, counts, overlap, restricted, coarse)
    precondition = AdditiveSchwarz(a, overlap=overlap, restricted=restricted, coarse=coarse)
    r = rank_rng(7).standard_normal((3, N))
    mine = r[:, a.owned_rows]
    np.testing.assert_allclose(precondition(mine), (r @ expected.T)[:, a.owned_rows], 1e-9, 1e-11)
    np.testing.assert_allclose(precondition.T(mine[0]), (expected.T @ r[0])[a.owned_rows], 1e-9, 1e-11)
    np.testing.assert_allclose(precondition.T.T(mine[0]), precondition(mine[0]))


def test_ranks_without_rows(rank_rng, rank, size):
    whole, n, last = matrix(SHAPE, 1.0, np.zeros(SHAPE), 0.01 * np.ones(SHAPE)), N, rank == size - 1
    a = DistributedMatrix.from_scipy(sp.csr_matrix(whole), counts=[0] * (size - 1) + [n])
    b = rank_rng(7).standard_normal(n)
    mine = b if last else b[:0]
    precondition, ones = AdditiveSchwarz(a), np.ones(n)
    # One part that is all, and one unknown beside it.
    expected = np.linalg.solve(whole, b) + ones * (b.sum() / whole.sum())
    np.testing.assert_allclose(precondition(mine), expected if last else [], 1e-9, 1e-11)
    u = a.solve(mine, preconditioner=precondition, rtol=1e-12)
    np.testing.assert_allclose(u, np.linalg.solve(whole, b) if last else [], 1e-8, 1e-10)


def test_what_it_saves(rank_rng, size):
    whole = matrix(SHAPE, 1.0, np.zeros(SHAPE), 0.01 * np.ones(SHAPE))
    # Parts of nearly the same size: parts of a few rows save little.
    divisions = [N // size + (r < N % size) for r in range(size)]
    a = DistributedMatrix.from_scipy(sp.csr_matrix(whole), counts=divisions)
    b, counts = rank_rng(7).standard_normal(N), {}
    jacobi, schwarz = ({"overlap": n, "restricted": False, "coarse": n > 0} for n in (0, 2))
    for name, settings in {"none": None, "jacobi": jacobi, "schwarz": schwarz}.items():
        norms, scipys = [], []
        preconditioner = None if settings is None else AdditiveSchwarz(a, **settings)
        u = a.solve(b[a.owned_rows], method="cg", preconditioner=preconditioner, rtol=1e-10, callback=norms.append)
        np.testing.assert_allclose(u, np.linalg.solve(whole, b)[a.owned_rows], 1e-6, 1e-8)
        inverse = None if settings is None else dense(whole, divisions, **settings)
        scipy.sparse.linalg.cg(whole, b, rtol=1e-10, M=inverse, callback=scipys.append)
        assert abs(len(norms) - len(scipys)) <= 1, name
        counts[name] = len(norms)
    assert counts["schwarz"] <= counts["jacobi"] + 2 and counts["schwarz"] < 0.6 * counts["none"]


def test_gradient_with_the_transpose(rank_rng, size):
    whole, _, a = divided(rank_rng, size)
    b, norms = rank_rng(7).standard_normal(N)[a.owned_rows], []
    preconditioner = AdditiveSchwarz(a, restricted=True)

    def loss(values):
        u = a.with_values(values).solve(b, preconditioner=preconditioner, rtol=1e-12, callback=norms.append)
        return mpiad.mpi_allreduce(anp.sum(u**2))

    found = mpiad.grad(loss)(a.values)
    u = np.linalg.solve(whole, rank_rng(7).standard_normal(N))
    multiplier = np.linalg.solve(whole.T, 2 * u)
    row, column = a.indices
    np.testing.assert_allclose(found, -multiplier[row] * u[column], 1e-7, 1e-9)
    assert len(norms) < 25


def test_what_is_refused(rank_rng, rank, size):
    (_, _, a), last = divided(rank_rng, size), rank == size - 1
    with pytest.raises(TypeError, match="matrix must be a DistributedMatrix, but got ndarray"):
        AdditiveSchwarz(np.eye(3))
    with pytest.raises(ValueError, match="overlap must be an integer, zero or more, but got -1"):
        AdditiveSchwarz(a, overlap=-1 if rank == size - 1 else 1)
    with pytest.raises(
        ValueError, match=r"must be square, with equally distributed rows and columns, but is DistributedMatrix\(3"
    ):
        rows = 3 if last else 0
        AdditiveSchwarz(DistributedMatrix(sp.csr_matrix((rows, 5)), columns=5 if last else 0))
    with pytest.raises(ValueError, match=r"the local matrix of rank \d, .* can't be factorized"):
        AdditiveSchwarz(a.with_values(0 * a.values), overlap=0)
    with pytest.raises(ValueError, match="right-hand side|must return an array of the shape of b"):
        a.solve(np.ones(a.local_shape[0]), preconditioner=lambda r: r[1:])
    assert mpiad.mpi_allreduce(1) == size


def laplacian(n, wind=0.0):
    one = sp.diags_array([-1.0 - wind, 2.0, -1.0 + wind], offsets=[-1, 0, 1], shape=(n, n))
    return sp.csr_array(sp.kron(sp.eye_array(n), one) + sp.kron(one, sp.eye_array(n)))


@pytest.mark.parametrize("wind", [0.0, 0.2])
def test_algebraic_multigrid(rank_rng, rank, size, wind):
    pyamg = pytest.importorskip("pyamg")
    whole, rng = laplacian(24, wind), rank_rng(100)
    a = DistributedMatrix.from_scipy(sp.csr_matrix(whole) if rank == 0 else None)
    x, y = rng.standard_normal((2, 24 * 24))
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    preconditioner = AdditiveSchwarz(a, local="amg")
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    if not wind:  # conjugate gradients need a symmetric preconditioner
        one, other = (mpiad.mpi_allreduce(preconditioner(p[a.owned_rows]) @ q[a.owned_rows]) for p, q in ((x, y), (y, x)))
        np.testing.assert_allclose(one, other, 1e-12)
    if size == 1 and not wind:  # one cycle for the whole matrix, and the correction that is constant
        np.random.seed(0)  # noqa: NPY002
        cycle = pyamg.smoothed_aggregation_solver(sp.csr_matrix(whole)).aspreconditioner()
        np.testing.assert_allclose(preconditioner(x), cycle @ x + x.sum() / whole.sum(), 1e-10)
        z = preconditioner(np.stack([x, y + 1j * x]))
        np.testing.assert_allclose(z, [preconditioner(x), preconditioner(y) + 1j * preconditioner(x)], 1e-12)
    counts = {}
    for name, chosen in {"none": None, "amg": preconditioner}.items():
        norms = []
        u = a.solve(x[a.owned_rows], preconditioner=chosen, rtol=1e-10, callback=norms.append)
        np.testing.assert_allclose(u, sp.linalg.spsolve(whole.tocsc(), x)[a.owned_rows], 1e-6, 1e-8)
        counts[name] = len(norms)
    assert counts["amg"] < 0.5 * counts["none"]

    def loss(values):
        u = a.with_values(values).solve(x[a.owned_rows], preconditioner=preconditioner, rtol=1e-12)
        return mpiad.mpi_allreduce(anp.sum(u**2))

    found = mpiad.grad(loss)(a.values)
    u = np.linalg.solve(whole.toarray(), x)
    multiplier = np.linalg.solve(whole.toarray().T, 2 * u)
    row, column = a.indices
    np.testing.assert_allclose(found, -multiplier[row] * u[column], 1e-6, 1e-6 * abs(found).max())


def test_refused_local_solvers(monkeypatch):
    a = DistributedMatrix.from_scipy(sp.csr_matrix(laplacian(4)))
    with pytest.raises(ValueError, match="local must be .* but got local='ilu'"):
        AdditiveSchwarz(a, local="ilu")
    with pytest.raises(ValueError, match="which takes options, but got local='lu', options={'max_levels': 2}"):
        AdditiveSchwarz(a, options={"max_levels": 2})
    monkeypatch.setitem(sys.modules, "pyamg", None)
    with pytest.raises(ImportError, match=r"PyAMG, which can't be imported .* pip install 'mpiad\[amg\]'"):
        AdditiveSchwarz(a, local="amg")


@pytest.mark.unguarded
def test_the_coarse_sums_take_one_message(operations):
    matrix = DistributedMatrix.from_scipy(sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(24, 24)).tocsr())
    preconditioner, r = AdditiveSchwarz(matrix), np.ones((2, matrix.local_shape[0]))
    preconditioner(r)
    for inverse in (preconditioner, preconditioner.T):
        calls = operations(lambda: inverse(r))  # noqa: B023
        assert [name for name in calls if "all" in name.lower()] == ["Allgatherv"]
