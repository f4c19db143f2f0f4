"""Attributes of arrays that traced arrays lack, and the memory of arrays: never the branch for other types or calls."""

import logging

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import assert_same

import mpiad

X = np.array([3.0, 1.0, 2.0])


def median(x, y):
    z = 1.0 * y
    try:
        z.sort()
    except AttributeError:
        pass
    return z[1] * x


def with_default(x, y):
    return x * (2.0 if getattr(y, "searchsorted", None) is None else 3.0)


def asked(x, y):
    return x * (anp.mean(y) if hasattr(y, "fill") else 1.0)


def of_results(x, y):
    return x * (2.0 if hasattr(y[0] * y[1], "tobytes") else 3.0)


def by_order(x, y):
    return x + 1.0 if y.flags.c_contiguous else x * 2.0


def by_strides(x, y):
    return x + 1.0 if y.strides[0] == y.itemsize else x * 2.0


def by_owner(x, y):
    return x + 1.0 if y.base is None else x * 2.0


def by_sharing(x, y):
    return x + 1.0 if np.shares_memory(y, TABLE) else x * 2.0


def by_bounds(x, y):
    return x + 1.0 if np.may_share_memory(TABLE, y) else x * 2.0


TABLE = np.arange(6.0)
COLUMN = np.ones((3, 2))[:, 0]
LACKING, LAYOUT = [median, with_default, asked, of_results], [by_order, by_strides, by_owner, by_sharing, by_bounds]
GIVEN = [X, COLUMN, TABLE[:3], TABLE[::2], X + 1]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("fun", [*LACKING, *LAYOUT], ids=lambda fun: fun.__name__)
def test_values_and_derivatives_are_those_of_numpy(fun, order, caplog):
    """With respect to x, while y is an array in all of them."""
    caplog.set_level(logging.WARNING, "mpiad")
    compiled = mpiad.jit(fun)
    for y in GIVEN[::order]:
        assert_same(compiled(X, y), fun(X, y))
    total = lambda fun: lambda x, y: anp.sum(fun(x, y) ** 2)  # noqa: E731
    outside, inside = mpiad.value_and_grad(total(mpiad.jit(fun))), mpiad.jit(mpiad.value_and_grad(total(fun)))
    for y in GIVEN[::order]:
        expected = mpiad.value_and_grad(total(fun))(X, y)
        assert_same(outside(X, y), expected)
        assert_same(inside(X, y), expected)
        found = mpiad.jvp(lambda x, y=y: compiled(x, y), X, X)
        assert_same(found, mpiad.jvp(lambda x, y=y: fun(x, y), X, X))
    assert len(caplog.records) == 2  # both jit(fun) have the same programs


@pytest.mark.parametrize("fun", [*LACKING, *LAYOUT], ids=lambda fun: fun.__name__)
def test_the_reason(fun):
    reason = "whose memory may differ" if fun in LAYOUT else "a traced array has no '.*': call a function of autograd.numpy"
    with pytest.raises(TypeError, match=f"{fun.__name__} can't be compiled: .* in {fun.__name__}: .*{reason}"):
        mpiad.jit(fun, strict=True)(X, X)


def test_the_advice():
    with pytest.raises(TypeError, match="call a function of autograd.numpy, such as np.argsort"):
        mpiad.jit(lambda x: x[x.argsort()], strict=True)(X)


def test_attributes_that_no_array_has():
    """Protocols of libraries, and names that aren't those of arrays or of the argument."""

    def fun(x, k):
        if hasattr(x, "__array_interface__") or hasattr(x, "tocsr") or hasattr(x, "_private"):
            return x
        return x * (k if hasattr(k, "sort") else 2.0 * k)  # a number has no such method

    for _ in range(2):
        np.testing.assert_array_equal(mpiad.jit(fun, strict=True)(X, 2.0), 4.0 * X)


def test_sizes_are_known():
    def fun(x):
        return x * (x.size + x.ndim + x.itemsize + x.nbytes)

    np.testing.assert_array_equal(mpiad.jit(fun, strict=True)(X), fun(X))


def test_one_array_twice():
    """The page says so."""
    compiled = mpiad.jit(lambda x, y: 2.0 * x if x is y else 3.0 * x, strict=True)
    np.testing.assert_array_equal(compiled(X, X), 3.0 * X)
