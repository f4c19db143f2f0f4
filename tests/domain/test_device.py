"""Fields on devices: the numbers of fields on the host, forwards and backwards, and of a halo its messages alone copied."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
import pytest
from device_double import DeviceArray, on_device, on_host, transfers

import mpiad
from mpiad import Domain

_RANK, _SIZE = mpiad.mpi_rank(), mpiad.mpi_size()


def _domain(**settings):
    return Domain((9, 8), **{"halo": (1, 2), **settings})


def _field(domain, lead=(), dtype=float, shift=0):
    rng = np.random.default_rng(_RANK + 7 + shift)
    field = rng.normal(size=(*lead, *domain.local_shape))
    return (field + 1j * rng.normal(size=field.shape)).astype(dtype) if np.dtype(dtype).kind == "c" else field.astype(dtype)


def _alike(fun, *fields, rtol=1e-12):
    """Compare value, gradient and tangent of a function of fields on the host and on the device."""
    host, there = [np.asarray(x) for x in fields], [on_device(x) for x in fields]

    def loss(*fields):
        found = fun(*fields)
        weights = np.cos(np.arange(np.prod(found.shape), dtype=float)).reshape(found.shape)
        on = on_device if type(mpiad.stop_gradient(found)) is DeviceArray else np.asarray
        return anp.sum(anp.abs(found * on(weights.astype(found.dtype))) ** 2).astype(float)

    argnum = tuple(range(len(fields)))
    np.testing.assert_allclose(on_host(fun(*there)), fun(*host), rtol=rtol, atol=1e-13)
    value, gradient = mpiad.value_and_grad(loss, argnum, objective="sum")(*host)
    found, of_device = mpiad.value_and_grad(loss, argnum, objective="sum")(*there)
    np.testing.assert_allclose(found, value, rtol=rtol)
    for mine, known in zip(of_device, gradient):
        assert type(mine) is DeviceArray and mine.dtype == known.dtype
        np.testing.assert_allclose(on_host(mine), known, rtol=rtol, atol=rtol)
    along = np.cos(host[0]).astype(host[0].dtype)
    first = lambda x, rest: loss(x, *rest)  # noqa: E731
    known = mpiad.jvp(lambda x: first(x, host[1:]), host[0], along)[1]
    moved = mpiad.jvp(lambda x: first(x, there[1:]), there[0], on_device(along))[1]
    np.testing.assert_allclose(on_host(moved), known, rtol=rtol)


@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect", (("edge", 2.0), "reflect")])
@pytest.mark.parametrize("corners", [True, False])
def test_halos(boundary, corners):
    domain = _domain()
    _alike(lambda u: domain.exchange(u, boundary, corners=corners), _field(domain))
    _alike(lambda u: domain.exchange(u, "zero", corners=corners), _field(domain, (2,), np.complex128))


def test_a_cotangent_that_others_share_stays():
    domain = _domain()
    around = np.random.default_rng(_RANK).normal(size=domain.padded_shape)
    _alike(lambda u, v: domain.exchange(u, "edge") + v, _field(domain), around)


def test_halos_that_travel_while_the_rank_computes():
    domain = _domain(periodic=(True, False))

    def around(u, v):
        first, second = domain.begin_exchange(u, "edge"), domain.begin_exchange(v)
        inner = anp.sum(u * v)
        return domain.end_exchange(second) * domain.end_exchange(first) + inner

    _alike(around, _field(domain), _field(domain, shift=1))


def test_several_fields_in_one_message():
    domain = _domain()

    def both(u, v):
        first, second = domain.exchange((u, v))
        return first * second[0]

    _alike(both, _field(domain), _field(domain, (2,), shift=1))


def test_an_exchange_copies_its_messages_alone():
    domain = Domain((40, 30), halo=1)
    u = on_device(_field(domain))
    transfers.reset()
    domain.exchange(u)
    cells = 2 * sum(domain.padded_shape)
    assert transfers.h2d_bytes <= 8 * cells and transfers.d2h_bytes <= 8 * cells
    if _SIZE == 1:
        assert transfers.copies == 0


@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect", 1.5])
def test_stencils(boundary):
    domain = _domain()
    weights = np.random.default_rng(0).normal(size=(3, 5))
    stencil = domain.stencil(weights, boundary)
    _alike(stencil, _field(domain))
    laplacian = domain.laplacian(0.5, boundary=boundary)
    _alike(laplacian, _field(domain, (2,)))
    own = np.random.default_rng(_RANK).normal(size=(3, 3, *domain.local_shape))
    _alike(lambda u, w: domain.correlate(u, w, boundary), _field(domain), own)


def test_sums_over_the_grid():
    domain = _domain()
    _alike(lambda u: domain.sum(u), _field(domain))
    _alike(lambda u, v: domain.dot(u, v), _field(domain), _field(domain, shift=1))
    _alike(lambda u: domain.norm(u), _field(domain))
    _alike(lambda u: domain.mean(u), _field(domain, (2,)))
    _alike(lambda u: domain.max(u) + domain.min(u), _field(domain))
    zero = on_device(np.zeros(domain.local_shape))
    np.testing.assert_array_equal(on_host(mpiad.grad(domain.norm, objective="sum")(zero)), on_host(zero))


def test_whole_grids():
    domain, whole = _domain(), np.arange(72.0).reshape(9, 8)
    block = domain.scatter(on_device(whole) if _RANK == 0 else None)
    if _RANK == 0:
        assert type(block) is DeviceArray
    mine = on_device(whole[domain.owned])
    gathered = domain.gather(mine, _SIZE - 1)
    assert type(gathered) is DeviceArray
    if _RANK == _SIZE - 1:
        np.testing.assert_array_equal(on_host(gathered), whole)
    np.testing.assert_array_equal(on_host(domain.scatter(on_device(whole))), whole[domain.owned])
