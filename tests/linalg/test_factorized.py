"""`factorized` against dense matrices of the whole grid in one process, and closed forms of the derivatives."""

import gc
import importlib
import sys
import weakref

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse
from mpi4py import MPI

import mpiad
import mpiad.timestepping
from mpiad.domain import Domain
from mpiad.linalg import DistributedMatrix, factorized
from mpiad.programs import program_cache
from mpiad.testing import check_grads

factorized_module = importlib.import_module("mpiad.linalg.factorized")
SHAPE = (9, 8)
WIND = 0.3


def stencil(v):
    """The difference operator of the tests on a padded block: diffusion and upwind advection, not symmetric."""
    u = v[1:-1, 1:-1]
    return 4 * u - v[2:, 1:-1] - v[:-2, 1:-1] - v[1:-1, 2:] - v[1:-1, :-2] + WIND * (u - v[:-2, 1:-1])


def whole_stencil():
    """The same operator as a dense matrix, by one unit vector after the other."""
    count = SHAPE[0] * SHAPE[1]
    units = np.eye(count).reshape(count, *SHAPE)
    return np.stack([stencil(np.pad(unit, 1)).ravel() for unit in units], axis=1)


class Case:
    def __init__(self, rank_rng, method="auto"):
        self.domain, rng = Domain(SHAPE), rank_rng(50)
        self.k, self.b, self.w = np.exp(rng.standard_normal(SHAPE)), rng.standard_normal(SHAPE), rng.standard_normal(SHAPE)
        self.several = rng.standard_normal((3, *SHAPE))
        self.differences = whole_stencil()
        self.matrix = np.eye(self.b.size) + self.k.ravel()[:, None] * self.differences
        self.method = method

    def local(self, whole):
        return whole[(..., *self.domain.owned)]

    def matvec(self, u, k):
        return u + k * stencil(self.domain.exchange(u))

    def solver(self, k):
        return factorized(self.matvec, self.local(self.b), k, pattern=self.domain, method=self.method)

    def close(self, block, whole):
        np.testing.assert_allclose(
            block, self.local(np.reshape(whole, (*np.shape(whole)[:-1], *SHAPE))), rtol=1e-9, atol=1e-11
        )


@pytest.fixture(params=["auto", "schwarz", "compiled"])
def case(request, rank_rng):
    case = Case(rank_rng, "auto" if request.param == "compiled" else request.param)
    if request.param == "compiled":
        domain = case.domain
        case.matvec = mpiad.jit(lambda u, k: u + k * stencil(domain.exchange(u)), strict=True)
    return case


def test_solutions_and_batches(case):
    solve = case.solver(case.local(case.k))
    assert solve.shape == case.matrix.shape and solve.T.T is solve
    case.close(solve(case.local(case.b)), np.linalg.solve(case.matrix, case.b.ravel()))
    case.close(solve.T(case.local(case.b)), np.linalg.solve(case.matrix.T, case.b.ravel()))
    columns = case.several.reshape(3, -1).T
    case.close(solve(case.local(case.several)), np.linalg.solve(case.matrix, columns).T)
    case.close(solve(case.local(case.several[:, None]))[:, 0], np.linalg.solve(case.matrix, columns).T)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_in_closed_form(case, transposed):
    """L = Σ w u³ with A u = b, or Aᵀ u = b: λ solves the other system with 3 w u², and k̄ = -λ D u for A = 1 + k D."""

    def loss(b, k):
        solve = case.solver(k)
        u = (solve.T if transposed else solve)(b)
        return case.domain.sum(case.local(case.w) * u**3)

    total, (b_bar, k_bar) = mpiad.value_and_grad(loss, argnum=(0, 1))(case.local(case.b), case.local(case.k))
    own, other = (case.matrix.T, case.matrix) if transposed else (case.matrix, case.matrix.T)
    u = np.linalg.solve(own, case.b.ravel())
    multiplier = np.linalg.solve(other, 3 * case.w.ravel() * u**2)
    left, right = (u, multiplier) if transposed else (multiplier, u)
    np.testing.assert_allclose(total, np.sum(case.w.ravel() * u**3), rtol=1e-10)
    case.close(b_bar, multiplier)
    case.close(k_bar, -left * (case.differences @ right))


def test_higher_orders_and_batches(case, size):
    b, k = case.local(case.b), case.local(case.k)

    def loss(x):
        solve = case.solver(anp.exp(0.1 * x["k"]))
        first = solve(anp.stack([x["b"], anp.sin(x["b"])]))
        return case.domain.sum(anp.sum(first, axis=0) ** 2) + case.domain.sum(solve.T(first[1]) ** 2)

    if size == 1:
        check_grads(loss, {"b": b, "k": k}, order=1)
    direction = {"b": 0.5 * b**2, "k": np.cos(k)}
    product = mpiad.hvp(loss)({"b": b, "k": k}, direction)
    step = 1e-4
    (above, up), (below, down) = (
        mpiad.value_and_grad(loss)({n: {"b": b, "k": k}[n] + s * direction[n] for n in "bk"}) for s in (step, -step)
    )
    for n in "bk":
        np.testing.assert_allclose(product[n], (up[n] - down[n]) / (2 * step), rtol=2e-5, atol=1e-6)
    slope = case.domain.sum(sum(direction[n] * (up[n] + down[n]) / 2 for n in "bk"))
    np.testing.assert_allclose((above - below) / (2 * step), slope, rtol=1e-6)
    _, tangent = mpiad.make_jvp(lambda x: case.solver(x["k"])(x["b"]))({"b": b, "k": k})(direction)
    # A u̇ = ḃ - k̇ D u, for A = 1 + k D.
    u = np.linalg.solve(case.matrix, case.b.ravel())
    right = 0.5 * case.b.ravel() ** 2 - np.cos(case.k.ravel()) * (case.differences @ u)
    case.close(tangent, np.linalg.solve(case.matrix, right))


def test_compiled_and_in_a_loop_of_steps(case):
    """Three implicit steps, compiled or not, with the closed form of the gradient with respect to the first state."""
    solve = case.solver(case.local(case.k))
    step = mpiad.jit(lambda u: solve(u + 0.1 * anp.sin(u)))

    def loss(u, advance):
        for _ in range(3):
            u = advance(u)
        return case.domain.sum(u**2)

    u, states = case.b.ravel(), []
    for _ in range(3):
        states.append(u)
        u = np.linalg.solve(case.matrix, u + 0.1 * np.sin(u))
    g = 2 * u
    for u in states[::-1]:
        g = (1 + 0.1 * np.cos(u)) * np.linalg.solve(case.matrix.T, g)
    for advance in (step, step.fun):
        case.close(mpiad.grad(loss)(case.local(case.b), advance), g)


@pytest.mark.few(2)
def test_derivatives_of_compiled_loops(case, monkeypatch):
    """First and second derivatives of a loop of two steps, with and without compilation, in closed form."""
    compiled = []
    original = program_cache.Entry
    monkeypatch.setattr(program_cache, "Entry", lambda *args: compiled.append(original(*args)) or compiled[-1])
    solve, b, v = case.solver(case.local(case.k)), case.local(case.b), case.local(case.several[0])

    def loop(u):
        for _ in range(2):
            u = solve.T(solve(u)) + u**2
        return u

    def loss(u):
        return case.domain.sum(loop(u) ** 3)

    inverse = np.linalg.inv(case.matrix)
    whole, direction = inverse.T @ inverse, case.several[0].ravel()

    def derivatives(u):
        states = [u]
        for _ in range(2):
            states.append(whole @ states[-1] + states[-1] ** 2)
        jacobian = np.eye(u.size)
        for state in states[:2]:
            jacobian = (whole + 2.0 * np.diag(state)) @ jacobian
        return states[-1], jacobian

    last, jacobian = derivatives(case.b.ravel())
    h = 1e-5
    ends = [derivatives(case.b.ravel() + s * direction) for s in (h, -h)]
    (above, below) = (3.0 * j.T @ u**2 for u, j in ends)
    for fun in (loss, mpiad.jit(loss, strict=True)):
        case.close(mpiad.grad(fun)(b), 3.0 * jacobian.T @ last**2)
        product = mpiad.hvp(fun)(b, v)
        np.testing.assert_allclose(product, case.local(((above - below) / (2 * h)).reshape(SHAPE)), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(mpiad.make_hvp(fun)(b).product(v), product, rtol=1e-8, atol=1e-8)
    for fun in (loop, mpiad.jit(loop, strict=True)):
        point = mpiad.linearize(fun)(b)
        case.close(point.jvp(v), jacobian @ direction)
        case.close(point.vjp(v), jacobian.T @ direction)
        case.close(point.vjp(case.local(case.several), batch=True), case.several.reshape(3, -1) @ jacobian)
    steps = [
        node.data.kind for entry in compiled for node in entry.replays.schedule.program.nodes if node.kind == "communicate"
    ]
    assert "operate" in steps and "opaque" not in steps


def test_params_that_change_between_compiled_steps(case):
    """The reverse pass uses the factors of each step; a change of the closure is an error on all ranks."""
    k = case.local(case.k).copy()
    solve = case.solver(k)
    step = mpiad.jit(lambda u: solve(u) + u, strict=True)

    def loss(u):
        for _ in range(3):
            u = step(u)
            k[...] *= 1.5
        return case.domain.sum(u**2)

    for _ in range(2):
        k[...] = case.local(case.k)
        found = mpiad.grad(loss)(case.local(case.b))
        u, inverses = case.b.ravel(), []
        for power in range(3):
            changed = np.eye(u.size) + 1.5**power * case.k.ravel()[:, None] * case.differences
            inverses.append(np.eye(u.size) + np.linalg.inv(changed))
            u = inverses[-1] @ u
        g = 2.0 * u
        for inverse in inverses[::-1]:
            g = inverse.T @ g
        case.close(found, g)
    factor = np.ones(1)
    reading = factorized(lambda u: factor[0] * u, k, pattern=case.domain, method=case.method)
    compiled = mpiad.jit(lambda u: reading(u), strict=True)
    case.close(compiled(case.local(case.b)), case.b.ravel())
    factor[0] = 2.0
    with pytest.raises(RuntimeError, match="closure has changed since it was factored"):
        compiled(case.local(case.b))
    with pytest.raises(ValueError, match="b must have shape"):
        compiled(np.ones((2, 2)))


def test_where_small_systems_are_solved(rank_rng, size, monkeypatch):
    """Up to 20,000 unknowns, rank 0 solves for all ranks; larger systems are solved by an iteration on several ranks."""
    iterations, original = [], factorized_module.iterate
    monkeypatch.setattr(factorized_module, "iterate", lambda *args: iterations.append(1) or original(*args))
    case = Case(rank_rng)
    expected = np.linalg.solve(case.matrix, case.b.ravel())
    for most in (20_000, 10):
        assert factorized_module._MOST_GATHERED == 20_000
        with monkeypatch.context() as changed:
            changed.setattr(factorized_module, "_MOST_GATHERED", most)
            solve = case.solver(case.local(most * case.k / most))
        case.close(solve(case.local(case.b)), expected)
        assert len(iterations) == int(most == 10 and size > 1)


def test_batches_of_products(case, monkeypatch):
    """Several products of a linearization, in both directions, are as many columns of one solve."""
    kind, solves = factorized_module._Factors, []
    original = kind.solved
    monkeypatch.setattr(kind, "solved", lambda *args: solves.append(1) or original(*args))
    b, k, several = case.local(case.b), case.local(case.k), case.local(case.several)
    point = mpiad.linearize(lambda x: case.solver(x["k"])(anp.sin(x["b"])))({"b": b, "k": k})
    whole, u = np.linalg.inv(case.matrix), np.linalg.solve(case.matrix, np.sin(case.b.ravel()))
    by_b, by_k = whole * np.cos(case.b.ravel()), -whole * (case.differences @ u)
    columns = case.several.reshape(3, -1)
    solves.clear()
    found = point.vjp(several, batch=True)
    case.close(found["b"], columns @ by_b)
    case.close(found["k"], columns @ by_k)
    assert len(solves) == 1
    case.close(point.jvp({"b": several, "k": several**2}, batch=True), columns @ by_b.T + columns**2 @ by_k.T)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_a_scan_whose_steps_share_the_factors(rank_rng, monkeypatch, checkpoints):
    """Three steps that call `factorized` with the params of the scan; the gradient with respect to k in closed form."""
    case, count = Case(rank_rng), []
    computed = factorized_module.probed_matrix
    monkeypatch.setattr(factorized_module, "probed_matrix", lambda *args: count.append(1) or computed(*args))
    operator = case.matvec  # one object: the factors belong to it

    def step(u, number, k):
        return factorized(operator, u, k, pattern=case.domain)(u)

    def loss(k):
        return case.domain.sum(mpiad.timestepping.scan(step, case.local(case.b), 3, k, checkpoints=checkpoints) ** 2)

    states = [case.b.ravel()]
    for _ in range(3):
        states.append(np.linalg.solve(case.matrix, states[-1]))
    g, k_bar = 2 * states[-1], np.zeros(case.b.size)
    for u in states[:0:-1]:
        g = np.linalg.solve(case.matrix.T, g)
        k_bar -= g * (case.differences @ u)
    case.close(mpiad.grad(loss)(case.local(case.k)), k_bar)
    assert len(count) == 1
    mpiad.grad(loss)(2 * case.local(case.k))
    assert len(count) == 2


def test_complex_operators(rank_rng):
    domain, rng = Domain(SHAPE), rank_rng(50)
    b = rng.standard_normal(SHAPE) + 1j * rng.standard_normal(SHAPE)
    solve = factorized(lambda u: (2 + 1j) * u + stencil(domain.exchange(u)), np.zeros(domain.local_shape), pattern=domain)
    whole = (2 + 1j) * np.eye(b.size) + whole_stencil()
    for transposed, matrix in ((False, whole), (True, whole.T)):
        found = (solve.T if transposed else solve)(b[domain.owned])
        np.testing.assert_allclose(found, np.linalg.solve(matrix, b.ravel()).reshape(SHAPE)[domain.owned], rtol=1e-9)
    real = factorized(lambda u: 5 * u + stencil(domain.exchange(u)), np.zeros(domain.local_shape), pattern=domain)
    expected = np.linalg.solve(5 * np.eye(b.size) + whole_stencil(), b.ravel()).reshape(SHAPE)
    np.testing.assert_allclose(real(b[domain.owned]), expected[domain.owned], rtol=1e-9)


def rows_of(rank_rng, rank, size):
    """A random sparse matrix with a strong diagonal on all ranks, and this rank's rows; lengths differ between ranks."""
    lengths = [7 + 3 * r for r in range(size)]
    rng, total = rank_rng(60), sum(lengths)
    whole = scipy.sparse.random_array((total, total), density=0.2, rng=rng, format="csr") + 4 * scipy.sparse.eye_array(
        total
    )
    start = sum(lengths[:rank])
    return whole.tocsr(), slice(start, start + lengths[rank]), rng.standard_normal((2, total))


def test_a_distributed_matrix_and_its_values(rank_rng, rank, size):
    whole, own, (b, w) = rows_of(rank_rng, rank, size)
    matrix = DistributedMatrix(whole[own])

    def loss(values):
        return mpiad.mpi_allreduce(anp.sum(w[own] * factorized(matrix.with_values(values))(b[own])))

    found = mpiad.grad(loss)(matrix.values)
    dense = whole.toarray()
    u, multiplier = np.linalg.solve(dense, b), np.linalg.solve(dense.T, w)
    np.testing.assert_allclose(factorized(matrix)(b[own]), u[own], rtol=1e-9, atol=1e-12)
    rows, columns = matrix.indices
    np.testing.assert_allclose(found, -multiplier[rows] * u[columns], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("method", ["gathered", "schwarz"])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_a_matrix_in_single_precision(rank_rng, rank, size, dtype, method):
    """Right-hand sides in double precision are solved in double precision."""
    whole, own, b = rows_of(rank_rng, rank, size)
    whole, b = whole.astype(np.float32), b.astype(dtype) * (1 if dtype == np.float64 else 1 + 0.5j)
    solve, dense = factorized(DistributedMatrix(whole[own]), method=method), whole.toarray().astype(float)
    for found, expected in (
        (solve(b[:, own]), np.linalg.solve(dense, b.T).T),
        (solve.T(b[:, own]), np.linalg.solve(dense.T, b.T).T),
    ):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected[:, own], rtol=1e-9, atol=1e-10)


def test_a_sparse_pattern(rank_rng, rank, size):
    whole, own, (b, _) = rows_of(rank_rng, rank, size)
    matrix = DistributedMatrix(whole[own])
    solve = factorized(matrix.operator(), b[own], matrix.values, pattern=whole[own] != 0)
    np.testing.assert_allclose(solve(b[own]), np.linalg.solve(whole.toarray(), b)[own], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(solve.T(b[own]), np.linalg.solve(whole.toarray().T, b)[own], rtol=1e-9, atol=1e-12)


def test_a_missing_entry_is_named(rank_rng, rank, size):
    whole, own, (b, _) = rows_of(rank_rng, rank, size)
    matrix, row = DistributedMatrix(whole[own]), whole.shape[0] - 2
    column = int(next(c for c in whole[[row]].nonzero()[1] if c != row))
    pattern = (whole != 0).tolil()
    pattern[row, column] = False
    with pytest.raises(ValueError, match=f"in row {row}, the entry of column {column} is missing"):
        factorized(matrix.operator(), b[own], matrix.values, pattern=pattern.tocsr()[own])


def test_without_a_pattern_on_one_rank(rng):
    matrix = rng.standard_normal((6, 6)) + 6 * np.eye(6)
    solve = factorized(lambda u, a: a @ u, np.zeros(6), matrix, comm=MPI.COMM_SELF)
    b = rng.standard_normal(6)
    np.testing.assert_allclose(solve(b), np.linalg.solve(matrix, b), rtol=1e-12)
    with pytest.raises(ValueError, match=r"can't be factorized.*largest in row 3"):
        factorized(lambda u: u * np.array([1.0, 2.0, 3.0, 0.0, 5.0]), np.zeros(5), comm=MPI.COMM_SELF)


def test_changed_params_are_factored_again(case):
    k = case.local(case.k).copy()
    solve = case.solver(k)
    solve.T(case.local(case.b))
    k *= 3.0  # in place
    changed = np.eye(case.b.size) + 3 * case.k.ravel()[:, None] * case.differences
    case.close(solve(case.local(case.b)), np.linalg.solve(changed, case.b.ravel()))
    case.close(solve.T(case.local(case.b)), np.linalg.solve(changed.T, case.b.ravel()))


def test_an_operator_that_cannot_be_followed(size):
    """The solutions of k c u = 1; the attribute k of the operator isn't watched."""

    class Diffusion:
        k = 2.0

        def __call__(self, u, c):
            return self.k * c * u

    op, c, ones, domain = Diffusion(), np.ones(3), np.ones(3), Domain(3 * size)
    inverse = factorized(op, ones, c, pattern=domain)
    np.testing.assert_allclose(inverse(ones), 0.5)
    c[:] = 10.0
    np.testing.assert_allclose(inverse(ones), 0.05)
    op.k, c[:] = 4.0, 1.0
    np.testing.assert_allclose(factorized(op, ones, c, pattern=domain)(ones), 0.25)
    op.k = 5.0
    np.testing.assert_allclose(factorized(op, ones, c, pattern=domain)(ones), 0.2)


def test_a_changed_closure_is_an_error_on_all_ranks(rank, size):
    domain, factor = Domain(SHAPE), np.ones(1)
    solve = factorized(lambda u: factor[0] * u, np.zeros(domain.local_shape), pattern=domain)
    if rank == size - 1:
        factor[0] = 2.0
    with pytest.raises(RuntimeError, match="closure has changed since it was factored"):
        solve(np.ones(domain.local_shape))


def test_refusals(rank, size):
    domain = Domain(SHAPE)
    like = np.zeros(domain.local_shape)
    for error, message, call in (
        (ValueError, "method must be one of", lambda: factorized(lambda u: u, like, pattern=domain, method="lu")),
        (TypeError, "matvec must be a function", lambda: factorized(3, like, pattern=domain)),
        (TypeError, "like must be an array", lambda: factorized(lambda u: u, 3, pattern=domain)),
        (ValueError, "domain's local shape", lambda: factorized(lambda u: u, np.zeros(3), pattern=domain)),
        (
            TypeError,
            "pattern must be a Domain or a sparse matrix",
            lambda: factorized(lambda u: u, like, pattern=np.eye(3)),
        ),
        (
            ValueError,
            "isn't linear",
            lambda: factorized(lambda u: u + 0.5 * u**2 * (rank == size - 1), like, pattern=domain),
        ),
        (ValueError, "without a pattern", lambda: factorized(lambda u: u, np.zeros(3000))),
        (ValueError, "must have shape", lambda: factorized(lambda u: u, like, pattern=domain)(np.zeros((2, 2)))),
    ):
        with pytest.raises(error, match=message):
            call()
    if size > 1:
        with pytest.raises(ValueError, match="without a pattern, the operator must be on one rank"):
            factorized(lambda u: u, like)
        rows = scipy.sparse.csr_array(np.ones((like.size, np.prod(SHAPE))))
        with pytest.raises(ValueError, match="factorized: all ranks must give the same .*pattern=a sparse matrix"):
            factorized(lambda u: u, like, pattern=rows if rank else domain)
        with pytest.raises(ValueError, match="factorized: all ranks must give the same .*method='auto'.*method='gathered'"):
            factorized(lambda u: u, like, pattern=domain, method="gathered" if rank else "auto")


def test_factors_of_old_operators_are_freed():
    """Each call has another operator; only the factors of a few of them stay in memory."""
    domain, operators = Domain(SHAPE), weakref.WeakSet()
    for k in range(12):
        operator = lambda u, k=k: (k + 2.0) * u  # noqa: E731
        operators.add(operator)
        b = np.ones(domain.local_shape)
        np.testing.assert_allclose(factorized(operator, b, pattern=domain)(b), b / (k + 2.0), rtol=1e-12)
    del operator
    gc.collect()
    assert len(operators) <= 4


@pytest.mark.parametrize("count", [None, 0, 2])
def test_gradients_on_ranks_without_unknowns(rank, count):
    """All unknowns are on the first rank; without a count of right-hand sides there is one, without an axis."""
    own = np.arange(3 if rank == 0 else 0)
    b = np.ones((*([] if count is None else [count]), len(own)))

    def loss(k):
        solve = factorized(lambda u, k: k * u, np.ones(len(own)), k, pattern=(own, own))
        return mpiad.mpi_allreduce(anp.sum(solve(b) ** 2 + solve.T(b)))

    total = 3 * (1 if count is None else count)
    value, k_bar = mpiad.value_and_grad(loss)(2.0)
    assert value == pytest.approx(total * 0.75)
    assert k_bar == pytest.approx(-0.5 * b.size)


def test_factors_after_a_communicator_of_the_same_domain_was_freed():
    domain, copy = Domain((9, 8)), MPI.COMM_WORLD.Dup()
    one = np.ones(domain.local_shape)
    factorized(lambda u: 2.0 * u, one, pattern=domain, comm=copy)
    copy.Free()
    assert np.all(factorized(lambda u: 4.0 * u, one, pattern=domain)(one) == 0.25)


@pytest.mark.skipif("MPI.COMM_WORLD.size == 1")
@pytest.mark.unguarded
@pytest.mark.parametrize("is_large", [False, True])
def test_messages_of_solves_with_gathered_factors_after_the_comparison(rank_rng, operations, monkeypatch, is_large):
    """Each rank has the factors of a small matrix: a solve takes one message, or divides right-hand sides among ranks."""
    if is_large:
        monkeypatch.setattr("mpiad.linalg.distributed_matrix._MOST_COPIED", 1)
    case = Case(rank_rng, "gathered")
    solve, b, several = case.solver(case.local(case.k)), case.local(case.b), case.local(case.several)
    divided = ["Allreduce", "Alltoallv", "Alltoallv"]
    single = divided if is_large else ["Allreduce", "Allgatherv"]
    assert operations(lambda: solve(b)) == operations(lambda: solve.T(b)) == single
    # Three right-hand sides are too few for four ranks.
    of_several = single if mpiad.mpi_size() > 3 else divided
    assert operations(lambda: solve(several)) == operations(lambda: solve.T(several)) == of_several
    columns = case.several.reshape(3, -1).T
    for inverse, matrix in ((solve, case.matrix), (solve.T, case.matrix.T)):
        case.close(inverse(b), np.linalg.solve(matrix, case.b.ravel()))
        case.close(inverse(several), np.linalg.solve(matrix, columns).T)


@pytest.mark.few(1)
@pytest.mark.unguarded
@pytest.mark.parametrize("first_solves", [0, 1_000_000], ids=["compiled", "SuperLU"])
def test_solves_of_a_program_take_one_message_and_few_calls(rank_rng, size, operations, monkeypatch, first_solves):
    """Products with the Jacobian of a loop of implicit steps; each step adds the same number of calls of Python."""
    monkeypatch.setattr("mpiad.linalg.sparse_factors._FIRST_SOLVES", first_solves)
    case = Case(rank_rng, "gathered")
    solve, v = case.solver(case.local(case.k)), case.local(case.w)
    step = mpiad.jit(lambda u, k, m: solve(u + 0.1 * m), strict=True)
    inverse, called = np.linalg.inv(case.matrix), []
    for steps in (4, 12):
        point = mpiad.linearize(lambda m, n=steps: mpiad.timestepping.scan(step, case.local(case.b), n, m))(v)
        product = lambda point=point: point.vjp(point.jvp(v))  # noqa: E731
        jacobian = 0.1 * sum(np.linalg.matrix_power(inverse, k + 1) for k in range(steps))
        for _ in range(2):
            case.close(product(), jacobian.T @ jacobian @ case.w.ravel())
        assert operations(product) == ["Allgatherv"] * (2 * steps if size > 1 else 0)
        frames = []
        sys.setprofile(lambda frame, event, _, frames=frames: frames.append(frame.f_code) if event == "call" else None)
        try:
            product()
        finally:
            sys.setprofile(None)
        called.append(len(frames))
    assert called[1] - called[0] <= 12 * (12 - 4) * 2


@pytest.mark.skipif("MPI.COMM_WORLD.size == 1")
@pytest.mark.parametrize("method", ["gathered", "schwarz"])
def test_dtypes_that_differ_between_ranks_are_refused_on_all_ranks(rank_rng, rank, method):
    case = Case(rank_rng, method)
    b, solve = case.local(case.b), case.solver(case.local(case.k))
    with pytest.raises(ValueError, match="right-hand sides of dtype .* and .*, but all ranks must pass the same dtype"):
        solve(b.astype(complex) if rank == 1 else b)
    with pytest.raises(ValueError, match="all ranks must"):
        mpiad.linalg.newton(
            lambda u: case.matvec(u, 1.0) - 1.0,
            b.astype(np.float32) if rank == 1 else b, pattern=case.domain, jacobian="sparse", method="gmres",
        )  # fmt: skip
    with pytest.raises(ValueError, match="all ranks must"):
        solve.matrix.solve(b.ravel().astype(np.float32) if rank == 1 else b.ravel(), method="direct")
    case.close(solve(b), np.linalg.solve(case.matrix, case.b.ravel()))


def _scaled(u, kappa, decay=0.0):
    return kappa * u + decay * u


def _scaled_by_name(u, params):
    return (params["a"] if "a" in params else 10.0 * params["b"]) * u


def test_params_of_another_structure_have_factors_of_their_own(size):
    """Further params, and params with other names, whose first leaves have the same bits; beside a division."""
    domain = Domain(3 * size)
    b = np.arange(1.0, 3 * size + 1)[domain.owned]
    for _ in range(2):
        for params, divisor in (((2.0,), 2.0), ((2.0, 8.0), 10.0)):
            np.testing.assert_allclose(factorized(_scaled, b, *params, pattern=domain)(b), b / divisor, rtol=1e-14)
        for name, divisor in (("a", 2.0), ("b", 20.0)):
            found = factorized(_scaled_by_name, b, {name: 2.0}, pattern=domain)(b)
            np.testing.assert_allclose(found, b / divisor, rtol=1e-14)
        total = lambda c: domain.sum(factorized(_scaled, b, 2.0, c, pattern=domain)(b))  # noqa: E731
        value, slope = mpiad.value_and_grad(total, shared=True)(8.0)
        assert (value, slope) == pytest.approx((domain.sum(b) / 10, -domain.sum(b) / 100), rel=1e-13)
