"""Keep freed pages of large arrays inside the process, and let the system back them by huge pages.

Each new array above glibc's mmap threshold causes one page fault per 4 KiB, which together take ten times as long as the
arithmetic on the array; reverse passes make dozens of such arrays. So the thresholds are raised once, unless
``MPIAD_MALLOPT=0`` is set, or the user sets a threshold (by a variable in `_USERS_OWN`, or ``GLIBC_TUNABLES``).

Arrays are then in the heap. With pages of 4 KiB it is random which parts of arrays compete for the second-level cache: the
same program may take 2.5 times as long in another process. Huge pages of 2 MiB avoid this. So the heap is extended once,
which reserves addresses but no memory, and huge pages are requested for it (``madvise``), unless ``MPIAD_HUGE_PAGES=0`` is
set, or ``GLIBC_TUNABLES`` sets ``glibc.malloc.hugetlb``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from mpiad.environment_variables import switch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_BYTES = 32 << 20  # mallopt's documented maximum on 64 bits (glibc 2.36 accepts more); larger arrays are mapped
_TRIM_BYTES = 512 << 20  # the free memory that may stay at the top of the heap
_PAD_BYTES = 16 << 20
_USERS_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.top_pad")

_MADV_HUGEPAGE = 14
_HEAP_BYTES = 256 << 20  # the extension of the heap: half of the free memory that may stay at its top
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_advised = False


def prepare_memory() -> bool:
    """Raise glibc's thresholds, and request huge pages for the heap; return whether the thresholds were raised."""
    global _advised
    try:
        libc = ctypes.CDLL(None)
    except OSError:
        return False
    # musl has a mallopt that does nothing.
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") and _raise_thresholds(libc)):
        return False
    if switch("MPIAD_HUGE_PAGES", True) and not _named("glibc.malloc.hugetlb"):
        with contextlib.suppress(OSError):
            _advised = "[madvise]" in _SWITCH.read_text() and _advise_heap(libc)
    return True


def huge_pages() -> str:
    """Return as text whether this process's arrays are in huge pages."""
    try:
        switch = _SWITCH.read_text()
    except OSError:
        return "none: the system has no transparent huge pages"
    mode = switch[switch.find("[") + 1 : switch.find("]")]
    if mode == "never":
        return "none: the system's setting is never"
    if mode == "always":
        return "for all arrays of 2 MiB and more, and for the heap"
    own = "for the heap" if _advised else "glibc's own setting" if _named("glibc.malloc.hugetlb") else "not requested"
    return f"{own} (the system's setting is {mode})"


def _named(tunable: str) -> bool:
    return tunable in os.environ.get("GLIBC_TUNABLES", "")


def _raise_thresholds(libc: ctypes.CDLL) -> bool:
    if not switch("MPIAD_MALLOPT", True) or any(name in os.environ for name in _USERS_OWN):
        return False
    if any(_named(tunable) for tunable in _TUNABLES):
        return False
    libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = ((_M_MMAP_THRESHOLD, _MMAP_BYTES), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    accepted = [libc.mallopt(parameter, value) == 1 for parameter, value in settings]  # all are tried
    return all(accepted)


def _advise_heap(libc: ctypes.CDLL) -> bool:
    """Extend the heap, and request huge pages there; return whether the request succeeded."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.sbrk.argtypes, libc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.sbrk(0)
    # malloc takes these blocks from the heap, and would map larger ones. Nothing is written into them.
    block = _MMAP_BYTES - (1 << 20)
    blocks = [libc.malloc(block) for _ in range(_HEAP_BYTES // block)]
    end = libc.sbrk(0)
    # The heap keeps its length, since the free memory at its top is below the trim threshold.
    for address in blocks:
        libc.free(address)
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-start // page) * page
    return end > first and libc.madvise(first, end - first, _MADV_HUGEPAGE) == 0
