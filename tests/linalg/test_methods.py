"""GMRES, BiCGSTAB and conjugate gradients: real and complex, several systems at once, preconditioned from both sides."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from transport_matrix import gradient, matrix

import mpiad
import mpiad.linalg.krylov
import mpiad.linalg.system
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError
from mpiad.linalg import solve
from mpiad.linalg.krylov import Arnoldi, CompiledArnoldi
from mpiad.linalg.system import Settings, System
from mpiad.testing import check_grads

SHAPE = (4, 5)
CLOSE = {"rtol": 1e-8, "atol": 1e-10}
TIGHT = {"rtol": 1e-12}
METHODS = ["gmres", "bicgstab"]


class Transport:
    """The same problem on all ranks, and its operator on blocks."""

    def __init__(self, rank_rng, dtype=float):
        self.domain, rng = Domain(SHAPE), rank_rng(100)
        self.nu, self.w = 1.3, rng.standard_normal(SHAPE)
        self.c = (1.0 + rng.random(SHAPE)).astype(dtype)
        self.b, self.weight = rng.standard_normal(SHAPE).astype(dtype), rng.random(SHAPE)
        if dtype is complex:
            self.c = self.c - 2j * rng.random(SHAPE)
            self.b = self.b + 1j * rng.standard_normal(SHAPE)

    def block(self, u):
        return u[(..., *self.domain.owned)]

    @property
    def point(self):
        return {"medium": [self.nu, self.block(self.w)], "c": self.block(self.c), "b": self.block(self.b)}

    def matvec(self, u, medium, c):
        v = self.domain.exchange(u)
        around = v[..., :-2, 1:-1] + v[..., 2:, 1:-1] + v[..., 1:-1, :-2] + v[..., 1:-1, 2:]
        return medium[0] * (4 * u - around) + medium[1] * (v[..., 1:-1, 2:] - v[..., 1:-1, :-2]) + c * u

    def lopsided(self, r, medium, c):
        """Precondition by the part of the operator that looks to the left: not symmetric, and no inverse."""
        v = self.domain.exchange(r / (4 * medium[0] + c))
        return v[..., 1:-1, 1:-1] + 0.2 * (medium[0] + medium[1]) * v[..., 1:-1, :-2]

    def loss(self, x, **settings):
        u = solve(self.matvec, x["b"], x["medium"], x["c"], **TIGHT, **settings)
        return self.domain.sum(self.block(self.weight) * anp.abs(u) ** 2)

    def expected(self):
        return gradient(SHAPE, (self.nu, self.w, self.c), self.b, self.weight)

    def check(self, found):
        _, of_nu, of_w, of_c, of_b = self.expected()
        np.testing.assert_allclose(mpiad.mpi_allreduce(found["medium"][0]), of_nu.real, **CLOSE)
        for name, block, whole in (("w", found["medium"][1], of_w.real), ("c", found["c"], of_c), ("b", found["b"], of_b)):
            np.testing.assert_allclose(block, self.block(whole), **CLOSE, err_msg=name)


PRECONDITIONED = [{}, {"side": "right"}, {"side": "left"}]


@pytest.mark.each_combination
@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("settings", PRECONDITIONED, ids=lambda s: s.get("side", "plain"))
def test_gradient(rank_rng, method, dtype, settings):
    case = Transport(rank_rng, dtype)
    if settings:
        settings = {**settings, "preconditioner": case.lopsided, "preconditioner_transpose": "derived"}
    value, found = mpiad.value_and_grad(case.loss)(case.point, method=method, **settings)
    np.testing.assert_allclose(value, np.sum(case.weight * np.abs(case.expected()[0]) ** 2), 1e-9)
    case.check(found)


@pytest.mark.parametrize("method", METHODS)
def test_a_preconditioner_of_one_rank_from_the_left(rank_rng, method, rank, size):
    """All ranks take part in the sums of its norms: those without a preconditioner, too."""
    case = Transport(rank_rng)
    scaled = (lambda r, medium, c: r / (4 * medium[0] + c)) if rank == size - 1 else None
    value = case.loss(case.point, method=method, preconditioner=scaled, side="left")
    np.testing.assert_allclose(value, np.sum(case.weight * case.expected()[0] ** 2), 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_tangent_and_second_derivative(rank_rng, method):
    case, rng = Transport(rank_rng), rank_rng(101)
    along = [0.4, *(rng.standard_normal(SHAPE) for _ in range(3))]
    direction = {"medium": [along[0], case.block(along[1])], "c": case.block(along[2]), "b": case.block(along[3])}

    def moved(h):
        nu, w, c, b = (x + h * d for x, d in zip((case.nu, case.w, case.c, case.b), along))
        return gradient(SHAPE, (nu, w, c), b, case.weight)

    def check(found):
        _, of_nu, *fields = [(after - before) / 2e-4 for after, before in zip(moved(1e-4), moved(-1e-4))]
        np.testing.assert_allclose(mpiad.mpi_allreduce(found["medium"][0]), of_nu, 1e-5, 1e-6)
        for block, whole in zip((found["medium"][1], found["c"], found["b"]), fields):
            np.testing.assert_allclose(block, case.block(whole), 1e-5, 1e-6)

    def loss(x):
        return case.loss(x, method=method)

    check(mpiad.hvp(loss)(case.point, direction))

    def slope(x):
        # Reverse over reverse, which takes the adjoint of the transposed system.
        g = mpiad.grad(loss)(x)
        (g_nu, g_w), g_c, g_b = g["medium"], g["c"], g["b"]
        (nu, w), c, b = direction["medium"], direction["c"], direction["b"]
        return g_nu * nu + anp.sum(g_w * w) + anp.sum(g_c * c) + anp.sum(g_b * b)

    check(mpiad.grad(slope, objective="sum")(case.point))
    _, tangent = mpiad.jvp(
        lambda x: solve(case.matvec, x["b"], x["medium"], x["c"], method=method, **TIGHT), case.point, direction
    )
    expected = (moved(1e-4)[0] - moved(-1e-4)[0]) / 2e-4
    np.testing.assert_allclose(tangent, case.block(expected), 1e-5, 1e-6)


def test_third_derivative(rank_rng):
    case = Transport(rank_rng)
    rest = case.block(case.w), case.block(case.c), case.block(case.b)

    def loss(nu):
        return case.loss({"medium": [nu, rest[0]], "c": rest[1], "b": rest[2]}, method="gmres")

    third = loss
    for _ in range(3):
        third = mpiad.grad(third, shared=True)
    h, values = 0.02, []
    for k in (-3, -2, -1, 1, 2, 3):
        a = matrix(SHAPE, case.nu + k * h, case.w, case.c)
        values.append(np.sum(case.weight.ravel() * np.linalg.solve(a, case.b.ravel()) ** 2))
    weights = np.array([1, -8, 13, -13, 8, -1]) / 8
    np.testing.assert_allclose(third(case.nu), weights @ values / h**3, 1e-4)


def test_hermitian_system(rank_rng, size):
    domain, rng = Domain(SHAPE), rank_rng(100)
    b = (rng.standard_normal(SHAPE) + 1j * rng.standard_normal(SHAPE))[domain.owned]
    phase, c = np.exp(0.7j), 0.3 + rng.random(SHAPE)

    def matvec(u, c, phase=phase):
        v = domain.exchange(u)
        return (4 + c) * u - phase * v[1:-1, 2:] - phase.conjugate() * v[1:-1, :-2] - v[2:, 1:-1] - v[:-2, 1:-1]

    def loss(c, b, method):
        return domain.sum(anp.abs(solve(matvec, b, c, method=method, **TIGHT) - 0.1) ** 4)

    of_cg, of_gmres = (mpiad.grad(loss, (0, 1))(c[domain.owned], b, method) for method in ("cg", "gmres"))
    for one, other in zip(of_cg, of_gmres):
        np.testing.assert_allclose(one, other, **CLOSE)
    if size == 1:  # on ranks the two methods' gradients are compared
        check_grads(loss, c[domain.owned], b, "cg", argnum=(0, 1), order=1)
    with pytest.raises(ConvergenceError, match="needs a Hermitian operator, but z·Az = .*j is not real.*average"):
        solve(lambda u: matvec(u, c[domain.owned]) + 2j * u, b)


@pytest.mark.parametrize("method", ["cg", *METHODS])
def test_several_systems_with_one_operator(rank_rng, method, monkeypatch):
    case = Transport(rank_rng)
    medium = [case.nu, case.block(case.w if method != "cg" else 0 * case.w)]
    whole = rank_rng(50).standard_normal((3, *SHAPE)) * np.array([1.0, 1e-6, 0.0])[:, None, None]
    b, reductions, norms = case.block(whole), [], []

    def counting(x, comm=None):
        reductions.append(1)
        return mpiad.mpi_allreduce(x, comm=comm)

    monkeypatch.setattr(mpiad.linalg.system, "mpi_allreduce", counting)
    settings = {"method": method, "batch": 1}
    u = solve(case.matvec, b, medium, case.block(case.c), **TIGHT, **settings, callback=norms.append)
    assert len(reductions) <= (2 if method == "bicgstab" else 1) * len(norms) + 8
    a = matrix(SHAPE, case.nu, case.w if method != "cg" else 0 * case.w, case.c)
    for found, right in zip(u, whole):
        expected = np.linalg.solve(a, right.ravel()).reshape(SHAPE)
        # Each to its own tolerance, the one a million times smaller too.
        np.testing.assert_allclose(found, case.block(expected), 1e-8, 1e-10 * np.abs(right).max())

    def loss(c, b, **settings):
        u = solve(case.matvec, b, medium, c, method=method, **TIGHT, **settings)
        return case.domain.sum(u**3) * 1e3

    # As one system of many unknowns it is the same function.
    apart, joint = (mpiad.grad(loss, (0, 1))(case.block(case.c), b, batch=k) for k in (1, 0))
    np.testing.assert_allclose(apart[0], joint[0], 1e-6, 1e-8)
    np.testing.assert_allclose(apart[1], joint[1], 1e-6, 1e-8)


def test_restarts_and_warm_start(rank_rng):
    case = Transport(rank_rng)
    medium, norms, again = ([case.nu, case.block(case.w)], case.block(case.c)), [], []
    b = case.block(case.b)
    u = solve(case.matvec, b, *medium, method="gmres", restart=5, callback=norms.append)
    assert len(norms) > 10
    true = case.domain.norm(b - case.matvec(u, *medium))
    np.testing.assert_allclose(norms[-1], true, 1e-6)
    np.testing.assert_allclose(u, case.block(case.expected()[0]), 1e-5, 1e-7)
    for method in METHODS:
        again.clear()
        found = solve(case.matvec, b, *medium, method=method, x0=u, rtol=1e-8, callback=again.append)
        assert again == []
        np.testing.assert_array_equal(found, u)


def test_space_that_holds_the_solution(rank_rng):
    # Two eigenvalues: after two products nothing is left to extend the basis by.
    b = rank_rng(7).standard_normal(9)
    norms = []
    u = solve(lambda u: anp.concatenate([2.0 * u[:4], 3.0 * u[4:]]), b, method="gmres", rtol=1e-14, callback=norms.append)
    np.testing.assert_allclose(u, b / np.repeat([2.0, 3.0], [4, 5]), 1e-13)
    assert len(norms) <= 2


def test_basis_stays_orthogonal(rank_rng, monkeypatch):
    # A hard case for one pass of Gram-Schmidt: eigenvalues from 1 to 1e7 by a rotation that mixes all of them.
    q, _ = np.linalg.qr(rank_rng(0).standard_normal((30, 30)))
    a = q @ np.diag(np.logspace(0, 7, 30)) @ q.T + 0.01 * np.triu(np.ones((30, 30)))
    b = rank_rng(1).standard_normal(30)
    lengths = np.array_split(np.arange(30), mpiad.mpi_size())
    mine = lengths[mpiad.mpi_rank()]

    def matvec(u):
        return a[mine] @ mpiad.mpi_allgather(u, axis=0)

    norms, spaces, original = [], [], mpiad.linalg.krylov.arnoldi_of
    monkeypatch.setattr(mpiad.linalg.krylov, "arnoldi_of", lambda *args: spaces.append(original(*args)) or spaces[-1])
    u = solve(matvec, b[mine], method="gmres", rtol=1e-9, restart=40, callback=norms.append)
    assert len(norms) <= 31
    found = spaces[0].vectors[: len(norms), 0]
    gram = mpiad.mpi_allreduce(found @ found.T)
    # One pass leaves 1e-8.
    assert np.abs(gram - np.eye(len(norms))).max() < 1e-11
    assert np.linalg.norm(a @ mpiad.mpi_allgather(u, axis=0) - b) <= 1e-8 * np.linalg.norm(b)


@pytest.mark.parametrize("method", METHODS)
def test_single_precision(rank_rng, method):
    case = Transport(rank_rng)
    b, c = case.block(case.b).astype("f4"), case.block(case.c).astype("f4")
    medium = [np.float32(case.nu), case.block(case.w).astype("f4")]
    u = solve(case.matvec, b, medium, c, method=method, rtol=1e-6)
    assert u.dtype == np.float32
    np.testing.assert_allclose(u, case.block(case.expected()[0]), atol=1e-4)


def test_transposes_of_preconditioners(rank_rng):
    """The transpose saves iterations of the adjoint system, wherever it comes from."""
    case = Transport(rank_rng)
    medium, c = [case.nu, case.block(case.w)], case.block(case.c)
    used = []

    class Jacobi:
        def __init__(self, name):
            self.name = name

        def __call__(self, r):
            used.append(self.name)
            return r / (4 * case.nu + c)

    class WithT(Jacobi):
        T = Jacobi("T")

    class WithTranspose(Jacobi):
        def transpose(self):
            return Jacobi("transpose()")

    def gradient_with(preconditioner, given=None):
        used.clear()

        def loss(b):
            u = solve(case.matvec, b, medium, c, method="gmres", preconditioner=preconditioner,
                      preconditioner_transpose=given, **TIGHT)  # fmt: skip
            return case.domain.sum(case.block(case.weight) * u**2)

        np.testing.assert_allclose(mpiad.grad(loss)(case.block(case.b)), case.block(case.expected()[4]), **CLOSE)
        return set(used)

    assert gradient_with(Jacobi("plain")) == {"plain"}
    assert gradient_with(WithT("plain")) == {"plain", "T"}
    assert gradient_with(WithTranspose("plain")) == {"plain", "transpose()"}
    assert gradient_with(WithT("plain"), Jacobi("given")) == {"plain", "given"}


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
@pytest.mark.parametrize(
    ("dtype", "size"), [(np.float32, 1e-21), (np.float32, 1e-30), (np.complex64, 1e20), (float, 1e-200)]
)
def test_right_hand_sides_whose_squares_leave_the_range(method, dtype, size, rank_rng):
    domain = Domain(23)
    b = rank_rng(100).standard_normal((2, 23))[:, domain.owned[0]].astype(dtype)
    b[1] = 0
    size, x0, norms = b.real.dtype.type(size), np.zeros_like(b), []

    def matvec(u):
        v = domain.exchange(u)
        return b.real.dtype.type(3) * u - v[:, :-2] - v[:, 2:]

    settings = {"method": method, "rtol": 1e-5, "batch": 1}
    expected = solve(matvec, b, **settings)
    found = solve(matvec, b * size, x0=x0, callback=norms.append, **settings)
    assert found.dtype == dtype
    np.testing.assert_allclose(found / size, expected, rtol=0, atol=2e-5)
    assert 0 < norms[-1] <= 1e-5 * size * np.sqrt(domain.sum(np.abs(b[0]) ** 2)) * 1.001
    # Far below atol nothing is to be done.
    assert not solve(matvec, b * size, atol=1e30, **settings).any()


def test_a_failure_shows_no_warning():
    """p·Ap is zero for a skew-symmetric operator."""
    with np.errstate(all="raise"), pytest.raises(ConvergenceError, match="but p·Ap = 0"):
        solve(lambda u: anp.stack([u[1], -u[0]]), np.ones(2, complex))  # interpreted


def test_kernels_do_what_arrays_do():
    """Three systems: one converges early, and the space of another is complete after three steps."""
    n, rng = 40, np.random.default_rng(3)
    a = rng.standard_normal((3, n, n)) + 8 * np.eye(n)
    a[1] = np.diag(np.repeat([1.0, 2.0, 5.0], [20, 10, 10]))
    first = rng.standard_normal((3, n))
    norms = np.linalg.norm(first, axis=1)
    system = System(None, None, first, Settings("gmres", 1e-8, 0.0, None, MPI.COMM_SELF, None, batch=1))
    found = []
    for kind in (Arnoldi, CompiledArnoldi):
        spaces, history = kind(first, norms, norms * [1e-3, 1e-10, 1e-12], 20), []
        for j in range(20):
            if spaces.grows:
                spaces.vectors[j + 1] = np.einsum("kij,kj->ki", a, spaces.vectors[j])
                spaces.extend(system, j, spaces.local_products(j))
            history.append(spaces.norms.copy())
        x = spaces.combination()
        np.testing.assert_allclose(np.linalg.norm(first - np.einsum("kij,kj->ki", a, x), axis=1), spaces.norms, 1e-6, 1e-12)
        found.append((x, np.array(history), spaces.steps))
    assert found[0][2][1] == 3 and 3 < found[0][2][0] < found[0][2][2] == 20
    np.testing.assert_array_equal(found[0][2], found[1][2])
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-9)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-6, atol=1e-11)
