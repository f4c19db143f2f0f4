"""Programs that the root drives, and optimization of distributed objectives."""

from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.drive import DrivenFunction, drive
from mpiad.optimize.history import History
from mpiad.optimize.iterates import MinimizeResult
from mpiad.optimize.least_squares import least_squares
from mpiad.optimize.minimize import minimize, mpi_optimize

__all__ = ["CheckpointFile", "DrivenFunction", "History", "MinimizeResult", "drive", "least_squares"]
__all__ += ["minimize", "mpi_optimize"]
__dir__ = __all__.copy
