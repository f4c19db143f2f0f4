"""Owners of points and values there, against SciPy's interpolation of the whole grid and closed forms."""

import autograd.numpy as anp
import numpy as np
import pytest
from scipy.interpolate import RegularGridInterpolator

import mpiad
from mpiad.domain import Domain, interpolation
from mpiad.testing import check_adjoint, check_grads

SHAPES = [(13,), (9, 7), (5, 6, 7)]
SPACING, ORIGIN = (0.5, 2.0, 0.25), (-1.0, 3.0, 0.5)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def grid(shape):
    axes = [x + h * np.arange(n) for n, h, x in zip(shape, SPACING, ORIGIN)]
    return {"spacing": SPACING[: len(shape)], "origin": ORIGIN[: len(shape)]}, axes


def inside(rng, axes, count):
    """Return points in the grid, its two ends among them."""
    points = np.stack([rng.uniform(axis[0], axis[-1], count) for axis in axes], axis=-1)
    points[0], points[1] = [axis[0] for axis in axes], [axis[-1] for axis in axes]
    return points


@each_shape
def test_values(rank, rank_rng, shape):
    domain, (lattice, axes) = Domain(shape, halo=0), grid(shape)
    u = rank_rng(100).standard_normal((2, *shape))
    points = inside(rank_rng(101), axes, 12)
    expected = np.stack([RegularGridInterpolator(axes, field)(points) for field in u])
    block = u[(..., *domain.owned)]
    np.testing.assert_allclose(domain.interpolate(block, points, **lattice), expected, 1e-12, 1e-12)
    np.testing.assert_allclose(domain.interpolate(block[0], points[3], **lattice), expected[0, 3], 1e-12)
    split = domain.interpolate(block, points.reshape(3, 4, -1), **lattice)
    np.testing.assert_allclose(split, expected.reshape(2, 3, 4), 1e-12, 1e-12)
    share = domain.interpolate(block, points, **lattice, result="share")
    owner = domain.locate(points, **lattice).owner
    np.testing.assert_array_equal(share[:, owner != rank], 0)
    np.testing.assert_allclose(share[:, owner == rank], expected[:, owner == rank], 1e-12, 1e-12)
    mine = points[rank : 2 * rank + 1]
    own = domain.interpolate(block, mine, **lattice, result="own")
    np.testing.assert_allclose(own, expected[:, rank : 2 * rank + 1], 1e-12, 1e-12)


@each_shape
def test_location(rank, rank_rng, shape):
    domain, (lattice, axes) = Domain(shape), grid(shape)
    points = inside(rank_rng(101), axes, 12)
    owner, cell, fraction = domain.locate(points, **lattice)
    np.testing.assert_array_equal(owner, domain.owner(cell))
    np.testing.assert_allclose(np.array(lattice["origin"]) + np.array(lattice["spacing"]) * (cell + fraction), points)
    assert (fraction >= 0).all() and (fraction <= 1).all()
    assert (cell <= np.array(shape) - 2).all()


def test_periodic_and_extent(rank_rng):
    # sin is known everywhere: the interpolation of its cells repeats with the grid, and so does a point two turns away.
    n = 16
    domain = Domain((n, 5), periodic=(True, False))
    x, y = domain.coordinates(extent=(2.0, (1.0, 3.0)))
    u = np.sin(np.pi * x) * y
    points = np.array([[1.95, 1.2], [-4.05 + 2.0, 1.2], [0.01, 3.0], [0.3, 1.0]])
    values = domain.interpolate(u, points, extent=(2.0, (1.0, 3.0)))
    nodes = np.sin(2 * np.pi * np.arange(n + 1) / n)
    expected = np.interp(points[:, 0] % 2.0, 2.0 * np.arange(n + 1) / n, nodes) * points[:, 1]
    np.testing.assert_allclose(values, expected, 1e-12, 1e-13)
    centred = Domain((n,))
    (x,) = centred.coordinates(extent=1.0, centred=True)
    np.testing.assert_allclose(centred.interpolate(3 * x, [[0.4]], extent=1.0, centred=True), [1.2], 1e-12)


@pytest.mark.parametrize("result", ["all", "share", "own"])
@each_shape
def test_dot_product(rank, rank_rng, rng, shape, result):
    domain, (lattice, axes) = Domain(shape), grid(shape)
    points = inside(rank_rng(101 + (rank if result == "own" else 0)), axes, 7)
    block = rng.standard_normal((2, *domain.local_shape))
    check_adjoint(lambda u: domain.interpolate(u, points, **lattice, result=result), block)


@pytest.mark.parametrize("result", ["all", "own"])
@pytest.mark.unguarded
def test_derivatives_by_field_and_positions(rank, size, rank_rng, result):
    shape = (9, 7)
    domain, (lattice, axes) = Domain(shape), grid(shape)
    u = rank_rng(100).standard_normal(shape)[domain.owned]
    # Away from the edges of the grid, since they are moved.
    points = (inside(rank_rng(101 + (rank if result == "own" else 0)), axes, 5)[2:] + [axis.mean() for axis in axes]) / 2

    def loss(u, points):
        values = domain.interpolate(u, points, **lattice, result=result)
        return anp.sum(anp.sin(values)) / (size if result == "all" else 1)

    # Points that all ranks have are moved together.
    check_grads(loss, u, points, argnum=(0, 1), objective="sum", shared=(False, result == "all"))


def test_gradient_by_a_position_in_a_bilinear_field(rank):
    # u = 2 x + 3 y + x y is its own interpolation.
    domain = Domain((6, 8))
    x, y = domain.coordinates()
    u, point = 2 * x + 3 * y + x * y, np.array([2.3, 4.6])

    def value(p):
        return domain.interpolate(u, p)

    found, gradient = mpiad.value_and_grad(value, shared=True)(point)
    np.testing.assert_allclose(found, 2 * 2.3 + 3 * 4.6 + 2.3 * 4.6, 1e-12)
    np.testing.assert_allclose(gradient, [2 + 4.6, 3 + 2.3], 1e-12)
    np.testing.assert_allclose(mpiad.hvp(value, shared=True)(point, np.array([0.5, 2.0])), [2.0, 0.5], 1e-12)


def test_precision_is_kept(rank_rng):
    domain = Domain((9, 7))
    u = rank_rng(100).standard_normal((9, 7)).astype("f4")[domain.owned]
    assert domain.interpolate(u, [[1.5, 2.5]]).dtype == np.float32


@pytest.mark.parametrize("result", ["all", "share", "own"])
def test_fields_of_integers_and_booleans(rank, result):
    """The values of 3 i + 2 j between cells in closed form; a field that is true in odd columns is halfway in between."""
    domain, points = Domain((6, 5)), np.array([[0.25, 1.5], [2.0, 2.5], [4.75, 3.5]])
    i, j = domain.coordinates()
    mine = (domain.locate(points).owner == rank) | (result != "share")
    for dtype in (int, np.uint8):
        values = domain.interpolate((3 * i + 2 * j).astype(dtype), points, result=result)
        np.testing.assert_allclose(values, np.where(mine, [3.75, 11.0, 21.25], 0.0), rtol=1e-15)
    odd = np.broadcast_to(j % 2 == 1, domain.local_shape).copy()
    np.testing.assert_allclose(domain.interpolate(odd, points, result=result), 0.5 * mine)


def test_what_is_refused(rank, size):
    domain = Domain((9, 8))
    u = np.ones(domain.local_shape)
    message = r"point 1 at \(8.5, 2.0\) is outside of the grid along dimension 0, whose 9 cells lie from 0 to 8. 1 of 2"
    for call in (domain.locate, lambda p: domain.interpolate(u, p), lambda p: domain.interpolate(u, p, result="own")):
        with pytest.raises(ValueError, match=message):
            call([[1.0, 2.0], [8.5, 2.0]])
    with pytest.raises(ValueError, match=r"at \(nan, 1.0\) is outside"):
        domain.locate([np.nan, 1.0])
    with pytest.raises(ValueError, match=r"points must have shape \(..., 2\).* but have \(3,\)"):
        domain.locate([1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="points must be an array of numbers, but got list"):
        domain.locate(["a", "b"])
    with pytest.raises(ValueError, match="result must be one of .* but got \"?'sum'\"?"):
        domain.interpolate(u, [1.0, 2.0], result="sum")
    mistaken = [[-1.0, 0.0]] if rank == size - 1 else [[1.0, 0.0]]
    with pytest.raises(ValueError, match="Domain.interpolate: point 0 at .-1.0, 0.0. is outside"):
        domain.interpolate(u, mistaken, result="own")
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
@pytest.mark.parametrize("way", ["plain", "traced", "jitted"])
@pytest.mark.unguarded
def test_points_that_differ_between_ranks_are_refused(rank, size, rank_rng, way, dtype):
    """Receivers drawn without a common seed: each rank would get zeros and values at points of others."""
    domain = Domain((9, 8))
    u = np.ones(domain.local_shape, dtype)
    if size > 1:
        points = rank_rng(rank).uniform(0.0, 7.0, (20, 2))

        def value(u):
            return anp.sum(anp.abs(domain.interpolate(u, points)) ** 2)

        differentiated = mpiad.value_and_grad(mpiad.jit(value) if way == "jitted" else value)
        with pytest.raises(ValueError, match='result="all".*the same on all ranks, but .* of 20 points'):
            (value if way == "plain" else differentiated)(u)
    same = rank_rng(7).uniform(0.0, 7.0, (20, 2))
    np.testing.assert_allclose(domain.interpolate(u, same), np.ones(20), 1e-6)
    assert mpiad.mpi_allreduce(1) == size


def test_points_are_compared_in_debug_mode(rank, size):
    """Also those of "share", which is not reduced, and those that have one owner each although they differ."""
    domain, on_one_rank = Domain((8 * size, 4)), np.array([[1.0, 1.0 + 0.5 * (rank == size - 1)]])
    u = np.ones(domain.local_shape)
    for result in ("all", "share"):
        with mpiad.debug.checked():
            if size > 1:
                with pytest.raises(mpiad.errors.ReplicationError, match="points must be the same on all ranks") as caught:
                    domain.interpolate(u, on_one_rank, result=result)
                assert caught.value.path == "points" and caught.value.index == (0, 1)
            share = domain.interpolate(u, [[1.0, 1.0]], result=result)
            own = domain.interpolate(u, on_one_rank, result="own")
        assert own == 1.0 and share == (1.0 if result == "all" or rank == 0 else 0.0)


@pytest.mark.not_on(4)
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_of_compiled_programs(rank_rng, compiled):
    """The owners of points are reduced together with the values: values and derivatives don't depend on that."""
    domain, (lattice, axes) = Domain((9, 7)), grid((9, 7))
    points, field = inside(rank_rng(101), axes, 6), rank_rng(102).standard_normal((2, 9, 7))
    weights = RegularGridInterpolator(axes, np.eye(63).reshape(9, 7, 63))(points)  # of each cell, shape (6, 63)
    u, v = field[(..., *domain.owned)]

    def value(u):
        return anp.sum(domain.interpolate(u, points, **lattice) ** 3)

    value = mpiad.jit(value) if compiled else value
    known, along = weights @ field[0].ravel(), weights @ field[1].ravel()
    for _ in range(3):
        found, gradient = mpiad.value_and_grad(value)(u)
        np.testing.assert_allclose(found, np.sum(known**3), 1e-12)
        expected = (3.0 * known**2) @ weights
        np.testing.assert_allclose(gradient, expected.reshape(9, 7)[domain.owned], 1e-12, 1e-12)
        expected = (6.0 * known * along) @ weights
        np.testing.assert_allclose(mpiad.hvp(value)(u, v), expected.reshape(9, 7)[domain.owned], 1e-12, 1e-12)


def hat_weights(shape, axes, points):
    """Return the weights of all cells at points, from the hat functions of the cells, shape (points, cells)."""
    total = np.ones((len(points), 1))
    for axis in range(len(shape)):
        distance = abs(points[:, axis, None] - axes[axis]) / SPACING[axis]
        total = (total[:, :, None] * np.maximum(1 - distance, 0)[:, None, :]).reshape(
            len(points), np.prod(shape[: axis + 1])
        )
    return total


def of_all_ranks(rank_rng, axes, size):
    """Return the points of each rank, of different numbers; the last rank has none if there are several."""
    return [inside(rank_rng(200 + r), axes, 4 + 3 * r)[: 0 if r == size - 1 > 0 else None] for r in range(size)]


@each_shape
def test_deposit(rank, size, rank_rng, shape):
    domain, (lattice, axes) = Domain(shape), grid(shape)
    points = of_all_ranks(rank_rng, axes, size)
    values = [rank_rng(300 + r).standard_normal((2, len(p))) for r, p in enumerate(points)]
    expected = sum(v @ hat_weights(shape, axes, p) for v, p in zip(values, points)).reshape(2, *shape)
    found = domain.deposit(points[rank], values[rank], **lattice)
    np.testing.assert_allclose(found, expected[(..., *domain.owned)], 1e-12, 1e-12)
    one = domain.deposit(points[rank], values[rank][0], **lattice)
    np.testing.assert_allclose(one, expected[(0, *domain.owned)], 1e-12, 1e-12)
    weights = hat_weights(shape, axes, points[rank])
    whole = rank_rng(400).standard_normal(shape)
    own = domain.interpolate(whole[domain.owned], points[rank], **lattice, result="own")
    np.testing.assert_allclose(own, weights @ whole.ravel(), 1e-12, 1e-12)


@each_shape
def test_adjoints_of_deposit(rank, size, rank_rng, rng, shape):
    domain, (lattice, axes) = Domain(shape), grid(shape)
    points = of_all_ranks(rank_rng, axes, size)[rank]
    values = rng.standard_normal((2, len(points)))
    check_adjoint(lambda v: domain.deposit(points, v, **lattice), values)
    # The named transpose of the interpolation, dot product by hand.
    u = rng.standard_normal((2, *domain.local_shape))
    one = np.sum(domain.deposit(points, values, **lattice) * u)
    other = np.sum(values * domain.interpolate(u, points, **lattice, result="own"))
    np.testing.assert_allclose(mpiad.mpi_allreduce(one), mpiad.mpi_allreduce(other), 1e-11)


@pytest.mark.unguarded
def test_derivatives_of_deposit(rank, size, rank_rng):
    shape = (9, 7)
    domain, (lattice, axes) = Domain(shape), grid(shape)
    rng, count = rank_rng(200 + rank), 0 if rank == size - 1 > 0 else 4 + 3 * rank
    # Away from the kinks of the weights, which are at the cells.
    cells = np.stack([rng.integers(0, n - 1, count) for n in shape], -1) + rng.uniform(0.2, 0.8, (count, 2))
    points = np.array(lattice["origin"]) + np.array(lattice["spacing"]) * cells
    values = rank_rng(500 + rank).standard_normal(len(points))

    def loss(z):
        return domain.sum(anp.sin(domain.deposit(z["points"], z["values"], **lattice))) / size

    check_grads(loss, {"points": points, "values": values}, objective="sum")
    _, gradient = mpiad.value_and_grad(loss, objective="sum")({"points": points, "values": values})
    total = domain.gather(domain.deposit(points, values, **lattice))
    slope = mpiad.mpi_bcast(np.cos(total) if rank == 0 else np.zeros(shape))
    np.testing.assert_allclose(gradient["values"], hat_weights(shape, axes, points) @ slope.ravel(), 1e-12, 1e-12)


def test_periodic_deposit():
    domain = Domain((8, 5), periodic=(True, False))
    points = np.array([[7.25, 2.0]] if mpiad.mpi_rank() == 0 else np.zeros((0, 2)))
    expected = np.zeros((8, 5))
    expected[7, 2], expected[0, 2] = 0.75 * 4, 0.25 * 4
    found = domain.deposit(points, np.full(len(points), 4.0))
    np.testing.assert_allclose(found, expected[domain.owned], 1e-14, 1e-14)
    assert domain.deposit(points, np.ones(len(points), np.complex64)).dtype == np.complex64


def test_own_points_are_sent_to_their_owners_only(rank, size, monkeypatch):
    domain, sent = Domain(6 * size), []
    (x,) = domain.coordinates()
    alltoall = interpolation.mpi_alltoall

    def noting(x, counts=None, *args, **named):
        sent.append(counts)
        return alltoall(x, counts, *args, **named)

    monkeypatch.setattr(interpolation, "mpi_alltoall", noting)
    points = np.minimum(x[:, None] + 1.5, 6 * size - 1)  # the last two are between cells of the next rank, if there is one
    found = domain.interpolate(x, points, result="own")
    np.testing.assert_allclose(found, points[:, 0], 1e-13)
    owners = np.minimum(points[:, 0] // 6, size - 1).astype(int)
    numbers, there, back = sent
    assert numbers is None  # the ranks exchange the numbers of their points
    np.testing.assert_array_equal(there, np.bincount(owners, minlength=size))
    assert set(np.flatnonzero(back).tolist()) <= {rank, max(rank - 1, 0)}  # values, back to the points' ranks


def test_refused_deposits(rank, size):
    domain = Domain((9, 8))
    points, last = np.ones((3, 2)), rank == size - 1
    with pytest.raises(ValueError, match=r"Domain.deposit: point 0 at \(-1.0, 1.0\) is outside of the grid"):
        domain.deposit(points - [2.0 * last, 0.0], np.ones(3))
    for wrong, text in ((np.ones(2), r"shape \(2,\)"), (np.ones(3, int), "dtype int64"), (1.0, "got float")):
        with pytest.raises(ValueError, match=rf"values must be an array of floats of shape \(..., \*\(3,\)\).*{text}"):
            domain.deposit(points, wrong if last else np.ones(3))
    if size > 1:
        mine = points[: 3 * (not rank)]  # only rank 0 has points
        for values, others in ((np.ones(3, np.float32), np.ones(0)), (np.ones((2, 3)), np.ones((3, 0)))):
            with pytest.raises(
                ValueError, match=r"Domain.deposit: all ranks must .*, but rank 0 gave values of .* and rank 1"
            ):
                domain.deposit(mine, others if rank else values)
    assert mpiad.mpi_allreduce(1) == size


@pytest.mark.serial
def test_points_that_depend_on_arguments_are_the_reason_against_compilation(caplog):
    domain = mpiad.Domain(8)
    u, points = np.arange(8.0) ** 2, np.array([[1.3], [4.4]])
    for call, fun in (
        ("Domain.interpolate", lambda p: domain.interpolate(u, p)),
        ("Domain.deposit", lambda p: domain.deposit(p, np.ones(2))),
    ):
        np.testing.assert_allclose(mpiad.jit(fun)(points), fun(points), rtol=1e-14)
        assert f"it calls {call} with points that depend on its arguments" in caplog.records[-1].getMessage()
