"""Data between any ranks: entries that other ranks own, by their global numbers, and Fourier transforms (`fft`)."""

from mpiad.redistribution.ghosts import GhostExchange

__all__ = ["GhostExchange"]
__dir__ = __all__.copy
