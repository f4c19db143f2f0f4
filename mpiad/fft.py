"""Discrete Fourier transforms of arrays that are divided among the ranks."""

from mpiad.redistribution.fft import DistributedFFT

__all__ = ["DistributedFFT"]
__dir__ = __all__.copy
