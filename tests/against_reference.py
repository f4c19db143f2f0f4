"""Compare a distributed function with the reference: value, adjoint, tangent, gradient, Hessian product.

Every rank calls `check` with the inputs of all ranks: each works the whole reference out for itself.
"""

import autograd.numpy as anp
import numpy as np
import reference
from arrays import EXACT_DTYPES, contiguous
from mpi4py import MPI

import mpiad

ULPS = 64
"""Rounding errors allowed, in units of the precision of the largest entry (or of 1, if that is larger)."""


def random(rng, shape, dtype):
    """Return an array of numbers of order one."""
    values = rng.uniform(-1, 1, shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.uniform(-1, 1, shape)
    return np.asarray(values, dtype)


def assert_close(got, expected, dtype):
    """Compare shape, dtype and numbers."""
    assert np.shape(got) == np.shape(expected)
    assert got.dtype == dtype
    scale = max(1.0, np.max(np.abs(expected), initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=ULPS * np.finfo(dtype).eps * scale)


def inner(a, b):
    """Return Σ a b, without conjugation."""
    return np.sum(np.asarray(a, "c16") * b)


def arrays(rngs, shapes, dtype="f8", layout=contiguous):
    """Return every rank's array: of one shape, or of each rank's own."""
    shapes = [shapes] * len(rngs) if isinstance(shapes, tuple) else shapes
    return [layout(random(rng, shape, dtype)) for rng, shape in zip(rngs, shapes)]


def check(fun, program, xs, rngs, comm=MPI.COMM_WORLD):
    """Compare `fun` with the reference's program at every rank's x.

    `rngs` are all ranks' generators, for directions, cotangents and weights that differ on all ranks.
    """
    x, dtype = xs[comm.rank], xs[comm.rank].dtype
    vs = [random(rng, shape, dtype) for rng, shape in zip(rngs, program.in_shapes)]
    gs = [random(rng, shape, dtype) for rng, shape in zip(rngs, program.out_shapes)]
    ws = [random(rng, shape, dtype) for rng, shape in zip(rngs, program.out_shapes)]
    assert_close(fun(x), program(xs)[comm.rank], dtype)
    check_products(fun, program, xs, vs, gs, comm)
    check_loss(fun, reference.Loss(program, ws), xs, vs, comm)


def check_products(fun, program, xs, vs, gs, comm):
    """Compare adjoint and tangent, and do the dot-product test with what the library returned on all ranks."""
    x, v, g, dtype = xs[comm.rank], vs[comm.rank], gs[comm.rank], xs[comm.rank].dtype
    value, tangent = mpiad.make_jvp(fun)(x)(v)
    assert_close(value, program(xs)[comm.rank], dtype)
    assert_close(tangent, program.tangent(xs, vs)[comm.rank], dtype)
    vjp, value = mpiad.make_vjp(fun)(x)
    assert_close(value, program(xs)[comm.rank], dtype)
    cotangent = vjp(g)
    assert_close(cotangent, program.adjoint(xs, gs)[comm.rank], dtype)
    pairs = [(tangent, g, v, cotangent)] + program.linear * [(value, g, x, cotangent)]
    check_dot_products(pairs, np.finfo(dtype).eps, comm)


def check_dot_products(pairs, eps, comm):
    """Check Σ_r ⟨y, g⟩_r = Σ_r ⟨x, Aᵀg⟩_r over all ranks, for each y = A x: a few roundings of the sum's terms."""
    terms = [[inner(y, g), inner(x, c), inner(abs(y), abs(g)) + inner(abs(x), abs(c))] for y, g, x, c in pairs]
    totals = np.array(terms)
    comm.Allreduce(MPI.IN_PLACE, totals)
    assert np.all(abs(totals[:, 0] - totals[:, 1]) <= 4 * eps * abs(totals[:, 2]))


def check_loss(fun, loss, xs, vs, comm):
    """Compare the value, the gradient and the Hessian product of a nonlinear loss around `fun`."""
    x, v, w, dtype = xs[comm.rank], vs[comm.rank], loss.weights[comm.rank], xs[comm.rank].dtype

    def share(x):
        return anp.sum(anp.real(w * reference.after(fun(reference.before(x)))))

    def slope(x):
        return anp.sum(anp.real(mpiad.grad(share, objective="sum", comm=comm)(x) * v))

    value, gradient = mpiad.value_and_grad(share, objective="sum", comm=comm)(x)
    assert_close(np.asarray(value, dtype), np.asarray(loss.value(xs)), dtype)
    assert_close(gradient, loss.gradient(xs)[comm.rank], dtype)
    product = loss.hessian_product(xs, vs)[comm.rank]
    assert_close(mpiad.hvp(share, objective="sum", comm=comm)(x, v), product, dtype)
    assert_close(mpiad.grad(slope, objective="sum", comm=comm)(x), product, dtype)


def check_exact(fun, program, rngs, dtypes=EXACT_DTYPES, comm=MPI.COMM_WORLD):
    """Compare integers and booleans with the reference, outside a trace and, untraced, inside one."""
    for dtype in map(np.dtype, dtypes):
        end = 2 if dtype.kind == "b" else 10
        xs = [rng.integers(0, end, shape).astype(dtype) for rng, shape in zip(rngs, program.in_shapes)]
        inside = []
        mpiad.make_vjp(lambda z, x=xs[comm.rank], inside=inside: inside.append(fun(x)) or z)(1.0)
        for got in (fun(xs[comm.rank]), inside[0]):
            assert isinstance(got, (np.ndarray, np.generic)) and got.dtype == dtype
            np.testing.assert_array_equal(got, program(xs)[comm.rank].astype(dtype))


def check_new_memory(fun, x):
    """Check that neither the result nor its cotangent shares memory with what was given."""
    assert not np.shares_memory(fun(x), x)
    vjp, value = mpiad.make_vjp(fun)(x)
    assert not np.shares_memory(value, x)
    g = np.ones_like(value)
    assert not np.shares_memory(vjp(g), g)
