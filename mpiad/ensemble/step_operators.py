"""The operators of a step, on columns (trajectories): sums over stages, programs of scalars, and linear systems.

Each operator has an adjoint and a tangent that consist of operators, so derivatives of any order exist. All operations are
elementwise over the columns, so the derivatives of a trajectory don't depend on other trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array
from mpiad.compiling.derivatives import jvp, vjp
from mpiad.compiling.program import Program, evaluated
from mpiad.device.assembly import concatenate, stack
from mpiad.differentiation.forward import STACKED_JVPS
from mpiad.differentiation.rules import JVP_RULES, VJP_RULES
from mpiad.ensemble.column_lu import Places, sums_by_row
from mpiad.ensemble.sparse_lu import LU


def _applied(operator: Any, *args: Any) -> Array:
    """Apply an operator, without autograd's search for traced arguments if there are none, which takes more time."""
    return operator(*args) if any(map(isbox, args)) else operator.fun(*args)


@primitive
def rows_of(like: Array, *rows: Array) -> Array:
    """Return an array of the shape and dtype of `like` from its rows; a row may be one number for all columns."""
    return _filled(np.empty_like(like), rows)


def _rows_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    chosen = [(k - 1, anp.ndim(args[k]) == 0, anp.iscomplexobj(args[k])) for k in argnums]

    def vjp(g: Array) -> list[Array]:
        parts = [anp.sum(g[i]) if is_number else g[i] for i, is_number, _ in chosen]
        return parts if not anp.iscomplexobj(g) else [x if c else anp.real(x) for x, (_, _, c) in zip(parts, chosen)]

    return vjp


def _rows_jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    tangents = dict(zip(argnums, gs))
    return _applied(rows_of, getval(ans), *[tangents.get(k, 0.0) for k in range(1, len(args))])


@primitive
def replaced(old: Array, columns: Array, new: Array | float) -> Array:
    """Return an array with new values in some columns, each at most once."""
    out = old.copy()
    out[..., columns] = new
    return out


def _replaced_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    columns = args[1]
    return lambda g: [replaced(g, columns, 0.0) if k == 0 else g[..., columns] for k in argnums]


def _replaced_jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    tangents = dict(zip(argnums, gs))
    return replaced(tangents.get(0, np.zeros_like(getval(ans))), args[1], tangents.get(2, 0.0))


@primitive
def advanced(u: Array, h: Array | float, weights: Array | Sequence[Array], *k: Array) -> Array:
    """Return u + h Σ w_i k_i; the weights have shape (stages, ...), each a number or one number per column."""
    total = weights[0] * k[0]
    term = np.empty_like(total)
    for i in range(1, len(k)):  # device arrays aren't iterable
        total += np.multiply(weights[i], k[i], term)
    total *= h
    total += u
    return total


def _advanced_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    u, h, weights, *k = args

    def vjp(g: Array) -> list[Array]:
        scaled = g * h
        cotangents = []
        for place in argnums:
            if place == 0:
                cotangents.append(_over_slots(g, u))
            elif place == 1:
                # Columns without a step, for which h is zero, have no increments.
                cotangents.append(_over_slots(anp.sum(anp.real(g * (ans - u)), axis=-2) / anp.where(h == 0, 1, h), h))
            elif place == 2:
                rates = [anp.sum(anp.real(scaled * stage), axis=-2, keepdims=anp.ndim(weights) > 2) for stage in k]
                cotangents.append(stack(rates))
            else:
                cotangents.append(_over_slots(scaled * weights[place - 3], u))
        return cotangents

    return vjp


def _over_slots(x: Array, like: Array) -> Array:
    """Return the sum over the first axis if x has one more than `like`: the axis of several values per column."""
    return x if x.ndim == like.ndim else anp.sum(x, axis=0)


def _advanced_jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    u, h, weights, *k = args
    tangents = dict(zip(argnums, gs))
    chosen = [j for j in range(len(k)) if j + 3 in tangents]
    tangent = tangents.get(0)
    if chosen:
        start = np.zeros_like(getval(u)) if tangent is None else tangent
        selected = [weights[j] for j in chosen] if isinstance(weights, list) else weights[chosen]
        tangent = _applied(advanced, start, h, selected, *[tangents[j + 3] for j in chosen])
    factors = [(tangents[1], weights)] if 1 in tangents else []
    factors += [(h, tangents[2])] if 2 in tangents else []
    for size, rates in factors:
        change = size * sum(rates[i] * k[i] for i in range(len(k)))
        tangent = change if tangent is None else tangent + change
    return tangent + np.zeros_like(getval(ans)) if anp.ndim(tangent) < anp.ndim(ans) else tangent


@primitive
def values_of(program: Program, *groups: Array) -> Array:
    """Return the outputs of a program of scalars for n columns, (outputs, n), given (inputs, n) for each of its groups."""
    values = evaluated(program, *groups)
    # The last group may have several rows of numbers.
    return _filled(np.empty_like(groups[0], shape=(len(values), *groups[-1].shape[1:])), values)


def _filled(out: Array, rows: Sequence[Array]) -> Array:
    for i, row in enumerate(rows):
        out[i] = row
    return out


def _stacked_advanced_jvp(argnums: tuple[int, ...], gs: Sequence[Array], *call: Any) -> Array | None:
    return None if 1 in argnums or 2 in argnums else _advanced_jvp(argnums, gs, *call)


@lru_cache(64)
def _derivative_of(program: Program, reverse: bool, wanted: tuple[str, ...]) -> Program:
    return (vjp if reverse else jvp)(program, dict.fromkeys(wanted), seeds=f"seed {len(program.groups)}")


def _values_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    program, *groups = args
    names = list(program.groups)
    wanted = tuple(names[k - 1] for k in argnums)

    def vjp(g: Array) -> list[Array]:
        cotangents = _applied(values_of, _derivative_of(program, True, wanted), *groups, g)
        return [cotangents[a:b] for a, b in pairwise(accumulate((program.groups[name] for name in wanted), initial=0))]

    return vjp


def _values_jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    program, *groups = args
    names = list(program.groups)
    wanted = tuple(names[k - 1] for k in argnums)
    return _applied(values_of, _derivative_of(program, False, wanted), *groups, concatenate(list(gs)))


def _stacked_values_jvp(argnums: tuple[int, ...], gs: Sequence[Array], *call: Any) -> Array:
    return np.swapaxes(_values_jvp(argnums, [np.swapaxes(np.concatenate(gs, axis=1), 0, 1)], *call), 0, 1)


def _row_sums_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    return lambda g: [g[args[1]]]


def _row_sums_jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    return _applied(sums_by_row, gs[0], *args[1:])


@primitive
def solved(
    lu: LU, transposed: bool, places: Places, entries: Array, weights: list[Array], right: Array, *k: Array
) -> Array:
    """Return x with W x = `right` + Σ w_i k_i, or with Wᵀ x, for W = M/γ - h J; h J has the `entries` at `places`."""
    x = advanced.fun(right, 1.0, weights, *k) if k else right.copy()
    lu.solve(x, transposed)
    return x


def _solved_vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    lu, transposed, places, entries, weights, *_ = args
    rows, columns = reversed(places) if transposed else places

    def vjp(g: Array) -> list[Array]:
        # From δ(W x) = δr: the cotangent of W is -r̄ xᵀ, and W contains -h J.
        right = _applied(solved, lu, not transposed, places, entries, [], g)
        return [right[rows] * ans[columns] if i == 3 else right if i == 5 else right * weights[i - 6] for i in argnums]

    return vjp


def _solved_jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    lu, transposed, places, entries, weights, *_ = args
    rows, columns = reversed(places) if transposed else places
    change = 0.0
    for i, g in zip(argnums, gs):
        term = _applied(sums_by_row, g * ans[columns], rows, len(ans)) if i == 3 else g if i == 5 else weights[i - 6] * g
        change = change + term
    return _applied(solved, lu, transposed, places, entries, [], change)


for _operator, _vjp, _jvp in (
    (rows_of, _rows_vjp, _rows_jvp),
    (replaced, _replaced_vjp, _replaced_jvp),
    (advanced, _advanced_vjp, _advanced_jvp),
    (values_of, _values_vjp, _values_jvp),
    (sums_by_row, _row_sums_vjp, _row_sums_jvp),
    (solved, _solved_vjp, _solved_jvp),
):
    defvjp_argnums(_operator, _vjp)
    defjvp_argnums(_operator, _jvp)
    # mpiad's traces call their own rules without the checks of autograd's.
    VJP_RULES[_operator], JVP_RULES[_operator] = _vjp, _jvp
STACKED_JVPS.update({advanced: _stacked_advanced_jvp, values_of: _stacked_values_jvp})
