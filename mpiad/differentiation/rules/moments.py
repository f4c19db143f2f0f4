"""Products, cumulative products, averages, variances and standard deviations over axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import autograd.numpy as anp
import numpy as np
from autograd.numpy import numpy_wrapper as wrapped
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.expansion import kept_shape
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp, VjpMaker, arrays_like, bound, refusal

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


def _slope_of_average(fun: Primitive, ans: Array, args: tuple, kwargs: dict) -> tuple[Array, dict]:
    """Return the weights divided by their sum, and the arguments by name."""
    named = bound(fun, "a axis weights returned keepdims", args, kwargs)
    x, axis, weights = named["a"], named.get("axis"), named.get("weights")
    if len(args) > 2 or isbox(weights) or named.get("returned"):
        raise refusal(fun, "with traced weights, weights by position or returned=True: write sum(w * x) / sum(w)")
    ones, shape = anp.ones_like(x), anp.shape(x)
    if weights is not None:
        if anp.shape(weights) != shape:  # a vector along the axis
            weights = anp.expand_dims(weights, [*range(1, len(shape) - (axis or 0) % len(shape))])
        ones = ones * weights
    return ones / anp.sum(ones, axis=axis, keepdims=True), named


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
    factors = concatenate([x[-1:], x[:0:-1]])

    def vjp(g: Array) -> tuple[Array]:
        sums = _recurrence(factors, anp.moveaxis(g, axis or 0, 0)[::-1])[::-1]
        return (fitted(anp.reshape(anp.moveaxis(before * sums, 0, axis or 0), shape), named["a"]),)

    return vjp


def _recurrence(a: Array, s: Array) -> Array:
    """Solve s_k = s_k + a_k s_{k-1} along the first axis, by a scan with as many steps as log2 of the length."""
    step = 1
    while step < s.shape[0]:
        s = concatenate([s[:step], s[step:] + a[step:] * s[:-step]])
        a = concatenate([a[:step], a[step:] * a[:-step]])
        step *= 2
    return s


_SLOPES = {
    anp.prod: _slope_of_prod,
    anp.average: _slope_of_average,
    getattr(wrapped, "_primitive_var", anp.var): _slope_of_var,
    getattr(wrapped, "_primitive_std", anp.std): _slope_of_std,
}
VJPS: dict[Primitive, VjpMaker] = {fun: partial(slope_vjp, fun, slope_of) for fun, slope_of in _SLOPES.items()}
VJPS[anp.cumprod] = cumprod_vjp
JVPS = {fun: partial(slope_jvp, fun, slope_of) for fun, slope_of in _SLOPES.items()}
