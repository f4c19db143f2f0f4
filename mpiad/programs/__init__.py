"""Compiled programs: `jit` compiles the computations between a function's communications to fused loops."""

from mpiad.programs.function import Jitted, jit, shared

__all__ = ["Jitted", "jit", "shared"]
__dir__ = __all__.copy
