"""Kernels of these tests are kept in memory only, and an interrupt is one."""

from __future__ import annotations

import signal
import threading

import pytest

from mpiad.ensemble.compiled import kernel_choice


@pytest.fixture(autouse=True)
def _nothing_on_disk(monkeypatch):
    monkeypatch.setenv("MPIAD_CACHE", "0")


@pytest.fixture(autouse=True)
def _interruptible():
    # Who starts tests in the background of a shell has them ignore it.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def free(monkeypatch):
    """Kernels cost nothing, so that "auto" takes one whenever it can."""
    for name in ("_LOADING", "_LOADING_COMPONENT", "_LOADING_OPERATION", "_LINES"):
        monkeypatch.setattr(kernel_choice, name, 0.0)
