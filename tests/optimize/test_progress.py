"""What is shown of a solve under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.optimize.least_squares import least_squares
from mpiad.optimize.minimize import minimize


def quartic(x: np.ndarray) -> Any:
    return (x - 2.0) ** 4


def test_only_the_root_writes(capsys: pytest.CaptureFixture, rank: int, size: int) -> None:
    root = size - 1
    result = minimize(quartic, 0.0, root=root, objective="mean", progress=True)
    lines = capsys.readouterr().err.splitlines()
    if rank != root:
        assert not lines
        return
    assert lines[0] == "0 iterations, 0:00:00: loss 1.600000e+01, |gradient| 3.20e+01, 1 evaluations"
    assert lines[-1].startswith(f"{result.nit} iterations, 0:") and f": loss {result.fun:.6e}, " in lines[-1]
    assert np.isfinite(result.history.seconds).all()


@pytest.mark.parametrize("method", ["BFGS", "L-BFGS-sharded"])
def test_the_limit_is_shown_also_after_a_checkpoint(
    method: str, capsys: pytest.CaptureFixture, rank: int, tmp_path: Path
) -> None:
    state = MPI.COMM_WORLD.bcast(tmp_path) / "state"
    for limit, first in ((3, "0 of 3 iterations, 0:00:00: "), (5, "4 of 5 iterations, 0:00:00: ")):
        options = {"maxiter": limit, "gtol": 0.0}
        minimize(quartic, 0.0, objective="mean", method=method, options=options, progress=True, checkpoint=state)
        lines = capsys.readouterr().err.splitlines()
        if rank == 0:
            assert lines[0].startswith(first) and lines[-1].startswith(f"{limit} of {limit} iterations")


def test_a_limit_of_evaluations(capsys: pytest.CaptureFixture, rank: int) -> None:
    minimize(quartic, 0.0, objective="mean", options={"maxfun": 6}, progress=True)
    least_squares(lambda x: (x - 2.0) ** 2 if rank == 0 else None, 0.0, max_nfev=4, progress=True)
    lines = capsys.readouterr().err.splitlines()
    if rank == 0:
        assert lines[0].startswith("1 of 6 evaluations, 0:00:00: loss") and lines[0].endswith(", iteration 0")
        assert any(line.startswith("4 of 4 evaluations") for line in lines)
