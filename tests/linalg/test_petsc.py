"""The adapter to PETSc: with PETSc where petsc4py is installed; everywhere with a stand-in, which shows what it gets."""

import importlib.util

import autograd.numpy as anp
import numpy as np
import petsc_stand_in
import pytest
import scipy.sparse as sp
from device_double import on_device
from transport_matrix import gradient, matrix

import mpiad
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError
from mpiad.linalg import DistributedMatrix, petsc

SHAPE = (5, 6)
INSTALLED = importlib.util.find_spec("petsc4py") is not None


@pytest.fixture(params=["petsc4py", "stand-in"])
def backend(request, monkeypatch):
    if request.param == "stand-in":
        petsc_stand_in.install(monkeypatch)
    elif not INSTALLED:
        pytest.skip("petsc4py is not installed")
    return request.param


class Case:
    def __init__(self, rank_rng):
        rng = rank_rng(100)
        self.domain = Domain(SHAPE, dims=(mpiad.mpi_size(), 1))
        self.nu, self.w, self.c = 1.3, 0.5 * rng.standard_normal(SHAPE), 1.0 + rng.random(SHAPE)
        self.b, self.weight = rng.standard_normal(SHAPE), rng.random(SHAPE)
        self.expected = gradient(SHAPE, (self.nu, self.w, self.c), self.b, self.weight)

    def block(self, u):
        return u[self.domain.owned]

    def matvec(self, u, nu, w, c):
        v = self.domain.exchange(u)
        around = v[:-2, 1:-1] + v[2:, 1:-1] + v[1:-1, :-2] + v[1:-1, 2:]
        return nu * (4 * u - around) + w * (v[1:-1, 2:] - v[1:-1, :-2]) + c * u


def test_operator(rank_rng, backend):
    case = Case(rank_rng)

    def matvec(u, nu, w, c):
        return anp.ravel(case.matvec(u.reshape(case.domain.local_shape), nu, w, c))

    def loss(nu, w, c, b):
        u = petsc.solve(matvec, b, nu, w, c, rtol=1e-11, options={"ksp_type": "gmres"})
        return mpiad.mpi_allreduce(anp.sum(case.block(case.weight).ravel() * u**2))

    value, found = mpiad.value_and_grad(loss, (0, 1, 2, 3))(
        case.nu, case.block(case.w), case.block(case.c), case.block(case.b).ravel()
    )
    u, of_nu, of_w, of_c, of_b = case.expected
    np.testing.assert_allclose(value, np.sum(case.weight * u**2), 1e-9)
    np.testing.assert_allclose(mpiad.mpi_allreduce(found[0]), of_nu, 1e-8)
    for block, whole in zip(found[1:], (of_w, of_c, of_b)):
        np.testing.assert_allclose(block, case.block(whole).reshape(block.shape), 1e-7, 1e-9)


def test_matrix(rank_rng, backend):
    case = Case(rank_rng)
    whole = matrix(SHAPE, case.nu, case.w, case.c)
    a = DistributedMatrix.from_scipy(sp.csr_matrix(whole))
    b = case.b.ravel()[a.owned_rows]

    def loss(values, b):
        u = petsc.solve(a.with_values(values), b, rtol=1e-11, options={"ksp_type": "gmres", "pc_type": "bjacobi"})
        return mpiad.mpi_allreduce(anp.sum(case.weight.ravel()[a.owned_rows] * u**2))

    of_values, of_b = mpiad.grad(loss, (0, 1))(a.values, b)
    u, multiplier = case.expected[0].ravel(), case.expected[4].ravel()
    row, column = a.indices
    np.testing.assert_allclose(of_b, multiplier[a.owned_rows], 1e-8, 1e-10)
    np.testing.assert_allclose(of_values, -multiplier[row] * u[column], 1e-7, 1e-9)
    product = mpiad.hvp(lambda v: loss(v, b))(a.values, np.ones_like(a.values))
    moved = [mpiad.grad(lambda v: loss(v, b))(a.values + h) for h in (1e-5, -1e-5)]
    np.testing.assert_allclose(product, (moved[0] - moved[1]) / 2e-5, 1e-4, 1e-5)


def test_options_are_handed_over_and_taken_back(rank_rng, monkeypatch):
    petsc_stand_in.install(monkeypatch)
    a = DistributedMatrix.from_scipy(sp.identity(8, format="csr") * 2.0)
    b = np.ones(a.local_shape[0])
    np.testing.assert_allclose(petsc.solve(a, b, options={"ksp_type": "cg", "pc_type": "gamg"}), 0.5 * b)
    assert set(petsc_stand_in.Options.seen) == {("ksp_type", "cg"), ("pc_type", "gamg")}
    assert petsc_stand_in.Options.database == {}
    with pytest.raises(ConvergenceError, match="petsc: PETSc failed: DIVERGED_ITS. Its options were .*'fails'") as caught:
        petsc.solve(a, b, options={"ksp_type": "fails"})
    assert len(caught.value.history) == 2
    assert petsc_stand_in.Options.database == {}
    with pytest.raises(TypeError, match="b must be an array of float64, as this PETSc was built for, but got complex128"):
        petsc.solve(a, b + 0j)
    with pytest.raises(ValueError, match="a DistributedMatrix takes no params, but got 1"):
        petsc.solve(a, b, 1.0)


@pytest.mark.parametrize("as_function", [False, True])
def test_under_watch(rank_rng, backend, as_function):
    a = DistributedMatrix.from_scipy(sp.identity(8, format="csr") * 2.0)
    b = np.ones(a.local_shape[0])
    operator = (lambda u: 2.0 * u) if as_function else a
    with mpiad.debug.checked():
        np.testing.assert_allclose(petsc.solve(operator, b, options={"ksp_type": "cg"}), 0.5 * b)


def test_a_device_array_on_one_rank_is_refused_on_all(rank_rng, size, monkeypatch):
    petsc_stand_in.install(monkeypatch)
    b = on_device(np.ones(3)) if mpiad.mpi_rank() == size - 1 else np.ones(3)
    with pytest.raises(TypeError, match="petsc.solve works on the host, but got DeviceArray on device 0 .* of shape"):
        petsc.solve(lambda u: u, b)
    a = DistributedMatrix.from_scipy(sp.identity(8, format="csr") * 2.0)
    with pytest.raises(TypeError, match="petsc.solve works on the host, but got DeviceArray"):
        petsc.solve(a.with_values(on_device(a.values)), np.ones(a.local_shape[0]))


@pytest.mark.skipif(INSTALLED, reason="petsc4py is installed")
def test_without_petsc(rank_rng):
    with pytest.raises(ImportError, match="needs petsc4py for the MPI of mpi4py, .* pip install 'petsc4py'"):
        petsc.solve(lambda u: u, np.ones(3))
