"""Compare the rules with autograd's own: adjoint, tangent, and second order nested in every way."""

import autograd
import autograd.numpy as np
import numpy
import plain_tape
from autograd.core import make_jvp as autograd_make_jvp
from autograd.core import make_vjp as autograd_make_vjp

ULPS = 16


def random_like(x, seed=0):
    """Return an array of the shape and dtype of x, or a tuple of such."""
    if isinstance(x, tuple):
        return tuple(random_like(part, seed + i) for i, part in enumerate(x))
    rng = numpy.random.default_rng(seed + 77)
    shape, dtype = numpy.shape(x), numpy.asarray(x).dtype
    values = rng.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    values = numpy.asarray(values, dtype)
    return values if shape else values[()]


def epsilon(*values):
    """Return the rounding error of the least precise of some arrays or tuples of arrays."""
    leaves = [leaf for value in values for leaf in (value if isinstance(value, tuple) else (value,))]
    return max(numpy.finfo(numpy.asarray(leaf).dtype).eps for leaf in leaves)


def assert_close(got, expected, x=None, eps=None, floor=0.0):
    """Compare to a few ulps of the largest element (or of `floor`); shapes as they are, real or complex as x."""
    if isinstance(expected, (tuple, list)):
        assert len(got) == len(expected)
        for i, (a, b) in enumerate(zip(got, expected)):
            assert_close(a, b, None if x is None else x[i], eps, floor)
        return
    got, expected = numpy.asarray(got), numpy.asarray(expected)
    assert got.shape == expected.shape
    if x is not None:
        assert got.shape == numpy.shape(x)
        assert (got.dtype.kind == "c") == numpy.iscomplexobj(x)
    tolerance = ULPS * (epsilon(got) if eps is None else eps)
    finite = numpy.abs(expected[numpy.isfinite(expected)])
    scale = max(finite.max(), floor) if finite.size else floor
    numpy.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * scale)


def inner(a, b):
    if isinstance(b, tuple):
        return sum(inner(a[i], b[i]) for i in range(len(b)))
    return np.sum(np.real(a * b))


def check(fun, x, reference=None, order=2, mixed=True, constants=(), floor=0.0):
    """Compare the derivatives of `fun` by our rules with those of `reference` (or itself) by autograd's.

    x is an array, a scalar, or a tuple of them. The second order is that of a sum of cubes of the result, so
    that the cotangent that reaches `fun` is itself traced; `fun` must be such that the cubes aren't linear in x.
    `mixed=False` leaves out our gradient inside autograd's, where autograd's own rule for `fun` is wrong or
    missing. `constants` are further operands, whose rounding counts too; `floor` is the size of what was summed,
    where the sum may be much smaller.
    """
    reference = fun if reference is None else reference
    eps = epsilon(x, *constants)
    vjp, value = plain_tape.make_vjp(fun, x)
    expected_vjp, expected_value = autograd_make_vjp(reference, x)
    assert_close(value, expected_value, eps=eps, floor=floor)
    g, v = random_like(value, 1), random_like(x, 2)
    assert_close(vjp(g), expected_vjp(g), x, eps, floor)
    assert_close(plain_tape.jvp(fun, x, v)[1], autograd_make_jvp(reference, x)(v)[1], eps=eps, floor=floor)
    if order == 2:
        check_second_order(fun, x, reference, g, v, mixed, eps, floor)


def check_second_order(fun, x, reference, g, v, mixed, eps, floor):
    def loss_of(f):
        def loss(z):
            y = f(z)
            return np.sum(np.real(g * y * y * y))

        return loss

    ours, theirs = plain_tape.grad(loss_of(fun)), autograd.grad(loss_of(reference))
    expected = autograd.grad(lambda z: inner(theirs(z), v))(x)
    assert_close(plain_tape.grad(lambda z: inner(ours(z), v))(x), expected, x, eps, floor)
    if mixed:
        assert_close(autograd.grad(lambda z: inner(ours(z), v))(x), expected, x, eps, floor)
    expected = autograd_make_jvp(theirs, x)(v)[1]
    assert_close(plain_tape.jvp(ours, x, v)[1], expected, x, eps, floor)
    if mixed:
        assert_close(autograd_make_jvp(ours, x)(v)[1], expected, x, eps, floor)
