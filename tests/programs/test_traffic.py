"""How much memory the loops of a wave equation's value and gradient read and write, compared with the least possible."""

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same

import mpiad
from mpiad.domain import Domain
from mpiad.programs.function import Listing

LOADS = 50  # at most so many entries are read in one loop, however long the program is


def star(padded):
    """Return the sum of the neighbors of each cell, and its own entry as often with the other sign."""
    inner, total = (slice(1, -1),) * padded.ndim, -2 * padded.ndim * padded[(slice(1, -1),) * padded.ndim]
    for axis in range(padded.ndim):
        for part in (slice(2, None), slice(None, -2)):
            total = total + padded[(*inner[:axis], part, *inner[axis + 1 :])]
    return total


def rings(u):
    """Return the same in a periodic grid."""
    total = -2 * u.ndim * u
    for axis in range(u.ndim):
        first, rest = ((slice(None),) * axis + (part,) for part in (slice(1), slice(1, None)))
        last, before = ((slice(None),) * axis + (part,) for part in (slice(-1, None), slice(-1)))
        total = total + anp.concatenate([u[rest], u[first]], axis) + anp.concatenate([u[last], u[before]], axis)
    return total


# Laplacians, shapes, what beyond the grid is, and how many arguments are copied to a buffer with a halo.
PROGRAMS = {
    "exchange": (lambda domain: lambda u: star(domain.exchange(u)), (48, 48, 48), "constant", 1),
    "pad": (lambda domain: lambda u: star(anp.pad(u, 1, "constant")), (48, 48, 48), "constant", 0),
    "concatenate": (lambda domain: rings, (160, 150), "wrap", 0),
    "laplacian": (lambda domain: domain.laplacian(), (48, 48, 48), "constant", 1),
}


def loss_of(laplacian, u, before, steps):
    """Return the objective as a function of the squared speed."""

    def loss(square):
        now, last = u, before
        for _ in range(steps):
            now, last = 2 * now - last + square * laplacian(now), now
        return mpiad.mpi_allreduce(anp.sum(now * now))

    return loss


def reference(square, u, before, steps, mode):
    """Return value and gradient by the adjoint equation: the Laplacian is symmetric, and its halo is known."""
    states = [u]
    for _ in range(steps):
        u, before = 2 * u - before + square * star(np.pad(u, 1, mode)), u
        states.append(u)
    adjoint, after, gradient = 2 * u, 0 * u, 0 * u
    for u in states[-2::-1]:
        gradient += adjoint * star(np.pad(u, 1, mode))
        adjoint, after = 2 * adjoint - after + star(np.pad(square * adjoint, 1, mode)), adjoint
    return np.sum(states[-1] ** 2), gradient


CASES = [pytest.param(name, steps) for name in PROGRAMS for steps in (6, 24)]
CASES += [pytest.param(name, 100) for name in ("pad", "laplacian")]
CASES += [pytest.param(name, 100, marks=pytest.mark.thorough) for name in ("exchange", "concatenate")]


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_arrays_per_step(name, steps, size):
    make, shape, mode, copies = PROGRAMS[name]
    is_whole = name in ("pad", "concatenate")  # each rank has a grid of its own
    shape = shape if is_whole else (size * shape[0], *shape[1:])
    rng = np.random.default_rng(steps)
    square, u, before = rng.uniform(0.05, 0.1, shape), rng.standard_normal(shape), rng.standard_normal(shape)
    domain = Domain(shape, dims=(size, 1, 1)[: len(shape)])
    own = ... if is_whole else domain.owned
    jitted = mpiad.jit(loss_of(make(domain), u[own], before[own], steps), strict=True)
    value, gradient = mpiad.value_and_grad(jitted)(square[own])
    expected, slope = reference(square, u, before, steps, mode)
    np.testing.assert_allclose(value, (size if is_whole else 1) * expected, 1e-9)
    np.testing.assert_allclose(gradient, slope[own], 0, 1e-9 * np.abs(slope).max())
    listing = Listing("loss", next(iter(jitted.form().jitted._cache.entries.values())).replays)
    forward, adjoint = listing.traffic
    # Forward: two states and the speed are read, and one state is written. In the reverse pass also the running sum of the
    # gradient, which is read and written less often.
    assert forward.arrays <= 4 * steps + 2 * copies + 0.1
    assert adjoint.arrays <= 7.5 * steps
    for part in (forward, adjoint):
        assert part.bytes == pytest.approx(8 * part.arrays, 1e-6)
    assert max(len(text.loads) for text in listing._replays.texts if text is not None) <= LOADS


def shared_sums(domain):
    """Return functions whose cotangents are sums of the results of folded halos and other terms."""

    def lap(u, boundary="edge"):
        return star(domain.exchange(u, boundary=boundary))

    def of_total(u):  # the other term depends on a later message
        return domain.sum(lap(u) ** 2) + domain.sum(u * domain.sum(u))

    def of_total_before(u):
        total = domain.sum(u**2)
        return domain.sum(lap(u * total) ** 2)

    def twice(u):  # two folded halos in one sum
        return domain.sum(anp.sin(lap(u)) * u + lap(u, "reflect") ** 2 + anp.cos(u))

    def fields(u):
        a, b = domain.exchange([u, u**2], boundary="reflect")
        return domain.sum(star(a) * star(b) + u**3)

    def batch(u):
        return domain.sum(anp.sin(u) * domain.exchange(anp.stack([u, u**2]))[1, 1:-1, :-2])

    return [of_total, of_total_before, twice, fields, batch]


@pytest.mark.also_on(2, 3)
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize("place", range(5))
def test_what_is_added_to_a_folded_halo(place, exact):
    domain = Domain((13, 9), periodic=(False, True))
    fun, u = shared_sums(domain)[place], np.random.default_rng(place).standard_normal((13, 9))[domain.owned]
    jitted = mpiad.jit(fun, strict=True, exact=exact)
    for x in (u, 0.5 * u):  # traced, then compiled
        assert_same(mpiad.value_and_grad(jitted)(x), mpiad.value_and_grad(fun)(x), 1e-11)
        assert_same(mpiad.hvp(jitted)(x, u), mpiad.hvp(fun)(x, u), 1e-10)


def test_an_exact_program_adds_in_the_order_of_the_function(rng):
    domain = Domain((12, 10), periodic=True)
    step = lambda u: anp.sin(u) * domain.exchange(u)[2:, 1:-1]  # noqa: E731
    u, g = (rng.standard_normal(domain.local_shape) for _ in range(2))
    pulls = [mpiad.make_vjp(fun)(u)[0](g) for fun in (step, mpiad.jit(step, strict=True, exact=True))]
    np.testing.assert_array_equal(*pulls)


# Boundaries, the modes of NumPy's padding, and further arguments of domains.
HALOS = [
    (("zero", "edge"), ("constant", "edge"), {}),
    (("reflect", 0.0), ("reflect", "constant"), {"halo": (2, 1)}),
    ("zero", ("wrap", "wrap"), {"periodic": True, "halo": 2}),
    ("edge", ("edge", "wrap"), {"periodic": (False, True), "halo": (1, 0)}),
    ("reflect", ("reflect", "reflect"), {"halo": 3}),
]


def neighborhood(padded, halo):
    """Return a function of each cell, of those at the corners of its halo, and of the nearest along each axis."""
    (h, k), (n, m) = halo, padded.shape
    inner, total = anp.sin(padded[h : n - h, k : m - k]), 0.0
    for a, b in ((h, k), (1, 0), (0, 1)):
        for sign in (-1, 1):
            a, b = sign * min(a, h), sign * min(b, k)
            total = (a - 2 * b + 3) * padded[h + a : n - h + a, k + b : m - k + b] + total * inner
    return total


@pytest.mark.also_on(2, 3)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("way", ["each", "together", "transposed"])
@pytest.mark.parametrize(("boundary", "modes", "options"), HALOS)
def test_an_argument_is_read_where_it_is(boundary, modes, options, way, dtype, size):
    """A step reads the argument, and copies the margin that the exchange reads."""
    shape = (370 * size, 380)
    domain = Domain(shape, dims=(size, 1), **options)
    halo = np.broadcast_to(options.get("halo", 1), 2).tolist()
    whole = np.random.default_rng(size).standard_normal((2, *shape)).astype(dtype)
    padded = np.pad(whole, ((0, 0), (halo[0], halo[0]), (0, 0)), modes[0])
    padded = np.pad(padded, ((0, 0), (0, 0), (halo[1], halo[1])), modes[1])
    own = domain.owned

    def step(pair):
        fields = [pair[0], pair[1]] if way != "transposed" else [pair[0].T, pair[1].T]
        filled = domain.exchange(fields, boundary) if way == "together" else [domain.exchange(u, boundary) for u in fields]
        return neighborhood(filled[0], halo) * neighborhood(filled[1], halo) + fields[0]

    jitted = mpiad.jit(step, strict=True)
    expected = (neighborhood(padded[0], halo) * neighborhood(padded[1], halo) + whole[0])[own]
    rounding = 1e-12 if dtype == np.float64 else 3e-5
    pair = np.ascontiguousarray(whole[:, own[0], own[1]].swapaxes(*((1, 2) if way == "transposed" else (1, 1))))
    for _ in range(3):  # traced, then compiled
        np.testing.assert_allclose(jitted(pair), expected, rounding, rounding * np.abs(expected).max())
    direction = np.cos(pair)
    assert_same(mpiad.jvp(jitted, pair, direction), mpiad.jvp(step, pair, direction), 10 * rounding)
    listing = jitted.program(pair)
    # Two fields are read, and one is written. The margins are read and written once more, and then so are the halos.
    margins = pair.size - 2 * np.prod([n - 2 * (h and h + 1) for n, h in zip(domain.local_shape, halo)])
    assert listing.traffic[0].arrays * pair.size <= 1.5 * pair.size + 4 * margins
