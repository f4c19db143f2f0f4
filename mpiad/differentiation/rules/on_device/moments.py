"""Products, variances and standard deviations over axes."""

from __future__ import annotations

import math
from collections.abc import Callable

import autograd.numpy as anp
from autograd.numpy import numpy_wrapper as wrapped

from mpiad._typing import Array
from mpiad.differentiation.rules.expansion import kept_shape, spread
from mpiad.differentiation.rules.protocol import Argnums, Vjp, VjpMaker

_NAMES = ("a", "axis", "dtype", "out", "ddof", "keepdims")


def _spreading(args: tuple, kwargs: dict) -> tuple[Callable[[Array], Array], int, dict]:
    """Return what repeats a cotangent over the axes that were reduced, how many elements these hold, and the arguments."""
    given = dict(zip(_NAMES, args), **kwargs)
    x, axis = given["a"], given.get("axis")
    shape = x.shape
    kept = kept_shape(shape, axis)
    count = math.prod(n for n, k in zip(shape, kept) if n != k)
    return lambda g: spread(g, shape, kept, g.dtype), count, given


def prod_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply by the product of the others: the product, divided by the element."""
    repeated, _, given = _spreading(args, kwargs)
    return lambda g: (repeated(g * ans) / given["a"],)


def var_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply by twice the distance from the mean."""
    repeated, count, given = _spreading(args, kwargs)
    return lambda g: (repeated(g) * _from_mean(given) * (2.0 / (count - given.get("ddof", 0))),)


def std_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Multiply by the distance from the mean, in standard deviations; zero where there is one element."""
    repeated, count, given = _spreading(args, kwargs)
    if count <= 1:
        return lambda g: (repeated(g) * 0.0,)
    return lambda g: (repeated(g / ans) * _from_mean(given) / (count - given.get("ddof", 0)),)


def _from_mean(given: dict) -> Array:
    x = given["a"]
    return anp.conj(x - anp.mean(x, axis=given.get("axis"), keepdims=True))


_VAR: VjpMaker = getattr(wrapped, "_primitive_var", anp.var)
_STD: VjpMaker = getattr(wrapped, "_primitive_std", anp.std)
VJPS = {anp.prod: prod_vjp, _VAR: var_vjp, _STD: std_vjp}
JVPS: dict = {}
