"""Compiled programs: `jit` makes fused loops of what a function computes between its communications."""

from mpiad.programs.function import Jitted, jit

__all__ = ["Jitted", "jit"]
