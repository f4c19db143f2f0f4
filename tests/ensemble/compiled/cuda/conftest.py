"""The device that kernels run on in tests of `EnsembleGPU`."""

import pytest
from device_double import transfers
from device_on_cpu import double, launcher

from mpiad.ensemble.compiled.cuda import gpu_solve


@pytest.fixture
def device(monkeypatch):
    """The stand-in for a device, without launches and transfers so far."""
    monkeypatch.setattr("mpiad.ensemble.backends.selected_arrays", lambda device: double)
    monkeypatch.setattr(launcher, "launches", [])
    gpu_solve._copied_together.cache_clear()
    transfers.reset()
    return launcher
