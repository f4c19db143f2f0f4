"""`synchronize`: broadcast the root's parameters to all ranks."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Comm, Rank, Tree
from mpiad.parallel.parameters import described, variables_of
from mpiad.primitives import mpi_bcast
from mpiad.primitives.checks import root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import suspended
from mpiad.pytrees import join, named_leaves, places_by_kind, split
from mpiad.transport import channel
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import is_device_array


def synchronize(tree: Tree, root: Rank = 0, comm: Comm = None) -> Tree:
    """Broadcast the root's parameters, or the state of its optimizer, to all ranks.

    Parameters
    ----------
    tree : pytree of arrays
        Floats are broadcast, in one message per dtype and device. Other leaves (integers, strings, None) are returned
        unchanged.
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    pytree of arrays
        A new pytree; its arrays are new, except on the root.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if a rank's pytree differs from the root's in structure, or a leaf in shape or dtype.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    None: traced values are refused.

    Examples
    --------
    >>> print(mpiad.parallel.synchronize({"w": np.ones(2) + rank}))
    {'w': array([1., 1.])}
    """
    used = channel(comm, "parallel.synchronize")
    root = root_of(root, used, "parallel.synchronize")
    with raising_together(used):
        leaves, trained, build = variables_of(tree, "parallel.synchronize", required=False)
        own = [(name, _described(leaf)) for name, leaf in named_leaves(tree, "tree")]
    root_leaves = used.data.bcast(own, root)
    with raising_together(used):
        _require_equal(own, root_leaves, used.rank, root)
    for places in places_by_kind(leaves, trained):
        with restoring_state(), suspended():
            whole = mpi_bcast(join([leaves[k] for k in places]), root, comm=comm)
        if used.rank == root:
            continue
        for k, part in zip(places, split(whole, [np.shape(leaves[k]) for k in places])):
            # A copy, because a view would keep the whole message in memory.
            leaves[k] = part.copy()[()]
    return build(leaves)


def _described(leaf: object) -> str:
    numeric = isinstance(leaf, (float, complex, np.inexact, np.ndarray)) or is_device_array(leaf)
    return described(spec_like(leaf)) if numeric else type(leaf).__name__


def _require_equal(own: list[tuple[str, str]], root_leaves: list[tuple[str, str]], rank: Rank, root: Rank) -> None:
    for (name, mine), (path, other) in zip(own, root_leaves):
        if name != path:
            raise ValueError(
                f"parallel.synchronize: all pytrees must have the same structure, but rank {rank} has {name}, and the "
                f"root, rank {root}, has {path} in its place."
            )
        if mine != other:
            raise ValueError(
                f"parallel.synchronize: {name} has {mine} on rank {rank}, but {other} on the root, rank {root}. Use the "
                "same shapes and dtypes on all ranks."
            )
    if len(own) != len(root_leaves):
        raise ValueError(
            f"parallel.synchronize: the pytree has {len(own)} leaves on rank {rank}, but {len(root_leaves)} on the root, "
            f"rank {root}."
        )
