"""`DistributedMatrix.from_entries` and `sparse_matmul`, against dense matrices in one process."""

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse as sp

import mpiad
from mpiad.linalg import DistributedMatrix, sparse_matmul
from mpiad.testing import check_adjoint, check_grads

NODES = 13


def elements(rng):
    """Return the nodes of random triangles, and symmetric matrices of shape (3, 3) for them."""
    cells = np.array([rng.choice(NODES, 3, replace=False) for _ in range(40)])
    parts = rng.standard_normal((40, 3, 3))
    return cells, parts @ parts.transpose(0, 2, 1) + np.eye(3)


def assembled(cells, matrices):
    """Return the dense sum of the matrices of all elements, entry by entry."""
    whole = 0.5 * np.eye(NODES, dtype=matrices.dtype)
    for nodes, part in zip(cells, matrices):
        for i in range(3):
            for j in range(3):
                whole[nodes[i], nodes[j]] += part[i, j]
    return whole


def uneven(rng, size):
    return np.diff([0, *np.sort(rng.integers(0, NODES + 1, size - 1)), NODES]).tolist()  # some ranks may have no rows


class Mesh:
    """The same elements on all ranks, and this rank's entries: those in its rows, and the diagonal."""

    def __init__(self, rank_rng, rank, size):
        rng = rank_rng(100)
        self.cells, self.matrices = elements(rng)
        self.counts = uneven(rng, size)
        first = sum(self.counts[:rank])
        self.own = slice(first, first + self.counts[rank])
        rows, columns = np.broadcast_arrays(self.cells[:, :, None], self.cells[:, None, :])
        mine = (rows >= first) & (rows < self.own.stop)
        diagonal = np.arange(self.own.start, self.own.stop)
        self.element = np.nonzero(mine)[0]
        self.rows, self.columns = (np.concatenate([x[mine], diagonal]) for x in (rows, columns))
        self.local, self.rest = self.matrices[mine], np.full(len(diagonal), 0.5)

    def matrix(self, stiffness):
        values = anp.concatenate([stiffness[self.element] * self.local, self.rest])
        return DistributedMatrix.from_entries(self.rows, self.columns, values, (NODES, NODES), counts=self.counts)


@pytest.fixture
def mesh(rank_rng, rank, size):
    return Mesh(rank_rng, rank, size)


def test_entries_are_added(mesh, rank_rng):
    a, expected = mesh.matrix(np.ones(40)), assembled(mesh.cells, mesh.matrices)
    np.testing.assert_allclose(a.local_rows().toarray(), expected[mesh.own], 1e-13, 1e-13)
    x = rank_rng(5).standard_normal(NODES)
    np.testing.assert_allclose(a @ x[mesh.own], (expected @ x)[mesh.own], 1e-12, 1e-12)
    assert len(np.unique(np.stack(a.indices), axis=1).T) == len(a.values)


def test_rectangular_and_complex(rank, size, rank_rng):
    shape, rng = (3 * size + 1, 7), rank_rng(100)
    whole = (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)
    rows = np.array_split(np.arange(shape[0]), size)[rank]
    a = DistributedMatrix.from_entries(rows[:, None], np.arange(7), 0.5 * whole[rows], shape)
    assert a.values.dtype == np.complex64
    twice = DistributedMatrix.from_entries(
        np.tile(rows[:, None, None], (1, 1, 2)), np.arange(7)[:, None], 0.5 * np.stack([whole[rows]] * 2, -1), shape
    )
    np.testing.assert_allclose(twice.local_rows().toarray(), whole[rows], 1e-6)
    np.testing.assert_allclose(2 * a.local_rows().toarray(), whole[rows], 1e-6)


def test_gradient_through_assembly_and_solve(mesh, rank_rng):
    """Each rank has a copy of the stiffness of all elements."""
    rng = rank_rng(101)
    stiffness, b = np.exp(rng.standard_normal(40)), rng.standard_normal(NODES)
    along = rng.standard_normal(40)

    def loss(stiffness):
        u = mesh.matrix(stiffness).solve(b[mesh.own], method="gmres", rtol=1e-13)
        return mpiad.mpi_allreduce(anp.sum(u**3))

    def dense(stiffness):
        u = np.linalg.solve(assembled(mesh.cells, stiffness[:, None, None] * mesh.matrices), b)
        return np.sum(u**3), u

    value, gradient = mpiad.value_and_grad(loss, shared=True)(stiffness)
    np.testing.assert_allclose(value, dense(stiffness)[0], 1e-9)
    expected = [np.imag(dense(stiffness + 1e-30j * e)[0]) / 1e-30 for e in np.eye(40)]
    np.testing.assert_allclose(gradient, expected, 1e-8, 1e-10)

    def gradient_of(stiffness):
        # The adjoint by hand: -λᵀ K_e u.
        whole = assembled(mesh.cells, stiffness[:, None, None] * mesh.matrices)
        u = np.linalg.solve(whole, b)
        multiplier = np.linalg.solve(whole.T, 3 * u**2)
        return np.array([-multiplier[c] @ k @ u[c] for c, k in zip(mesh.cells, mesh.matrices)])

    np.testing.assert_allclose(gradient, gradient_of(stiffness), 1e-8, 1e-10)
    second = np.imag(gradient_of(stiffness + 1e-30j * along)) / 1e-30
    np.testing.assert_allclose(mpiad.hvp(loss, shared=True)(stiffness, along), second, 1e-7, 1e-9)


def test_dot_product_of_the_values(rank, size, rng):
    rows = np.sort(rng.integers(0, 4, 17)) + 4 * rank
    columns = rng.integers(0, 4 * size, 17)
    check_adjoint(
        lambda v: DistributedMatrix.from_entries(rows, columns, v, (4 * size, 4 * size)).values, rng.standard_normal(17)
    )


@pytest.mark.parametrize("last_only", [False, True])
def test_refused_entries(rank, size, last_only):
    shape, wrong = (2 * size, 2 * size), not last_only or rank == size - 1
    own, ones = np.array([2 * rank, 2 * rank + 1]), np.ones(2)

    def call(rows=own, columns=own, values=ones, shape=shape, **settings):
        return DistributedMatrix.from_entries(rows, columns, values, shape, **settings)

    def bad(**changed):
        return call(**changed) if wrong else call()

    with pytest.raises(ValueError, match=rf"column {2 * size} \(1 of 2 entries\), is outside of the shape"):
        bad(columns=np.array([0, 2 * size]))
    with pytest.raises(ValueError, match=r"in row -1 and column"):
        bad(rows=np.array([-1, 2 * rank]))
    if size > 1:
        other = 2 * ((rank + 1) % size)
        with pytest.raises(ValueError, match=r"in row \d .* belongs to another rank: this rank owns rows \d to \d"):
            bad(rows=np.array([other, other]))
    with pytest.raises(TypeError, match="rows must be an array of integers, but has dtype float64"):
        bad(rows=own * 1.0)
    with pytest.raises(TypeError, match="values must be an array of dtype .* but got dtype int64"):
        bad(values=np.ones(2, int))
    with pytest.raises(ValueError, match=r"columns must broadcast to the shape of values, \(2,\), but has shape \(3,\)"):
        bad(columns=np.zeros(3, int))
    with pytest.raises(ValueError, match="from_entries: counts must be .* that add up to"):
        call(counts=[1] * size)
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same arguments"):
            call(shape=(2 * size, 2 * size + rank))
    assert mpiad.mpi_allreduce(1) == size


def of(rank, dtype=float, shape=(6, 5)):
    rng = np.random.default_rng(rank)
    whole = rng.standard_normal(shape) * (rng.random(shape) < 0.6)
    return (whole + (1j * whole[::-1] if np.dtype(dtype).kind == "c" else 0)).astype(dtype)


@pytest.mark.parametrize("shape", [(5,), (5, 3), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("form", [sp.csr_array, sp.csc_matrix, sp.coo_array])
def test_constant_products(rank, rng, shape, form):
    whole, x = of(rank, shape=(6 + rank, 5)), rng.standard_normal(shape)
    a = form(whole)
    np.testing.assert_allclose(sparse_matmul(a, x), whole @ x, 1e-13, 1e-13)
    check_adjoint(lambda x: sparse_matmul(a, x), x)
    check_grads(lambda x: anp.sum(anp.sin(sparse_matmul(a, x))), x, objective="sum")
    slope = mpiad.grad(lambda x: anp.sum(anp.sin(sparse_matmul(a, x))), objective="sum")(x)
    np.testing.assert_allclose(slope, whole.T @ np.cos(whole @ x), 1e-12, 1e-12)


@pytest.mark.parametrize(("matrix", "vector"), [("c16", "f8"), ("f8", "c16"), ("c16", "c16"), ("f4", "f4")])
def test_dtypes_of_constant_products(rank, rng, matrix, vector):
    whole, x, w = of(rank, matrix), rng.standard_normal(5).astype(vector), rng.standard_normal(6)
    a = sp.csr_array(whole)
    assert sparse_matmul(a, x).dtype == (whole @ x).dtype
    slope = mpiad.grad(lambda x: anp.sum(w * anp.real(sparse_matmul(a, x))), objective="sum")(x)
    assert slope.dtype == x.dtype
    expected = whole.T @ w if x.dtype.kind == "c" else (whole.T @ w).real
    np.testing.assert_allclose(slope, expected, 1e-5 if vector == "f4" else 1e-13)


def test_batches_and_compiled_constant_products(rank, rng):
    whole, x = of(rank), rng.standard_normal(5)
    a = sp.csr_array(whole)
    kept = mpiad.linearize(lambda x: anp.sin(sparse_matmul(a, x)))(x)
    jacobian = np.cos(whole @ x)[:, None] * whole
    np.testing.assert_allclose(kept.jvp(np.eye(5), batch=True), jacobian.T, 1e-13, 1e-13)
    np.testing.assert_allclose(kept.vjp(np.eye(6), batch=True), jacobian, 1e-13, 1e-13)
    sine = mpiad.jit(lambda x: anp.sin(sparse_matmul(a, x)))
    for _ in range(2):  # the first time, and with the program of the first time
        compiled = mpiad.linearize(sine)(x)
        np.testing.assert_allclose(compiled.jvp(np.eye(5), batch=True), jacobian.T, 1e-13, 1e-13)
        np.testing.assert_allclose(compiled.vjp(np.ones(6)), jacobian.sum(0), 1e-13, 1e-13)
    a.data *= 2.0
    np.testing.assert_allclose(sine(x), np.sin(2.0 * whole @ x), 1e-13, 1e-13)
    a.data /= 2.0
    fun = mpiad.jit(mpiad.value_and_grad(lambda x: anp.sum(sparse_matmul(a, x) ** 2), objective="sum"), strict=True)
    value, slope = fun(x)
    np.testing.assert_allclose(value, mpiad.mpi_allreduce(np.sum((whole @ x) ** 2)), 1e-12)
    np.testing.assert_allclose(slope, 2 * whole.T @ (whole @ x), 1e-12, 1e-12)
    cubes = mpiad.jit(lambda x: anp.sum(sparse_matmul(a, x) ** 3), strict=True)
    for _ in range(2):
        _, _, product = mpiad.make_hvp(cubes, objective="sum")(x)
        np.testing.assert_allclose(product(x), 6 * whole.T @ (whole @ x) ** 2, 1e-12, 1e-12)


def test_refused_constant_products():
    a = sp.csr_array(np.eye(3))
    with pytest.raises(TypeError, match="A must be a sparse matrix .* but got ndarray"):
        sparse_matmul(np.eye(3), np.ones(3))
    with pytest.raises(TypeError, match="A must have dtype"):
        sparse_matmul(sp.csr_array(np.eye(3, dtype=int)), np.ones(3))
    with pytest.raises(TypeError, match="x must be an array of dtype .* but got dtype int64"):
        sparse_matmul(a, np.ones(3, int))
    for shape in [(), (4,), (4, 3), (3, 4, 2)]:
        with pytest.raises(ValueError, match=r"x must have shape \(3,\) or \(..., 3, k\), but has "):
            sparse_matmul(a, np.ones(shape))
