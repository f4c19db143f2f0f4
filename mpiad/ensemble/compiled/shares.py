"""The trajectories of a solve divided into shares: for threads, and so that what is kept of one stays small."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleThreads
from mpiad.ensemble.ranks import EnsembleMPI

__all__ = ["each", "shares_of", "threads_of"]

# At the end of a share its last trajectories leave lanes empty: two hundredths of the work, for so few trajectories.
_LEAST, _MOST = 512, 16_384
# Shares of a thread, so that the one with the hardest trajectories doesn't make the other threads wait for long.
_EACH = 16

Result = TypeVar("Result")


def threads_of(backend: EnsembleAlgorithm) -> int:
    """Return how many threads a way to run ensembles asks for."""
    inner = backend.inner if isinstance(backend, EnsembleMPI) else backend
    if not isinstance(inner, EnsembleThreads):
        return 1
    if inner.threads is not None:
        return max(1, inner.threads)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shares_of(count: int, threads: int) -> list[tuple[int, int]]:
    """Return where shares begin and end."""
    size = min(_MOST, max(_LEAST, -(-count // (_EACH * threads)))) if threads > 1 else _MOST
    parts = -(-count // size)
    bounds = [count * i // parts for i in range(parts + 1)] if parts else [0]
    return list(zip(bounds, bounds[1:]))


def each(fun: Callable[[Any], Result], items: Iterable[Any], threads: int) -> list[Result]:
    """Return what a function makes of all items, by so many threads."""
    items = list(items)
    if threads == 1 or len(items) < 2:
        return [fun(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as executor:
        return list(executor.map(fun, items))
