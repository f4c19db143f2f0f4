"""Tests of the compiler have LLVM's optimizations in each run."""

from __future__ import annotations

import pytest

from mpiad.compiling import cache


@pytest.fixture(autouse=True)
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "optimization_level", 2)
