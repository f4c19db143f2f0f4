"""Small networks that tell a layer's parameters for some coordinates from the others."""

from __future__ import annotations

import functools

import autograd.numpy as np
import numpy

from mpiad._typing import Array
from mpiad.vi.placed_constants import Constant

__all__ = ["evaluated", "initial_network", "masked_network"]


def initial_network(inputs: int, hidden: int, outputs: int, rng: numpy.random.Generator) -> list[tuple[Array, Array]]:
    """Return weights and biases of two hidden layers; the last layer starts at zero, so that the flow starts simple."""
    sizes = [inputs, hidden, hidden, outputs]
    # By the root of the inputs, so that a unit's value doesn't grow with their number; where dim is one there are none.
    weights = [rng.normal(size=(n, m)) / max(n, 1) ** 0.5 for n, m in zip(sizes, sizes[1:])]
    weights[-1] *= 0
    return [(w, numpy.zeros(w.shape[1])) for w in weights]


def evaluated(network: list[tuple[Array, Array]], x: Array, masks: list[Constant] | None = None) -> Array:
    """Return the network's values at points of shape (S, inputs), its weights masked where masks are given."""
    for k, (w, b) in enumerate(network):
        x = x @ (w if masks is None else w * masks[k].beside(w)) + b
        if k < len(network) - 1:
            x = np.tanh(x)
    return x


@functools.lru_cache(maxsize=64)
def masked_network(dim: int, hidden: int, per_output: int) -> list[Constant]:
    """Return masks by which output i depends on inputs before i alone (MADE; Germain et al., 2015).

    Hidden units take turns in how many inputs they may see, from none on, so that also the second output depends on
    something where there are few of them.
    """
    seen = numpy.arange(hidden) % max(dim, 1)  # unit k sees the first `seen[k]` inputs
    first = numpy.arange(dim)[:, None] < seen[None, :]
    middle = seen[:, None] <= seen[None, :]
    last = seen[:, None] <= numpy.repeat(numpy.arange(dim), per_output)[None, :]
    return [Constant(mask.astype(float)) for mask in (first, middle, last)]
