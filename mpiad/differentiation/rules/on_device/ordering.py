"""Sorted vectors: the same elements in another order."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp

__all__ = ["JVPS", "VJPS"]


def _order(fun: Primitive, args: tuple) -> Array:
    x = getval(args[0])
    if len(x.shape) != 1:
        raise NotImplementedError(f"the derivative of {fun.__name__} is available for vectors, but got shape {x.shape}")
    return np.argsort(x) if fun is anp.sort else np.argpartition(x, args[1])


def _ordering_vjp(fun: Primitive) -> Any:
    def ordering_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
        """Give each element of the cotangent to where its element came from."""
        back = np.argsort(_order(fun, args))  # the inverse of a permutation
        return lambda g: (g[back],)

    return ordering_vjp


def _ordering_jvp(fun: Primitive) -> Any:
    def ordering_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
        """Bring the tangent into the order of the elements."""
        return gs[0][_order(fun, args)]

    return ordering_jvp


VJPS = {fun: _ordering_vjp(fun) for fun in (anp.sort, anp.partition)}
JVPS = {fun: _ordering_jvp(fun) for fun in (anp.sort, anp.partition)}
