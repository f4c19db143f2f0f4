"""Tangents of functions for which autograd has only the adjoint: transforms, factorizations, special functions.

The adjoint w ↦ Jᵀw is linear. For any w, the gradient of ⟨Jᵀw, v⟩ with respect to w is therefore the tangent Jv.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from autograd.core import primitive_jvps, primitive_vjps
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.rules import VJP_RULES
from mpiad.differentiation.rules.protocol import (
    Argnums,
    JvpMaker,
    Primitive,
    VjpMaker,
    checked_tangent,
    inherited_jvp,
    inherited_vjp,
    refusal,
)


def tangent_rule(fun: Primitive, value: Array, argnums: Argnums) -> JvpMaker:
    """Return autograd's tangent rule, or one by transposing the adjoint; raise the error of `refusal` if neither exists."""
    if fun in primitive_jvps:
        return partial(inherited_jvp, fun)
    if (fun in primitive_vjps or fun in VJP_RULES) and hasattr(value, "dtype"):
        return partial(checked_tangent, fun, partial(_by_transposition, VJP_RULES.get(fun) or partial(inherited_vjp, fun)))
    raise refusal(fun, f"forwards with respect to argument {argnums}: it has no tangent")


def _by_transposition(rule: VjpMaker, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    # Imported here, since the module `nodes` imports this one.
    from mpiad.differentiation.backward import run_backward
    from mpiad.differentiation.trace import trace_list

    adjoint, w = rule(argnums, ans, args, kwargs), np.zeros_like(getval(ans))
    _, places, recording = trace_list(lambda variables: tuple(adjoint(variables[0])), [w])
    seeds = [(place, g) for place, g in zip(places, gs) if place >= 0]
    found = run_backward(recording, seeds, 1)[0]
    return w if found is None else found
