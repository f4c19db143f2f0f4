"""The number of samples of a batch, and sums of these numbers and of losses over all ranks, before gradients are summed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Tree
from mpiad.differentiation.objective import PendingError, raise_everywhere
from mpiad.parallel.buckets import Plan
from mpiad.parallel.parameters import described
from mpiad.pytrees import flatten, is_variable, named_leaves
from mpiad.transport import SUM, Channel
from mpiad.transport.core.agreement import agreed
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.watch import watch_settings


class Items(list):
    """A batch in the form of a list of objects, one per sample."""


def count_samples(samples: Callable[..., int] | None, params: Tree, batch: Sequence[Any]) -> int:
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


class _LastContainer(threading.local):
    size = 0
    order: Tree = None


last_container = _LastContainer()
"""The last data container that this thread used: its number of ranks, and the values that determine its order."""


def require_equal_replicas(used: Channel, call: str, compared: dict[str, Tree]) -> None:
    """Raise on all ranks under MPIAD_DEBUG=1 if `compared` differs between ranks, except in untrained leaves."""
    if not watch_settings.debug():
        return
    # The orders of samples are also compared, if the last container of every rank has as many ranks as `used`.
    if not on_any_rank(used.data, last_container.size != used.size):
        compared = {**compared, "data": last_container.order}
    named = [(name, path, leaf) for name, part in compared.items() for path, leaf in named_leaves(part, name)]
    leaves = [(path, leaf) for name, path, leaf in named if is_variable(leaf) or name not in ("params", "state")]
    advice = "Call parallel.synchronize before the first step, and use the same seed, rate and epoch on all ranks."
    require_replicated(used, leaves, f"{call}: all ranks must train the same parameters in the same way", advice)


class Totals(NamedTuple):
    """Sums over all ranks: samples in this batch, samples in all accumulated batches, and losses."""

    batch: int
    all: int
    loss: float


def totals(
    used: Channel, plan: Plan, params: Tree, call: str, count: int, accumulated_before: int = 0, loss: float = 0.0,
    problem: PendingError | None = None,
) -> Totals:  # fmt: skip
    """Sum samples and losses over the ranks; raise on all ranks a `problem`, or if their parameters don't match."""
    # All entries except the loss are integers; their sums are below 2⁵³, so they are exact.
    local = [count, count + accumulated_before, plan.digest, plan.digest**2, problem is not None, loss]
    found = allreduce(used, np.array(local, float), SUM, call)
    total, accumulated, digests, squares, problems, sum_of_losses = found.tolist()
    # By the Cauchy-Schwarz inequality, size · Σ d² = (Σ d)² only if all digests d are equal. The products may be too large
    # for exact floats.
    if used.size * int(squares) != int(digests) ** 2:
        raise agreed(used, _difference(used, plan, params, call))
    if total < 1:
        raise agreed(used, ValueError(f"{call}: none of the {used.size} rank(s) has a sample."))
    if problems:
        raise_everywhere(used, problem)
    return Totals(int(total), int(accumulated), sum_of_losses)


def _difference(used: Channel, plan: Plan, params: Tree, call: str) -> ValueError:
    paths = (path for path, leaf in named_leaves(params, "params") if is_variable(leaf))
    local = [f"{path} has {described(spec)}" for path, spec in zip(paths, plan.specs)]
    every = used.data.allgather((local, plan.limit))
    for rank, (others, limit) in enumerate(every):
        first, first_limit = every[0]
        for one, other in zip(first, others):
            if one != other:
                return ValueError(
                    f"{call}: the parameters must have the same form, shapes and dtypes on all ranks, but {one} on rank 0, "
                    f"and {other} on rank {rank}."
                )
        if (len(others), limit) != (len(first), first_limit):
            return ValueError(
                f"{call}: all ranks must train the same number of arrays with the same bucket_bytes, but rank 0 has "
                f"{len(first)} and {first_limit}, and rank {rank} has {len(others)} and {limit}."
            )
    return ValueError(f"{call}: the parameters differ between ranks.")
