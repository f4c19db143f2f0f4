"""Independent tasks: handed to the ranks one after the other, or to groups of ranks, with derivatives of their sum."""

from mpiad.tasks.map import mpi_map
from mpiad.tasks.sum_over import RankGroups, sum_over

__all__ = ["RankGroups", "mpi_map", "sum_over"]
