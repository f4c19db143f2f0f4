"""Optimisation of distributed objectives: the root drives, or each rank keeps its own variables."""

from mpiad.optimize.history import History
from mpiad.optimize.minimize import minimize

__all__ = ["History", "minimize"]
