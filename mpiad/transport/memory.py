"""Keep freed pages of large arrays inside the process.

A fresh array above glibc's mmap threshold costs a page fault for every 4 KiB, each time it is made: ten times the
arithmetic done on it. Reverse passes make such arrays by the dozen, of equal sizes. So the thresholds are raised once,
at import, where the C library has `mallopt`. ``MPIAD_MALLOPT=0`` leaves them alone, and so does any of glibc's own
variables for them (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``).
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["raise_malloc_thresholds"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_BYTES = 32 << 20  # the largest that glibc accepts on 64 bits; larger arrays are mapped as before
_TRIM_BYTES = 512 << 20  # what may stay at the top of the heap once it is free
_PAD_BYTES = 16 << 20
_USERS_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def raise_malloc_thresholds() -> bool:
    """Raise glibc's mmap and trim thresholds for this process.

    Returns
    -------
    bool
        Whether they were raised: False without glibc, or where the user has decided otherwise.
    """
    if os.environ.get("MPIAD_MALLOPT") == "0" or any(name in os.environ for name in _USERS_OWN):
        return False
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (AttributeError, OSError):
        return False
    # musl has a mallopt that does nothing; only glibc tells its version.
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = ((_M_MMAP_THRESHOLD, _MMAP_BYTES), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    accepted = [mallopt(parameter, value) == 1 for parameter, value in settings]  # all are tried
    return all(accepted)
