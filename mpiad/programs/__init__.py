"""Compiled programs: `jit` compiles the computations between a function's communications to fused loops."""

from mpiad.programs.function import Jitted, jit

__all__ = ["Jitted", "jit"]
__dir__ = __all__.copy
