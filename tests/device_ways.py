"""The ways in which device arrays travel, for tests on the stand-in: each test takes all of them.

`staged` copies arrays through the host, `direct` gives MPI the memory that the stand-in says is the device's, `exchanged`
does so too, and sums by an exchange of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from autograd.tracer import getval
from device_double import DeviceArray, double, on_device, takes_device_memory
from mpi4py import MPI

from mpiad.device import to_device, to_host
from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_settings import DeviceSettings

SETTINGS = {
    "staged": DeviceSettings(cuda_aware=False),
    "direct": DeviceSettings(cuda_aware=True),
    "exchanged": DeviceSettings(cuda_aware=True, exchanged=16),
}

each_way = pytest.mark.parametrize("way", SETTINGS)


@contextmanager
def travelling(way: str | DeviceSettings) -> Iterator[None]:
    """Have device arrays travel in one of the ways; all ranks enter it."""
    settings = SETTINGS[way] if isinstance(way, str) else way
    if settings.cuda_aware and not takes_device_memory():
        pytest.skip("this MPI doesn't take the memory of a GPU")
    before, aware = device_settings.put(settings), double.aware
    double.aware = bool(settings.cuda_aware)
    try:
        yield
    finally:
        double.synchronize()
        double.aware = aware
        device_settings.put(before)


def through_device(fun, goes=True):
    """Return a function of host arrays that does on the device what `fun` does; on the host where it doesn't go there."""

    def there_and_back(x):
        there = to_device(x, like=on_device(0.0)) if goes else x
        y = fun(there)
        assert isinstance(getval(y), DeviceArray) is goes, type(y)
        return to_host(y) if goes else y

    return there_and_back


def beside(fun):
    """Return the same for odd ranks; the others' arrays stay on the host."""
    return through_device(fun, MPI.COMM_WORLD.rank % 2 == 1)
