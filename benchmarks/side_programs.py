"""The sides of a comparison: each a program in `benchmarks/sides/`, run by the interpreter of its library's environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from reaches import report_missing

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / ".venv-peers" / "bin"
LIMIT = 300  # seconds


def folders(library: str, line: str) -> dict[str, Path]:
    """Return the folder of the interpreter of mpiad, and of a peer if it is installed; otherwise report the line."""
    found = {"mpiad": Path(sys.executable).parent}
    python = PEERS / "python"
    if python.exists() and subprocess.run([python, "-c", f"import {library}"], capture_output=True).returncode == 0:
        return found | {library: PEERS}
    print(f"{library} isn't installed: make bench-peers")
    report_missing(line, "peer not installed")
    return found


def run_side(program: str, python: Path, arguments: Sequence[object], ranks: int | None = None, **variables: str) -> dict:
    """Run a side and return what it has measured; `ranks`: by mpiexec; `variables` of the environment."""
    command = [str(python), str(HERE / "sides" / f"{program}.py"), *map(str, arguments)]
    if ranks is not None:
        launcher = python.parent / "mpiexec"
        command = [str(launcher) if launcher.exists() else "mpiexec", "-n", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **variables})
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
