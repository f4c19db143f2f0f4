"""Optimization of distributed objectives: the root drives, or each rank keeps its own variables."""

from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.history import History
from mpiad.optimize.least_squares import least_squares
from mpiad.optimize.minimize import minimize, mpi_optimize

__all__ = ["CheckpointFile", "History", "least_squares", "minimize", "mpi_optimize"]
