"""Which trajectories go back over their steps together: as many as there is device memory for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.transport.device_arrays import ArrayModule

# So many numbers come to the host, whatever the ensemble's size.
_BLOCKS = 4096


class Share(NamedTuple):
    """Trajectories first, ..., first + count - 1, none of which took more than `capacity` steps."""

    first: int
    count: int
    capacity: int


def longest_of_blocks(arrays: ArrayModule, naccept: Array) -> tuple[int, Array]:
    """Return how many trajectories a block has, and on the host the most steps of any in each block."""
    n = len(naccept)
    size = -(-n // _BLOCKS)
    whole = n // size * size
    longest = [np.max(naccept[:whole].reshape(-1, size), axis=1)]
    if whole < n:
        longest.append(np.max(naccept[whole:]).reshape(1))
    return size, arrays.to_host(longest[0] if len(longest) == 1 else np.concatenate(longest))


def shares_within(size: int, longest: Array, count: int, bytes_per_step: int, budget: int) -> list[Share]:
    """Return shares of `count` trajectories, in order, whose steps fit into a budget.

    Blocks have so many trajectories, of which the longest has so many steps. A MemoryError where those of one trajectory
    alone don't fit.
    """
    needed = int(longest.max(initial=0)) * bytes_per_step
    if needed > budget:
        raise MemoryError(
            f"solve: the steps of one trajectory take {needed} bytes of device memory for its gradient, but there are "
            f"{budget}. Raise tape_bytes= of EnsembleGPU where more is free, or loosen rtol."
        )
    if needed * count <= budget:
        return [Share(0, count, int(longest.max(initial=0)))]
    made: list[Share] = []
    for block, steps in enumerate(longest.tolist()):
        first, stop = block * size, min((block + 1) * size, count)
        if made and (more := max(steps, made[-1].capacity)) * (stop - made[-1].first) * bytes_per_step <= budget:
            made[-1] = Share(made[-1].first, stop - made[-1].first, more)
        else:
            most = min(stop - first, budget // max(1, steps * bytes_per_step))
            made += [Share(a, min(most, stop - a), steps) for a in range(first, stop, most)]
    return made
