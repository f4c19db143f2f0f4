"""Checks that a shared variable and the objective are the same on all ranks.

The checks run only under ``MPIAD_DEBUG=1``, since each check needs an additional reduction. If the copies of a variable
differ, for example after initialization with different random seeds, the gradient is wrong for all copies.
"""

from __future__ import annotations

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.differentiation.trace import Variables
from mpiad.pytrees import named_leaves
from mpiad.transport import Channel
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.core.tracing import checked_on_replay
from mpiad.transport.watch import watch_settings

_BROADCAST = "Broadcast the variable once before the first step, and make the same updates on all ranks."


def require_equal_copies(variables: Variables, channel: Channel, call: str) -> None:
    """Under ``MPIAD_DEBUG=1``, raise a ReplicationError on all ranks if the copies of a shared argument differ."""
    if watch_settings.debug():
        claim = f"{call}: shared=True says that all ranks hold the same variable x"
        leaves = [(path, to_host(leaf)) for path, leaf in named_leaves(variables.build(variables.leaves), "x")]
        checked_on_replay(require_replicated, channel, leaves, claim, _BROADCAST)


def require_equal_objective(value: Array, channel: Channel, call: str) -> None:
    """Under ``MPIAD_DEBUG=1``, raise a ReplicationError on all ranks if J differs between ranks."""
    if watch_settings.debug():
        claim = f"{call}: J must be the same on all ranks"
        advice = (
            "Reductions of this MPI round differently on different ranks. If the program branches on J, let one rank "
            "choose, and broadcast its choice."
        )
        checked_on_replay(require_replicated, channel, named_leaves(value, "J"), claim, advice)
