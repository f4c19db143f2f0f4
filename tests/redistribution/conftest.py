"""Fixtures of the tests of data between any ranks."""

import pytest


@pytest.fixture
def rngs(rank_rng, size):
    """All ranks' generators, the same on all ranks, so that each can make the arrays of all."""
    return [rank_rng(rank) for rank in range(size)]
