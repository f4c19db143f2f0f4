"""Tangents of functions for which autograd has only the adjoint: transforms, factorizations, special functions.

The adjoint w -> Jᵀw is linear, so the derivative of ⟨Jᵀw, v⟩ in w is Jv, at any w: the transpose of the transpose.
"""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
from autograd.core import make_vjp, primitive_jvps, primitive_vjps
from autograd.tracer import getval

from mpiad._typing import Array, Scalar
from mpiad.differentiation.rules import VJP_RULES
from mpiad.differentiation.rules.protocol import (
    Argnums,
    JvpMaker,
    Primitive,
    Vjp,
    VjpMaker,
    checked_tangent,
    inherited_jvp,
    inherited_vjp,
    refusal,
)
from mpiad.transport.device_arrays import is_device_array


def tangent_rule(fun: Primitive, value: Array, argnums: Argnums) -> JvpMaker:
    """Return the tangent rule of a function for which we define none; raise the error of `refusal` if there is none."""
    if fun in primitive_jvps:
        return partial(inherited_jvp, fun)
    if (fun in primitive_vjps or fun in VJP_RULES) and hasattr(value, "dtype"):
        return partial(checked_tangent, fun, partial(_by_transposition, VJP_RULES.get(fun) or partial(inherited_vjp, fun)))
    raise refusal(fun, f"forwards with respect to argument {argnums}: it has no tangent")


def _by_transposition(rule: VjpMaker, argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Return the tangent of a result, from its adjoint rule only; `gs` are those of the arguments `argnums`."""
    adjoint = rule(argnums, ans, args, kwargs)
    if is_device_array(getval(ans)):
        return _transposed_on_device(adjoint, gs, np.zeros_like(getval(ans)))
    plain = np.asarray(getval(ans))

    def paired(w: Array) -> Scalar:
        return sum(anp.sum(anp.real(part * g)) for part, g in zip(adjoint(w), gs))

    # ⟨Aᵀw, g⟩ = ⟨w, A g⟩ is linear in w, so its gradient in w is the tangent A g, at any w: here at zero.
    return make_vjp(paired, np.zeros_like(plain))[0](1.0)


def _transposed_on_device(adjoint: Vjp, gs: list, w: Array) -> Array:
    """Run the adjoint backwards on a tape of ours, whose rules stay on the device; autograd's don't."""
    # The tape is made of nodes, which look up their tangents here.
    from mpiad.differentiation.backward import run_backward
    from mpiad.differentiation.trace import trace_list

    _, places, recording = trace_list(lambda variables: tuple(adjoint(variables[0])), [w])
    seeds = [(place, g) for place, g in zip(places, gs) if place >= 0]
    found = run_backward(recording, seeds, 1)[0]
    return w if found is None else found
