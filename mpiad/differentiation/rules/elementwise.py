"""Elementwise functions of one array: autograd's formulas, with less overhead for small arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp, anp, inherited_vjp, one_negated

_RULES = {
    anp.negative: lambda x, ans: one_negated,
    anp.exp: lambda x, ans: lambda g: (g * ans,),
    anp.log: lambda x, ans: lambda g: (g / x,),
    anp.sin: lambda x, ans: lambda g: (g * anp.cos(x),),
    anp.cos: lambda x, ans: lambda g: (-(g * anp.sin(x)),),
    anp.tanh: lambda x, ans: lambda g: (4.0 * g / ((e := anp.exp(x)) + 1.0 / e) ** 2,),  # NumPy's cosh is slower
    anp.arccosh: lambda x, ans: lambda g: (g / (anp.sqrt(x - 1.0) * anp.sqrt(x + 1.0)),),  # √(x² - 1) has other branches
    anp.sqrt: lambda x, ans: lambda g: (g / (ans + ans),),  # autograd's rule would call pow
}


def _vjp(fun: Primitive, rule: Callable[..., Vjp], argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    if kwargs or len(args) != 1:
        return inherited_vjp(fun, argnums, ans, args, kwargs)
    return rule(args[0], ans)


VJPS = {fun: partial(_vjp, fun, rule) for fun, rule in _RULES.items()}
# autograd's tangent of arccosh has the same branches as its adjoint.
JVPS = {anp.arccosh: lambda argnums, gs, *call: VJPS[anp.arccosh](argnums, *call)(gs[0])[0]}
