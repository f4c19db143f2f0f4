"""How many samples a batch has, on this rank and on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Tree
from mpiad.differentiation.trees import flatten
from mpiad.parallel.buckets import Plan
from mpiad.primitives import mpi_allreduce
from mpiad.transport import Channel
from mpiad.transport.agreement import agreed

__all__ = ["Items", "counted", "total_samples"]


class Items(list):
    """A batch of objects, one for each sample; of another list it can't be seen how many samples it holds."""


def counted(samples: Callable[..., int] | None, params: Tree, batch: Sequence[Any]) -> int:
    """Return the number of this rank's samples."""
    if samples is not None:
        return int(samples(params, *batch))
    for part in batch:
        if isinstance(part, Items):
            return len(part)
    for leaf in flatten(list(batch))[0]:
        if np.ndim(leaf):
            return np.shape(leaf)[0]
    return 1


def total_samples(used: Channel, plan: Plan, count: int, call: str) -> int:
    """Return the number of all ranks' samples, after seeing that they are about to add up the same arrays.

    Raises
    ------
    ValueError
        On all ranks, where their parameters differ in number, shape or dtype; where none has a sample.

    Ranks
    -----
    All ranks of the channel call it, outside of all traces.
    """
    # By Cauchy and Schwarz, size · Σ d² = (Σ d)² for equal digests only: the comparison costs no message of its own.
    found = mpi_allreduce(np.array([count, plan.digest, plan.digest**2]), comm=used.user)
    total, digests, squares = found.tolist()
    if used.size * squares != digests**2:
        raise agreed(used, _difference(used, plan, call))
    if total < 1:
        raise agreed(used, ValueError(f"{call}: none of the {used.size} rank(s) has a sample to learn from."))
    return total


def _difference(used: Channel, plan: Plan, call: str) -> ValueError:
    mine = [f"shape {spec.shape} and dtype {spec.dtype}" for spec in plan.specs]
    every = used.data.allgather((mine, plan.limit))
    for rank, (theirs, limit) in enumerate(every):
        first, first_limit = every[0]
        for place, (one, other) in enumerate(zip(first, theirs)):
            if one != other:
                return ValueError(
                    f"{call}: the parameters must be alike on all ranks, but the array number {place} among those that are "
                    f"trained has {one} on rank 0, and {other} on rank {rank}."
                )
        if (len(theirs), limit) != (len(first), first_limit):
            return ValueError(
                f"{call}: all ranks must train as many arrays with the same bucket_bytes, but rank 0 has {len(first)} and "
                f"{first_limit}, and rank {rank} has {len(theirs)} and {limit}."
            )
    return ValueError(f"{call}: the parameters differ between ranks.")
