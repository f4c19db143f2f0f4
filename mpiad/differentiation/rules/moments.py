"""Products, cumulative products, averages, variances and standard deviations over axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from autograd.numpy import numpy_wrapper as wrapped
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Axis
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.expansion import kept_shape
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp, VjpMaker, anp, arrays_like, bound

_NAMES = "a axis dtype out ddof keepdims"


def _slope_of_prod(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, dict]:
    """Return the derivative (for each element the product of the other elements), and the arguments by name."""
    named = bound(fun, "a axis dtype out keepdims initial", args, kwargs)
    x, axis = named["a"], named.get("axis")
    shape = anp.shape(x)
    kept = kept_shape(shape, axis)
    value = getval(x)
    if isinstance(value, (np.ndarray, np.generic)) and np.all(value):
        return anp.reshape(ans, kept) / x, named
    # The reduced axes are moved to the end, except axes of length one.
    axes = [i for i, (n, k) in enumerate(zip(shape, kept)) if n != k]
    order = [*[i for i in range(len(shape)) if i not in axes], *axes]
    moved = anp.transpose(x, order)
    rest = moved.shape[: len(shape) - len(axes)]
    others = anp.reshape(_product_of_others(anp.reshape(moved, (*rest, math.prod(moved.shape[len(rest) :])))), moved.shape)
    return anp.transpose(others, tuple(sorted(range(len(order)), key=order.__getitem__))) * named.get("initial", 1.0), named


def _product_of_others(x: Array) -> Array:
    """Return, for each element, the product of the other elements along the last axis, without division."""
    n = x.shape[-1]
    if n <= 1:
        return anp.ones_like(x)
    if n % 2:
        x = concatenate([x, arrays_like(x).full((*x.shape[:-1], 1), 1, getval(x).dtype)], -1)
    first, second = x[..., ::2], x[..., 1::2]
    rest = _product_of_others(first * second)
    return anp.reshape(stack([second * rest, first * rest], -1), x.shape)[..., :n]


def _average(
    a: Array, axis: Axis = None, weights: Array = None, returned: bool = False, *, keepdims: bool = False
) -> Array | tuple[Array, Array]:
    """Return `numpy.average`; of traced arguments as a quotient of sums, since primitives don't trace keyword arguments."""
    if not isbox(a) and not isbox(weights):
        return _primitive_average(a, axis, weights, returned, keepdims=keepdims)
    shape, ones = anp.shape(a), anp.ones_like(a)
    if weights is not None:
        np.average(np.broadcast_to(1.0, shape), axis, np.broadcast_to(1.0, anp.shape(weights)))  # raises NumPy's errors
        if anp.shape(weights) != shape:  # those of the axes only
            axes = [int(k) % len(shape) for k in np.atleast_1d(axis)]  # type: ignore[arg-type]
            weights = anp.transpose(weights, [axes.index(k) for k in sorted(axes)])
            weights = anp.reshape(weights, [n if k in axes else 1 for k, n in enumerate(shape)])
        ones = ones * weights
    total = anp.sum(ones, axis=axis, keepdims=keepdims)
    value = getval(total)
    if weights is not None and isinstance(value, (np.ndarray, np.generic)) and not np.all(value):
        raise ZeroDivisionError("average: the weights sum to zero, and can't be normalized.")
    average = anp.sum(a * ones, axis=axis, keepdims=keepdims) / total
    return (average, total) if returned else average


# Autograd's own function calls NumPy's, which can't compute with traced weights.
_primitive_average = anp.average
for _module in (anp, wrapped):
    vars(_module)["average"] = _average


def _slope_of_var(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, dict]:
    """Return twice the deviations from the mean, divided by the degrees of freedom, and the arguments by name."""
    named = bound(fun, _NAMES, args, kwargs)
    x, axis = named["a"], named.get("axis")
    count = math.prod(n for n, k in zip(anp.shape(x), kept_shape(anp.shape(x), axis)) if n != k)
    return anp.conj(x - anp.mean(x, axis=axis, keepdims=True)) * 2.0 / (count - named.get("ddof", 0)), named


def _slope_of_std(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, dict]:
    """Return the derivative of the variance, divided by twice the standard deviation; zero for one element."""
    slope, named = _slope_of_var(fun, ans, args, kwargs)
    shape = anp.shape(slope)
    kept = kept_shape(shape, named.get("axis"))
    return slope * 0.0 if shape == kept else slope / (2.0 * nonzero_divisor(anp.reshape(ans, kept))), named


def nonzero_divisor(root: Array) -> Array:
    """Return a norm or standard deviation as the divisor of its own derivative, with ones instead of zeros.

    So the derivative at zero is zero. The root has no second derivative there: that of `1 - sqrt(root)` makes it NaN.
    """
    return anp.where(root == 0, 1.0 - anp.sqrt(root), root)


def slope_vjp(fun: Primitive, slope_of: Callable, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply cotangents by the derivative of a reduction, which `slope_of` returns with the arguments by name."""
    slope, named = slope_of(fun, ans, args, kwargs)
    kept = kept_shape(anp.shape(slope), named.get("axis"))
    return lambda g: (fitted(anp.reshape(g, kept) * slope, args[0]),)


def slope_jvp(
    fun: Primitive, slope_of: Callable, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict
) -> Array:
    """Sum the products of tangents and derivatives."""
    slope, named = slope_of(fun, ans, args, kwargs)
    terms = slope * gs[0]
    terms = terms if anp.iscomplexobj(ans) else anp.real(terms)
    return anp.sum(terms, axis=named.get("axis"), keepdims=named.get("keepdims", False))


def cumprod_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply the product of the elements before x_i by s_i = g_i + x_{i+1} s_{i+1}; there is no division by zeros."""
    named = bound(anp.cumprod, "a axis", args, kwargs)
    shape, axis = anp.shape(named["a"]), named.get("axis")
    x = anp.moveaxis(anp.reshape(named["a"], anp.shape(ans)), axis or 0, 0)
    products = anp.moveaxis(ans, axis or 0, 0)
    before = concatenate([anp.ones_like(products[:1]), products[:-1]])

    def vjp(g: Array) -> tuple[Array]:
        # The recurrence is a scan with as many steps as log2 of the length.
        factors, sums, step = concatenate([x[-1:], x[:0:-1]]), anp.moveaxis(g, axis or 0, 0)[::-1], 1
        while step < sums.shape[0]:
            sums = concatenate([sums[:step], sums[step:] + factors[step:] * sums[:-step]])
            factors = concatenate([factors[:step], factors[step:] * factors[:-step]])
            step *= 2
        return (fitted(anp.reshape(anp.moveaxis(before * sums[::-1], 0, axis or 0), shape), named["a"]),)

    return vjp


_SLOPES = {
    anp.prod: _slope_of_prod,
    getattr(wrapped, "_primitive_var", anp.var): _slope_of_var,
    getattr(wrapped, "_primitive_std", anp.std): _slope_of_std,
}
VJPS: dict[Primitive, VjpMaker] = {fun: partial(slope_vjp, fun, slope_of) for fun, slope_of in _SLOPES.items()}
VJPS[anp.cumprod] = cumprod_vjp
JVPS = {fun: partial(slope_jvp, fun, slope_of) for fun, slope_of in _SLOPES.items()}
