"""Matrices and Jacobians by a general sparsity pattern, against a dense model in one process."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse

import mpiad
from mpiad.linalg import DistributedMatrix, factorized, newton
from mpiad.linalg.probing import probing_of

N = 23
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class Case:
    """A random sparse matrix W, divided unevenly: rank 1 has no rows if there are three ranks or more."""

    def __init__(self, rng, rank, size):
        shares = np.array([0.0 if r == 1 and size > 2 else 1.0 + r for r in range(size)])
        counts = np.floor(N * shares / shares.sum()).astype(int)
        counts[-1] += N - counts.sum()
        self.own = slice(int(counts[:rank].sum()), int(counts[: rank + 1].sum()))
        self.whole = scipy.sparse.random_array((N, N), density=0.12, rng=rng, format="lil")
        self.whole[3, :] = 0.0  # a row, and so a matrix without a diagonal entry there
        self.whole = self.whole.tocsr()
        self.whole.eliminate_zeros()
        self.matrix = DistributedMatrix(self.whole[self.own])
        self.dense, self.k = self.whole.toarray(), 1.0 + rng.random(N)
        self.x, self.v = rng.standard_normal((2, N))

    def pattern(self, kind, diagonal=True):
        """Return the entries of this rank's rows: unsorted, and some of them twice."""
        rows, columns = (self.whole[self.own] + (scipy.sparse.eye_array(N).tocsr()[self.own] if diagonal else 0)).nonzero()
        order = np.random.default_rng(1).permutation(np.tile(np.arange(len(rows)), 2)[: len(rows) + 5])
        if kind == "entries":
            return self.own.start + rows[order], columns[order]
        starts = np.searchsorted(rows, np.arange(self.own.stop - self.own.start + 1))
        mixed = np.concatenate([columns[a:b][::-1] for a, b in zip(starts, starts[1:])] or [columns])
        given = np.ones(len(mixed), bool), mixed, starts
        return scipy.sparse.csr_array(given, shape=(len(starts) - 1, N))

    def product(self, u, k):
        """Return this rank's part of (diag(k²) W + 5) u."""
        return k**2 * (self.matrix @ u) + 5.0 * u

    def of(self, k):
        return (k**2)[:, None] * self.dense + 5.0 * anp.eye(N)

    def check(self, fun, model):
        """Compare value, gradient and the product with the Hessian, with respect to k."""
        own, k = self.own, self.k
        value, gradient = mpiad.value_and_grad(fun)(k[own])
        np.testing.assert_allclose(value, model(k), **CLOSE)
        np.testing.assert_allclose(gradient, autograd.grad(model)(k)[own], **CLOSE)
        expected = autograd.grad(lambda k: anp.dot(autograd.grad(model)(k), self.v))(k)
        _, _, product = mpiad.make_hvp(fun)(k[own])
        np.testing.assert_allclose(product(self.v[own]), expected[own], **CLOSE)


@pytest.fixture
def case(rank_rng, rank, size):
    return Case(rank_rng(17), rank, size)


@pytest.mark.parametrize("kind", ["matrix", "entries"])
def test_a_matrix_from_a_pattern(case, kind):
    calls, own = [], case.own

    def counted(u, k):
        calls.append(u)
        return case.product(u, k)

    pattern = case.pattern(kind)
    a = DistributedMatrix.from_pattern(counted, pattern, case.x[own], case.k[own])
    np.testing.assert_allclose(a.local_rows().toarray(), case.of(case.k)[own], **CLOSE)
    most = max(np.diff((case.whole + scipy.sparse.eye_array(N)).tocsr().indptr))
    assert most <= len(calls) - 1 < N  # products for the colors, and one that compares
    rows = probing_of(pattern, own.stop - own.start, None, "test").rows
    assert rows.has_canonical_format
    for row in range(rows.shape[0]):
        colors = rows.data[rows.indptr[row] : rows.indptr[row + 1]]
        assert len(set(colors)) == len(colors)


@pytest.mark.parametrize("kind", ["matrix", "entries"])
def test_derivatives_of_a_matrix(case, kind):
    pattern, own = case.pattern(kind), case.own

    def loss(k):
        a = DistributedMatrix.from_pattern(case.product, pattern, case.x[own], k)
        return mpiad.mpi_allreduce(anp.sum(anp.sin(a @ case.x[own]) + a.rmatvec(case.v[own]) ** 3))

    case.check(loss, lambda k: anp.sum(anp.sin(anp.dot(case.of(k), case.x)) + anp.dot(case.of(k).T, case.v) ** 3))


@pytest.mark.parametrize("method", ["gathered", "schwarz"])
@pytest.mark.parametrize("kind", ["matrix", "entries"])
def test_solves(case, kind, method):
    pattern, own = case.pattern(kind), case.own

    def loss(k):
        u = factorized(case.product, case.x[own], k, pattern=pattern, method=method)(case.x[own])
        return mpiad.mpi_allreduce(anp.sum(u**2))

    case.check(loss, lambda k: anp.sum(anp.linalg.solve(case.of(k), case.x) ** 2))


@pytest.mark.parametrize("kind", ["matrix", "entries"])
def test_newton(case, kind):
    pattern, own = case.pattern(kind), case.own

    def residual(u, k):
        return case.product(u, k) + k * u**3 - 3.0

    def loss(k):
        u = newton(residual, case.x[own], k, jacobian="sparse", pattern=pattern, rtol=1e-12)
        return mpiad.mpi_allreduce(anp.sum(u**2))

    def model(k):
        u, plain = anp.zeros(N), mpiad.stop_gradient
        for fixed in [plain] * 30 + [lambda k: k] * 2:  # the last two steps have the root's first two derivatives
            jacobian = case.of(fixed(k)) + anp.diag(3.0 * fixed(k) * u**2)
            u = u - anp.linalg.solve(jacobian, anp.dot(case.of(fixed(k)), u) + fixed(k) * u**3 - 3.0)
        return anp.sum(u**2)

    case.check(loss, model)


def test_a_jacobian_of_a_function(case):
    own, x = case.own, case.x[case.own]
    derivative = mpiad.linearize(lambda u: anp.sin(case.matrix @ u) + u**2)(x).jvp
    a = DistributedMatrix.from_pattern(derivative, case.pattern("entries"), x)
    expected = anp.cos(case.dense @ case.x)[:, None] * case.dense + anp.diag(2.0 * case.x)
    np.testing.assert_allclose(a.local_rows().toarray(), expected[own], **CLOSE)


def test_few_colors_suffice(rank, size):
    rows = slice(40 * rank // size, 40 * (rank + 1) // size)
    whole = scipy.sparse.diags_array([np.ones(39), np.ones(40), np.ones(39)], offsets=[-1, 0, 1]).tocsr()
    count = probing_of(whole[rows], rows.stop - rows.start, None, "test").count
    assert count == 3 if size == 1 else count <= 5  # a column shares rows with four others


def test_the_stencil_of_a_domain(size):
    domain = mpiad.Domain((9, 8 * size))
    matvec = lambda u, k: k * u + domain.laplacian()(u)  # noqa: E731
    like = anp.ones(domain.local_shape)
    a = DistributedMatrix.from_pattern(matvec, domain, like, 2.0)
    np.testing.assert_allclose(a @ like.ravel(), matvec(like, 2.0).ravel(), **CLOSE)

    def total(k):
        return mpiad.mpi_allreduce(anp.sum(DistributedMatrix.from_pattern(matvec, domain, like, k).values ** 2))

    value, slope = mpiad.value_and_grad(total, shared=True)(2.0)
    np.testing.assert_allclose(slope, 2.0 * (2.0 - 4.0) * 72 * size, **CLOSE)
    np.testing.assert_allclose(value, anp.sum(mpiad.mpi_allreduce(anp.sum(a.values**2))), **CLOSE)


def test_a_missing_entry_is_named(case, rank):
    row, column = next((int(i), int(j)) for i, j in zip(*case.whole.nonzero()) if i != j and i > 5)
    rows, columns = case.pattern("entries")
    kept = (rows != row) | (columns != column)
    x, own = case.x[case.own], case.own
    text = f"in row {row}, the entry of column {column} is missing in the pattern"
    for attempt in (DistributedMatrix.from_pattern, lambda f, p, *rest: factorized(f, *rest, pattern=p)):
        with pytest.raises(ValueError, match=text):
            attempt(case.product, (rows[kept], columns[kept]), x, case.k[own])


def test_refused_patterns(case, rank, size):
    x, last, like = case.x[case.own], rank == size - 1, np.arange(3)

    def refused(kind, text, pattern, matvec=lambda u: u):
        with pytest.raises(kind, match=text):
            DistributedMatrix.from_pattern(matvec, pattern, x)

    rows, columns = case.pattern("entries")
    refused(ValueError, "in row 23 and column 0 .*outside of the shape", (rows, columns) if not last else ([23], [0]))
    refused(ValueError, "rows and columns of pattern must have the same shape", (rows, columns) if not last else (like, 1))
    refused(TypeError, "pattern: columns must be an array of integers", (rows, columns) if not last else ([0], [0.5]))
    refused(TypeError, "or a pair of arrays", (rows, columns) if not last else (rows, columns, rows))
    refused(ValueError, f"pattern must have {N} columns", case.pattern("matrix")[:, : N - 1 if last else N])
    refused(TypeError, "matvec must return an array of floats", (rows, columns), lambda u: [0.0] if last else u)
    if size > 1:
        refused(ValueError, "belongs to another rank", (rows, columns) if not last else ([0], [0]))
        refused(ValueError, "same arguments", (rows, columns) if not last else case.pattern("matrix"))
    assert mpiad.mpi_allreduce(1) == size
