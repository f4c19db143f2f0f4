"""Groups of consecutive ranks, each with its own communicator."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mpiad._typing import Comm
from mpiad.transport.core.agreement import require_alike
from mpiad.transport.core.channels import Channel, make_communicator
from mpiad.transport.core.lookup import channel

_GROUPS_CALL = "tasks.RankGroups"
_cached_groups: WeakKeyDictionary[Channel, dict[int, RankGroups]] = WeakKeyDictionary()


class RankGroups:
    """A division of the ranks into groups of k consecutive ranks: ranks 0 to k - 1, k to 2 k - 1, and so on.

    Parameters
    ----------
    count : int
        The number of groups, a divisor of the number of ranks.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    count : int
        The number of groups.
    index : int
        The index of this rank's group, from 0.
    comm : mpi4py intracommunicator
        The communicator of this rank's group, for example for a `Domain` per group.
    across : mpi4py intracommunicator
        The communicator of the ranks, one per group, that have the same rank in their group as this rank. If a variable
        is divided among all ranks, ``mpi_allgather(part, axis=0, comm=groups.across)`` concatenates parts such that the
        ranks of each group together have the whole variable.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if `count` doesn't divide the number of ranks, or differs between ranks.

    Ranks
    -----
    All ranks of `comm` call the constructor. The communicators exist until `free` is called on all ranks.

    Examples
    --------
    >>> groups = mpiad.tasks.RankGroups(mpiad.mpi_size())
    >>> print(groups.count == mpiad.mpi_size(), groups.comm.size)
    True 1
    """

    def __init__(self, count: int, comm: Comm = None):
        whole = channel(comm, _GROUPS_CALL)
        require_alike(whole, _problem_with(count, whole.size), _GROUPS_CALL, f"{count!r:.60} groups")
        self.count, self.whole = int(count), comm
        self.index, rank_in_group = divmod(whole.rank, whole.size // self.count)
        # The user's functions get these communicators. So the user's communicator is split, not the library's duplicate of
        # it, which may be a wrapper of `transport.watch`.
        self.comm: Any = make_communicator(whole.user.Split, self.index, rank_in_group)
        self.across: Any = make_communicator(whole.user.Split, rank_in_group, self.index)
        for division in (self.comm, self.across):
            channel(division, _GROUPS_CALL)  # also prepares the communicator for point-to-point messages
            whole.divisions.append(division)

    def free(self) -> None:
        """Free the communicators; collective. Call it after the last gradient of a function that communicates on them."""
        self.comm.Free()
        self.across.Free()

    def __repr__(self) -> str:
        return f"RankGroups({self.count}): rank {self.comm.rank} of {self.comm.size} in group {self.index}"


def rank_groups(groups: RankGroups | int, comm: Comm) -> RankGroups:
    """Return the groups; for a number, construct them at the first call."""
    if isinstance(groups, RankGroups):
        return groups
    cached = _cached_groups.setdefault(channel(comm, _GROUPS_CALL), {})
    if not isinstance(groups, (int, np.integer)) or groups not in cached:
        cached[groups] = RankGroups(groups, comm)
    return cached[groups]


def _problem_with(count: object, size: int) -> Exception | None:
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool):
        return TypeError(
            f"{_GROUPS_CALL}: the number of groups must be an integer, but got {type(count).__name__} {count!r:.60}."
        )
    if count < 1 or size % count:
        possible = ", ".join(str(k) for k in range(1, size + 1) if size % k == 0)
        return ValueError(
            f"{_GROUPS_CALL}: {size} rank(s) can't form {count} groups of equal size. "
            f"Possible numbers of groups: {possible}."
        )
    return None
