"""Optimisation of distributed objectives: the root drives, the other ranks wait for its instruction."""

from mpiad.optimize.history import History
from mpiad.optimize.minimize import minimize

__all__ = ["History", "minimize"]
