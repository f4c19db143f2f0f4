"""What it costs to have communication watched: off, with a deadline alone, and in debug mode.

    mpiexec -n 2 python benchmarks/guard.py [--rounds 40] [--calls 100] [--json FILE]
    mpiexec -n 2 python benchmarks/guard.py --without TREE

All are measured in one run, alternated, and the smallest time of many rounds counts. `--without` compares, instead, the
library as it is when nothing is watched with another tree of it (a worktree of a commit from before there was a watch):
both are started in turn, several times. What is aimed at: 1.01 for off, and 5 for debug mode on 2 ranks. The last
line shows the µs that `mpiad.debug.watch` adds to the program's own receive from any rank, at most 2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as anp
import numpy as np
from mpi4py import MPI
from reaches import report

REACH = {"off": 1.01, "debug": 5.0, "receive": 2.0}
WORLD = MPI.COMM_WORLD


def cases() -> dict[str, Callable[[], object]]:
    """Return the programs that are measured."""
    import mpiad

    x, small = np.ones(3), np.ones(1)
    right, left = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    gradient = mpiad.value_and_grad(lambda x: anp.sum(mpiad.mpi_allreduce(x) ** 2))

    def ring() -> None:
        mpiad.mpi_send(small, right)
        mpiad.mpi_recv(small, left)

    return {
        "allreduce": lambda: mpiad.mpi_allreduce(x),
        "bcast": lambda: mpiad.mpi_bcast(x),
        "ring": ring,
        "value_and_grad": lambda: gradient(x),
    }


def seconds(run: Callable[[], object], calls: int) -> float:
    """Return the time of one call, the longest of all ranks."""
    WORLD.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return WORLD.allreduce((time.perf_counter() - start) / calls, MPI.MAX)


def side_by_side(rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the times in µs by case and mode."""
    from mpiad.transport.watch import switch, watch_settings

    modes = {"off": None, "deadline": watch_settings.Settings(False, 60.0), "debug": watch_settings.Settings(True, 60.0)}
    found: dict[str, dict[str, float]] = {}
    programs = cases()
    for _ in range(rounds):
        for mode, wanted in modes.items():
            before = watch_settings.present()
            if wanted is not None:
                switch.apply(wanted)
            for case, run in programs.items():
                run()
                times = found.setdefault(case, {})
                times[mode] = min(times.get(mode, np.inf), 1e6 * seconds(run, calls))
            if wanted is not None:
                WORLD.Barrier()
                switch.restore(before)
    return found


def added_to_a_receive(rounds: int, calls: int) -> float:
    """Return the µs that the watch of the program adds to a receive from any rank, here from the rank itself."""
    import mpiad

    bare = WORLD.Dup()
    comms = bare, mpiad.debug.watch(bare)
    x, y = np.ones(1), np.empty(1)
    best = [np.inf, np.inf]
    for _ in range(rounds):
        for side, comm in enumerate(comms):
            sends = [bare.Isend(x, WORLD.rank) for _ in range(calls)]
            best[side] = min(best[side], seconds(lambda comm=comm: comm.Recv(y), calls))
            for send in sends:
                send.Wait()
    return 1e6 * (best[1] - best[0])


def against(tree: Path, rounds: int, calls: int) -> None:
    """Compare this tree with another one, both without a watch."""
    best: dict[str, dict[str, float]] = {}
    here = Path(__file__).resolve().parent.parent
    for _ in range(rounds):
        for name, path in (("without", tree), ("off", here)):
            command = [os.environ.get("MPIEXEC", "mpiexec"), "-n", "2", sys.executable, __file__, "--once", str(calls)]
            done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            for case, time_of in json.loads(done.stdout).items():
                times = best.setdefault(case, {})
                times[name] = min(times.get(name, np.inf), time_of)
    for case, times in best.items():
        ratio = times["off"] / times["without"]
        aim = "" if ratio <= REACH["off"] else f"   (at most {REACH['off']:g} is aimed at)"
        print(f"{case:16} without {times['without']:7.2f} µs   off {times['off']:7.2f} µs = {ratio:5.3f} x{aim}")


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--without", type=Path)
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.once:
        found = {case: 1e6 * min(seconds(run, chosen.once) for _ in range(60)) for case, run in cases().items()}
        if WORLD.rank == 0:
            print(json.dumps(found))
        return
    if chosen.without:
        against(chosen.without, chosen.rounds, chosen.calls)
        return
    found = side_by_side(chosen.rounds, chosen.calls)
    added = added_to_a_receive(chosen.rounds, chosen.calls)
    if WORLD.rank > 0:
        return
    for case, times in found.items():
        cells = [f"{mode} {times[mode]:7.2f} µs = {times[mode] / times['off']:5.2f} x" for mode in ("deadline", "debug")]
        print(f"{case:16} off {times['off']:7.2f} µs   {'   '.join(cells)}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found))
    worst = max(times["debug"] / times["off"] for times in found.values())
    print(f"debug mode costs {worst:.1f} times as much at worst; at most {REACH['debug']:g} is aimed at")
    report("debug mode, over none", worst, at_most=REACH["debug"])
    print(f"the watch of the program adds {added:.2f} µs to a receive from any rank")
    report("µs that the watch adds to a receive", added, at_most=REACH["receive"])


if __name__ == "__main__":
    main()
