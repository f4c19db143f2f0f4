"""Multigrid on devices: cycles, solutions and derivatives as on the host, and what is copied: no fields in an iteration."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import Elliptic, Multigrid, solve, solve_elliptic

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()
# The coarsest level on the device by its inverse in two and three dimensions, by the host's factors in one.
SHAPES = [(1500,), (33, 40), (9, 11, 12)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _case(shape, jump=False, dtype=float, **settings):
    """A domain with this rank's blocks of κ, c and a right-hand side."""
    domain = Domain(shape, **settings)
    rng = np.random.default_rng(5)
    kappa, c, b = np.exp(rng.standard_normal(shape)), rng.random(shape), rng.standard_normal(shape)
    if jump:
        kappa[tuple(slice(n // 3, n // 2) for n in shape)] *= 1e5
    return domain, *[field[domain.owned].astype(dtype) for field in (kappa, c, b)]


@pytest.mark.not_on(4)
@each_shape
@pytest.mark.parametrize("jump", [False, True], ids=["", "jump"])
def test_cycles_and_solutions(shape, jump):
    domain, kappa, c, b = _case(shape, jump)
    host, there = Multigrid(domain, kappa, c), Multigrid(domain, on_device(kappa), on_device(c))
    known, found = host(b), there(on_device(b))
    assert type(found) is DeviceArray
    np.testing.assert_allclose(on_host(found), known, rtol=1e-9, atol=1e-10 * abs(known).max())
    # The same levels serve both sides.
    np.testing.assert_array_equal(there(b), known)
    np.testing.assert_array_equal(on_host(host(on_device(b))), on_host(found))
    u, expected = there.solve(on_device(b)), host.solve(b)
    assert len(there.history) == len(host.history)
    np.testing.assert_allclose(on_host(u), expected, rtol=1e-7, atol=1e-9 * abs(expected).max())
    # What is given as a start is improved, and the operator is the host's.
    again = there.solve(on_device(b), x0=u, rtol=1e-11)
    np.testing.assert_allclose(on_host(there.matvec(again)), b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, complex])
def test_cycles_in_other_precisions(dtype):
    domain, kappa, c, b = _case((33, 40))
    b = (np.stack([b, 2 * b[::-1]]) * (1 + 0.5j)).real.astype(dtype) if np.dtype(dtype).kind == "f" else b * (1 - 0.5j)
    b = b.astype(dtype)
    levels = Multigrid(domain, kappa, c)
    known, found = levels(b), levels(on_device(b))
    assert found.dtype == known.dtype == dtype
    np.testing.assert_allclose(on_host(found), known, rtol=1e-5, atol=1e-5 * abs(known).max())


@pytest.mark.not_on(4)
@pytest.mark.parametrize("periodic", [True, (True, False)])
def test_operators_with_constants_in_their_kernel(periodic):
    domain, kappa, _, b = _case((24, 32), periodic=periodic)
    settings = {"boundary": "neumann", "mean_zero": True}
    host, there = Multigrid(domain, kappa, **settings), Multigrid(domain, on_device(kappa), **settings)
    u = there.solve(on_device(b))
    np.testing.assert_allclose(on_host(u), host.solve(b), rtol=1e-7, atol=1e-9)
    assert abs(on_host(domain.sum(u))) < 1e-9
    if _SIZE == 1:
        transfers.reset()
        there(on_device(b))
        # The means that are taken away, before and after.
        assert (transfers.h2d, transfers.d2h, transfers.d2h_bytes) == (0, 2, 16)


def _loss(domain, **settings):
    def loss(kappa, b, c):
        return anp.sum(anp.sin(solve_elliptic(domain, kappa, b, c, rtol=1e-12, **settings)))

    return loss


@pytest.mark.not_on(4)
@pytest.mark.parametrize("shape", [(17, 14), pytest.param((6, 7, 5), marks=pytest.mark.one_rank)], ids=str)
def test_derivatives_of_solutions(shape):
    domain, kappa, c, b = _case(shape)
    loss, settings = _loss(domain), {"argnum": (0, 1, 2), "objective": "sum"}
    known = mpiad.value_and_grad(loss, **settings)(kappa, b, c)
    found = mpiad.value_and_grad(loss, **settings)(*map(on_device, (kappa, b, c)))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-9)
    for mine, host in zip(found[1], known[1]):
        assert type(mine) is DeviceArray
        np.testing.assert_allclose(on_host(mine), host, rtol=1e-7, atol=1e-8)
    point, along = [kappa, b, c], [np.cos(kappa), np.sin(b), np.cos(c)]
    both = lambda x: loss(*x)  # noqa: E731
    known = mpiad.jvp(both, point, along)[1]
    found = mpiad.jvp(both, [on_device(x) for x in point], [on_device(v) for v in along])[1]
    np.testing.assert_allclose(on_host(found), known, rtol=1e-7)
    known = mpiad.hvp(both, objective="sum")(point, along)
    found = mpiad.hvp(both, objective="sum")([on_device(x) for x in point], [on_device(v) for v in along])
    for mine, host in zip(found, known):
        np.testing.assert_allclose(on_host(mine), host, rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
@pytest.mark.not_on(4)
def test_several_directions_at_once():
    domain, kappa, _, b = _case((17, 14))
    along = np.stack([np.cos(kappa), np.sin(b), kappa])

    def kept(b):
        return mpiad.linearize(lambda kappa: solve_elliptic(domain, kappa, b, rtol=1e-12))

    host, there = kept(b)(kappa), kept(on_device(b))(on_device(kappa))
    for known, found in ((host.jvp, there.jvp), (host.vjp, there.vjp)):
        made = found(on_device(along), batch=True)
        assert type(made) is DeviceArray
        np.testing.assert_allclose(on_host(made), [known(v) for v in along], rtol=1e-7, atol=1e-8)


@pytest.mark.not_on(4)
def test_numbers_for_coefficients():
    """κ and c as numbers of the host's travel with the calls, and have derivatives that are numbers."""
    domain, _, _, b = _case((20, 18))
    loss = _loss(domain, boundary=(("neumann", "dirichlet"), "dirichlet"), centred=True)
    known = mpiad.grad(loss, (0, 1, 2), objective="sum")(2.0, b, 0.5)
    found = mpiad.grad(loss, (0, 1, 2), objective="sum")(2.0, on_device(b), 0.5)
    assert np.ndim(found[0]) == np.ndim(found[2]) == 0 and type(found[1]) is DeviceArray
    for mine, host in zip(found, known):
        np.testing.assert_allclose(on_host(mine), host, rtol=1e-7, atol=1e-9)


def test_the_operator():
    domain, kappa, c, b = _case((12, 10))
    operator = Elliptic(domain, boundary=("neumann", "dirichlet"))
    product = lambda u, kappa, c: anp.sum(operator(u, kappa, c) ** 3)  # noqa: E731
    known = mpiad.grad(product, (0, 1, 2), objective="sum")(b, kappa, c)
    found = mpiad.grad(product, (0, 1, 2), objective="sum")(*map(on_device, (b, kappa, c)))
    for mine, host in zip(found, known):
        np.testing.assert_allclose(on_host(mine), host, rtol=1e-11, atol=1e-11)
    single = operator(on_device(b.astype(np.float32)), on_device(kappa), 0.5)
    assert single.dtype == np.float32
    np.testing.assert_allclose(on_host(single), operator(b, kappa, 0.5), rtol=1e-4, atol=1e-4)


@pytest.mark.not_on(4)
def test_as_a_preconditioner():
    domain, kappa, c, b = _case((33, 40))
    levels, counts = Multigrid(domain, kappa, c), []
    for put in (np.asarray, on_device):
        norms = []
        u = solve(levels.operator, put(b), put(kappa), put(c), preconditioner=levels, rtol=1e-10, callback=norms.append)
        counts.append(len(norms))
    assert counts[0] == counts[1] < 20
    np.testing.assert_allclose(on_host(u), levels.solve(b, rtol=1e-11), rtol=1e-7, atol=1e-9)


@pytest.mark.serial
def test_a_cycle_copies_nothing_and_an_iteration_a_few_numbers():
    domain, kappa, c, b = _case((33, 40))
    kappa, c, b = map(on_device, (kappa, c, b))
    transfers.reset()
    levels = Multigrid(domain, kappa, c)
    # The levels are found on the host: one copy of each coefficient, and nothing back.
    assert (transfers.h2d, transfers.d2h, transfers.d2h_bytes) == (0, 2, kappa.nbytes + c.nbytes)
    levels(b)
    assert transfers.d2h == 2 and transfers.h2d > 0
    transfers.reset()
    levels(b)
    assert transfers.copies == 0
    levels.solve(b)
    iterations = len(levels.history) - 1
    assert iterations > 5
    # The norm of the residual, and two inner products in one copy.
    assert transfers.h2d == 0 and transfers.d2h == 1 + 2 * iterations
    assert transfers.d2h_bytes == 8 * (1 + 3 * iterations)


@pytest.mark.serial
def test_a_large_coarsest_level_is_solved_on_the_host():
    domain, kappa, c, b = _case((1500,))
    levels, b = Multigrid(domain, kappa, c), on_device(b)
    levels(b)
    transfers.reset()
    levels(b)
    # One right-hand side of the coarsest level down, and its solution with a point on either side up.
    assert transfers.h2d == transfers.d2h == 1
    assert transfers.h2d_bytes == transfers.d2h_bytes + 16


def test_cycles_copy_their_messages_alone():
    """On several ranks: no more bytes than the sides of the levels, and the coarsest ones, have points."""
    domain, kappa, c, b = _case((64, 64))
    levels, b = Multigrid(domain, kappa, c), on_device(b)
    levels(b)
    transfers.reset()
    levels(b)
    if _SIZE == 1:
        assert transfers.copies == 0
    sides = 2 * sum(domain.padded_shape) * 8
    assert max(transfers.h2d_bytes, transfers.d2h_bytes) < 8 * sides + b.nbytes


def test_arrays_in_two_places_are_refused_on_all_ranks():
    domain, kappa, c, b = _case((16, 18))
    mixed = on_device(kappa) if _RANK == 0 else kappa
    with pytest.raises(TypeError, match="linalg.Multigrid: kappa and c must be on one device, but kappa is .* on device 0"):
        Multigrid(domain, mixed, c)
    mixed = on_device(b) if _RANK == _SIZE - 1 else b
    with pytest.raises(
        TypeError, match="linalg.solve_elliptic: b and kappa must be on one device, but b is .* on device 0"
    ):
        solve_elliptic(domain, kappa, mixed)
    levels = Multigrid(domain, kappa, c)
    with pytest.raises(TypeError, match="linalg.Multigrid.solve: b and x0 must be on one device, but b is .* on device 0"):
        levels.solve(mixed, x0=b)
    with pytest.raises(TypeError, match="linalg.Elliptic: u and kappa must be on one device.*to_device and to_host"):
        levels.operator(on_device(b), kappa)
    with pytest.raises(TypeError, match="expected a plain array of floats, but got dtype int64"):
        levels(on_device(np.ones(b.shape, int)))
