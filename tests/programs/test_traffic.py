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
