"""`synchronize`, and collectives that overwrite their arguments, without an adjoint, for state such as running means."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpiad._typing import Array, Comm, Op, Rank, Request, Tree
from mpiad.parallel.parameters import described, require_same_leaves, variables_of
from mpiad.primitives import mpi_allreduce, mpi_bcast, mpi_iallreduce, mpi_reduce, mpi_wait
from mpiad.primitives.checks import reduction_of, root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import suspended
from mpiad.pytrees import is_variable, join, named_leaves, places_by_kind, split
from mpiad.transport import SUM, channel
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.core.buffers import require_sendable
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
    >>> rank = mpiad.mpi_rank()
    >>> print(mpiad.parallel.synchronize({"w": np.ones(2) + rank}))
    {'w': array([1., 1.])}
    """
    used = channel(comm, "parallel.synchronize")
    root = root_of(root, used, "parallel.synchronize")
    with raising_together(used):
        leaves, trained, build, _ = variables_of(tree, "parallel.synchronize", required=False)
        own = [
            f"{path} has {described(spec_like(x)) if hasattr(x, 'dtype') or is_variable(x) else type(x).__name__}"
            for path, x in named_leaves(tree, "tree")
        ]
        for k in trained:
            require_sendable(leaves[k], "parallel.synchronize")
    require_same_leaves(used, own, "parallel.synchronize", root)
    for places in places_by_kind(leaves, trained):
        with restoring_state(), suspended():
            whole = mpi_bcast(join([leaves[k] for k in places]), root, comm=comm)
        if used.rank == root:
            continue
        for k, part in zip(places, split(whole, [np.shape(leaves[k]) for k in places])):
            # A copy, because a view would keep the whole message in memory.
            leaves[k] = part.copy()[()]
    return build(leaves)


def allreduce_(x: Tree, op: Op = SUM, comm: Comm = None) -> Tree:
    """Reduce the arrays of all ranks, and write the result into them on every rank.

    Parameters
    ----------
    x : array, or pytree of arrays
        Untraced arrays, with the same shapes and dtypes on all ranks; on the host or on devices.
    op : mpi4py operation
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    `x` itself

    Raises
    ------
    TypeError
        On all ranks, if a leaf isn't a writable array, or the operation isn't supported for its dtype.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> x = np.ones(2)
    >>> print(mpiad.parallel.allreduce_(x) is x, x / size)
    True [1. 1.]
    """
    return _overwritten(x, "parallel.allreduce_", comm, lambda array: mpi_allreduce(array, op, comm=comm), op=op)


def reduce_(x: Tree, op: Op = SUM, root: Rank = 0, comm: Comm = None) -> Tree:
    """Reduce the arrays of all ranks, and write the result into the root's arrays; otherwise as `allreduce_`.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> x = np.ones(2)
    >>> _ = mpiad.parallel.reduce_(x)
    >>> print(x[0] == (size if rank == 0 else 1))
    True
    """
    is_root = channel(comm, "parallel.reduce_").rank == root
    return _overwritten(x, "parallel.reduce_", comm, lambda array: mpi_reduce(array, op, root, comm=comm), is_root, op)


def bcast_(x: Tree, root: Rank = 0, comm: Comm = None) -> Tree:
    """Write the values of the root's arrays into the arrays of every rank; otherwise as `allreduce_`.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> x = np.arange(3.0) + rank
    >>> print(mpiad.parallel.bcast_(x))
    [0. 1. 2.]
    """
    return _overwritten(x, "parallel.bcast_", comm, lambda array: mpi_bcast(array, root, comm=comm))


class Pending:
    """Sums in progress, started by `iallreduce_`."""

    def __init__(self, x: Tree, arrays: list[np.ndarray], requests: list[Request]):
        self._x, self._arrays, self._requests = x, arrays, requests

    def wait(self) -> Tree:
        """Wait for the sums, write them into the arrays, and return the pytree; a second call only returns the pytree."""
        for array, request in zip(self._arrays, self._requests):
            with restoring_state(), suspended():
                array[...] = mpi_wait(request)
        # A second call must not overwrite later values.
        self._arrays, self._requests = [], []
        return self._x


def iallreduce_(x: Tree, comm: Comm = None) -> Pending:
    """Start a sum of the arrays of all ranks; the method `wait` of the result writes the sums into the arrays.

    Parameters
    ----------
    x : array, or pytree of arrays
        As for `allreduce_`. The values at the time of this call are summed; the arrays are overwritten by `wait`.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    Pending
        The sum in progress. Its method `wait` returns `x`, after writing the sums into its arrays.

    Raises
    ------
    TypeError
        As `allreduce_`.

    Ranks
    -----
    All ranks of `comm` call it, and each rank may call `wait` at any time; other communication is allowed in between.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> x = np.ones(2)
    >>> pending = mpiad.parallel.iallreduce_(x)
    >>> _ = pending.wait()
    >>> print(x / size)
    [1. 1.]
    """
    arrays = _writable(x, "parallel.iallreduce_", comm, SUM)
    with restoring_state(), suspended():
        return Pending(x, arrays, [mpi_iallreduce(array, comm=comm) for array in arrays])


def _overwritten(
    x: Tree, call: str, comm: Comm, compute: Callable[[Array], Array], here: bool = True, op: Op | None = None
) -> Tree:
    """Return x, with its arrays overwritten by the results of `compute` if this rank gets them (`here`); collective."""
    arrays = _writable(x, call, comm, op)
    with restoring_state(), suspended():
        # All results are computed before any of them is written, since an array may occur twice in the pytree.
        results = list(map(compute, arrays))
        for array, result in zip(arrays, results if here else ()):
            array[...] = result
    return x


def _writable(x: Tree, call: str, comm: Comm, op: Op | None) -> list[np.ndarray]:
    """Return the arrays of a pytree; raise on all ranks before any message if they can't be reduced or overwritten."""
    leaves = named_leaves(x, "x")
    with raising_together(channel(comm, call)):
        for name, leaf in leaves:
            if not is_device_array(leaf) and not (isinstance(leaf, np.ndarray) and leaf.flags.writeable):
                kind = "a read-only array" if isinstance(leaf, np.ndarray) else f"{type(leaf).__name__} {leaf!r:.40}"
                raise TypeError(f"{call}: {name} must be a writable array, but got {kind}.")
            require_sendable(leaf, call)
            if op is not None:
                reduction_of(op, leaf, call)
    return [leaf for _, leaf in leaves]
