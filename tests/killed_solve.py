"""A solve on two ranks that SIGKILL ends in the middle, and that the same program then goes on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np

# What a solve's program has to say of itself: `fun`, which calls `counted(x)` first, and its `result`.
_PROGRAM = """
import os, signal, sys
import autograd.numpy as np
import mpiad
from mpiad.optimize import CheckpointFile, least_squares

path, kill, rank, count = sys.argv[1], int(sys.argv[2]), mpiad.mpi_rank(), [0]

def counted(x):
    count[0] += 1
    if rank == 1 and count[0] == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and count[0] == 1 and os.path.exists(path):
        assert np.array_equal(np.load(path)["x"], mpiad.stop_gradient(x))
{own}
print("ended", result.success, bool(np.allclose(result.x, 1.0, atol=1e-4)), len(result.history.loss))
"""


def killed_and_started_again(
    mpirun: Callable[..., CompletedProcess], folder: Path, own: str, evaluation: int
) -> tuple[int, int]:
    """Kill rank 1 in an evaluation, and start the program again, which must end at its minimum, all ones.

    Returns
    -------
    tuple of int
        Iterates that were written when it was killed, and those of both runs together.
    """
    program, path = _PROGRAM.format(own=own), folder / "run.npz"
    assert mpirun(2, program, path, evaluation).returncode != 0
    written = len(np.load(path)["history"])
    done = mpirun(2, program, path, 0)
    ended = next(line for line in done.stdout.splitlines() if line.startswith("ended")).split()
    assert done.returncode == 0 and ended[1:3] == ["True", "True"]
    return written, int(ended[3])
