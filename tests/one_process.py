"""The reference: the program of all ranks as one function, differentiated by plain autograd in one process.

`whole(xs)` takes the list of all ranks' inputs and returns the objective J; `outputs(xs)` returns the list of all
ranks' results. Both are written with autograd.numpy alone and know nothing of the library under test.
"""

import autograd
import autograd.numpy as anp
import numpy as np

ROUNDING = 1e-11
"""Relative to the largest entry: sums over ranks are rounded in another order."""


def inputs(rank_rng, size, shape=lambda rank: (3 + rank,)):
    """Return all ranks' inputs, of shapes that differ by rank."""
    return [rank_rng(rank).standard_normal(shape(rank)) for rank in range(size)]


def directions(xs, seed=5):
    """Return one direction for each rank's input, different on every rank."""
    return [np.random.default_rng([seed, r]).standard_normal(np.shape(x)) for r, x in enumerate(xs)]


def gradients(whole, xs):
    """Return the derivative of J by each rank's input."""
    return autograd.grad(whole)(list(xs))


def flat(xs):
    return anp.concatenate([anp.ravel(x) for x in xs])


def pieces(vector, xs):
    """Cut a vector into arrays of the shapes of `xs`."""
    ends = np.cumsum([np.size(x) for x in xs])
    return [anp.reshape(vector[end - np.size(x) : end], np.shape(x)) for end, x in zip(ends, xs)]


def hessian(whole, xs):
    """Return all second derivatives of J by all ranks' inputs, as one matrix."""
    return autograd.hessian(lambda z: whole(pieces(z, xs)))(flat(xs))


def hessian_products(whole, xs, vs):
    """Return the product of the Hessian with all ranks' directions, cut by ranks."""
    return pieces(hessian(whole, xs) @ flat(vs), xs)


def jacobian(outputs, xs):
    """Return all derivatives of all ranks' results by all ranks' inputs, as one matrix."""
    return autograd.jacobian(lambda z: flat(outputs(pieces(z, xs))))(flat(xs))


def objective(losses, kind, root=0):
    """Return J of the list of all ranks' losses."""
    total = sum(losses)
    return {"root": losses[root], "sum": total, "mean": total / len(losses)}[kind]


def assert_close(got, expected, rounding=ROUNDING):
    """Compare shape, dtype and values; values relative to the largest."""
    assert not hasattr(got, "_trace"), f"a traced value was returned: {got}"
    assert np.shape(got) == np.shape(expected)
    assert np.asarray(got).dtype == np.asarray(expected).dtype
    scale = np.max(np.abs(expected), initial=0.0)
    np.testing.assert_allclose(got, expected, rtol=rounding, atol=rounding * scale)
