"""Time-stepping: loops whose gradient needs the memory of a few states, not of all."""

from mpiad.timestepping.checkpoints import Checkpoints
from mpiad.timestepping.scan import scan

__all__ = ["Checkpoints", "scan"]
