"""Functions whose derivatives aren't available on devices, and what to do instead."""

from __future__ import annotations

import autograd.numpy as anp
from autograd.numpy import fft, linalg

__all__ = ["REFUSALS"]

_ASSEMBLY = "it makes an array of NumPy's. Import mpiad.device.numpy in place of autograd.numpy"
_FOURIER = "use rfft, irfft and the complex transforms, axis by axis"

REFUSALS = {
    anp.concatenate_args: ("concatenate", _ASSEMBLY),
    anp.array_from_args: ("array", _ASSEMBLY),
    anp.make_diagonal: ("make_diagonal", "multiply by a mask, as in x[..., None] * identity"),
    anp.real_if_close: ("real_if_close", "the host doesn't know the values. Use real"),
    linalg.eig: ("linalg.eig", "copy the matrix with mpiad.device.to_host"),
    **{getattr(fft, name): (f"fft.{name}", _FOURIER) for name in ("rfft2", "irfft2", "rfftn", "irfftn")},
}
