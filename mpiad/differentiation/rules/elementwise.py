"""Elementwise functions of one array: autograd's formulas, with less overhead for small arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import trace_primitives_map

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import (
    BOX_TYPES,
    Argnums,
    Primitive,
    Vjp,
    anp,
    inherited_vjp,
    one_negated,
    one_unchanged,
)


@primitive
def _slope_of_tanh(x: Array) -> Array:
    """Return 1 / cosh(x)². Its own rules are finite for large x, where derivatives of the expression below are NaN."""
    e = np.exp(2.0 * np.where(np.real(x) < 0, x, -x) if np.iscomplexobj(x) else -2.0 * np.abs(x))
    return 4.0 * e / (1.0 + e) ** 2  # NumPy's cosh is slower, and would overflow


defvjp(_slope_of_tanh, lambda ans, x: lambda g: -2.0 * g * ans * anp.tanh(x))
defjvp(_slope_of_tanh, lambda g, ans, x: -2.0 * g * ans * anp.tanh(x))

_sign = anp.sign


def sign(x: Array, *args: object, **kwargs: object) -> Array:
    """Return `numpy.sign`, which is z / |z| for complex numbers; its derivative at zero is zero."""
    if type(x) not in BOX_TYPES or not anp.iscomplexobj(x):
        return _sign(x, *args, **kwargs)
    modulus = anp.abs(x)
    return anp.where(modulus == 0, 0.0, x / anp.where(modulus == 0, 1.0, modulus))


if np.sign(1j) == 1j:  # since NumPy 2; before, it was the sign of the real part
    sign.fun = np.sign  # type: ignore[attr-defined]
    sign.outer = getattr(_sign, "outer", None)
    anp.sign = anp.numpy_wrapper.sign = trace_primitives_map[np.sign] = sign

_RULES = {
    anp.negative: lambda x, ans: one_negated,
    anp.positive: lambda x, ans: one_unchanged,
    anp.exp: lambda x, ans: lambda g: (g * ans,),
    anp.log: lambda x, ans: lambda g: (g / x,),
    anp.sin: lambda x, ans: lambda g: (g * anp.cos(x),),
    anp.cos: lambda x, ans: lambda g: (-(g * anp.sin(x)),),
    anp.tanh: lambda x, ans: lambda g: (g * _slope_of_tanh(x),),
    anp.arccosh: lambda x, ans: lambda g: (g / (anp.sqrt(x - 1.0) * anp.sqrt(x + 1.0)),),  # √(x² - 1) has other branches
    anp.sqrt: lambda x, ans: lambda g: (g / (ans + ans),),  # autograd's rule would call pow
}


def _vjp(fun: Primitive, rule: Callable[..., Vjp], argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    if kwargs or len(args) != 1:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    return rule(args[0], ans)


def _jvp(fun: Primitive, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    return VJPS[fun](argnums, ans, args, kwargs)(gs[0])[0]


VJPS = {fun: partial(_vjp, fun, rule) for fun, rule in _RULES.items()}
# Autograd's tangents have other branches (arccosh), or derivatives that are NaN for large x (tanh).
JVPS = {fun: partial(_jvp, fun) for fun in (anp.arccosh, anp.tanh, anp.positive)}
