"""`assert_replicated`: a value of which every rank should hold the same copy."""

from __future__ import annotations

from mpiad._typing import Comm, Tree
from mpiad.differentiation.trees import named_leaves
from mpiad.transport import channel
from mpiad.transport.replication import require_replicated

__all__ = ["assert_replicated"]


def assert_replicated(x: Tree, comm: Comm = None, name: str = "x") -> None:
    """Raise on all ranks where their copies of a value differ.

    Parameters
    ----------
    x : nest of arrays, numbers and strings
        Of traced values the plain ones are compared.
    comm : mpi4py intracommunicator, optional
    name : str
        What the message calls the value.

    Raises
    ------
    ReplicationError
        A ValueError that says which ranks differ from most, where first (the path of the leaf and the index), and by how
        much; or how shapes, dtypes and structures differ.
    TypeError
        On all ranks, where one holds a leaf that is no number, string or array of them.

    Ranks
    -----
    All ranks of `comm` call it. Where the copies are equal, that costs a hash of x and one reduction of 40 bytes.

    Notes
    -----
    Equal means equal in every bit: ``-0.0`` differs from ``0.0``, and a NaN equals only a NaN of the same bits. Lists and
    tuples count alike, and the order of a dict's keys doesn't matter.

    Examples
    --------
    >>> mpiad.debug.assert_replicated({"w": np.ones(2)})  # silent where all ranks hold the same
    """
    used = channel(comm, "assert_replicated")
    require_replicated(used, named_leaves(x, name), f"assert_replicated: {name} must be the same on all ranks")
