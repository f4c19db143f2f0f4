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
    shown = capsys.readouterr().err.splitlines()
    if rank != root:
        assert not shown
        return
    assert shown[-1].startswith(f"iterations: {result.nit}it [") and f", loss {result.fun:.6e}, |gradient| " in shown[-1]
    assert np.isfinite(result.history.seconds).all()


@pytest.mark.parametrize("method", ["BFGS", "L-BFGS-sharded"])
def test_the_limit_is_shown_also_after_a_checkpoint(
    method: str, capsys: pytest.CaptureFixture, rank: int, tmp_path: Path
) -> None:
    state = MPI.COMM_WORLD.bcast(tmp_path) / "state"
    for limit, first in ((3, "| 0/3 [00:00<"), (5, "| 4/5 [00:00<")):
        options = {"maxiter": limit, "gtol": 0.0}
        minimize(quartic, 0.0, objective="mean", method=method, options=options, progress=True, checkpoint=state)
        shown = capsys.readouterr().err.splitlines()
        if rank == 0:
            assert first in "".join(shown)
            assert shown[-1].startswith("iterations: 100%") and f"| {limit}/{limit} [" in shown[-1]


def test_a_limit_of_evaluations(capsys: pytest.CaptureFixture, rank: int) -> None:
    minimize(quartic, 0.0, objective="mean", options={"maxfun": 6}, progress=True)
    least_squares(lambda x: (x - 2.0) ** 2 if rank == 0 else None, 0.0, max_nfev=4, progress=True)
    shown = capsys.readouterr().err
    if rank == 0:
        assert "evaluations:  17%" in shown and "| 1/6 [" in shown and ", iteration " in shown
        assert "evaluations: 100%" in shown and "| 4/4 [" in shown
