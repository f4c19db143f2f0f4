"""Whether the copies of one variable, of which every rank holds its own, are equal.

Looked at under ``MPIAD_DEBUG=1`` only, since it takes a reduction more. Copies that have drifted apart (one rank that
was seeded otherwise, or updated its own) give a gradient that belongs to none of them.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad.transport import Channel

__all__ = ["require_equal_copies"]

_LOOKS = os.environ.get("MPIAD_DEBUG") == "1"


def require_equal_copies(leaves: list[Any], channel: Channel, call: str) -> None:
    """Raise on all ranks where their copies of a shared argument differ, under ``MPIAD_DEBUG=1``.

    Parameters
    ----------
    leaves : list of array or number
        This rank's copy.
    channel : Channel
    call : str
        Name of the public function.

    Raises
    ------
    ValueError
        Naming the first leaf that differs and the ranks.

    Ranks
    -----
    All ranks of the channel call it.
    """
    if _LOOKS:
        _compare([_described(leaf) for leaf in leaves], channel, call)


def _described(leaf: Any) -> tuple[str, str]:
    value = np.ascontiguousarray(getval(leaf))
    return f"shape {np.shape(getval(leaf))}, dtype {value.dtype}", hashlib.sha256(value.tobytes()).hexdigest()


def _compare(mine: list[tuple[str, str]], channel: Channel, call: str) -> None:
    every = channel.data.allgather(mine)
    counts = {len(leaves) for leaves in every}
    if len(counts) > 1:
        raise ValueError(f"{call}: shared=True, but the copies have {sorted(counts)} leaves. {_ADVICE}")
    for k, leaf in enumerate(every[0]):
        others = [rank for rank, leaves in enumerate(every) if leaves[k] != leaf]
        if others:
            raise ValueError(
                f"{call}: shared=True says that all ranks hold the same variable, but leaf {k} of it ({leaf[0]} on rank 0) "
                f"differs from rank 0's on rank(s) {others} ({every[others[0]][k][0]}). {_ADVICE}"
            )


_ADVICE = "Broadcast the variable once before the first step, and update it alike on all ranks."
