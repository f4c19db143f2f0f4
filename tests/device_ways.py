"""The ways in which device arrays travel, for tests on the stand-in: each test takes all of them.

`staged` copies arrays through the host, `direct` gives MPI the memory that the stand-in says is the device's, `exchanged`
does so too, and sums by an exchange of blocks; in `shared` ranks read each other's device memory, where messages allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from autograd.tracer import getval
from device_double import DeviceArray, double, on_device, takes_device_memory
from device_memory_double import MemoryDouble, install, remove
from mpi4py import MPI

from mpiad.device import to_device, to_host
from mpiad.transport.core.channels import base, world_ranks
from mpiad.transport.devices import device_messages, device_settings
from mpiad.transport.devices.device_settings import DeviceSettings

SETTINGS = {
    "staged": DeviceSettings(cuda_aware=False),
    "direct": DeviceSettings(cuda_aware=True),
    "exchanged": DeviceSettings(cuda_aware=True, exchanged=16),
    "shared": DeviceSettings(cuda_aware=False, ipc=True),
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
        with sharing() if way == "shared" else nullcontext():
            yield
    finally:
        double.synchronize()
        double.aware = aware
        device_settings.put(before)


@contextmanager
def sharing(introduced: bool = True, least: int = 64) -> Iterator[MemoryDouble]:
    """Share the stand-in's memory between the ranks of a node, which already know each other if `introduced`.

    `least`: bytes of a collective, in which ranks ask each other first.
    """
    before, device_messages.LEAST_SHARED = device_messages.LEAST_SHARED, least
    node = base().Split_type(MPI.COMM_TYPE_SHARED)
    memory = install()
    device_messages.start(node, world_ranks(node), True)
    for _ in range(2 if introduced and device_messages.present() is not None else 0):
        device_messages.present().introduce(double, range(base().size))
        node.Barrier()
    try:
        yield memory
    finally:
        found = device_messages.present()
        device_messages.LEAST_SHARED = before
        alive = found is not None and bool(found.results)  # arrays of the program, which it may still read
        device_messages.close()
        node.Free()
        remove()
        assert bool(memory.blocks) == alive and not memory.opened and not memory.registered


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
