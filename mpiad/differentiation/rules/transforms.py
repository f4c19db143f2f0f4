"""Fourier transforms along several axes, and between real and complex arrays; tangents are transformed like values."""

from __future__ import annotations

from functools import partial
from typing import Any

import autograd.numpy as anp
from autograd.numpy import fft

from mpiad._typing import Array, Shape
from mpiad.differentiation.rules.broadcasting import fitted
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp, arrays_like, bound, linear_jvp, refusal

_TWO_DIMENSIONAL = (fft.fft2, fft.ifft2, fft.rfft2, fft.irfft2)
_ADJOINT_NORMS = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


def _axes(fun: Primitive, args: tuple, kwargs: dict) -> tuple[Shape, list[int], Any, str | None]:
    """Return the shape of the argument, the axes, the lengths along the axes (or None), and the normalization."""
    one_axis = fun is fft.rfft or fun is fft.irfft
    named: Any = bound(fun, "a n axis norm" if one_axis else "a s axes norm", args, kwargs)
    shape, norm = anp.shape(named["a"]), named.get("norm")
    if one_axis:
        lengths, axes = named.get("n") and [named["n"]], [named.get("axis", -1)]
    else:
        lengths, axes = named.get("s"), named.get("axes", (-2, -1) if fun in _TWO_DIMENSIONAL else None)
        axes = range(-len(lengths or shape), 0) if axes is None else axes
    axes = [axis % len(shape) for axis in axes]
    if len(set(axes)) != len(axes):
        raise refusal(fun, f"if an axis is transformed twice: axes={axes}")
    return shape, axes, lengths, norm


def _complex_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Transform the cotangent, since the matrix of the transform is symmetric."""
    transform = fft.fftn if fun in (fft.fft2, fft.fftn) else fft.ifftn
    shape, axes, _, norm = _axes(fun, args, kwargs)
    return lambda g: (fitted(_resized(transform(g, axes=axes, norm=norm), shape, axes), args[0]),)


def _real_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Pad the cotangent with zeros, transform it, and take the real part, since rfft returns the first entries of fft."""
    shape, (*leading, last), lengths, norm = _axes(fun, args, kwargs)
    n = lengths[-1] if lengths is not None else shape[last]

    def vjp(g: Array) -> tuple[Array]:
        g = _resized(fft.fftn(g, axes=leading, norm=norm), shape, leading) if leading else g
        return (_resized(anp.real(fft.fft(g, n=n, axis=last, norm=norm)), shape, [last]),)

    return vjp


def _inverse_vjp(fun: Primitive, argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Transform the cotangent, and double it except at the first and, for an even length, the last frequency."""
    shape, (*leading, last), _, norm = _axes(fun, args, kwargs)
    n = ans.shape[last]
    frequencies = arrays_like(ans).arange(n // 2 + 1)
    once = ((frequencies == 0) | (frequencies == (n // 2 if n % 2 == 0 else -1))).astype(ans.dtype)
    weights = anp.reshape(2.0 - once, (-1,) + (1,) * (len(shape) - 1 - last))

    def vjp(g: Array) -> tuple[Array]:
        part = anp.conj(fft.rfft(g, n=n, axis=last, norm=_ADJOINT_NORMS[norm])) * weights
        part = fft.ifftn(part, axes=leading, norm=norm) if leading else part
        return (fitted(_resized(part, shape, [*leading, last]), args[0]),)

    return vjp


def _resized(part: Array, shape: Shape, axes: list[int]) -> Array:
    """Truncate or zero-pad an array along `axes` to `shape`: the adjoint of the transform's padding or truncation."""
    for axis in axes:
        count, length = shape[axis], part.shape[axis]
        if length > count:
            part = part[(*(slice(None),) * axis, slice(count))]
        elif length < count:
            part = anp.pad(part, [(0, count - length if i == axis else 0) for i in range(len(shape))], "constant")
    return part


VJPS = {
    **{fun: partial(_complex_vjp, fun) for fun in (fft.fft2, fft.ifft2, fft.fftn, fft.ifftn)},
    **{fun: partial(_real_vjp, fun) for fun in (fft.rfft, fft.rfft2, fft.rfftn)},
    **{fun: partial(_inverse_vjp, fun) for fun in (fft.irfft, fft.irfft2, fft.irfftn)},
}
_TRANSFORMS = ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn")
JVPS = {getattr(fft, name): partial(linear_jvp, getattr(fft, name)) for name in (*_TRANSFORMS, "fftshift", "ifftshift")}
