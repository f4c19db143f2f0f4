"""What ranks compare before they add up: by numbers, which must be exact for any number of ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpiad.differentiation.trace import Variables
from mpiad.parallel import distributed_optimizer
from mpiad.parallel.buckets import Plan
from mpiad.transport import Spec


def plans(count):
    return [Plan((Spec((n, 2), np.dtype(float)),), 1 << 20) for n in range(1, count + 1)]


def channel_of(size) -> Any:
    return SimpleNamespace(size=size, members=(0,), started={}, separate=lambda: None)


@pytest.mark.serial
@pytest.mark.parametrize("size", [3, 91, 1000, 8191, 100_000])
def test_equal_plans_are_found_equal_on_many_ranks(size, monkeypatch):
    monkeypatch.setattr(distributed_optimizer, "allreduce", lambda used, mine, op, call: mine * used.size)
    for plan in plans(200):
        found = distributed_optimizer.totals(channel_of(size), plan, [], "step", 2)
        assert found[0] == 2 * size


@pytest.mark.serial
@pytest.mark.parametrize("size", [3, 1000, 100_000])
def test_one_other_plan_among_many_is_found(size, monkeypatch):
    def explain(used, local, call):
        raise ValueError("differ")

    monkeypatch.setattr(distributed_optimizer, "require_same_leaves", explain)
    known = plans(40)
    for plan, other in zip(known, known[1:]):
        theirs = np.array([2, other.digest, other.digest**2, 0, 1, 1, 0], float)
        monkeypatch.setattr(
            distributed_optimizer, "allreduce", lambda used, mine, op, call, sent=theirs: mine * (used.size - 1) + sent
        )
        with pytest.raises(ValueError, match="differ"):
            distributed_optimizer.totals(channel_of(size), plan, Variables([], [], list), "step", 2)
