"""Data-parallel training: every rank holds the parameters and uses its own samples."""

from mpiad.parallel.adam import SGD, Adam, AdamW
from mpiad.parallel.data import DistributedDataContainer, local_rank, total_workers
from mpiad.parallel.distributed_optimizer import DistributedOptimizer, value, value_and_grad
from mpiad.parallel.parameter_groups import ParameterGroups
from mpiad.parallel.synchronize import allreduce_, bcast_, iallreduce_, reduce_, synchronize
from mpiad.parallel.training_checkpoint import load_checkpoint, save_checkpoint

__all__ = ["SGD", "Adam", "AdamW", "DistributedDataContainer", "DistributedOptimizer", "ParameterGroups", "value"]
__all__ += ["value_and_grad"]
__all__ += ["allreduce_", "bcast_", "iallreduce_", "local_rank", "reduce_", "synchronize", "total_workers"]
__all__ += ["load_checkpoint", "save_checkpoint"]
__dir__ = __all__.copy
