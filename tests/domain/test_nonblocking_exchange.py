"""Exchanges in two halves against numpy.pad on the whole grid, and what is computed between the halves."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from whole_grid import Exchange

import mpiad
import mpiad.domain.field_exchange
import mpiad.domain.halo
import mpiad.errors
from mpiad.domain import Domain
from mpiad.testing import check_adjoint, check_grads

ROUNDING = 1e-12
CASES = [
    # shape, halo, periodic
    ((13,), 2, False),
    ((16,), 3, True),
    ((9, 11), 1, False),
    ((9, 11), 2, (True, False)),
    ((8, 9), (0, 2), False),
    ((10, 8), (1, 2), True),
    ((6, 7, 8), 1, (False, True, False)),
    ((7, 6, 9), (1, 2, 1), True),
]
each_case = pytest.mark.parametrize(("shape", "halo", "periodic"), CASES, ids=str)
each_boundary = pytest.mark.parametrize("boundary", ["zero", "edge", "reflect", 2.5], ids=str)
each_corners = pytest.mark.parametrize("corners", [True, False], ids=["corners", "faces"])


def whole(rank_rng, shape, number=0):
    """Return the same array on all ranks."""
    return rank_rng(100 + number).standard_normal(shape)


def in_halves(domain, boundary="zero", corners=True):
    return lambda u: domain.end_exchange(domain.begin_exchange(u, boundary, corners=corners))


@each_corners
@each_boundary
@each_case
def test_value_adjoint_and_tangent(rank, rank_rng, shape, halo, periodic, boundary, corners):
    domain = Domain(shape, halo=halo, periodic=periodic)
    reference = Exchange(shape, domain.dims, halo, periodic, boundary, corners)
    u, v, mine = whole(rank_rng, shape), whole(rank_rng, shape, 1), domain.owned
    cotangents = [rank_rng(200 + r).standard_normal(p.shape) for r, p in enumerate(reference.places)]
    value = boundary if isinstance(boundary, float) else 0.0
    for exchange in (in_halves(domain, boundary, corners), lambda x: domain.exchange(x, boundary, corners=corners)):
        pull, padded = mpiad.make_vjp(exchange)(u[mine])
        np.testing.assert_array_equal(padded, reference(u, value)[rank])
        np.testing.assert_allclose(pull(cotangents[rank]), reference.adjoint(cotangents)[mine], ROUNDING, ROUNDING)
        padded, tangent = mpiad.jvp(exchange, u[mine], v[mine])
        np.testing.assert_array_equal(padded, reference(u, value)[rank])
        np.testing.assert_array_equal(tangent, reference(v)[rank])


@each_corners
@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect"])
def test_dot_product(rng, boundary, corners):
    for shape, halo, periodic in CASES:
        domain = Domain(shape, halo=halo, periodic=periodic)
        u = rng.standard_normal((2, *domain.local_shape))
        check_adjoint(in_halves(domain, boundary, corners), u)
        check_adjoint(lambda x: domain.exchange(x, boundary, corners=corners), u)  # noqa: B023


def test_first_and_second_derivatives_of_a_nonlinear_program(rank, rank_rng):
    # J = Σ w (exchange(sin u) + pad of u²)³ / 6: what is computed in between counts too.
    shape, periodic = (8, 11), (False, True)
    domain = Domain(shape, halo=2, periodic=periodic)
    u, v, w = (whole(rank_rng, shape, k)[domain.owned] for k in range(3))

    def loss(x, in_between):
        if in_between:
            begun = domain.begin_exchange(anp.sin(x), "edge")
            square = x**2
            padded = domain.end_exchange(begun)
        else:
            square, padded = x**2, domain.exchange(anp.sin(x), "edge")
        laplacian = padded[4:, 2:-2] + padded[:-4, 2:-2] + padded[2:-2, 4:] + padded[1:-3, 1:-3]
        return domain.dot(w, (laplacian + square) ** 3) / 6

    def slope(x, in_between):
        return domain.dot(mpiad.grad(lambda y: loss(y, in_between))(x), v)

    for derive in (
        lambda k: mpiad.grad(lambda x: loss(x, k))(u),
        lambda k: mpiad.hvp(lambda x: loss(x, k))(u, v),
        lambda k: mpiad.grad(lambda x: slope(x, k))(u),
    ):
        np.testing.assert_allclose(derive(True), derive(False), 1e-11, 1e-11)
    check_grads(lambda x: loss(x, True), u)


def test_several_fields_in_one_message(rank, rank_rng, monkeypatch):
    shape, periodic = (6, 7), (False, True)
    domain = Domain(shape, periodic=periodic)
    reference = Exchange(shape, domain.dims, 1, periodic, "edge")
    fields = [whole(rank_rng, lead + shape, k) for k, lead in enumerate([(), (2,), ()])]
    sent = []

    def counting(x, dest, tag, comm):
        sent.append(dest)
        assert tag <= 32767
        return mpiad.mpi_send(x, dest, tag=tag, comm=comm)

    monkeypatch.setattr(mpiad.domain.halo, "mpi_send", counting)
    padded = in_halves(domain, "edge")([field[(..., *domain.owned)] for field in fields])
    assert len(sent) == len(set(sent)) and rank not in sent
    for field, one in zip(fields, padded):
        for part, whole_part in zip(one.reshape(-1, *domain.padded_shape), field.reshape(-1, *shape)):
            np.testing.assert_array_equal(part, reference(whole_part)[rank])


@pytest.mark.interpreted
def test_messages_travel_while_the_rank_computes_in_both_directions(monkeypatch):
    domain = Domain((12, 9))
    events = []

    def noting(name, fun):
        def noted(*args):
            events.append(name)
            return fun(*args)

        return noted

    def completed(values, incoming, backwards):
        events.append("add" if backwards else "put")
        return mpiad.domain.halo.complete(values, incoming, backwards)

    monkeypatch.setattr(mpiad.domain.field_exchange, "post", noting("post", mpiad.domain.halo.post))
    monkeypatch.setattr(mpiad.domain.field_exchange, "complete", completed)
    compute = primitive(noting("compute", np.sin))
    defvjp(compute, lambda ans, x: noting("compute back", lambda g: g * anp.cos(x)))

    def loss(x):
        begun = domain.begin_exchange(x)
        inside = compute(x)
        return domain.sum(inside) + domain.norm(domain.end_exchange(begun)[domain.interior])

    mpiad.grad(loss)(np.ones(domain.local_shape))
    assert events == ["post", "compute", "put", "post", "compute back", "add"]


def test_ends_in_another_order_on_each_rank(rank, rank_rng):
    shape = (7, 9)
    domain = Domain(shape)
    reference = Exchange(shape, domain.dims, 1, False, "edge")
    fields = [whole(rank_rng, shape, k) for k in range(3)]
    shapes = [p.shape for p in reference.places]
    weights = [[rank_rng(300 + 10 * k + r).standard_normal(s) for r, s in enumerate(shapes)] for k in range(3)]
    order = np.roll(np.arange(3), rank)

    def loss(*blocks):
        begun = [domain.begin_exchange(block, "edge") for block in blocks]
        padded = {k: domain.end_exchange(begun[k]) for k in order}
        return sum(anp.sum(weights[k][rank] * padded[k] ** 2) for k in range(3)) / 2

    mine = domain.owned
    gradients = mpiad.grad(loss, (0, 1, 2), objective="sum")(*[field[mine] for field in fields])
    for k, (field, found) in enumerate(zip(fields, gradients)):
        cotangents = [w * y for w, y in zip(weights[k], reference(field))]
        np.testing.assert_allclose(found, reference.adjoint(cotangents)[mine], ROUNDING, ROUNDING)


def test_traced_boundary_value(rank, rank_rng):
    shape = (7, 8)
    domain = Domain(shape)
    u = whole(rank_rng, shape)[domain.owned]

    def loss(value, in_between):
        exchange = in_halves(domain, value) if in_between else lambda x: domain.exchange(x, value)
        return anp.sum(exchange(u) ** 3)

    slopes = [mpiad.grad(lambda v: loss(v, k), objective="sum")(0.7) for k in (True, False)]  # noqa: B023
    np.testing.assert_allclose(slopes[0], slopes[1], 1e-12)
    with pytest.raises(TypeError, match="traced boundary value needs corners=True"):
        mpiad.grad(lambda v: anp.sum(domain.exchange(u, v, corners=False)), objective="sum")(0.7)


def test_what_is_refused():
    domain = Domain((8, 9), halo=1)
    block = np.ones(domain.local_shape)
    begun = domain.begin_exchange(block)
    domain.end_exchange(begun)
    with pytest.raises(mpiad.errors.RequestError, match="Domain.end_exchange: <Domain.begin_exchange .* waited for before"):
        domain.end_exchange(begun)
    with pytest.raises(TypeError, match="expected a result of Domain.begin_exchange, but got ndarray"):
        domain.end_exchange(block)
    with pytest.raises(ValueError, match="Domain.begin_exchange: expected an array of shape"):
        domain.begin_exchange(np.ones(domain.padded_shape))
    with pytest.raises(ValueError, match="got an empty sequence"):
        domain.begin_exchange([])
    several = [domain.begin_exchange(block) for _ in range(224)]
    with pytest.raises(mpiad.errors.RequestError, match="224 exchanges were begun after"):
        domain.begin_exchange(block)
    for begun in reversed(several):
        domain.end_exchange(begun)
    begun = domain.begin_exchange(block)
    with pytest.raises(mpiad.errors.RequestError, match="outside any trace"):
        mpiad.grad(lambda u: domain.sum(domain.end_exchange(begun)[domain.interior] * u))(block)
    domain.end_exchange(begun)


def test_an_exchange_that_never_ends_is_named():
    domain = Domain((8, 9))

    def loss(u):
        domain.begin_exchange(u)
        return domain.sum(u)

    with pytest.raises(mpiad.errors.RequestError, match="1 request.* never waited for.* <Domain.begin_exchange"):
        mpiad.grad(loss)(np.ones(domain.local_shape))
    mpiad.reset()
    assert mpiad.mpi_allreduce(1) == mpiad.mpi_size()


def test_after_an_exception_that_ranks_met_at_different_places(rank, size, rank_rng):
    shape = (8, 9)
    domain = Domain(shape)
    u = whole(rank_rng, shape)

    def failing(x):
        for _ in range(rank):  # each rank begins another number of exchanges
            domain.begin_exchange(x)
        raise KeyError("of the user's")

    with pytest.raises(KeyError):
        mpiad.grad(failing)(u[domain.owned])
    mpiad.reset()
    padded = in_halves(domain, "edge")(u[domain.owned])
    np.testing.assert_array_equal(padded, Exchange(shape, domain.dims, 1, False, "edge")(u)[rank])


@pytest.mark.mpi(min_size=2)
def test_plain_autograd_is_refused(size):
    domain = Domain((2 * size,))
    with pytest.raises(mpiad.errors.ForeignTraceError, match="Use mpiad.grad"):
        autograd.grad(lambda u: anp.sum(in_halves(domain)(u)))(np.ones(2))
    mpiad.reset()
