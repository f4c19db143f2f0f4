"""Independent tasks, distributed to single ranks, or to groups of ranks with derivatives of the sum of results."""

from mpiad.tasks.map import mpi_map
from mpiad.tasks.sum_over import RankGroups, sum_over

__all__ = ["RankGroups", "mpi_map", "sum_over"]
