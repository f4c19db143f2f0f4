"""Run the tests of device arrays on CuPy's own, in place of the stand-in: `make test-gpu`.

Without a GPU that CuPy can use it says so and ends with 1: nothing was tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import device_kinds
import pytest

TESTS = Path(__file__).parent


def main(flags: list[str]) -> int:
    why = device_kinds.why_no_gpu()
    if why:
        print(f"make test-gpu: nothing was tested, since this machine has no GPU for CuPy: {why}.", file=sys.stderr)
        print("On a machine with one: pip install 'mpiad[gpu]' (CUDA 12) or 'mpiad[gpu13]' (CUDA 13).", file=sys.stderr)
        return 1
    # Those in transport/ are about the stand-in itself.
    files = sorted(map(str, (path for path in TESTS.glob("*/**/test_device*.py") if "transport" not in path.parts)))
    # Those that go both ways, of which the host's is tested elsewhere.
    names = ("events", "event_gradient", "matrix_states")
    ensembles = [str(TESTS / "ensemble" / f"test_{name}.py") for name in names]
    cupy = {**os.environ, "DEVICE_ARRAYS": "cupy"}
    ends = []
    for ranks in os.environ.get("RANKS", "1 2").split():
        launch = [sys.executable, str(TESTS / "launch.py"), "--ranks", ranks, "--limit", "1800", "--"]
        # Most of the time is NVRTC's, on the host.
        parallel = ["-n", "4", "--dist", "loadfile"] if ranks == "1" else []
        run = [*launch, "-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", *parallel, *flags]
        jobs = (
            ([*run, "-k", "cupy", str(TESTS)], os.environ),
            ([*run, *files], cupy),
            ([*run, "-k", "device", *ensembles], cupy),
        )
        ends += [subprocess.run(command, check=False, env=environment).returncode for command, environment in jobs]
    # On several ranks some of these have no tests.
    return max((end for end in ends if end != pytest.ExitCode.NO_TESTS_COLLECTED), key=abs, default=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
