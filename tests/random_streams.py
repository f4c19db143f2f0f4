"""The generators that calls with ``rng=seed`` derive, by NumPy alone: see `Random numbers` in docs/semantics.md."""

import numpy as np


def generator(seed, *numbers):
    """The generator with some numbers, such as that of an epoch, among those of a call with ``rng=seed``."""
    key = int.from_bytes(np.random.default_rng(seed).bytes(16), "little")
    return np.random.default_rng(np.random.SeedSequence(key, spawn_key=numbers))
