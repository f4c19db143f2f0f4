"""The main job: it recovers the field, and its way there doesn't depend on the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]
PROGRAM = "examples/terrain_inversion.py"


def invert(mpirun: Run, ranks: int, folder: Path, *arguments: object) -> tuple[CompletedProcess, np.ndarray]:
    """Run the example in a folder of its own; return what it printed and its losses."""
    folder.mkdir()
    done = mpirun(ranks, PROGRAM, "--history", "losses.txt", *arguments, timeout=70, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, np.loadtxt(folder / "losses.txt")


@pytest.mark.thorough
def test_ranks_share_one_history(mpirun: Run, tmp_path: Path) -> None:
    arguments = ("--coarsen", 12, "--wells", 1, "--before", 8, "--iterations", 8, "--least", 0)
    _, one = invert(mpirun, 1, tmp_path / "one", *arguments)
    _, four = invert(mpirun, 4, tmp_path / "four", *arguments)
    assert len(one) == len(four) == 18  # nine on each grid
    np.testing.assert_allclose(four, one, rtol=1e-8)
    assert (np.diff(one[:9]) < 0).all() and (np.diff(one[9:]) < 0).all() and one[-1] < 0.05 * one[0]
    # What was found on the coarser grid is nearly as good on the finer one.
    assert one[9] < 2 * one[8]


@pytest.mark.thorough
def test_field_is_recovered(mpirun: Run, tmp_path: Path) -> None:
    done, losses = invert(mpirun, 2, tmp_path / "run", "--coarsen", 9, "--iterations", 40, "--least", 0.9)
    table = dict(re.findall(r"^(\S.*?) {2,}.*?([\d.]+)$", done.stdout, re.MULTILINE))
    assert float(table["correlation with the true log κ"]) > 0.9
    assert float(table["relative error of log κ"]) < 0.45
    misfits = [float(value) for name, value in table.items() if name.startswith("misfit of well")]
    # Heads are explained about as well as their noise allows: the number of boreholes is ten times that of what is sought.
    assert len(misfits) == 6 and 0.7 < min(misfits) and max(misfits) < 1.5
    assert len(losses) > 10 and losses[-1] < 1e-2 * losses[0]
    assert re.search(r"iterations: 100%.* 40/40 .*, loss .*, \d+ evaluations\]$", done.stderr, re.MULTILINE)
    picture = (tmp_path / "run" / "demo" / "terrain_inversion.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000


@pytest.mark.thorough
def test_a_field_that_is_not_recovered_fails(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(2, PROGRAM, "--coarsen", 12, "--first", 1, "--iterations", 1, "--wells", 1, timeout=70, cwd=tmp_path)
    assert done.returncode != 0
    assert "not recovered" in done.stderr
