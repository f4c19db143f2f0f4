"""The safeguarded step beside SciPy's port of MINPACK's, in all of its cases."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize._dcsrch import dcstep

from mpiad.optimize.sharded.cubic_step import End, next_step


def test_steps_are_those_of_minpack() -> None:
    rng, cases = np.random.default_rng(4), set()
    for _ in range(4000):
        # The trial lies inside the interval, and the best end's slope points at it.
        best_step, far = rng.uniform(0.0, 2.0), rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 2.0)
        bracketed = bool(rng.integers(2)) or far < 0.0
        best = End(best_step, rng.normal(), -np.sign(far) * rng.exponential())
        other = End(best_step + far, best.value + rng.exponential(), rng.normal())
        trial = End(best_step + far * rng.uniform(0.05, 0.95), best.value + 0.5 * rng.normal(), rng.normal())
        low, high = (min(best.step, other.step), max(best.step, other.step)) if bracketed else (best.step, 9.0)
        if trial.value > best.value:
            cases.add(1)
        elif trial.slope * best.slope < 0.0:
            cases.add(2)
        else:
            cases.add((3 if abs(trial.slope) < abs(best.slope) else 4, bracketed))
        ends = (best.step, best.value, best.slope, other.step, other.value, other.slope)
        expected = dcstep(*ends, trial.step, trial.value, trial.slope, bracketed, low, high)[6]
        assert next_step(best, other, trial, bracketed, low, high) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(cases) == 6
