"""Random fields that don't depend on the number of ranks."""

from __future__ import annotations

import math

import numpy as np

from mpiad._typing import LocalArray, Rng, Shape
from mpiad.domain.decomposition import Decomposition
from mpiad.transport.core.agreement import require_same
from mpiad.transport.core.random_keys import shared_key
from mpiad.transport.watch import watch_settings

_UNIT = 2.0**-53  # uniform numbers have 53 random bits, like NumPy's


def normal(domain: Decomposition, rng: Rng, shape: Shape) -> LocalArray:
    """See `Domain.normal`."""
    key = shared_key(rng, domain._channel, "Domain.normal", compare=watch_settings.debug())
    if watch_settings.debug():
        require_same(domain._channel, f"shape={shape}", "Domain.normal")
    # This counter-based generator computes any element of its sequence directly.
    generator = np.random.Philox(key=key)
    count, (*rows, last) = math.prod(shape), domain.owned
    out = np.empty((count, *domain.local_shape))
    for field in range(count):
        for row in np.ndindex(domain.local_shape[:-1]):
            index = field
            # A cell's index in the whole grid selects its element of the sequence.
            for n, i, cells in zip(domain.shape, row, rows):
                index = index * n + cells.start + i
            start = index * domain.shape[-1] + last.start
            out[(field, *row)] = _normals(generator, start, last.stop - last.start)
    return out.reshape(*shape, *domain.local_shape)


def _normals(generator: np.random.Philox, start: int, count: int) -> np.ndarray:
    """Return `count` normal numbers, beginning with number `start`; each step of the generator yields two of them."""
    state = generator.state
    step = start // 2
    state["state"]["counter"] = np.array([step % 2**64, step >> 64, 0, 0], np.uint64)
    state["buffer_pos"] = 4  # discard the buffered numbers of the last step
    generator.state = state
    odd = start % 2
    raw = generator.random_raw(2 * (count + odd))[2 * odd :].reshape(count, 2)
    uniform = ((raw >> np.uint64(11)).astype(float) + 0.5) * _UNIT
    # The Box-Muller transform; only the first of its two results is used, so that each cell has its own uniform numbers.
    return np.sqrt(-2.0 * np.log(uniform[:, 0])) * np.cos(2.0 * math.pi * uniform[:, 1])
