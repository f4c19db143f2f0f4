"""The resources of a rank's process: its share of the node's cores, and memory of large arrays.

NumPy and SciPy each have a BLAS with a pool of threads that poll for work. If calls of the two libraries alternate, the
threads of one occupy the cores that the other needs, so a product of vectors may take a hundred times as long. Therefore
vectors are processed by NumPy only, and on the calling thread unless they are long or there is one thread anyway.

Each new array above glibc's mmap threshold causes one page fault per 4 KiB, which together take ten times as long as the
arithmetic on the array; reverse passes make dozens of such arrays. So the thresholds are raised once, unless
``MPIAD_MALLOPT=0`` is set, or the user sets a threshold (by a variable in `_USERS_MALLOC`, or ``GLIBC_TUNABLES``).

Arrays are then in the heap. With pages of 4 KiB, the physical addresses of arrays are random, and so are conflicts in the
second-level cache: the same program may take 2.5 times as long in another process. Huge pages of 2 MiB avoid this. So the
heap is extended once, which reserves addresses but no memory, and huge pages are requested for it (``madvise``), unless
``MPIAD_HUGE_PAGES=0`` is set, or ``GLIBC_TUNABLES`` sets ``glibc.malloc.hugetlb``.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
from pathlib import Path

import numpy as np
import threadpoolctl
from mpi4py import MPI

from mpiad._typing import Array, Comm, Scalar
from mpiad.cache_folder import first_time
from mpiad.environment_variables import switch

_log = logging.getLogger("mpiad")
_NOTICE = "told-of-threads"
# OpenBLAS wakes further threads for products of vectors that are longer than 10,000; not if it has only one thread.
_serial_length, _PARALLEL_LENGTH = 8192, 10**6
_USERS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    # Not every system has the function.
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


_share = 1  # threads of this rank; one until the ranks on the node are known


def loop_threads() -> int:
    """Return the number of threads for a loop: the rank's share of the cores, or OMP_NUM_THREADS if it is smaller."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(_share, max(1, int(wanted))) if wanted.isdecimal() else _share


def vdot(x: Array, y: Array) -> Scalar:
    """Return `np.vdot` of two plain arrays, on the calling thread if they have fewer than a million entries."""
    if type(x) is not np.ndarray or not _serial_length < x.size < _PARALLEL_LENGTH:
        return np.vdot(x, y)
    x, y = x.reshape(-1), y.reshape(-1)
    return sum(np.vdot(x[k : k + _serial_length], y[k : k + _serial_length]) for k in range(0, x.size, _serial_length))


def _by_blas(rows: np.ndarray, length: int | None) -> bool:
    """Return whether BLAS computes a product with these rows: short ones, or rows long enough for several threads."""
    return rows.size <= _serial_length or (length or rows.shape[1]) >= _PARALLEL_LENGTH


def vdots(rows: np.ndarray, x: np.ndarray, length: int | None = None) -> np.ndarray:
    """Return each conjugated row's product with x, on this thread; `length`: of the whole vectors if these are parts."""
    if _by_blas(rows, length):
        return (rows.conj() if rows.dtype.kind == "c" else rows) @ x
    return np.array([vdot(row, x) for row in rows])


def combination(numbers: np.ndarray, rows: np.ndarray, length: int | None = None, out: Array = None) -> np.ndarray:
    """Return the linear combination of the rows; see `vdots`."""
    if _by_blas(rows, length):
        return np.matmul(numbers, rows, out=out)
    return np.einsum("i,in->n", numbers, rows, out=out)


def gram(rows: np.ndarray) -> np.ndarray:
    """Return the inner products of real rows with each other, on the calling thread."""
    width = max(1, _serial_length // len(rows))
    stretches = [rows[:, k : k + width] for k in range(0, rows.shape[1], width)]
    return sum((stretch @ stretch.T for stretch in stretches), np.zeros((len(rows), len(rows))))


def limit_threads(comm: Comm, ranks_on_node: int) -> None:
    """Limit thread pools to a share of the node's cores, unless the user set them; the lowest rank logs it; collective."""
    global _share, _serial_length
    _share = max(1, len(cores()) // ranks_on_node)
    share = _limited(ranks_on_node)
    if os.environ.get("OMP_NUM_THREADS") == "1":
        _serial_length = sys.maxsize
    first = comm.allreduce(comm.size if share is None else comm.rank, MPI.MIN)
    if first == comm.rank and first_time(_NOTICE):
        _log.warning(
            f"{MPI.Get_processor_name()}: {ranks_on_node} ranks share {len(cores())} cores: thread pools "
            f"limited to {share} thread(s) each. Set OMP_NUM_THREADS (or MPIAD_THREADS=0) to decide yourself. "
            "This message appears once."
        )


def _limited(ranks_on_node: int) -> int | None:
    """Limit this rank's pools; return their number of threads, or None if nothing was changed."""
    decided = not switch("MPIAD_THREADS", True) or any(name in os.environ for name in _USERS_THREADS)
    if ranks_on_node < 2 or decided:
        return None
    share = _share
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    if pools and max(pools) <= share:
        return None
    threadpoolctl.threadpool_limits(share)
    # Libraries that are loaded later, such as SciPy's BLAS, read these variables at their start.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(share)
    return share


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_BYTES = 32 << 20  # mallopt's documented maximum on 64 bits (glibc 2.36 accepts more); larger arrays are mapped
_TRIM_BYTES = 512 << 20  # the free memory that may stay at the top of the heap
_PAD_BYTES = 16 << 20
_USERS_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
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
            _advised = "[madvise]" in _SWITCH.read_text(encoding="utf-8") and _advise_heap(libc)
    return True


def huge_pages() -> str:
    """Return as text whether this process's arrays are in huge pages."""
    modes = _SWITCH.read_text(encoding="utf-8") if _SWITCH.exists() else "[never]"
    requested = "for the heap" if _advised else "not requested"
    return f"{requested} (the system's setting is {modes.partition('[')[2].partition(']')[0]})"


def _named(tunable: str) -> bool:
    return tunable in os.environ.get("GLIBC_TUNABLES", "")


def _raise_thresholds(libc: ctypes.CDLL) -> bool:
    decided = any(name in os.environ for name in _USERS_MALLOC) or any(map(_named, _TUNABLES))
    if not switch("MPIAD_MALLOPT", True) or decided:
        return False
    libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    settings = ((_M_MMAP_THRESHOLD, _MMAP_BYTES), (_M_TRIM_THRESHOLD, _TRIM_BYTES), (_M_TOP_PAD, _PAD_BYTES))
    accepted = [libc.mallopt(parameter, value) == 1 for parameter, value in settings]
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
