"""Whether MPI takes the memory of a device as it is: reported by the library, and tested before use.

An MPI that isn't CUDA-aware doesn't refuse the address of device memory, but reads from it and crashes. So nothing is
tried unless the library has said yes. If it has, arrays are sent from this process to itself and compared: builds
that know CUDA are known to be misconfigured. ``MPIAD_CUDA_AWARE`` overrides both.
"""

from __future__ import annotations

import importlib.util
import logging

import numpy as np
from mpi4py import MPI

from mpiad.transport import device_settings
from mpiad.transport.device_arrays import ArrayModule, arrays_named
from mpiad.transport.gpus import gpus_of_node
from mpiad.transport.guarded import watch_settings
from mpiad.transport.library import device_buffers, device_kinds

# Open MPI's nonblocking reductions read device memory as if it were the host's, and crash; its documentation lists them as
# unsupported, with all nonblocking collectives.
_BLOCKING_ONLY = MPI.get_vendor()[0] == "Open MPI"
_LENGTHS = 8, 1 << 16  # MPI sends short and long messages in different ways
_REMEDY = "Arrays are copied; MPIAD_CUDA_AWARE=0 asks for it from the start, and has large ones copied in pieces."
_log = logging.getLogger("mpiad")
_tried: dict[tuple[type, int], bool | None] = {}  # None if the library hasn't said yes


def takes_directly(arrays: ArrayModule, nonblocking: bool = False) -> bool:
    """Return whether MPI takes arrays of a device as they are, in this process's own view.

    `nonblocking`: in nonblocking collectives. Nobody else is asked: whole arrays may go either way on each rank, and the
    receiver of a message takes pieces too.
    """
    # Under watch collectives are nonblocking too.
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
    """Try again at the next use."""
    _tried.clear()


def described() -> str:
    """Return as text whether MPI takes device arrays as they are, and the source of this information."""
    forced, said = device_settings.present().cuda_aware, device_buffers()
    if forced is not None:
        return f"{'yes' if forced else 'no'}, by MPIAD_CUDA_AWARE={forced:d} (the library itself says: {said})"
    # Only here is CuPy loaded without one of its arrays: for a report, and if the library has said yes.
    if device_kinds() and importlib.util.find_spec("cupy") is not None and gpus_of_node():
        try:
            takes_directly(arrays_named("CuPy"))
        except Exception as error:  # noqa: BLE001 - a CuPy that doesn't load says why itself
            _log.warning("CuPy is installed and can't be used, by %s: %s.", type(error).__name__, error)
    for (kind, device), passed in _tried.items():
        if passed is not None:
            package = kind.__module__.partition(".")[0]
            said += f"; with arrays of {package} on device {device} it {'works' if passed else 'fails'}"
    return said


def _passes(arrays: ArrayModule) -> bool:
    """Send arrays to this process itself, and compare the received ones."""
    alone, right = MPI.COMM_SELF.Dup(), True
    try:
        for length in _LENGTHS:
            numbers = np.arange(length) + 0.5  # none is zero: entries that were never written show
            sent, got = arrays.to_device(numbers), arrays.full((length,), 0, numbers.dtype)
            arrays.synchronize()
            alone.Sendrecv(arrays.message(sent), 0, 0, arrays.message(got), 0, 0)
            right = right and bool((arrays.to_host(got) == numbers).all())
    except Exception as error:  # noqa: BLE001 - whatever it is, the staged way works
        _log.warning("MPI says that it takes device memory, and %s: %s. %s", type(error).__name__, error, _REMEDY)
        return False
    finally:
        alone.Free()
    if not right:
        _log.warning("MPI says that it takes device memory, but delivers other numbers than were sent. %s", _REMEDY)
    return right
