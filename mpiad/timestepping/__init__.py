"""Time-stepping: loops whose gradient stores a few states and recomputes the others."""

from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.scan import scan

__all__ = ["CheckpointSchedule", "scan"]
