"""Early warning: the forecasts are in their bands, get narrower with time, and don't depend on the number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from same_answers import Run, check_same_answers

pytestmark = [pytest.mark.launches, pytest.mark.limit(240)]


@pytest.mark.thorough
def test_ranks_say_the_same_and_forecasts_get_narrower(mpirun: Run, tmp_path: Path) -> None:
    program, picture = "examples/early_warning.py", ("--picture", "demo/warning.png")
    found = check_same_answers(mpirun, (1, 2), program, tmp_path, *picture, timeout=110, close=1e-10)
    assert 0.92 < found["share"] < 0.98  # of 200 events of the prior in the bands of 95 %
    true, mean = found["true uplift"].ravel(), found["mean after 1800 s"].ravel()
    assert np.corrcoef(true, mean)[0, 1] > 0.9
    after = [found[f"forecast after {seconds} s"] for seconds in (120, 360, 1800)]
    spreads = [std for _, std in after]
    assert all(np.all(later <= earlier + 1e-9) for earlier, later in zip(spreads, spreads[1:]))
    assert spreads[2].max() < 0.4 * spreads[0].max()
    highest = np.argmax(found["truth"])
    assert abs(after[1][0][highest] - found["truth"][highest]) < 1.96 * after[1][1][highest]
