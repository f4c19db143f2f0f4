"""Points between the cells of fields on devices: values, derivatives and owners as on the host, and what is copied."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad import Domain
from mpiad.device import to_device

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()
SHAPES = [(13,), (9, 7), (5, 6, 7)]
SPACING, ORIGIN = (0.5, 2.0, 0.25), (-1.0, 3.0, 0.5)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_result = pytest.mark.parametrize("result", ["all", "share", "own"])


def _case(shape, lead=(), dtype=float, periodic=False, count=11):
    """A domain, where its cells lie, this rank's block and points: the same on all ranks, and others on each."""
    domain, ndim = Domain(shape, halo=0, periodic=periodic), len(shape)
    lattice = {"spacing": SPACING[:ndim], "origin": ORIGIN[:ndim]}
    rng = np.random.default_rng(3)
    field = rng.standard_normal((*lead, *shape))
    field = field + 1j * rng.standard_normal(field.shape) if np.dtype(dtype).kind == "c" else field
    ends = np.array(SHAPES[ndim - 1]) - 1
    points = np.array(ORIGIN[:ndim]) + np.array(SPACING[:ndim]) * rng.random((_SIZE + 1, count, ndim)) * ends
    points[:, 0] = np.array(ORIGIN[:ndim]) + np.array(SPACING[:ndim]) * ends
    return domain, lattice, field.astype(dtype)[(..., *domain.owned)], points[0], points[1 + _RANK][: count - 2 * _RANK]


@each_shape
@each_result
@pytest.mark.parametrize("dtype", [np.float32, float, complex])
def test_values(shape, result, dtype):
    domain, lattice, u, same, own = _case(shape, (2,), dtype)
    points = own if result == "own" else same
    known = domain.interpolate(u, points, **lattice, result=result)
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype is np.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for given in (points, on_device(points)):
        found = domain.interpolate(on_device(u), given, **lattice, result=result)
        assert type(found) is DeviceArray and found.dtype == u.dtype and found.shape == known.shape
        np.testing.assert_allclose(on_host(found), known, **close)
    first = domain.interpolate(on_device(u[0]), points[2], **lattice, result=result)
    np.testing.assert_allclose(on_host(first), domain.interpolate(u[0], points[2], **lattice, result=result), **close)


def _loss(domain, lattice, result):
    """A loss that isn't linear in the field, nor in the points."""
    return lambda u, points: anp.sum(anp.sin(2 * domain.interpolate(u, points, **lattice, result=result)) ** 2)


@each_shape
@each_result
@pytest.mark.parametrize("points_there", [False, True], ids=["points on the host", "all on the device"])
def test_derivatives(shape, result, points_there):
    domain, lattice, u, same, own = _case(shape)
    points, loss = own if result == "own" else same, _loss(domain, lattice, result)
    put = on_device if points_there else np.asarray
    settings = {"argnum": (0, 1), "objective": "sum"}
    known = mpiad.value_and_grad(loss, **settings)(u, points)
    found = mpiad.value_and_grad(loss, **settings)(on_device(u), put(points))
    np.testing.assert_allclose(found[0], known[0], rtol=1e-12)
    assert [type(part) for part in found[1]] == [DeviceArray, type(put(points))]
    for mine, host in zip(found[1], known[1]):
        np.testing.assert_allclose(on_host(mine), host, 1e-11, 1e-11)
    along = np.cos(u), np.sin(points)
    both = lambda pair: loss(*pair)  # noqa: E731
    known = mpiad.jvp(both, [u, points], list(along))[1]
    found = mpiad.jvp(both, [on_device(u), put(points)], [on_device(along[0]), put(along[1])])[1]
    np.testing.assert_allclose(on_host(found), known, rtol=1e-11, atol=1e-11)


@each_result
def test_second_derivatives(result):
    domain, lattice, u, same, own = _case((9, 7), periodic=(True, False))
    points, loss = own if result == "own" else same, _loss(domain, lattice, result)
    along = np.cos(u)
    known = mpiad.hvp(lambda u: loss(u, points), objective="sum")(u, along)
    found = mpiad.hvp(lambda u: loss(u, points), objective="sum")(on_device(u), on_device(along))
    np.testing.assert_allclose(on_host(found), known, 1e-11, 1e-11)
    # By the points too, with the field: the slopes between cells change with it.
    both = lambda pair: loss(*pair)  # noqa: E731
    along = [np.cos(u), np.sin(points)]
    known = mpiad.hvp(both, objective="sum")([u, points], along)
    found = mpiad.hvp(both, objective="sum")([on_device(u), on_device(points)], [on_device(v) for v in along])
    for mine, host in zip(found, known):
        np.testing.assert_allclose(on_host(mine), host, 1e-11, 1e-11)


@each_shape
def test_owners(shape):
    domain, lattice, _, points, _ = _case(shape)
    known, found = domain.locate(points, **lattice), domain.locate(on_device(points), **lattice)
    assert {type(part) for part in found} == {DeviceArray}
    for mine, host in zip(found, known):
        np.testing.assert_array_equal(on_host(mine), host)
    there = on_device(points)
    transfers.reset()
    domain.locate(there, **lattice)
    # The points, and who owns them, between which cells, and where.
    assert (transfers.d2h, transfers.d2h_bytes) == (1, points.nbytes)
    assert (transfers.h2d, transfers.h2d_bytes) == (3, 2 * points.nbytes + 8 * len(points))
    slopes = mpiad.grad(lambda x: anp.sum(domain.locate(x, **lattice).fraction ** 2), objective="sum")
    np.testing.assert_allclose(on_host(slopes(on_device(points))), slopes(points), 1e-13, 1e-13)


@pytest.mark.serial
def test_points_are_copied_once_for_each_set_of_them():
    domain, lattice, u, points, _ = _case((9, 7))
    # Its own share alone: the sum over ranks would copy its message.
    field, lattice = on_device(u), {**lattice, "result": "share"}
    transfers.reset()
    domain.interpolate(field, points, **lattice)
    # Where the four corners of their cells are, and with which weights.
    assert (transfers.h2d, transfers.d2h, transfers.h2d_bytes) == (2, 0, 2 * 8 * 4 * len(points))
    transfers.reset()
    gradient = mpiad.grad(lambda u: anp.sum(domain.interpolate(u, points, **lattice) ** 2))
    for _ in range(3):
        gradient(field)
    assert (transfers.h2d, transfers.d2h, transfers.d2h_bytes) == (0, 3, 24)  # J, each time
    points[2] = points[3]
    transfers.reset()
    found = domain.interpolate(field, points, **lattice)
    assert transfers.h2d == 2
    np.testing.assert_allclose(on_host(found), domain.interpolate(u, points, **lattice), 1e-12)
    there = on_device(points)
    domain.interpolate(field, there, **lattice)
    transfers.reset()
    domain.interpolate(field, there, **lattice)
    assert (transfers.h2d, transfers.d2h, transfers.d2h_bytes) == (0, 1, points.nbytes)


@pytest.mark.serial
def test_sets_of_points_and_lattices_are_told_apart():
    domain, _, u, _, _ = _case((9, 7))
    field, rng = on_device(u), np.random.default_rng(0)
    sets = [rng.random((4, 2)) * 3 for _ in range(12)]
    # More sets than are kept, and each with all lattices while it is.
    for points in (*sets, sets[0].astype(np.float32), sets[0], sets[0].reshape(2, 2, 2)):
        for spacing in (1.0, 2.0, (1.0, 2.0)):
            found = domain.interpolate(field, points, spacing)
            np.testing.assert_allclose(on_host(found), domain.interpolate(u, points, spacing), 1e-6, 1e-7)


def test_a_value_that_is_not_finite_stays_where_it_is():
    domain, lattice, u, points, _ = _case((9, 7))
    u[...] = np.where(domain.owned[0].start == 0, np.inf, u)
    with np.errstate(invalid="ignore"):
        known = domain.interpolate(u, points, **lattice, result="share")
        found = domain.interpolate(on_device(u), points, **lattice, result="share")
    np.testing.assert_array_equal(np.isfinite(on_host(found)), np.isfinite(known))


@each_result
def test_points_outside_and_in_two_places_are_refused(result):
    domain, lattice, u, same, own = _case((9, 7))
    points = own if result == "own" else same
    with pytest.raises(TypeError, match="must be on the host or on the device of u, but points are .* on device 0"):
        domain.interpolate(u, on_device(points), **lattice, result=result)
    points[1] = 1e6
    with pytest.raises(ValueError, match="point 1 at .* is outside of the grid"):
        domain.interpolate(on_device(u), points, **lattice, result=result)
    with pytest.raises(ValueError, match="Domain.locate: point 1 at .* is outside of the grid"):
        domain.locate(on_device(points), **lattice)


def test_parameters_of_the_host_that_place_receivers():
    """Points that are traced on the host move over a field that is made on the device."""
    domain, lattice, u, points, _ = _case((9, 7))

    def loss(shift, there):
        field = to_device(u, like=on_device(0.0)) if there else u
        return anp.sum(domain.interpolate(field, points * 0.9 + shift * 0.1, **lattice) ** 3)

    shift = points.mean(axis=0)
    gradient = mpiad.grad(loss, objective="sum")
    found = gradient(shift, True)
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found, gradient(shift, False), 1e-11)
