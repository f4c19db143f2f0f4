"""Time-stepping: loops whose gradient needs the memory of a few states, not of all."""

from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.timestepping.scan import scan

__all__ = ["CheckpointSchedule", "scan"]
