"""In which state the machine is, by fixed work in two processes at once.

For minutes the same program may take two or three times as long, by nothing that is in the program: others use the cores,
or the system has given it other pages of memory, which decide how much of it the caches can hold. So two new processes pass
over as much memory as a second-level cache holds, and compute on what the first level holds. A figure that was measured
while that took longer than at other times says little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import NamedTuple

PROCESSES, SECONDS = 2, 0.4
LIMIT, SLOWER, LEAST_SHARE = 120, 1.15, 0.9


class State(NamedTuple):
    """The slowest of the processes.

    Attributes
    ----------
    memory, arithmetic : float
        Least time of a pass, in µs.
    share : float
        Part of the time in which the process had a core.
    """

    memory: float
    arithmetic: float
    share: float


def probe() -> State:
    """Measure the machine as it is now."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(PROCESSES)
    ]
    found = [State(*json.loads(process.communicate(timeout=LIMIT)[0])) for process in started]
    return State(max(s.memory for s in found), max(s.arithmetic for s in found), min(s.share for s in found))


def best_of(states: list[State]) -> State:
    """Return the best that was seen of each."""
    return State(min(s.memory for s in states), min(s.arithmetic for s in states), max(s.share for s in states))


def described(states: list[State], best: State) -> str:
    """Return how slow the machine was in the worst of some states, "quiet" where it wasn't."""
    memory = max(s.memory for s in states) / best.memory
    arithmetic = max(s.arithmetic for s in states) / best.arithmetic
    share = min(s.share for s in states)
    said = [f"{name} × {ratio:.1f}" for name, ratio in (("memory", memory), ("arithmetic", arithmetic)) if ratio > SLOWER]
    said += [f"{share:.0%} of a core"] if share < LEAST_SHARE else []
    return ", ".join(said) or "quiet"


def _least(call, seconds: float) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def main() -> None:
    """Do the work of one process, and print what it took."""
    import numpy as np

    wide, narrow = np.ones(150_000), np.ones(2_000)  # 1.2 MB, 16 kB
    start, busy = time.perf_counter(), time.process_time()
    memory = _least(lambda: np.add(wide, 1.0, out=wide), SECONDS)
    arithmetic = _least(lambda: np.exp(-narrow), SECONDS)
    share = (time.process_time() - busy) / (time.perf_counter() - start)
    print(json.dumps([memory, arithmetic, share]))


if __name__ == "__main__":
    main()
