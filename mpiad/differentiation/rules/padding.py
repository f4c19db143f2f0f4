"""Padding with a constant, or with elements of the array (edge, reflect, symmetric, wrap)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval

from mpiad._typing import Array, Shape
from mpiad.differentiation.rules.protocol import Argnums, Vjp, anp, refusal

Widths: TypeAlias = list[tuple[int, int]]
COPYING = ("edge", "reflect", "symmetric", "wrap")


def pad_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Remove the padding from the cotangent; add the cotangents of copied elements to those of their sources."""
    x, width, mode = _arguments(argnums, args, kwargs)
    shape = np.shape(getval(x))
    widths = _widths(width, len(shape))
    if mode == "constant":
        inner = tuple(slice(before, before + n) for (before, _), n in zip(widths, shape))
        return lambda g: (g[inner],)
    return lambda g: (fold(g, widths, mode, shape),)


def pad_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Pad the tangent with zeros or with elements of the tangent."""
    _, width, mode = _arguments(argnums, args, kwargs)
    return anp.pad(gs[0], width, mode)


def _arguments(argnums: Argnums, args: tuple, kwargs: dict) -> tuple[Any, Any, Any]:
    """Return array, widths and mode of a call; raise the error of `refusal` if this call has no rule."""
    named = {**dict(zip(("array", "pad_width", "mode"), args)), **kwargs}
    x, width, mode, others = named.pop("array"), named.pop("pad_width"), named.pop("mode", "constant"), named
    # The odd reflection (reflect_type="odd") doesn't copy elements, and has no rule.
    if argnums != (0,) or isinstance(width, dict) or not (mode == "constant" or (mode in COPYING and not others)):
        raise refusal(
            anp.pad, f"with mode={mode!r}, {others}, pad_width={width!r}: supported are constant, {', '.join(COPYING)}"
        )
    return x, width, mode


def _widths(width: Any, ndim: int) -> Widths:
    """Return, for each axis, the numbers of elements added before and after."""
    if type(width) is int:
        return [(width, width)] * ndim
    return [(int(before), int(after)) for before, after in np.broadcast_to(width, (ndim, 2))]


@primitive
def fold(g: Array, widths: Widths, mode: str, shape: Shape) -> Array:
    """Return the cotangent of the array before padding: add the cotangents of copied layers to those of their sources."""
    for axis, ((before, after), n) in enumerate(zip(widths, shape)):
        if before == after == 0:
            continue
        lead = (slice(None),) * axis
        total = g[(*lead, slice(before, before + n))].copy()
        # Padding the array of indices gives the source of each layer.
        source = np.pad(np.arange(n), (before, after), mode)  # type: ignore[call-overload]
        for layer in (*range(before), *range(before + n, before + n + after)):
            total[(*lead, source[layer])] += g[(*lead, layer)]
        g = total
    return g


# Padding with elements of the array is linear, and `fold` is its transpose.
defvjp(fold, lambda ans, g, widths, mode, shape: lambda h: anp.pad(h, widths or 0, mode))
defjvp(fold, lambda dg, ans, g, widths, mode, shape: fold(dg, widths, mode, shape))

VJPS = {anp.pad: pad_vjp}
JVPS = {anp.pad: pad_jvp}
