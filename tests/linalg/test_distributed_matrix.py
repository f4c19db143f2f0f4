"""`DistributedMatrix` against SciPy's matrix in one process: products, solves, their derivatives, and what is refused."""

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse as sp

import mpiad
from mpiad.linalg import DistributedMatrix
from mpiad.testing import check_adjoint, check_grads
from mpiad.transport.core.channels import Channel

N = 23
CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def random_matrix(rng, shape, dtype=float, density=0.2):
    found = sp.random(*shape, density, "csr", rng=rng).astype(dtype)
    found.data = rng.standard_normal(found.nnz) + (1j * rng.standard_normal(found.nnz) if dtype is complex else 0)
    return found


def cuts(total, size, rng):
    """Return uneven parts: some ranks have nothing."""
    return np.diff([0, *np.sort(rng.integers(0, total + 1, size - 1)), total]).tolist()


class Case:
    """A matrix, in one process and divided unevenly."""

    def __init__(self, rank_rng, rank, size, dtype=float, shape=(N, N), shift=6.0):
        rng = rank_rng(100)
        self.whole = random_matrix(rng, shape, dtype)
        if shape[0] == shape[1]:
            self.whole = (self.whole + shift * sp.identity(N)).tocsr()
        self.counts = cuts(shape[0], size, rng)
        self.columns = self.counts if shape[0] == shape[1] else cuts(shape[1], size, rng)
        self.rank = rank
        rows = self.part(np.arange(shape[0]), 0)
        self.matrix = DistributedMatrix(self.whole[rows], columns=self.columns[rank])
        self.mine = slice(self.whole.indptr[rows[0]], self.whole.indptr[rows[-1] + 1]) if len(rows) else slice(0, 0)
        self.x, self.y = (self.vector(rng, n, dtype) for n in shape[::-1])

    def vector(self, rng, n, dtype):
        return rng.standard_normal(n) + (1j * rng.standard_normal(n) if dtype is complex else 0)

    def part(self, vector, axis):
        stops = np.cumsum([self.counts, self.columns][axis])
        return vector[..., stops[self.rank] - [self.counts, self.columns][axis][self.rank] : stops[self.rank]]


@pytest.fixture(params=[float, complex], ids=["real", "complex"])
def case(request, rank_rng, rank, size):
    return Case(rank_rng, rank, size, request.param)


@pytest.mark.parametrize("shape", [(N, N), (N, 9), (5, N)], ids=str)
def test_products(rank_rng, rank, size, shape):
    case = Case(rank_rng, rank, size, shape=shape)
    a, x, y = case.matrix, case.part(case.x, 1), case.part(case.y, 0)
    assert a.shape == shape and a.local_shape == (len(y), len(x))
    np.testing.assert_allclose(a @ x, case.part(case.whole @ case.x, 0), **CLOSE)
    np.testing.assert_allclose(a.rmatvec(y), case.part(case.whole.T @ case.y, 1), **CLOSE)
    np.testing.assert_allclose(a.T @ y, a.rmatvec(y), **CLOSE)
    np.testing.assert_allclose(a.T.T @ x, a @ x, **CLOSE)
    np.testing.assert_allclose(a.T.rmatvec(x), case.part(case.whole @ case.x, 0), **CLOSE)
    many = np.stack([np.stack([x, 2 * x]), np.stack([-x, x**2])])
    np.testing.assert_allclose(a.matvec(many), [[a @ v for v in row] for row in many], **CLOSE)
    np.testing.assert_allclose(a.rmatvec(np.stack([y, 3 * y]))[1], 3 * a.rmatvec(y), **CLOSE)
    check_adjoint(a.matvec, x, adjoint=a.rmatvec)


def test_derivatives(case):
    values, x, y = case.matrix.values, case.part(case.x, 1), case.part(case.y, 0)

    def loss(values, x, y):
        a = case.matrix.with_values(values)
        return mpiad.mpi_allreduce(anp.sum(anp.abs(a @ x) ** 4) + anp.sum(anp.abs(a.rmatvec(y) * x) ** 2) / 9)

    whole, product = case.whole, case.whole @ case.x
    check_grads(loss, values, x, y, argnum=(0, 1, 2), order=1)
    # Σ (A x)² by the values, in closed form.
    of_values = mpiad.grad(lambda v: mpiad.mpi_allreduce(anp.sum(anp.real(case.matrix.with_values(v) @ x) ** 2)))(values)
    rows = np.repeat(np.arange(N), np.diff(whole.indptr))
    np.testing.assert_allclose(of_values, (2 * product.real[rows] * case.x[whole.indices])[case.mine], **CLOSE)


def test_diagonal(case):
    weight = np.arange(1.0, case.matrix.local_shape[0] + 1)
    np.testing.assert_array_equal(case.matrix.diagonal(), case.part(case.whole.diagonal(), 0))
    found = mpiad.grad(lambda v: mpiad.mpi_allreduce(anp.sum(weight * anp.real(case.matrix.with_values(v).diagonal()))))(
        case.matrix.values
    )
    row, column = case.matrix.indices
    np.testing.assert_array_equal(found[row == column].real, weight)
    assert not found[row != column].any()


@pytest.mark.each_combination
@pytest.mark.parametrize("method", ["gmres", "bicgstab", "direct"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "T"])
def test_solves(case, method, transposed):
    b, whole = case.part(case.y, 0), case.whole.toarray().T if transposed else case.whole.toarray()

    def solved(values, b):
        a = case.matrix.with_values(values)
        return (a.T if transposed else a).solve(b, method=method, rtol=1e-12)

    def loss(values, b):
        return mpiad.mpi_allreduce(anp.sum(anp.abs(solved(values, b)) ** 2))

    u = np.linalg.solve(whole, case.y)
    np.testing.assert_allclose(solved(case.matrix.values, b), case.part(u, 0), **CLOSE)
    of_values, of_b = mpiad.grad(loss, (0, 1))(case.matrix.values, b)
    multiplier = np.linalg.solve(whole.T, 2 * u.conj())
    left, right = (u, multiplier) if transposed else (multiplier, u)
    rows = np.repeat(np.arange(N), np.diff(case.whole.indptr))
    np.testing.assert_allclose(of_b, case.part(multiplier, 0), **CLOSE)
    np.testing.assert_allclose(of_values, -(left[rows] * right[case.whole.indices])[case.mine], **CLOSE)


def check_second(loss, values, rng):
    """Compare products with the Hessian, forward and reverse over reverse, with differences of the gradient."""
    v, h = rng.standard_normal(values.shape), 1e-5
    expected = (mpiad.grad(loss)(values + h * v) - mpiad.grad(loss)(values - h * v)) / (2 * h)
    scale = np.sqrt(mpiad.mpi_allreduce(np.sum(expected**2)))
    np.testing.assert_allclose(mpiad.hvp(loss)(values, v), expected, atol=1e-7 * scale)
    again = mpiad.grad(lambda x: anp.sum(mpiad.grad(loss)(x) * v), objective="sum")(values)
    np.testing.assert_allclose(again, expected, atol=1e-7 * scale)


def test_second_derivatives(rank_rng, rank, size):
    case = Case(rank_rng, rank, size)
    x, y = case.part(case.x, 1), case.part(case.y, 0)

    def of_solve(values):
        a = case.matrix.with_values(values)
        return mpiad.mpi_allreduce(anp.sum(a.solve(y, method="direct") ** 3))

    def of_products(values):
        a = case.matrix.with_values(values)
        return mpiad.mpi_allreduce(anp.sum((a @ x) ** 3) + anp.sum((a.T @ (a @ x)) ** 2))

    for loss in (of_solve, of_products):
        check_second(loss, case.matrix.values, rank_rng(rank))


def test_several_right_hand_sides(case):
    b = np.stack([case.part(case.y, 0), 1e-5 * case.part(case.x, 1)])
    expected = np.linalg.solve(case.whole.toarray(), np.stack([case.y, 1e-5 * case.x]).T).T
    for method in ("gmres", "direct"):
        found = case.matrix.solve(b, method=method, batch=1, rtol=1e-12)
        np.testing.assert_allclose(found, case.part(expected, 0), 1e-8, 1e-13)


@pytest.mark.parametrize("even", [True, False])
def test_matrix_of_the_root(rank_rng, rank, size, even):
    rng, root = rank_rng(100), size - 1
    whole, counts = random_matrix(rng, (N, N)), None if even else cuts(N, size, rng)
    a = DistributedMatrix.from_scipy(whole if rank == root else None, root=root, counts=counts)
    lengths = [len(part) for part in np.array_split(np.arange(N), size)] if even else counts
    start = sum(lengths[:rank])
    assert a.owned_rows == a.owned_columns == slice(start, start + lengths[rank])
    x = rng.standard_normal(N)
    np.testing.assert_allclose(a @ x[a.owned_columns], (whole @ x)[a.owned_rows], **CLOSE)
    back = a.gathered(root)
    assert (back is None) == (rank != root)
    if back is not None:
        np.testing.assert_array_equal(back.toarray(), whole.toarray())
    wide = DistributedMatrix.from_scipy(whole[:7] if rank == root else None, root=root)
    np.testing.assert_allclose(wide @ x[wide.owned_columns], (whole[:7] @ x)[wide.owned_rows], **CLOSE)


def test_only_ghosts_travel(rank, size, monkeypatch):
    # A chain: each rank needs one entry of each neighbour.
    n = 40
    whole = sp.diags([np.full(n - 1, -1.0), np.full(n, 2.0), np.full(n - 1, -1.0)], [-1, 0, 1], format="csr")
    a = DistributedMatrix.from_scipy(whole)
    inner = (rank > 0) + (rank < size - 1)
    assert repr(a).startswith("DistributedMatrix(40 x 40, float64; rank ") and f", ghosts: {inner})" in repr(a)
    sent = []

    def counting(channel, kind, buffers, call, messages, *rest):
        sent.extend(message[0].size for message in messages if kind == "blocking send")
        return begin(channel, kind, buffers, call, messages, *rest)

    begin = Channel.begin
    monkeypatch.setattr(Channel, "begin", counting)
    assert np.isfinite(a @ np.ones(a.local_shape[1])).all()
    assert sent == [1] * inner


def test_entries_given_twice(rank, size):
    n = size + 1
    rows = [rank] if rank < size - 1 else [rank, rank + 1]
    places = np.repeat(np.arange(len(rows)), 3), [k for r in rows for k in (r, 0, r)]
    local = sp.coo_matrix((np.ones(3 * len(rows)), places), (len(rows), n))
    a = DistributedMatrix(local)
    np.testing.assert_array_equal(a @ np.ones(len(rows)), np.full(len(rows), 3.0))
    assert a.values.sum() == 3.0 * len(rows)
    local = sp.csr_array((np.arange(3.0 * len(rows)), places[1], 3 * np.arange(len(rows) + 1)), (len(rows), n))
    a, expected = DistributedMatrix(local), local.toarray()
    np.testing.assert_array_equal(a.local_rows().toarray(), expected)
    # The caller's matrix keeps its entries, though they are added up.
    assert local.nnz == 3 * len(rows) > a.values.size


def test_what_is_refused(rank_rng, rank, size):
    case, last = Case(rank_rng, rank, size), size - 1
    good = case.whole[case.part(np.arange(N), 0)]
    for error, match, wrong in [
        (TypeError, r"sparse array of SciPy, but got ndarray. scipy.sparse.csr_array\(x\) converts", np.eye(3)),
        (TypeError, "rows must have dtype float32, .* but got int64", sp.csr_matrix(np.eye(3, dtype=int))),
        (ValueError, f"must have the same number of columns|the ranks' rows, .* add up to {N}", good[:, :-1]),
    ]:
        with pytest.raises(error, match=match):
            DistributedMatrix(wrong if rank == last else good)
    for columns in (-1, 2.5):
        with pytest.raises(ValueError, match=f"columns must be an integer, zero or more, but got {columns}"):
            DistributedMatrix(good, columns=columns if rank == last else case.columns[rank])
    with pytest.raises(ValueError, match=rf"columns=\[.*\] adds up to {N + size}, but the matrix has {N}"):
        DistributedMatrix(good, columns=case.columns[rank] + 1)
    square = DistributedMatrix.from_scipy(sp.eye(N, format="csr") if rank == 0 else None)
    for method in ("gmres", "direct"):
        with pytest.raises(ValueError, match=rf"DistributedMatrix.solve: .* rank {last}'s part of {N}"):
            square.solve(np.ones(square.local_shape[0] + (rank == last)), method=method)
    with pytest.raises(ValueError, match=f"counts must be {size} numbers, none negative, that add up to {N} rows, but got"):
        DistributedMatrix.from_scipy(case.whole if rank == 0 else None, counts=[1] * size)
    with pytest.raises(ValueError, match=f"root must be a rank from 0 to {size - 1}, but got {size}"):
        DistributedMatrix.from_scipy(case.whole, root=size)
    for counts in (N, [float(N), *[0.0] * (size - 1)], [N + 1, *[-1] * (size - 1)], "rows"):
        with pytest.raises(ValueError, match=rf"counts must be {size} numbers, none negative, that add up to"):
            DistributedMatrix.from_scipy(case.whole if rank == 0 else None, counts=counts)
    with pytest.raises(ValueError, match=rf"shape \(\.\.\., {case.columns[rank]}\), rank {rank}'s part of {N}, but got"):
        case.matrix @ np.ones(case.columns[rank] + 1)
    with pytest.raises(TypeError, match="expected an array of floats .* but got list"):
        case.matrix @ [1.0]
    with pytest.raises(ValueError, match="one for each entry of the rows of rank"):
        case.matrix.with_values(np.ones(len(case.matrix.values) + 1))
    with pytest.raises(ValueError, match="solve: the matrix must be square, .* but is "):
        Case(rank_rng, rank, size, shape=(N, 5)).matrix.solve(np.ones(case.counts[rank]))
    singular = DistributedMatrix(sp.csr_matrix(good.shape))
    with pytest.raises(ValueError, match=r"the matrix \(23, 23\) can't be factorized"):
        singular.solve(case.part(case.y, 0), method="direct")
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("method", ["matvec", "rmatvec"])
def test_wrong_vectors_of_one_rank(rank_rng, rank, size, method):
    """Errors of the first product are raised on all ranks."""
    last = size - 1
    case = Case(rank_rng, rank, size)
    call, length = getattr(case.matrix, method), case.counts[rank]
    for kind, text, wrong in (
        (ValueError, rf"DistributedMatrix.{method}: expected an array of shape .* rank {last}'s part", np.ones(length + 1)),
        (TypeError, rf"DistributedMatrix.{method}: expected an array of floats .* dtype int64", np.ones(length, int)),
    ):
        with pytest.raises(kind, match=text):
            call(wrong if rank == last else np.ones(length))
    if size > 1:
        text = rf"DistributedMatrix.{method}: shapes and dtypes may differ along axis .*rank {last}: \(2, "
        with pytest.raises(ValueError, match=text):
            call(np.ones((2, length) if rank == last else length))
    vector = case.part(case.y, 0)
    whole = case.whole if method == "matvec" else case.whole.T
    np.testing.assert_allclose(call(vector), case.part(whole @ case.y, 0), **CLOSE)


def test_products_in_compiled_functions(rank_rng, rank, size):
    """Values, gradients and products with the Hessian, by x and by the values, against interpreted ones."""
    case = Case(rank_rng, rank, size)
    a, x = case.matrix, case.part(case.y, 0)

    def loss(x, values):
        y = a.with_values(values)
        return mpiad.mpi_allreduce(anp.sum(anp.sin(y @ x) ** 2 * y.T.matvec(x)))

    compiled = mpiad.jit(loss, strict=True)
    for argnum, direction in ((0, x), (1, np.cos(np.arange(len(a.values))))):
        *expected, product = mpiad.make_hvp(loss, argnum)(x, a.values)
        for _ in range(2):
            *found, compiled_product = mpiad.make_hvp(compiled, argnum)(x, a.values)
            for one, other in zip([*found, compiled_product(direction)], [*expected, product(direction)]):
                np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("of", ["matrix", "values", "transpose", "method"])
def test_matrices_that_compiled_functions_read(of, prepared, rank_rng, rank, size):
    """Without an ordinary product before, and after a change of the values in place."""
    case = Case(rank_rng, rank, size)
    a, x, dense = case.matrix, case.part(case.y, 0), case.whole
    if prepared:
        a @ x
    matvec, transposed = a.matvec, a.T
    products = {
        "matrix": lambda x: a @ x,
        "values": lambda x: a.with_values(2.0 * a.values) @ (0.5 * x),
        "transpose": lambda x: transposed @ x,
        "method": lambda x: matvec(x),
    }
    compiled = mpiad.jit(products[of], strict=True)
    expected = case.part((dense.T if of == "transpose" else dense) @ case.y, 0)
    for factor in (1.0, 1.0, 3.0):
        a.values[:] = factor * a.values
        expected = factor * expected
        np.testing.assert_allclose(compiled(x), expected, **CLOSE)
        _, tangent = mpiad.jvp(lambda x: anp.sin(compiled(x)), x, x)
        np.testing.assert_allclose(tangent, np.cos(expected) * expected, **CLOSE)
