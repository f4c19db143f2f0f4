"""Whether MPI can read and write device memory directly: reported by the library, and tested before the first use.

An MPI that isn't CUDA-aware doesn't refuse the address of device memory, but crashes. So the test runs only if the library
reports support. It sends arrays from this process to itself, since some CUDA-aware builds are misconfigured.
``MPIAD_CUDA_AWARE`` replaces report and test.
"""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
from mpi4py import MPI

from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_named
from mpiad.transport.devices.gpus import gpus_of_node
from mpiad.transport.devices.library import device_buffers, device_kinds
from mpiad.transport.watch import watch_settings

# Open MPI's nonblocking reductions access device memory from the host, and crash; its documentation excludes all
# nonblocking collectives.
_BLOCKING_ONLY = MPI.get_vendor()[0] == "Open MPI"
_LENGTHS = 8, 1 << 16  # MPI uses different protocols for short and long messages
_REMEDY = "Arrays are copied to the host; MPIAD_CUDA_AWARE=0 requests this from the start, in pieces if they are large."
_log = logging.getLogger("mpiad")
_tried: dict[tuple[type, int], bool | None] = {}  # None if the library doesn't report support


def takes_directly(arrays: ArrayModule, nonblocking: bool = False) -> bool:
    """Return whether MPI can access the arrays of a device directly, as this process has found.

    `nonblocking`: in nonblocking collectives. The ranks needn't agree: each may stage its arrays or not.
    """
    # With debug mode or a timeout, all collectives are nonblocking.
    if _BLOCKING_ONLY and (nonblocking or watch_settings.present().watches):
        return False
    forced = device_settings.present().cuda_aware
    if forced is not None:
        return forced
    key = arrays.kind, arrays.device
    if key not in _tried:
        _tried[key] = _passes(arrays) if device_kinds() else None
    return bool(_tried[key])


def forget() -> None:
    """Discard the results of the tests."""
    _tried.clear()


def described() -> str:
    """Return as text whether MPI can access device arrays directly, and the source of this information."""
    forced, said = device_settings.present().cuda_aware, device_buffers()
    if forced is not None:
        return f"{'yes' if forced else 'no'}, by MPIAD_CUDA_AWARE={forced:d} (the library itself says: {said})"
    # If the library reports support, CuPy is loaded here, even if the program has no CuPy array.
    if device_kinds() and importlib.util.find_spec("cupy") is not None and gpus_of_node():
        try:
            takes_directly(arrays_named("CuPy"))
        except Exception as error:  # noqa: BLE001 - CuPy may raise anything while it is loaded
            _log.warning("CuPy is installed, but can't be used: %s: %s.", type(error).__name__, error)
    for (kind, device), passed in _tried.items():
        if passed is not None:
            package = kind.__module__.partition(".")[0]
            said += f"; with arrays of {package} on device {device} it {'works' if passed else 'fails'}"
    return said


def _passes(arrays: ArrayModule) -> bool:
    """Return whether arrays that this process sends to itself arrive unchanged."""
    alone, right = MPI.COMM_SELF.Dup(), True
    try:
        for length in _LENGTHS:
            numbers = np.arange(length) + 0.5  # no zeros, so that entries that were never written are detected
            sent, got = arrays.to_device(numbers), arrays.full((length,), 0, numbers.dtype)
            arrays.synchronize()
            alone.Sendrecv(arrays.message(sent), 0, 0, arrays.message(got), 0, 0)
            right = right and bool((arrays.to_host(got) == numbers).all())
    except Exception as error:  # noqa: BLE001 - after any error, arrays are staged
        _log.warning(
            "MPI reports that it can access device memory, but raised %s: %s. %s", type(error).__name__, error, _REMEDY
        )
        return False
    finally:
        alone.Free()
    if not right:
        _log.warning("MPI reports that it can access device memory, but delivers other numbers than were sent. %s", _REMEDY)
    return right
