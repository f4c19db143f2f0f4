"""Independent tasks: a map over items on single ranks, and a differentiable sum over items on groups of ranks."""

from mpiad.tasks.map import mpi_map
from mpiad.tasks.sum_over import sum_over
from mpiad.transport.core.rank_groups import RankGroups

__all__ = ["RankGroups", "mpi_map", "sum_over"]
__dir__ = __all__.copy
