"""Keep freed pages of large arrays inside the process, and let the system back them by huge pages.

Each new array above glibc's mmap threshold causes one page fault per 4 KiB. Together they take ten times as long as the
arithmetic on the array. Reverse passes make dozens of such arrays, of equal sizes. So the thresholds are raised once, at
import, if the C library has `mallopt`. They aren't raised with ``MPIAD_MALLOPT=0``, nor if the user has set one of them by
``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_TOP_PAD_`` or ``GLIBC_TUNABLES``.

Arrays are then in the heap. With pages of 4 KiB it is random which parts of the arrays compete for the same places in the
second-level cache: in one process the same program may take 2.5 times as long as in another. In a huge page of 2 MiB
neighbors in the array are neighbors in the cache. The kernel provides huge pages on request (``madvise``). So the heap is
extended once, which reserves addresses but no memory, and huge pages are requested for the whole extension. They aren't
requested with ``MPIAD_HUGE_PAGES=0``, nor if ``GLIBC_TUNABLES`` sets ``glibc.malloc.hugetlb``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from mpiad.environment_variables import switch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_BYTES = 32 << 20  # the largest that glibc accepts on 64 bits; larger arrays are mapped as before
_TRIM_BYTES = 512 << 20  # the free memory that may stay at the top of the heap
_PAD_BYTES = 16 << 20
_USERS_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = ("glibc.malloc.mmap_threshold", "glibc.malloc.trim_threshold", "glibc.malloc.top_pad")

_MADV_HUGEPAGE = 14
_HEAP_BYTES = 256 << 20  # the extension of the heap: half of the free memory that may stay at its top
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_advised = False


def prepare_memory() -> bool:
    """Raise glibc's thresholds for this process, and ask for huge pages in its heap.

    Return whether the thresholds were raised: False without glibc, or if the user has set them.
    """
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
    """Return as text whether this process's arrays lie in huge pages, for a report."""
    try:
        switch = _SWITCH.read_text()
    except OSError:
        return "none: the system has no transparent huge pages"
    mode = switch[switch.find("[") + 1 : switch.find("]")]
    if mode == "never":
        return "none: the system's switch is on never"
    if mode == "always":
        return "for all arrays of 2 MiB and more, and for the heap"
    own = "for the heap" if _advised else "glibc's own setting" if _named("glibc.malloc.hugetlb") else "not asked for"
    return f"{own} (the system's switch is on {mode})"


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
    # In blocks that malloc takes from the heap: larger ones would be mapped. Nothing is written into them.
    block = _MMAP_BYTES - (1 << 20)
    blocks = [libc.malloc(block) for _ in range(_HEAP_BYTES // block)]
    end = libc.sbrk(0)
    # The heap keeps its length, since the free memory at its top is below the trim threshold.
    for address in blocks:
        libc.free(address)
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-start // page) * page
    return end > first and libc.madvise(first, end - first, _MADV_HUGEPAGE) == 0
