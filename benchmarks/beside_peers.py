"""mpiad beside mpi4jax and mpi4torch: value and gradient of the same programs, on 2 ranks of this machine.

    python benchmarks/beside_peers.py [--rounds 3]

Each library runs in its own environment (`benchmarks/peers/install.sh` makes that of the peers), so the programs are
started in turn, several rounds of each, and the smallest time counts. A peer that isn't there is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin"
LIMIT = 300


def run(mpiexec: str, python: str, program: Path, *arguments: str) -> str | None:
    """Run a program on 2 ranks; return what it printed, None where it failed."""
    command = [mpiexec, "-n", "2", python, str(program), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def mpiad_times() -> dict[tuple[str, int], float]:
    """Return mpiad's times in µs by case and number of doubles."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        mpiexec = Path(sys.executable).parent / "mpiexec"
        launcher = str(mpiexec) if mpiexec.exists() else "mpiexec"
        if run(launcher, sys.executable, HERE / "primitives.py", "--quick", "--json", str(file)) is None:
            raise SystemExit("benchmarks/primitives.py failed")
        return {(row["case"], row["n"]): row["mpiad"] for row in json.loads(file.read_text())}


def peer_times(library: str) -> dict[tuple[str, int], float]:
    """Return a peer's times in µs, empty where it isn't installed."""
    printed = run(str(PEERS / "mpiexec"), str(PEERS / "python"), HERE / "peers" / f"{library}_primitives.py")
    rows = [json.loads(line) for line in (printed or "").splitlines() if line.startswith("{")]
    return {(row["case"], row["n"]): row["us"] for row in rows if row["correct"]}


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    best: dict[str, dict[tuple[str, int], float]] = {"mpiad": {}, "mpi4jax": {}, "mpi4torch": {}}
    for _ in range(rounds):
        for library, found in best.items():
            for key, time in (mpiad_times() if library == "mpiad" else peer_times(library)).items():
                found[key] = min(time, found.get(key, time))
    for library in [name for name, found in best.items() if not found]:
        print(f"{library} isn't installed: run benchmarks/peers/install.sh")
    print(f"{'':10}{'doubles':>9}" + "".join(f"{library + ' µs':>14}" for library in best))
    for case, n in best["mpiad"]:
        shown = [f"{found[case, n]:14.1f}" if (case, n) in found else f"{'–':>14}" for found in best.values()]
        print(f"{case:10}{n:9}" + "".join(shown))


main()
