"""How much longer a program takes than on a quiet machine, for limits on time that aren't what a test measures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# However busy a machine looks, a hang is one after that.
MOST = 20.0


def slowdown() -> float:
    """Return how many processes there are for each core, now or lately, which is 1 at least."""
    try:
        lately, _, _, running, _ = Path("/proc/loadavg").read_text().split()
        waiting = max(float(lately), float(running.split("/")[0]))
    except OSError:  # not Linux
        waiting = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1.0, waiting / cores), MOST)


def takes_at_most(seconds: float, measure: Callable[[], float]) -> bool:
    """Whether what is measured takes less than so many seconds in one of three tries: other processes come and go."""
    return any(measure() < seconds for _ in range(3))
