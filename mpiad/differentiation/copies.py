"""Checks that a shared variable and the objective are the same on all ranks.

Done under ``MPIAD_DEBUG=1`` only, since it takes an additional reduction. If copies differ (one rank used another random
seed, or updated its own copy only), the gradient is that of none of them.
"""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.differentiation.trace import Variables
from mpiad.pytrees import named_leaves
from mpiad.transport import MIN, Channel
from mpiad.transport.guarded import watch_settings
from mpiad.transport.replication import require_replicated
from mpiad.transport.tracing import settled

_BROADCAST = "Broadcast the variable once before the first step, and update it alike on all ranks."


def require_equal_copies(variables: Variables, channel: Channel, call: str) -> None:
    """Raise on all ranks if their copies of a shared argument differ, under ``MPIAD_DEBUG=1``; all ranks call it.

    The ReplicationError names the ranks and the first entry that differs.
    """
    if watch_settings.debug():
        claim = f"{call}: shared=True says that all ranks hold the same variable x"
        # With their paths, so that the error names the parameter that differs.
        leaves = [(path, to_host(leaf)) for path, leaf in named_leaves(variables.build(variables.leaves), "x")]
        settled(require_replicated, channel, leaves, claim, _BROADCAST)


def require_equal_objective(value: Array, channel: Channel, call: str) -> None:
    """Raise on all ranks if J differs, under ``MPIAD_DEBUG=1``: decisions that depend on J would differ, too."""
    if watch_settings.debug() and not settled(_same_number, getval(value), channel):
        advice = "This MPI's reductions give other bits on other ranks. Let one rank decide, and broadcast its decision."
        require_replicated(channel, named_leaves(value, "J"), f"{call}: J must be the same on all ranks", advice)


def _same_number(value: np.float64, channel: Channel) -> bool:
    # Runs at every evaluation: one reduction of the bits and their complement, without a hash, for 8 bytes.
    bits = np.array(value).reshape(1).view(np.uint64)
    mine = np.concatenate([bits, ~bits])
    least = np.empty_like(mine)
    channel.data.Allreduce(mine, least, MIN)
    return bool(least[0] == ~least[1])  # the least complement is that of the greatest
