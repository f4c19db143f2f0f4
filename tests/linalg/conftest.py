"""Iterations are compiled at once on one rank, so that all tests run the programs, too."""

from __future__ import annotations

import pytest

from mpiad.linalg import compiled_iteration


@pytest.fixture(autouse=True)
def compiled_at_once(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    if size == 1:
        monkeypatch.setattr(compiled_iteration, "_FIRST_RUNS", 0)
