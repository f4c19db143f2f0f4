"""Time-stepping: loops whose gradient stores a few states instead of all."""

from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.scan import scan

__all__ = ["CheckpointSchedule", "scan"]
