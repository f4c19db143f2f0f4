"""Optimisation of distributed objectives: the root drives, or each rank keeps its own variables."""

from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.history import History
from mpiad.optimize.least_squares import least_squares
from mpiad.optimize.minimize import minimize, mpi_optimize
from mpiad.optimize.minimize_many import Minima, minimize_many

__all__ = ["CheckpointFile", "History", "Minima", "least_squares", "minimize", "minimize_many", "mpi_optimize"]
