"""Kernels of these tests are kept in memory only."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_on_disk(monkeypatch):
    monkeypatch.setenv("MPIAD_CACHE", "0")
