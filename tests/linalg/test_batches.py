"""Batches of products with the derivatives of `solve` and `newton`, against dense matrices; see also `test_factorized`."""

import importlib

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import AdditiveSchwarz, DistributedMatrix, compiled_iteration, newton, solve

solve_module = importlib.import_module("mpiad.linalg.solve")
N, LANES = 11, 4


class Case:
    """A(k) u = (2 + k²) u - u₋ - a u₊ + u in N cells; with a = 1 it is symmetric."""

    def __init__(self, rank_rng, a):
        self.domain, self.a, rng = Domain(N), a, rank_rng(0)
        self.k, self.b, *self.several = rng.standard_normal((2 + 2 * LANES, N))
        self.matrix = np.diag(3 + self.k**2) - np.eye(N, k=-1) - a * np.eye(N, k=1)
        self.v, self.w = np.array(self.several[:LANES]), np.array(self.several[LANES:])

    def local(self, x):
        return x[..., self.domain.owned[0]]

    def matvec(self, u, k):
        padded = self.domain.exchange(u)
        return (3 + k**2) * u - padded[:-2] - self.a * padded[2:]

    def close(self, block, whole, rounding=1e-8):
        np.testing.assert_allclose(block, self.local(whole), rtol=rounding, atol=rounding)


@pytest.fixture
def solves(monkeypatch, request, rank):
    """The numbers of right-hand sides of all solves, at most two; CG's iterations are compiled on every second rank."""
    shapes, original = [], solve_module.iterate
    monkeypatch.setattr(solve_module, "iterate", lambda *args: shapes.append(args[2].shape[:-1]) or original(*args))
    monkeypatch.setattr(solve_module, "_MOST_LANES", 2)
    is_compiled = rank % 2 == 0 and request.node.callspec.params.get("method") == "cg"
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 0 if is_compiled else 10**9)
    return shapes


@pytest.mark.parametrize(("method", "a"), [("cg", 1.0), ("gmres", 0.4)])
def test_products_through_a_solve(method, a, solves, rank_rng):
    case = Case(rank_rng, a)
    k, b, v, w = map(case.local, (case.k, case.b, case.v, case.w))
    precondition = lambda r: r / 3.0  # noqa: E731

    def state(x):
        return solve(case.matvec, x["b"], x["k"], method=method, preconditioner=precondition, rtol=1e-11)

    point, inverse = mpiad.linearize(state)({"k": k, "b": b}), np.linalg.inv(case.matrix)
    by_k = -inverse * (2 * case.k * (inverse @ case.b))
    solves.clear()
    case.close(point.jvp({"k": v, "b": w}, batch=True), case.v @ by_k.T + case.w @ inverse.T)
    back = point.vjp(w, batch=True)
    case.close(back["k"], case.w @ by_k)
    case.close(back["b"], case.w @ inverse)
    assert solves == [(), (2,), (2,), (2,), (2,)]  # the first product records a reverse pass
    case.close(point.vjp(w[3])["k"], case.w[3] @ by_k)

    def gradient(z):  # of Σ u³/3
        matrix = case.matrix + np.diag(z**2 - case.k**2)
        u = np.linalg.solve(matrix, case.b)
        return -2 * z * u * np.linalg.solve(matrix.T, u**2)

    step = 1e-5
    expected = [(gradient(case.k + step * v) - gradient(case.k - step * v)) / (2 * step) for v in case.v]
    product = mpiad.make_hvp(lambda k: case.domain.sum(state({"k": k, "b": b}) ** 3) / 3.0)(k).product
    solves.clear()
    case.close(product(v, batch=True), np.array(expected), 1e-6)
    assert solves == [(2,)] * 4


@pytest.mark.parametrize("jacobian", ["products", "sparse"])
def test_products_through_newton(jacobian, solves, rank_rng):
    """A(k) u + u³ = b, whose Jacobian is A(k) + 3 diag u²."""
    case = Case(rank_rng, 0.4)
    k, b, v, w = map(case.local, (case.k, case.b, case.v, case.w))
    settings = {"jacobian": "sparse", "pattern": case.domain} if jacobian == "sparse" else {}

    def state(k):
        return newton(lambda u, k: case.matvec(u, k) + u**3 - b, 0 * b, k, rtol=1e-11, **settings)

    point, u = mpiad.linearize(state)(k), np.zeros(N)
    for _ in range(20):
        slope = case.matrix + np.diag(3 * u**2)
        u = u - np.linalg.solve(slope, case.matrix @ u + u**3 - case.b)
    by_k = -np.linalg.inv(slope) * (2 * case.k * u)
    solves.clear()
    along = point.jvp(v, batch=True)
    case.close(along, case.v @ by_k.T)
    case.close(point.vjp(along, batch=True), case.v @ by_k.T @ by_k)
    assert solves == [(), (2,), (2,), (2,), (2,)]
    case.close(point.vjp(w[3]), case.w[3] @ by_k)


def test_preconditioners_of_blocks(monkeypatch, rank_rng):
    """A preconditioner of this library is called for all right-hand sides at once, and so is its transpose."""
    case, shapes = Case(rank_rng, 0.4), []
    k, b, w = map(case.local, (case.k, case.b, case.w))
    schwarz = AdditiveSchwarz(DistributedMatrix.from_operator(case.matvec, case.domain, k))
    corrected = AdditiveSchwarz._corrected
    monkeypatch.setattr(AdditiveSchwarz, "_corrected", lambda self, r: shapes.append(r.shape[:-1]) or corrected(self, r))
    point = mpiad.linearize(lambda b: solve(case.matvec, b, k, method="gmres", preconditioner=schwarz, rtol=1e-11))(b)
    shapes.clear()
    case.close(point.vjp(w, batch=True), case.w @ np.linalg.inv(case.matrix))
    assert set(shapes) == {(LANES,)}


def test_gradients_of_batches_of_products(monkeypatch, rank_rng):
    """Of Σ (J v)² with respect to the directions v: 2 Jᵀ J v."""
    monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 10**9)
    case = Case(rank_rng, 0.4)
    v, inverse = case.local(case.v[:3]), np.linalg.inv(case.matrix)
    point = mpiad.linearize(lambda b: solve(case.matvec, b, case.local(case.k), method="gmres", rtol=1e-11))(
        case.local(case.b)
    )
    found = mpiad.grad(lambda v: case.domain.sum(anp.sum(point.jvp(v, batch=True) ** 2, axis=0)))(v)
    case.close(found, 2 * case.v[:3] @ inverse.T @ inverse)
