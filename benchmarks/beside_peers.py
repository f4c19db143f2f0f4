"""mpiad beside mpi4jax and mpi4torch: value and gradient of the same programs, on 2 ranks of this machine.

    python benchmarks/beside_peers.py [--rounds 3]

Each library runs in its own environment (`make bench-peers` makes that of the peers), so the programs are started in
turn, several rounds of each, and the smallest time counts. A peer that isn't there is left out, and said so.

mpi4jax transposes an allreduce as the identity: its `allreduce` communicates forward only, and is right for one copy of
the loss. `allreduce_summed` communicates backward too, as the other libraries do: that is equal work. The peers run with
the C library's own malloc thresholds, mpiad with those that it sets at import (MPIAD_MALLOPT=0 leaves them alone).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from reaches import report, report_missing

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin"
LIMIT = 300
COLUMNS = (
    ("mpi4jax", {"allreduce": "allreduce_summed", "ring": "ring"}),
    ("mpi4jax", {"allreduce": "allreduce"}),
    ("mpi4torch", {"allreduce": "allreduce", "ring": "ring"}),
)


def run(mpiexec: str, python: str, program: Path, *arguments: str) -> str:
    """Run a program on 2 ranks and return what it printed; end with its last words where it fails."""
    command = [mpiexec, "-n", "2", python, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"{program.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def mpiad_times() -> dict[tuple[str, int], float]:
    """Return mpiad's times in µs by case and number of doubles."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        mpiexec = Path(sys.executable).parent / "mpiexec"
        launcher = str(mpiexec) if mpiexec.exists() else "mpiexec"
        run(launcher, sys.executable, HERE / "primitives.py", "--alone", "--json", str(file))
        return {(row["case"], row["n"]): row["mpiad"] for row in json.loads(file.read_text())}


def peer_times(library: str) -> dict[tuple[str, int], float]:
    """Return a peer's times in µs."""
    printed = run(str(PEERS / "mpiexec"), str(PEERS / "python"), HERE / "peers" / f"{library}_primitives.py")
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    wrong = [(row["case"], row["n"]) for row in rows if not row["correct"]]
    if wrong:
        raise SystemExit(f"{library} gives a wrong gradient in {wrong}")
    return {(row["case"], row["n"]): row["us"] for row in rows}


def installed(library: str) -> bool:
    """Tell whether a peer is there."""
    python = PEERS / "python"
    return python.exists() and subprocess.run([python, "-c", f"import {library}"], capture_output=True).returncode == 0


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    best: dict[str, dict[tuple[str, int], float]] = {"mpiad": {}}
    for library in ("mpi4jax", "mpi4torch"):
        if installed(library):
            best[library] = {}
        else:
            print(f"{library} isn't installed: make bench-peers")
            report_missing(f"primitives beside {library}", "peer not installed")
    for _ in range(rounds):
        for library, found in best.items():
            for key, time in (mpiad_times() if library == "mpiad" else peer_times(library)).items():
                found[key] = min(time, found.get(key, time))
    for (case, n), ours in best["mpiad"].items():
        cells = [f"mpiad {ours:9.1f} µs"]
        for library, column in COLUMNS:
            time = best.get(library, {}).get((column.get(case, ""), n))
            if time is not None:
                cells.append(f"{library} ({column[case]}) {time:9.1f} µs = {time / ours:5.2f} x")
                report(f"{case}, {n:,} doubles, over {library} ({column[case]})", ours / time)
        print(f"{case:10}{n:9}  " + "   ".join(cells))


main()
