"""The aquifer's uncertainty: heads that were left out are in their bands, and any number of ranks says the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from same_answers import Run, check_same_answers

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

PROGRAM = "examples/groundwater_uncertainty.py"
SMALL = ("--coarsen", 20, "--boreholes", 40, "--pairs", 20, "--draws", 12)


@pytest.mark.thorough
def test_ranks_say_the_same_and_the_data_narrow_the_field(mpirun: Run, tmp_path: Path) -> None:
    # Conjugate gradients, ended early ten times, leave nine of the digits in which sums over ranks are rounded.
    arguments = *SMALL, "--picture", "demo/aquifer.png"
    found = check_same_answers(mpirun, (1, 2), PROGRAM, tmp_path, *arguments, timeout=70, close=1e-8)
    # Before the data it is 1 in each cell.
    assert 0.2 < found["deviation"].min() and found["deviation"].max() < 1.0
    away = (found["mean"] - found["truth"]) / found["deviation"]
    assert np.mean(np.abs(away) <= 1.96) > 0.9
    # Fields of the posterior agree where the deviation is small, and with the prior's sample nowhere.
    assert np.std(found["sample"] - found["mean"]) < 0.8 * np.std(found["prior sample"] - found["mean"])
