"""Functions of one array, element by element: autograd's formulas with less overhead, which dominates at small arrays."""

from __future__ import annotations

from functools import partial

from mpiad.differentiation.rules.protocol import anp, one_negated, unary_vjp

_RULES = {
    anp.negative: lambda x, ans: one_negated,
    anp.exp: lambda x, ans: lambda g: (g * ans,),
    anp.log: lambda x, ans: lambda g: (g / x,),
    anp.sin: lambda x, ans: lambda g: (g * anp.cos(x),),
    anp.cos: lambda x, ans: lambda g: (-(g * anp.sin(x)),),
    anp.sqrt: lambda x, ans: lambda g: (g / (ans + ans),),  # autograd's rule calls pow
}
VJPS = {fun: partial(unary_vjp, fun, rule) for fun, rule in _RULES.items()}
JVPS: dict = {}
