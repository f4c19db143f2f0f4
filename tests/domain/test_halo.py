"""The halo exchange against numpy.pad on the whole grid: values, adjoint, tangent, and both again."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from whole_grid import Exchange, factorisations, owned

import mpiad
import mpiad.domain.halo
import mpiad.errors
from mpiad.domain import Domain
from mpiad.domain import boundary as boundaries
from mpiad.domain.boundary import ZERO, Side
from mpiad.domain.halo import fill_halo
from mpiad.extend import custom_operator, defjvp, defvjp
from mpiad.testing import check_adjoint, check_grads

ROUNDING = 1e-12
CASES = [
    # shape, halo, periodic
    ((13,), 1, False),
    ((16,), 3, True),
    ((9, 11), 1, False),
    ((9, 11), 2, (True, False)),
    ((8, 12), (3, 1), (False, True)),
    ((8, 9), (0, 2), False),
    ((10, 8), 2, True),
    ((6, 7, 8), 1, False),
    ((15, 6, 7), 3, (True, False, True)),
    ((7, 6, 9), (1, 2, 3), False),
]
BOUNDARIES = ["zero", "edge", "reflect", 2.5]

each_case = pytest.mark.parametrize(("shape", "halo", "periodic"), CASES, ids=str)
each_boundary = pytest.mark.parametrize("boundary", BOUNDARIES, ids=str)


def whole(rank_rng, shape, number=0):
    """Return the same array on all ranks."""
    return rank_rng(100 + number).standard_normal(shape)


def all_padded(rank_rng, exchange, number=0):
    """Return an array like each rank's block with its halo, the same list on all ranks."""
    return [rank_rng(200 + 10 * number + r).standard_normal(p.shape) for r, p in enumerate(exchange.places)]


def value_of(boundary):
    return boundary if isinstance(boundary, float) else 0.0


@pytest.mark.each_combination
@each_boundary
@each_case
def test_value_adjoint_and_tangent(rank, rank_rng, shape, halo, periodic, boundary):
    domain = Domain(shape, halo=halo, periodic=periodic)
    reference = Exchange(shape, domain.dims, halo, periodic, boundary)
    u, v, cotangents = whole(rank_rng, shape), whole(rank_rng, shape, 1), all_padded(rank_rng, reference)
    mine = domain.owned

    def exchange(block):
        return domain.exchange(block, boundary)

    padded = exchange(u[mine])
    np.testing.assert_array_equal(padded, reference(u, value_of(boundary))[rank])
    np.testing.assert_array_equal(padded[domain.interior], u[mine])
    pull, value = mpiad.make_vjp(exchange)(u[mine])
    np.testing.assert_array_equal(value, padded)
    np.testing.assert_allclose(pull(cotangents[rank]), reference.adjoint(cotangents)[mine], ROUNDING, ROUNDING)
    value, tangent = mpiad.jvp(exchange, u[mine], v[mine])
    np.testing.assert_array_equal(tangent, reference(v)[rank])


def test_grids_of_ranks_by_hand(rank, size, rank_rng):
    shape, periodic = (5, 6, 5), (False, True, False)
    for dims in factorisations(size, 3):
        domain = Domain(shape, periodic=periodic, dims=dims)
        reference = Exchange(shape, dims, 1, periodic, "edge")
        u, g = whole(rank_rng, shape), all_padded(rank_rng, reference)
        assert domain.owned == owned(shape, dims, rank)
        pull, padded = mpiad.make_vjp(lambda x: domain.exchange(x, "edge"))(u[domain.owned])  # noqa: B023
        np.testing.assert_array_equal(padded, reference(u)[rank])
        np.testing.assert_allclose(pull(g[rank]), reference.adjoint(g)[domain.owned], ROUNDING, ROUNDING)


@pytest.mark.parametrize("periodic", [False, True])
@each_boundary
def test_halo_as_wide_as_the_smallest_block(rank, size, rank_rng, boundary, periodic):
    shape = (2 * size + (size > 1),) if size > 1 else (3,)
    domain = Domain(shape, halo=2, periodic=periodic)
    reference = Exchange(shape, (size,), 2, periodic, boundary)
    u, g = whole(rank_rng, shape), all_padded(rank_rng, reference)
    np.testing.assert_array_equal(domain.exchange(u[domain.owned], boundary), reference(u, value_of(boundary))[rank])
    pull, _ = mpiad.make_vjp(lambda x: domain.exchange(x, boundary))(u[domain.owned])
    np.testing.assert_allclose(pull(g[rank]), reference.adjoint(g)[domain.owned], ROUNDING, ROUNDING)


@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect"])
def test_dot_product(rng, boundary):
    for shape, halo, periodic in CASES:
        domain = Domain(shape, halo=halo, periodic=periodic)
        check_adjoint(lambda u: domain.exchange(u, boundary), rng.standard_normal(domain.local_shape))  # noqa: B023


@pytest.mark.mpi(min_size=2)
def test_adjoint_that_crops_the_halo_is_caught(rng):
    domain = Domain((9, 8))

    @custom_operator
    def wrong(u):
        return fill_halo(u, domain._halo, ((ZERO, ZERO), (ZERO, ZERO)))

    defvjp(wrong, lambda ans, u: lambda g: g[domain.interior])
    defjvp(wrong, lambda du, ans, u: wrong(du))
    with pytest.raises(AssertionError):
        check_adjoint(wrong, rng.standard_normal(domain.local_shape))


@pytest.mark.parametrize("boundary", ["zero", "edge", "reflect"])
def test_gradient_and_hessian_of_a_nonlinear_program(rank, rank_rng, boundary):
    # J = Σ_r Σ w_r y_r³ / 6 with y = exchange(u); its derivatives written out.
    shape, halo, periodic = (8, 11), 2, (False, True)
    domain = Domain(shape, halo=halo, periodic=periodic)
    reference = Exchange(shape, domain.dims, halo, periodic, boundary)
    u, v, weights = whole(rank_rng, shape), whole(rank_rng, shape, 1), all_padded(rank_rng, reference)
    y, dy = reference(u), reference(v)

    def loss(block):
        return anp.sum(weights[rank] * domain.exchange(block, boundary) ** 3) / 6

    gradient = reference.adjoint([w * p**2 / 2 for w, p in zip(weights, y)])[domain.owned]
    product = reference.adjoint([w * p * d for w, p, d in zip(weights, y, dy)])[domain.owned]
    np.testing.assert_allclose(mpiad.grad(loss, objective="sum")(u[domain.owned]), gradient, 1e-11, 1e-11)
    forward_over_reverse = mpiad.hvp(loss, objective="sum")(u[domain.owned], v[domain.owned])
    np.testing.assert_allclose(forward_over_reverse, product, 1e-11, 1e-11)

    def slope(block):
        return anp.sum(mpiad.grad(loss, objective="sum")(block) * v[domain.owned])

    np.testing.assert_allclose(mpiad.grad(slope, objective="sum")(u[domain.owned]), product, 1e-11, 1e-11)


def test_taylor_rates(rng):
    domain = Domain((7, 9), periodic=(True, False))
    check_grads(
        lambda u: mpiad.mpi_sum(anp.sum(anp.sin(domain.exchange(u, "reflect")) ** 2)),
        rng.standard_normal(domain.local_shape),
    )


def test_exchange_whose_result_one_rank_uses(rank, rank_rng):
    # The others' losses don't depend on it; their halos' owners must get nothing, and nobody may wait.
    shape = (9, 8)
    domain = Domain(shape)
    reference = Exchange(shape, domain.dims, 1, False, "edge")
    u, w = whole(rank_rng, shape), all_padded(rank_rng, reference)

    def loss(block):
        padded = domain.exchange(block, "edge")
        return anp.sum(w[0] * padded) if rank == 0 else None

    cotangents = [w[0], *[np.zeros(p.shape) for p in reference.places[1:]]]
    expected = reference.adjoint(cotangents)[domain.owned]
    np.testing.assert_allclose(mpiad.grad(loss)(u[domain.owned]), expected, ROUNDING, ROUNDING)


@pytest.mark.parametrize("boundary", [("edge", 1.5), ((0.5, "edge"), ("reflect", "zero"))], ids=str)
def test_boundary_for_each_side(rank, rank_rng, boundary):
    shape = (8, 11)
    domain = Domain(shape, halo=2)
    u = whole(rank_rng, shape)
    pairs = [pair if isinstance(pair, tuple) else (pair, pair) for pair in boundary]
    padded = u
    for axis, (low, high) in enumerate(pairs):
        for place, kind in enumerate((low, high)):
            width = [(0, 0), (0, 0)]
            width[axis] = (2, 0) if place == 0 else (0, 2)
            if kind in ("edge", "reflect"):
                padded = np.pad(padded, width, kind)
            else:
                padded = np.pad(padded, width, constant_values=0.0 if kind == "zero" else kind)
    mine = tuple(slice(c.start, c.stop + 4) for c in domain.owned)
    np.testing.assert_array_equal(domain.exchange(u[domain.owned], boundary), padded[mine])
    linear = tuple(tuple("zero" if isinstance(k, float) else k for k in pair) for pair in pairs)
    check_adjoint(lambda x: domain.exchange(x, linear), u[domain.owned])


@pytest.mark.parametrize("boundary", ["all", "sides"])
def test_traced_boundary_value(rank, rank_rng, boundary):
    # J = Σ w y² / 2, and y = v on the sides that have a value.
    shape = (7, 8)
    domain = Domain(shape)
    kinds = "zero" if boundary == "all" else ("edge", "zero")
    reference = Exchange(shape, domain.dims, 1, False, kinds)
    u, w = whole(rank_rng, shape), all_padded(rank_rng, reference)

    def loss(value, block):
        padded = domain.exchange(block, value if boundary == "all" else ("edge", value))
        return anp.sum(w[rank] * padded**2) / 2

    y = reference(u, 0.7)
    slope = sum(np.sum((w * y)[p < 0]) for p, w, y in zip(reference.places, w, y))
    of_u = reference.adjoint([w * y for w, y in zip(w, y)])[domain.owned]
    by_value, by_u = mpiad.grad(loss, (0, 1), objective="sum")(0.7, u[domain.owned])
    total = mpiad.mpi_allreduce(by_value)
    np.testing.assert_allclose(total, slope, 1e-11)
    np.testing.assert_allclose(by_u, of_u, 1e-11, 1e-11)
    with pytest.raises(TypeError, match="one number"):
        mpiad.grad(lambda v: anp.sum(domain.exchange(u[domain.owned], (v, 1.0))), objective="sum")(0.7)


@pytest.mark.parametrize("dtype", ["f4", "c8", "c16", "i4", "u1", "?"])
def test_dtypes(rank, rank_rng, dtype):
    shape = (6, 7)
    domain = Domain(shape)
    u = (10 * whole(rank_rng, shape)).astype(dtype)
    padded = domain.exchange(u[domain.owned])
    assert padded.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(padded, Exchange(shape, domain.dims, 1, False, "zero")(u, u.dtype.type(0))[rank])
    if padded.dtype.kind in "fc":
        pull, value = mpiad.make_vjp(domain.exchange)(u[domain.owned])
        assert pull(value).dtype == np.dtype(dtype)


def test_layers_in_front_and_memory_order(rank, rank_rng):
    shape = (6, 7)
    domain = Domain(shape)
    reference = Exchange(shape, domain.dims, 1, False, "edge")
    u = whole(rank_rng, (2, 3, *shape))
    mine = (..., *domain.owned)
    for block in (u[mine], np.asfortranarray(u[mine]), u[mine][..., ::-1][..., ::-1]):
        padded = domain.exchange(block, "edge")
        assert padded.shape == (2, 3, *domain.padded_shape)
        for i, j in np.ndindex(2, 3):
            np.testing.assert_array_equal(padded[i, j], reference(u[i, j])[rank])
    check_adjoint(lambda x: domain.exchange(x, "edge"), u[mine])


def test_result_is_new_memory():
    domain = Domain((6, 7), halo=0)
    block = np.ones(domain.local_shape)
    domain.exchange(block)[...] = 2
    assert (block == 1).all()


def test_fields_travel_in_one_message(rank, rank_rng, monkeypatch):
    shape = (6, 7)
    domain = Domain(shape, periodic=(False, True))
    reference = Exchange(shape, domain.dims, 1, (False, True), "edge")
    fields = [whole(rank_rng, lead + shape, k) for k, lead in enumerate([(), (2,), ()])]
    blocks = [field[(..., *domain.owned)] for field in fields]
    sent = []

    def counting(x, dest, tag, comm):
        sent.append((dest, tag))
        return mpiad.mpi_send(x, dest, tag=tag, comm=comm)

    monkeypatch.setattr(mpiad.domain.halo, "mpi_send", counting)
    padded = domain.exchange(blocks, "edge")
    # One to each neighbour along each dimension, also where the one before is the one after.
    expected = [n for pair in domain.neighbours for n in {*pair} if n is not None and n != rank]
    assert sorted(dest for dest, _ in sent) == sorted(expected)
    assert all(tag <= 32767 for _, tag in sent)
    for field, one in zip(fields, padded):
        assert one.shape == field.shape[:-2] + domain.padded_shape
        for part, whole_part in zip(one.reshape(-1, *domain.padded_shape), field.reshape(-1, *shape)):
            np.testing.assert_array_equal(part, reference(whole_part)[rank])
    weights = [rank_rng(300 + rank).standard_normal(one.shape) for one in padded]

    def together(x):
        return sum(anp.sum(w * y**2) for w, y in zip(weights, domain.exchange(x, "edge")))

    def apart(x):
        return sum(anp.sum(w * domain.exchange(y, "edge") ** 2) for w, y in zip(weights, x))

    for one, other in zip(mpiad.grad(together, objective="sum")(blocks), mpiad.grad(apart, objective="sum")(blocks)):
        np.testing.assert_allclose(one, other, ROUNDING, ROUNDING)
    assert domain.exchange([]) == []


def test_users_messages_of_any_tag_in_between(rank, size, rank_rng):
    domain = Domain((4 * size,), periodic=True)
    u = whole(rank_rng, (4 * size,))
    coming = mpiad.mpi_irecv(np.zeros(1), (rank - 1) % size)
    going = MPI.COMM_WORLD.isend("user's own", (rank + 1) % size, tag=32750)
    padded = domain.exchange(u[domain.owned])
    mpiad.mpi_send(np.full(1, float(rank)), (rank + 1) % size)
    assert mpiad.mpi_wait(coming) == (rank - 1) % size
    assert MPI.COMM_WORLD.recv(source=(rank - 1) % size, tag=32750) == "user's own"
    going.wait()
    np.testing.assert_array_equal(padded, Exchange((4 * size,), (size,), 1, True, "zero")(u)[rank])


def test_communicators_of_some_ranks(rank, size, rank_rng):
    part = MPI.COMM_WORLD.Split(rank % 2, -rank)
    shape = (5, 6)
    domain = Domain(shape, comm=part)
    u = whole(rank_rng, shape, rank % 2)
    reference = Exchange(shape, domain.dims, 1, False, "reflect")
    padded = domain.exchange(u[domain.owned], "reflect")
    np.testing.assert_array_equal(padded, reference(u)[part.rank])
    g = mpiad.grad(lambda x: domain.sum(x**2), comm=part)(u[domain.owned])
    np.testing.assert_allclose(g, 2 * u[domain.owned], ROUNDING)
    part.Free()


def test_many_exchanges_in_one_trace(rank_rng):
    # u ← u + c Lu on a periodic grid; its adjoint is the same steps, L being symmetric.
    domain = Domain((8,), periodic=True)
    u, w = whole(rank_rng, (8,)), whole(rank_rng, (8,), 1)

    def step(block):
        padded = domain.exchange(block)
        return block + 0.1 * (padded[2:] - 2 * padded[1:-1] + padded[:-2])

    def loss(block):
        for _ in range(50):
            block = step(block)
        return domain.dot(block, w[domain.owned])

    expected = w
    for _ in range(50):
        expected = expected + 0.1 * (np.roll(expected, 1) - 2 * expected + np.roll(expected, -1))
    np.testing.assert_allclose(mpiad.grad(loss)(u[domain.owned]), expected[domain.owned], 1e-10, 1e-13)


@pytest.mark.mpi(min_size=2)
def test_plain_autograd_is_refused(size):
    domain = Domain((2 * size,))
    with pytest.raises(mpiad.errors.ForeignTraceError, match="Use mpiad.grad"):
        autograd.grad(lambda u: anp.sum(domain.exchange(u)))(np.ones(2))


def test_what_is_refused(size):
    domain = Domain((2 * size, 5), halo=(1, 0))
    good = np.ones(domain.local_shape)
    with pytest.raises(ValueError, match=r"Domain.exchange: expected an array of shape .*, but got \(\d+, \d+\) on rank"):
        domain.exchange(np.ones(domain.padded_shape))
    with pytest.raises(TypeError, match="expected an array .* but got list"):
        domain.exchange([[1.0]])
    with pytest.raises(TypeError, match="expected an array .* but got float"):
        domain.exchange(1.0)
    with pytest.raises(ValueError, match="boundary must be one of .* but got 'wrap'"):
        domain.exchange(good, "wrap")
    with pytest.raises(TypeError, match="boundary must be one of .* but got NoneType"):
        domain.exchange(good, None)
    with pytest.raises(ValueError, match="boundary has 3 entries for a grid of 2 dimensions"):
        domain.exchange(good, ("edge", "edge", "edge"))
    with pytest.raises(ValueError, match="two sides, but boundary has 3 entries"):
        domain.exchange(good, ("edge", ("edge", "edge", "edge")))
    with pytest.raises(TypeError, match="value 0.5 doesn't fit into an array of dtype int"):
        domain.exchange(good.astype(int), 0.5)
    for value, dtype in ((300, np.uint8), (np.int64(300), np.uint8), (-1, np.uint8), (200, np.int8), (2**70, np.int64)):
        with pytest.raises(TypeError, match=f"value .*{value}.* doesn't fit into an array of dtype {np.dtype(dtype)}"):
            domain.exchange(good.astype(dtype), value)
    assert domain.max(domain.exchange(good.astype(np.uint8), 255)[:-2]) == 255
    with pytest.raises(TypeError, match="same dtype, but got float64, float32"):
        domain.exchange([good, good.astype("f4")])
    narrow = Domain((4 * size, 2), halo=2, dims=(size, 1))
    with pytest.raises(ValueError, match="halo of 2 can't be reflected along dimension 1, which has 2 cells"):
        narrow.exchange(np.ones(narrow.local_shape), "reflect")
    assert domain.exchange(good).shape == domain.padded_shape


def padded_by(u, halo):
    """Return the whole grid with minus its reflection before it and half its edge plus 2 after it, along each dimension."""
    for axis in range(u.ndim):
        width = [(0, 0)] * u.ndim
        width[axis] = (halo, halo)
        low, high = np.pad(u, width, "reflect"), np.pad(u, width, "edge")
        cells = np.arange(u.shape[axis] + 2 * halo).reshape([-1 if k == axis else 1 for k in range(u.ndim)])
        u = np.where(cells < halo, -low, np.where(cells >= u.shape[axis] + halo, 0.5 * high + 2.0, high))
    return u


@pytest.mark.parametrize("shape", [(11,), (11, 8)])
def test_sides_with_factors(shape, rank_rng, monkeypatch):
    """A new kind of boundary is an entry of one table: here an antisymmetric side, and one of Robin's."""
    monkeypatch.setitem(boundaries._KINDS, "odd", boundaries._KINDS["reflect"]._replace(factor=-1))
    monkeypatch.setitem(boundaries._KINDS, "robin", Side(boundaries._KINDS["edge"].layers, factor=0.5, value=2.0))
    domain, sides = Domain(shape, halo=2), (("odd", "robin"),) * len(shape)
    u = whole(rank_rng, shape)
    mine = padded_by(u, 2)[tuple(slice(c.start, c.stop + 4) for c in domain.owned)]
    block = u[domain.owned]
    np.testing.assert_allclose(domain.exchange(block, sides), mine, 1e-14)
    np.testing.assert_allclose(domain.end_exchange(domain.begin_exchange(block, sides)), mine, 1e-14)
    check_adjoint(lambda u: domain.exchange(u, ("odd",) * len(shape)), block)
    laplacian, weights = domain.laplacian(boundary=sides), rank_rng(7).standard_normal(domain.padded_shape)
    check_grads(lambda u: domain.sum(laplacian(u) ** 3), block)
    check_grads(lambda u: mpiad.mpi_allreduce(anp.sum(weights * domain.exchange(u, sides) ** 3)), block)
    with pytest.raises(TypeError, match="a traced boundary value must be one number"):
        mpiad.grad(lambda v: domain.sum(domain.exchange(block, ((v, "odd"),) * len(shape))[domain.interior]))(1.0)
