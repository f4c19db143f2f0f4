"""Groups of ranks, each with a communicator of its own, and one across them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mpiad._typing import Comm
from mpiad.transport import Channel, channel
from mpiad.transport.agreement import require_alike
from mpiad.transport.channels import make_communicator

_CALL = "tasks.RankGroups"
_kept: WeakKeyDictionary[Channel, dict[int, RankGroups]] = WeakKeyDictionary()


class RankGroups:
    """Divide the ranks into groups of equal size: ranks 0 to k - 1, k to 2 k - 1, and so on.

    Parameters
    ----------
    count : int
        How many groups: a divisor of the number of ranks.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    count : int
    index : int
        This rank's group.
    comm : mpi4py intracommunicator
        The ranks of this rank's group, for a `Domain` of each group, for one.
    across : mpi4py intracommunicator
        The ranks that stand at this rank's place in each of the groups. With a variable in pieces on all ranks,
        ``mpi_allgather(piece, axis=0, comm=groups.across)`` is the part of it that belongs to this rank within its group.

    Raises
    ------
    TypeError, ValueError
        On all ranks, where `count` doesn't divide their number or isn't the same on all of them.

    Ranks
    -----
    All ranks of `comm` make it. Its communicators are kept until `free`.

    Examples
    --------
    >>> groups = mpiad.tasks.RankGroups(mpiad.mpi_size())
    >>> print(groups.count == mpiad.mpi_size(), groups.comm.size)
    True 1
    """

    def __init__(self, count: int, comm: Comm = None):
        used = channel(comm, _CALL)
        require_alike(used, _problem_with(count, used.size), _CALL, f"{count!r:.60} groups")
        self.count, self.whole = int(count), comm
        self.index, place = divmod(used.rank, used.size // self.count)
        # Of the user's own communicator, since functions of the user's get it: our duplicate may be under watch.
        self.comm: Any = make_communicator(used.user.Split, self.index, place)
        self.across: Any = make_communicator(used.user.Split, place, self.index)
        for made in (self.comm, self.across):
            channel(made, _CALL)  # prepared, also for messages from rank to rank

    def free(self) -> None:
        """Free the communicators, after the last gradient through them; collective."""
        self.comm.Free()
        self.across.Free()

    def __repr__(self) -> str:
        return f"RankGroups({self.count}): rank {self.comm.rank} of {self.comm.size} in group {self.index}"


def groups_of(given: RankGroups | int, comm: Comm) -> RankGroups:
    """Return groups that a user gave, or so many of the communicator: made at first, and kept with it."""
    if isinstance(given, RankGroups):
        return given
    known = _kept.setdefault(channel(comm, _CALL), {})
    # Looked up by all ranks alike: those of another number are told so by the constructor.
    if not isinstance(given, int) or given not in known:
        made = RankGroups(given, comm)
        known[made.count] = made
        return made
    return known[given]


def _problem_with(count: object, size: int) -> Exception | None:
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool):
        return TypeError(f"{_CALL}: the number of groups must be an integer, but got {type(count).__name__} {count!r:.60}.")
    if count < 1 or size % count:
        possible = ", ".join(str(k) for k in range(1, size + 1) if size % k == 0)
        return ValueError(
            f"{_CALL}: {size} rank(s) can't form {count} groups of equal size. Numbers that they can form: {possible}."
        )
    return None
