"""Fourier transforms of and to real vectors; all transforms are linear, so each is its own tangent."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
from autograd.numpy import fft

from mpiad._typing import Array
from mpiad.differentiation.rules.on_device.constant_arrays import arrays_like
from mpiad.differentiation.rules.protocol import Argnums, Primitive, Vjp

_NAMES = ("a", "n", "axis", "norm")
_REVERSED = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


def rfft_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Take the real part of the whole transform of the cotangent: the matrix is symmetric, rows are missing."""
    given: Any = dict(zip(_NAMES, args), **kwargs)
    shape, axis, norm = given["a"].shape, given.get("axis", -1), given.get("norm")
    n = given.get("n") or shape[axis]
    return lambda g: (_resized(anp.real(fft.fft(g, n=n, axis=axis, norm=norm)), shape[axis], axis),)


def irfft_vjp(argnums: Argnums, ans: Array, args: tuple, kwargs: dict) -> Vjp:
    """Transform the cotangent back; all frequencies but the first, and the last of an even number, count twice."""
    given: Any = dict(zip(_NAMES, args), **kwargs)
    x, axis, norm = given["a"], given.get("axis", -1), given.get("norm")
    n = ans.shape[axis]
    last = n // 2 if n % 2 == 0 else -1
    places = arrays_like(ans).arange(n // 2 + 1)
    once = ((places == 0) | (places == last)).astype(ans.dtype)
    weights = anp.reshape(2.0 - once, (-1,) + (1,) * (len(ans.shape) - 1 - axis % len(ans.shape)))
    count = x.shape[axis]
    return lambda g: (_resized(anp.conj(fft.rfft(g, n=n, axis=axis, norm=_REVERSED[norm])) * weights, count, axis),)


def _resized(part: Array, count: int, axis: int) -> Array:
    """Cut off what the transform added, or fill up with zeros what it left out."""
    rank = len(part.shape)
    place, have = axis % rank, part.shape[axis]
    if have >= count:
        return part if have == count else part[(*(slice(None),) * place, slice(count))]
    return anp.pad(part, [(0, count - have if i == place else 0) for i in range(rank)], "constant")


def _linear(fun: Primitive) -> Any:
    def linear_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
        """Transform the tangent."""
        return fun(gs[0], *args[1:], **kwargs)

    return linear_jvp


VJPS = {fft.rfft: rfft_vjp, fft.irfft: irfft_vjp}
_TRANSFORMS = ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "irfft", "rfft2", "irfft2", "rfftn", "irfftn")
JVPS = {getattr(fft, name): _linear(getattr(fft, name)) for name in (*_TRANSFORMS, "fftshift", "ifftshift")}
