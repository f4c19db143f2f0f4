"""Settings for the communication of device arrays, read from the environment and made the same on all ranks.

The numbers of bytes determine the number of messages for a large array, so all ranks use the smallest setting of any rank.
A setting on one rank holds for all, since not every launcher passes variables on. A collective cuts large arrays into
pieces on all ranks or on none, host arrays included. So the ranks agree once on whether any of them may use arrays that are
copied to the host.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad.environment_variables import switch
from mpiad.transport.devices.gpus import may_be_used
from mpiad.transport.devices.library import device_kinds

LEAST_CHUNK = 64
_UNSET = np.iinfo(np.int64).max


class DeviceSettings(NamedTuple):
    """The settings."""

    cuda_aware: bool | None = None  # whether MPI accesses device memory directly; None: test it
    chunk: int = 4 << 20  # bytes of a staged array that are copied and sent at once
    pinned: int = 256 << 20  # bytes of unused page-locked host memory that are kept
    expected: bool = True  # whether collectives cut large arrays
    exchanged: bool = False  # whether sums of large arrays are computed by an exchange of blocks


_present = DeviceSettings(expected=False)


def present() -> DeviceSettings:
    """Return the current settings."""
    return _present


def put(settings: DeviceSettings) -> DeviceSettings:
    """Change the settings, which must be the same on all ranks; return the previous ones."""
    global _present
    before, _present = _present, settings
    return before


def divides(nbytes: int) -> bool:
    """Return whether a collective on an array of this size is cut into pieces; the same on all ranks."""
    return _present.expected and nbytes > _present.chunk and not _present.cuda_aware


def exchanges(nbytes: int) -> bool:
    """Return whether arrays of this size are summed by an exchange of blocks; the same on all ranks."""
    return _present.exchanged and nbytes > _present.chunk


def from_environment() -> DeviceSettings:
    """Return the settings in the environment; raise a ValueError for invalid values."""
    default = DeviceSettings()
    return DeviceSettings(
        switch("MPIAD_CUDA_AWARE", None),
        _bytes("MPIAD_DEVICE_CHUNK", LEAST_CHUNK, default.chunk),
        _bytes("MPIAD_DEVICE_PINNED", 0, default.pinned),
    )


def _bytes(name: str, least: int, default: int) -> int:
    given = os.environ.get(name, "")
    if given == "":
        return default
    if not given.isascii() or not given.isdecimal() or not least <= int(given) < _UNSET:
        raise ValueError(f"{name} must be a number of bytes, {least} or more, but got {given!r}.")
    return int(given)


def start() -> None:
    """Agree on the settings in all ranks' environments; a ValueError on all ranks if a value is invalid; collective."""
    wrong, wanted = None, DeviceSettings()
    try:
        wanted = from_environment()
    except ValueError as error:
        wrong = error
    asked = [os.environ.get(name, "") != "" for name in ("MPIAD_DEVICE_CHUNK", "MPIAD_DEVICE_PINNED")]
    sizes = [size if given else _UNSET for size, given in zip((wanted.chunk, wanted.pinned), asked)]
    expects = wrong is None and (asked[0] or may_bring_arrays())
    direct = bool(device_kinds())
    # Minima over the ranks of truth values (no error, not "0", not "1", no device arrays, none that are copied to the host,
    # none that MPI accesses directly) and of sizes.
    asks = [wanted.cuda_aware is not False, wanted.cuda_aware is not True]
    switches = [wrong is None, *asks, not expects, not expects or direct, not expects or not direct]
    mine = np.array([*switches, *sizes], np.int64)
    least = np.empty_like(mine)
    MPI.COMM_WORLD.Allreduce(mine, least, MPI.MIN)
    if wrong is not None or not least[0]:
        raise wrong or ValueError("MPIAD_DEVICE_CHUNK or MPIAD_DEVICE_PINNED has an invalid value on another rank.")
    cuda_aware = None if least[1] and least[2] else bool(least[1])  # if ranks request both 0 and 1: 0, which always works
    default = DeviceSettings()
    chunk, pinned = (int(size) if size != _UNSET else usual for size, usual in zip(least[6:], default[1:]))
    brought, copied, taken = (not flag for flag in least[3:6].tolist())
    if cuda_aware is not None:
        copied, taken = brought, brought and cuda_aware
    put(DeviceSettings(cuda_aware, chunk, pinned, copied, taken))


def may_bring_arrays() -> bool:
    """Return whether this process could have arrays on a GPU, without loading libraries."""
    found = "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None
    return found and may_be_used()
