"""Independent tasks, handed to the ranks one after the other."""

from mpiad.tasks.map import mpi_map

__all__ = ["mpi_map"]
