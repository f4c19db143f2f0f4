"""Data-parallel training: every rank holds the parameters, and computes with its own samples."""

from mpiad.parallel.adam import Adam, AdamW
from mpiad.parallel.data import DistributedDataContainer
from mpiad.parallel.distributed_optimizer import DistributedOptimizer
from mpiad.parallel.in_place import allreduce_, bcast_, iallreduce_, reduce_
from mpiad.parallel.sgd import SGD
from mpiad.parallel.synchronize import synchronize
from mpiad.parallel.training_checkpoint import load_checkpoint, save_checkpoint
from mpiad.parallel.training_gradient import value_and_grad
from mpiad.parallel.workers import local_rank, total_workers

__all__ = [
    "SGD", "Adam", "AdamW", "DistributedDataContainer", "DistributedOptimizer", "allreduce_", "bcast_", "iallreduce_",
    "load_checkpoint", "local_rank", "reduce_", "save_checkpoint", "synchronize", "total_workers", "value_and_grad",
]  # fmt: skip
