"""Time-stepping: loops whose gradient stores a few states and recomputes the others, and loops that can be restarted."""

from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.restart import restartable
from mpiad.timestepping.scan import scan

__all__ = ["CheckpointSchedule", "restartable", "scan"]
__dir__ = __all__.copy
