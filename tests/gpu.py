"""Run the tests of device arrays on CuPy's own, in place of the stand-in: `make test-gpu`.

Without a GPU that CuPy can use it says so and ends with 1: nothing was tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import device_kinds

TESTS = Path(__file__).parent


def main(flags: list[str]) -> int:
    why = device_kinds.why_no_gpu()
    if why:
        print(f"make test-gpu: nothing was tested, since this machine has no GPU for CuPy: {why}.", file=sys.stderr)
        print("On a machine with one: pip install 'mpiad[gpu]' (CUDA 12) or 'mpiad[gpu13]' (CUDA 13).", file=sys.stderr)
        return 1
    ranks = os.environ.get("RANKS", "1 2").split()
    launch = [sys.executable, str(TESTS / "launch.py"), "--ranks", *ranks, "--limit", "1800"]
    pytest = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "-q", *flags]
    both = [*launch, "--", *pytest, "-k", "cupy", str(TESTS)]
    # Those in transport/ are about the stand-in itself.
    files = sorted(path for path in TESTS.glob("*/**/test_device*.py") if "transport" not in path.parts)
    alone = [*launch, "--", *pytest, *map(str, files)]
    # Those that go both ways, of which the host's is tested elsewhere.
    names = ("events", "event_gradient", "continuous", "matrix_states")
    ensembles = [TESTS / "ensemble" / f"test_{name}.py" for name in names]
    there = [*launch, "--", *pytest, "-k", "device", *map(str, ensembles)]
    cupy = {**os.environ, "DEVICE_ARRAYS": "cupy"}
    ends = [
        subprocess.run(both, check=False).returncode,
        *(subprocess.run(command, check=False, env=cupy).returncode for command in (alone, there)),
    ]
    return max(ends, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
