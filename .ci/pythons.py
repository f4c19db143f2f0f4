"""Run a target of make with each Python that the machine has, each in an environment of its own, and print a table.

    python3 .ci/pythons.py --versions 3.10 3.11 3.12 3.13 --least 3 -- test RANKS="1 2"

A version is looked for on PATH, and among the interpreters of pyenv and uv; without the GIL it does not count. It exits
with 1 if the target fails with any of them, or if fewer than `--least` are found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

DESCRIBE = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_config_var('Py_GIL_DISABLED') or 0, sep='.')"


def candidates(version: str) -> Iterator[Path]:
    """Return the programs that may be an interpreter of this version, the best first."""
    if found := shutil.which(f"python{version}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local" / "share" / "uv" / "python"))
    for folder, pattern in ((pyenv, f"{version}.*"), (uv, f"cpython-{version}.*")):
        yield from sorted(folder.glob(f"{pattern}/bin/python{version}"), reverse=True)


def interpreter(version: str) -> Path | None:
    """Return an interpreter of this version with the GIL, or None."""
    for path in candidates(version):
        done = subprocess.run([path, "-c", DESCRIBE], capture_output=True, text=True)  # one of pyenv's shims may fail
        if done.stdout.strip() == f"{version}.0":
            return path
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--versions", nargs="+", required=True)
    parser.add_argument("--least", type=int, default=1, help="how many of them must be found")
    parser.add_argument("target", nargs="+", help="arguments of make")
    options = parser.parse_args()
    rows, ran, failed = [], 0, False
    for version in options.versions:
        if (path := interpreter(version)) is None:
            rows.append((version, "skipped: not found"))
            continue
        start, venv = time.monotonic(), f"VENV=.venv-python{version}"
        done = subprocess.run(["make", "--no-print-directory", *options.target, f"PYTHON={path}", venv])
        ran, failed = ran + 1, failed or done.returncode != 0
        outcome = "passed" if done.returncode == 0 else f"FAILED with {done.returncode}"
        rows.append((version, f"{outcome} in {time.monotonic() - start:.0f} s: {path}"))
    for version, text in rows:
        print(f"Python {version:>6}  {text}")
    if failed or ran < options.least:
        sys.exit(f"{ran} of {len(rows)} Pythons ran, {options.least} are needed" if not failed else 1)


if __name__ == "__main__":
    main()
