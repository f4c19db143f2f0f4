"""Iterations of Krylov methods that are compiled with the user's functions, compared with dense solves."""

from __future__ import annotations

from types import SimpleNamespace

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse as sp

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import DistributedMatrix, compiled_iteration, factorized, solve

SETTINGS = {"method": "cg", "rtol": 1e-12}
METHODS = pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])


def sizes(size):
    return [4 + rank for rank in range(size)]


def block(rank, seed=0):
    """A symmetric positive definite matrix of one rank, and a vector through which the ranks are coupled."""
    n = 4 + rank
    rng = np.random.default_rng([seed, rank])
    a = rng.standard_normal((n, n))
    return a @ a.T + n * np.eye(n), rng.standard_normal(n)


def coupled(matrix, vector, u):
    return _with_coupling(anp.dot(matrix, u), vector, u)


def _with_coupling(product, vector, u):
    return product + vector * mpiad.mpi_allreduce(anp.dot(vector, u))


def dense_solution(size, rank, b, matrices, factor=1.0):
    """Return this rank's part of the solution of the whole system, and the part of A⁻¹ w for w = 1, 2, 3, …"""
    whole = np.zeros((sum(sizes(size)),) * 2)
    offsets = np.cumsum([0, *sizes(size)])
    for k, matrix in enumerate(matrices):
        whole[offsets[k] : offsets[k + 1], offsets[k] : offsets[k + 1]] = matrix
    v = np.concatenate([block(k)[1] for k in range(size)])
    return np.linalg.solve(factor * (whole + np.outer(v, v)), np.concatenate(b))[offsets[rank] : offsets[rank + 1]]


@pytest.fixture
def right_sides(size):
    return [np.random.default_rng([5, rank]).standard_normal(n) for rank, n in enumerate(sizes(size))]


@pytest.fixture
def programs(monkeypatch):
    """The results of all attempts to compile an iteration: None if it must be interpreted."""
    found = []
    original = compiled_iteration.optional_program

    def spied(*args):
        found.append(original(*args))
        return found[-1]

    monkeypatch.setattr(compiled_iteration, "optional_program", spied)
    monkeypatch.setattr(compiled_iteration, "_known", [])
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 0)
    return found


@METHODS
@pytest.mark.unguarded
def test_one_program_serves_all_values_of_params(right_sides, programs, rank, size, method):
    _, v = block(rank)

    def matvec(u, matrix, factor):
        return factor * coupled(matrix, v, u)

    for seed, factor in ((0, 1.0), (1, 3.0), (2, 0.5)):
        x = solve(matvec, right_sides[rank], block(rank, seed)[0], factor, method=method, rtol=1e-12)
        expected = dense_solution(size, rank, right_sides, [block(k, seed)[0] for k in range(size)], factor)
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-11)
    assert len(programs) == 2 and None not in programs  # of the iteration and the final check


@METHODS
@pytest.mark.parametrize("first", [1, 4, 9])
@pytest.mark.unguarded
def test_a_solve_goes_on_with_a_program(monkeypatch, programs, rank, size, method, first):
    """The first iterations are interpreted, and the others compiled, in the middle of a solve; closed form."""
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", first)
    n, eigenvalues = 60, np.linspace(1.0, 40.0, 60)
    own = slice(n * rank // size, n * (rank + 1) // size)
    norms = []
    b = np.cos(np.arange(n))[own]
    x = solve(lambda u: eigenvalues[own] * u, b, method=method, rtol=1e-12, callback=norms.append)
    np.testing.assert_allclose(x, b / eigenvalues[own], rtol=1e-9)
    assert len(norms) > 20 and programs and None not in programs


@METHODS
@pytest.mark.parametrize("dtype", [np.float32, complex])
@pytest.mark.unguarded
def test_batches_and_other_dtypes(right_sides, programs, rank, size, method, dtype):
    """Three systems with a preconditioner; complex systems are interpreted."""
    matrix, v = (x.astype(dtype) for x in block(rank))
    diagonal = np.diag(matrix)
    b = np.stack([right_sides[rank], 0.0 * right_sides[rank], 1e-3 * right_sides[rank] ** 2]).astype(dtype)

    def matvec(u):
        return anp.dot(u, matrix) + v * mpiad.mpi_allreduce(anp.sum(v * u, axis=1))[:, None]

    x = solve(matvec, b, batch=1, preconditioner=lambda r: r / diagonal, method=method, rtol=1e-6)
    assert x.dtype == dtype
    matrices = [block(k)[0] for k in range(size)]
    for k, found in enumerate(x):
        parts = [[r, 0.0 * r, 1e-3 * r**2][k] for r in right_sides]
        expected = dense_solution(size, rank, parts, matrices)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(np.concatenate(parts)).max())
    assert bool(programs) == (dtype is np.float32) and None not in programs


@pytest.mark.unguarded
def test_one_program_serves_bases_of_any_length(programs, rank, size):
    """GMRES without restarts, against the dense solve."""
    n, eigenvalues = 60, np.linspace(1.0, 40.0, 60)
    own = slice(n * rank // size, n * (rank + 1) // size)
    norms, b = [], np.ones(n)[own]
    x = solve(lambda u: eigenvalues[own] * u, b, method="gmres", restart=60, rtol=1e-12, callback=norms.append)
    np.testing.assert_allclose(x, b / eigenvalues[own], rtol=1e-9)
    assert len(norms) > 33 and len(programs) == 2 and None not in programs


@METHODS
@pytest.mark.parametrize("interprets", [False, True])
@pytest.mark.unguarded
def test_derivatives(right_sides, programs, rank, size, method, interprets):
    """Ranks that compile, and the last rank, which interprets if its function reads an iterator."""
    matrix, v = block(rank)
    read = iter(()) if interprets and rank == size - 1 else ()
    weights = [np.arange(1.0, n + 1) for n in sizes(size)]

    def loss(matrix, b):
        x = solve(lambda u, matrix: coupled(matrix, v, u) + len([*read]), b, matrix, method=method, rtol=1e-12)
        return anp.sum(weights[rank] * x**2)

    by_matrix, by_b = mpiad.grad(loss, (0, 1), objective="sum")(matrix, right_sides[rank])
    matrices = [block(k)[0] for k in range(size)]
    everywhere = [dense_solution(size, k, right_sides, matrices) for k in range(size)]
    cotangents = [2.0 * w * x for w, x in zip(weights, everywhere)]
    adjoint = dense_solution(size, rank, cotangents, matrices)
    np.testing.assert_allclose(by_b, adjoint, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(by_matrix, -np.outer(adjoint, everywhere[rank]), rtol=1e-8, atol=1e-10)
    # The adjoint solve has a program of the iteration, unless the operator is symmetric, and one of a shorter check.
    assert len(programs) == (3 if method == "cg" else 4)
    assert [program is None for program in programs] == len(programs) * [read != ()]


def _padded_by(kind, u, rank, size, domain, ghosts):
    """Return this rank's block with the entries beside it, zeros at the ends, by one kind of messages."""
    left, right = rank - 1 if rank else None, rank + 1 if rank < size - 1 else None
    zero = np.zeros(1)
    if kind == "exchange":
        before = mpiad.mpi_exchange(u[-1:], right, left, like=zero)
        after = mpiad.mpi_exchange(u[:1], left, right, like=zero)
    elif kind == "send":
        if right is not None:
            mpiad.mpi_send(u[-1:], right)
        before = zero if left is None else mpiad.mpi_recv(zero, left)
        if left is not None:
            mpiad.mpi_send(u[:1], left)
        after = zero if right is None else mpiad.mpi_recv(zero, right)
    elif kind == "isend":
        requests = [mpiad.mpi_irecv(zero, peer) for peer in (left, right) if peer is not None]
        sent = [mpiad.mpi_isend(x, peer) for x, peer in ((u[:1], left), (u[-1:], right)) if peer is not None]
        received = iter(mpiad.mpi_waitall([*requests, *sent]))
        before, after = (zero if peer is None else next(received) for peer in (left, right))
    elif kind == "fetch":
        beside = ghosts.fetch(u)
        before, after = beside[:1] if rank else zero, beside[-1:] if rank < size - 1 else zero
    else:
        return domain.end_exchange(domain.begin_exchange(u))
    return anp.concatenate([before, u, after])


@pytest.mark.parametrize("interprets", [False, True])
@pytest.mark.parametrize("kind", ["exchange", "send", "isend", "fetch", "begin_exchange"])
@pytest.mark.parametrize("method", ["gmres", "bicgstab"])
@pytest.mark.unguarded
def test_adjoint_solves_with_messages(programs, rank, size, method, kind, interprets):
    """Transport along a line, beside complex steps of the dense solve; the last rank may interpret its function."""
    read = iter(()) if interprets and rank == size - 1 else ()
    n, at, domain = 6, np.arange(size * 6), Domain(size * 6)
    own = slice(6 * rank, 6 * rank + 6)
    ghosts = mpiad.GhostExchange([k for k in (6 * rank - 1, 6 * rank + 6) if 0 <= k < len(at)], (6 * rank, 6 * rank + 6))
    ghosts.fetch(np.zeros(6))  # in its first call, ranks compare their arrays, which isn't compiled

    def matvec(u, wind):
        v = _padded_by(kind, u, rank, size, domain, ghosts)
        return (3.0 + 0.1 * at[own] * wind) * u - v[:-2] - v[2:] + wind * (v[2:] - v[:-2]) + len([*read])

    def loss(wind):
        u = solve(matvec, 1.0 + 0.1 * at[own], wind, method=method, rtol=1e-12)
        return mpiad.mpi_allreduce(anp.sum((1 + rank) * u**2))

    def by_hand(wind):
        a = np.diag(3.0 + 0.1 * at * wind) + np.diag((wind - 1.0) * np.ones(len(at) - 1), 1)
        a = a - np.diag((wind + 1.0) * np.ones(len(at) - 1), -1)
        return np.sum((1 + at // n) * np.linalg.solve(a, 1.0 + 0.1 * at) ** 2)

    for wind in (0.2, 0.3, 0.25):  # a second solve has other messages before it
        value, gradient = mpiad.value_and_grad(loss, shared=True)(wind)
        np.testing.assert_allclose(value, by_hand(wind), rtol=1e-10)
        np.testing.assert_allclose(gradient, by_hand(wind + 1e-20j).imag / 1e-20, rtol=1e-9)
        mpiad.mpi_exchange(np.ones(1), (rank + 1) % size, (rank - 1) % size)  # another message between the same ranks
    assert [program is None for program in programs] == len(programs) * [read != ()] and programs


def _dense(lengths, rank):
    """Return two matrices, the slice of this rank's rows and a right-hand side; the first matrix is symmetric."""
    n, ends = sum(lengths), np.cumsum([0, *lengths])
    rng = np.random.default_rng(n)
    a = rng.standard_normal((n, n))
    return (
        a @ a.T + n * np.eye(n),
        np.diag(np.arange(1.0, n + 1)),
        slice(ends[rank], ends[rank + 1]),
        rng.standard_normal(n),
    )


def _gathered(kind, u, size):
    if kind == "allgather":
        return mpiad.mpi_allgather(u, axis=0)
    return anp.concatenate([mpiad.mpi_bcast(u, root) for root in range(size)])


@METHODS
@pytest.mark.parametrize(("kind", "interprets"), [("allgather", False), ("bcast", True)])
@pytest.mark.unguarded
def test_products_with_gathered_unknowns(monkeypatch, programs, rank, size, method, kind, interprets):
    """Only a run tells how long other ranks' arrays are; dense solves, rank 1 without rows, the last may interpret."""
    lengths = [4, 0, 3][:size]
    read = iter(()) if interprets and rank == size - 1 else ()
    a0, a1, own, b = _dense(lengths, rank)
    if method != "cg":
        a1 = a1 + np.triu(a1 @ a0 / len(b))
    weights = 1.0 + np.arange(len(b)) ** 2

    def matvec(u, rows, s):
        return (rows + s * a1[own]) @ _gathered(kind, u, size) + len([*read])

    def loss(s, rows):
        u = solve(mpiad.jit(matvec) if read == () else matvec, b[own] * s, rows, s, method=method, rtol=1e-12)
        return mpiad.mpi_allreduce(anp.sum(weights[own] * u**2))

    def by_hand(s):
        return np.sum(weights * np.linalg.solve(a0 + s * a1, b * s) ** 2)

    interpreted, original = [], compiled_iteration.Operator.interpreted
    spied = lambda *args: interpreted.append(args[1]) or original(*args)  # noqa: E731
    monkeypatch.setattr(compiled_iteration.Operator, "interpreted", spied)
    slope = lambda s: by_hand(s + 1e-20j).imag / 1e-20  # noqa: E731
    for s in (0.5, 1.0, 0.7):
        interpreted.clear()
        value, gradient = mpiad.value_and_grad(lambda s: loss(s, a0[own]), shared=True)(s)
        np.testing.assert_allclose(value, by_hand(s), rtol=1e-10)
        np.testing.assert_allclose(gradient, slope(s), rtol=1e-9)
        u = np.linalg.solve(a0 + s * a1, b * s)
        adjoint = np.linalg.solve((a0 + s * a1).T, 2.0 * weights * u)
        by_rows = mpiad.grad(loss, 1)(s, a0[own])
        np.testing.assert_allclose(by_rows, -np.outer(adjoint, u)[own], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(mpiad.jvp(lambda s: loss(s, a0[own]), s, 2.0)[1], 2.0 * slope(s), rtol=1e-9)
        second = mpiad.hvp(lambda s: loss(s, a0[own]), shared=True)(s, 1.0)
        np.testing.assert_allclose(second, (slope(s + 1e-5) - slope(s - 1e-5)) / 2e-5, rtol=1e-6)
    assert programs and {program is None for program in programs} == {read != ()} == {interpreted != []}


@pytest.mark.parametrize(
    ("method", "kind"), [("cg", "allgather"), ("gmres", "allgather"), ("gmres", "bcast"), ("bicgstab", "bcast")]
)
@pytest.mark.unguarded
def test_other_ranks_with_other_numbers_of_rows(monkeypatch, programs, rank, size, method, kind):
    """The first rank has the same shapes in all solves, and its programs are interpreted in the middle; dense solves."""
    continued, original = [], compiled_iteration.Operator.continued
    spied = lambda *args: continued.append(args[1]) or original(*args)  # noqa: E731
    monkeypatch.setattr(compiled_iteration.Operator, "continued", spied)

    def matvec(u, rows):
        other = mpiad.mpi_exchange(anp.sum(u), (rank + 1) % size, (rank - 1) % size)
        return rows @ _gathered(kind, u, size) + 0.0 * other

    for lengths in ([4, 0, 3], [4, 0, 3], [4, 3, 0], [4, 0, 3], [4, 1, 2]):
        a0, a1, own, b = _dense(lengths[:size], rank)
        whole = a0 if method == "cg" else a0 + np.triu(a1)

        def loss(b):
            return anp.sum((1 + rank) * solve(matvec, b, whole[own], method=method, rtol=1e-12) ** 2)  # noqa: B023

        gradient = mpiad.grad(loss, objective="sum")(b[own])
        weights = 1 + np.repeat(np.arange(size), lengths[:size])
        expected = np.linalg.solve(whole.T, 2 * weights * np.linalg.solve(whole, b))
        np.testing.assert_allclose(gradient, expected[own], rtol=1e-9, atol=1e-11)
    assert programs and None not in programs and bool(continued) == (rank == 0 and size == 3)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def matvec(self, u, diagonal):
        return self.factor * diagonal * u


def operators(kind):
    """Return eight operators with their factors."""
    if kind == "methods":
        models = [Scaled(k + 1.0) for k in range(8)]
        return [(lambda model=model: model.matvec, model.factor) for model in models]
    functions = [
        lambda u, d: 1.0 * d * u, lambda u, d: d * (2.0 * u), lambda u, d: d * u * 3.0, lambda u, d: d * u + 3.0 * d * u,
        lambda u, d: d * (u * 5.0), lambda u, d: 6.0 * (d * u), lambda u, d: d * u * 8 - d * u, lambda u, d: (8.0 * d) * u,
    ]  # fmt: skip
    compiled = [mpiad.jit(fun, strict=True) for fun in functions]
    return [(lambda fun=fun: fun, k + 1.0) for k, fun in enumerate(compiled)]


@pytest.mark.parametrize("kind", ["jit", "methods"])
@pytest.mark.serial
@pytest.mark.unguarded
def test_operators_that_are_used_in_turn_are_all_compiled(monkeypatch, programs, kind):
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 20)
    monkeypatch.setattr(compiled_iteration, "_RUNS_TO_PAY", 80)
    d, b = np.linspace(1.0, 9.0, 12), np.sin(np.arange(12.0))
    given = operators(kind)
    for _ in range(20):
        for matvec, factor in given:
            np.testing.assert_allclose(solve(matvec(), b, d, rtol=1e-12), b / (factor * d), rtol=1e-10)
    assert len(programs) == 16 and None not in programs


@pytest.mark.serial
@pytest.mark.unguarded
def test_methods_of_an_object_that_changes(programs):
    model, d, b = Scaled(2.0), np.linspace(1.0, 9.0, 12), np.sin(np.arange(12.0))
    for factor in (2.0, 3.0, 3.0, 5.0):
        model.factor = factor
        np.testing.assert_allclose(solve(model.matvec, b, d, rtol=1e-12), b / (factor * d), rtol=1e-10)
    assert len(programs) == 6 and None not in programs  # none for the same factor


@pytest.mark.serial
@pytest.mark.unguarded
def test_operators_that_are_used_once_are_compiled_a_few_times(monkeypatch, programs):
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 8)
    d, b = np.linspace(1.0, 9.0, 12), np.sin(np.arange(12.0))
    for k in range(20):
        other = d + k  # another object in the closure of each function
        np.testing.assert_allclose(solve(lambda u: other * u, b, rtol=1e-12), b / other, rtol=1e-10)  # noqa: B023
    assert 0 < len(programs) <= 2 * 4 and None not in programs


def changes(rank):
    """Yield functions of u, each after a change of what it reads, with the seed and the factor of its operator."""
    read = SimpleNamespace(matrix=block(rank)[0], factor=1.0)
    _, v = block(rank)
    table = {"matrix": read.matrix}

    def by_attributes(u):
        return read.factor * coupled(read.matrix, v, u)

    def by_table(u):
        return coupled(table["matrix"], v, u)

    yield by_attributes, 0, 1.0
    read.matrix[:] = block(rank, 1)[0]
    yield by_attributes, 1, 1.0
    read.factor = 2.5
    yield by_attributes, 1, 2.5
    read.matrix = block(rank, 2)[0]
    yield by_attributes, 2, 2.5
    yield by_table, 1, 1.0
    table["matrix"] = block(rank, 3)[0]
    yield by_table, 3, 1.0
    for seed in range(7):
        matrix = block(rank, seed)[0]
        yield (lambda u, matrix=matrix: coupled(matrix, v, u)), seed, 1.0
        yield (lambda u: coupled(matrix, v, u)), seed, 1.0  # noqa: B023


def test_changes_of_what_a_function_reads_are_noticed(right_sides, rank, size):
    for matvec, seed, factor in changes(rank):
        x = solve(matvec, right_sides[rank], **SETTINGS)
        expected = dense_solution(size, rank, right_sides, [block(k, seed)[0] for k in range(size)], factor)
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-11)


def test_a_preconditioner_that_changes(right_sides, rank, size):
    matrix, v = block(rank)
    diagonal = np.diag(matrix).copy()
    expected = dense_solution(size, rank, right_sides, [block(k)[0] for k in range(size)])
    counts = []
    for _ in range(2):
        norms = []
        given = {**SETTINGS, "preconditioner": lambda r: r / diagonal, "callback": norms.append}
        np.testing.assert_allclose(solve(lambda u: coupled(matrix, v, u), right_sides[rank], **given), expected, rtol=1e-9)
        counts.append(len(norms))
        diagonal[:] = np.geomspace(1.0, 1e4, len(diagonal))
    assert counts[1] > counts[0]


def test_branches_on_params_and_counters(right_sides, rank, size):
    """A function with an effect is interpreted, and one that decides by a param takes its branch in each solve."""
    (matrix, v), calls = block(rank), []

    def deciding(u, sign):
        return coupled(matrix, v, u) if sign > 0 else 3.0 * coupled(matrix, v, u)

    def counting(u):
        calls.append(None)
        return coupled(matrix, v, u)

    expected = dense_solution(size, rank, right_sides, [block(k)[0] for k in range(size)])
    for sign in (1.0, -1.0, 1.0):
        x = solve(deciding, right_sides[rank], sign, **SETTINGS)
        np.testing.assert_allclose(x, expected if sign > 0 else expected / 3.0, rtol=1e-9, atol=1e-11)
    norms = []
    x = solve(counting, right_sides[rank], callback=norms.append, **SETTINGS)
    np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-11)
    assert len(calls) >= len(norms) - 1 > 2


@METHODS
def test_ranks_that_interpret_among_others_that_compile(right_sides, rank, size, method):
    matrix, v = block(rank)
    sparse = sp.csr_matrix(matrix)

    def of_another_library(u):
        return _with_coupling(sparse @ np.asarray(u), v, u)

    expected = dense_solution(size, rank, right_sides, [block(k)[0] for k in range(size)])
    for _ in range(2):
        matvec = of_another_library if rank == size - 1 else lambda u: coupled(matrix, v, u)
        x = solve(matvec, right_sides[rank], method=method, rtol=1e-12)
        np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-11)
    calls = []

    def failing(u):
        calls.append(None)
        if len(calls) == 5 and error is not None:
            raise error
        return of_another_library(u) * (np.nan if len(calls) >= 5 else 1.0)

    for error, kind in ((None, mpiad.errors.NotFiniteError), (KeyError("no row"), KeyError)):
        calls.clear()
        with pytest.raises(kind, match="no row" if error else r"is not finite: \d+ entries on rank"):
            solve(failing if rank == size - 1 else lambda u: coupled(matrix, v, u), right_sides[rank], method=method)
        assert mpiad.mpi_allreduce(1) == size


@pytest.mark.filterwarnings("ignore:invalid value")
def test_sums_that_overflow_in_the_check(right_sides, rank, size):
    """The squares of the image of a constant overflow, and the last rank interprets: no rank waits for another one."""
    matrix, v = block(rank)
    read = iter(()) if rank == size - 1 else ()
    b = [1e200 * part for part in right_sides]
    x = solve(lambda u: 1e200 * coupled(matrix, v, u) + len([*read]), b[rank], **SETTINGS)
    expected = dense_solution(size, rank, right_sides, [block(k)[0] for k in range(size)])
    np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-11)
    assert mpiad.mpi_allreduce(1) == size


def test_errors_are_those_of_interpreted_iterations(right_sides, rank, size):
    matrix, v = block(rank)
    b = right_sides[rank]
    with pytest.raises(mpiad.errors.ConvergenceError, match="symmetric positive definite operator, but p·Ap = -"):
        solve(lambda u: -coupled(matrix, v, u), b, **SETTINGS)
    with pytest.raises(mpiad.errors.ConvergenceError, match="positive definite preconditioner, but r·z = -"):
        solve(lambda u: coupled(matrix, v, u), b, preconditioner=lambda r: -r, **SETTINGS)
    with pytest.raises(mpiad.errors.NotFiniteError, match=r"the result of matvec is not finite: \d+ entries"):
        solve(lambda u: anp.log(-1.0 - u * u) if rank == size - 1 else 1.0 * u, b, **SETTINGS)
    with pytest.raises(mpiad.errors.ConvergenceError, match="maxiter"):
        solve(lambda u: coupled(matrix, v, u), b, maxiter=2, **SETTINGS)


@METHODS
def test_a_rank_without_entries(rank, size, method):
    diagonal = np.arange(2.0, 2.0 if rank == 0 and size > 1 else 7.0)
    b = np.stack([diagonal**2, 2.0 * diagonal])
    for _ in range(2):
        x = solve(lambda u: diagonal * u, b, method=method, rtol=1e-12, batch=1)
        np.testing.assert_allclose(x, b / diagonal, rtol=1e-10)
    n, first = len(diagonal), 5 * (rank - (size > 1)) if rank else 0
    rows = sp.csr_array((diagonal, (np.arange(n), first + np.arange(n))), shape=(n, 5 * max(size - 1, 1)))
    np.testing.assert_allclose(factorized(DistributedMatrix(rows))(b), b / diagonal, rtol=1e-12)
