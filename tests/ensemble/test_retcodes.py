"""Return codes have names and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.ensemble import RK4, EnsembleProblem, ODEProblem, ReturnCode, solve
from mpiad.ensemble.outcome import came_through, codes_of

pytestmark = pytest.mark.serial


def test_names_and_numbers():
    names = np.array([code.value for code in ReturnCode])
    np.testing.assert_array_equal(codes_of(names), np.arange(len(names)))
    np.testing.assert_array_equal(codes_of(names[::-2]), [code.code for code in list(ReturnCode)[::-2]])
    np.testing.assert_array_equal(ReturnCode.names_of(codes_of(names)), names)
    assert codes_of(names[:0]).shape == (0,)
    np.testing.assert_array_equal(came_through(codes_of(names)), [not code.failed for code in ReturnCode])


@pytest.mark.usefixtures("solved_by")
@pytest.mark.parametrize("solved_by", ["columns", "kernels", "device", "gpu"], indirect=True)
def test_fixed_steps_end_where_the_state_is_not_finite(solved_by):
    # u' = p u² has a pole at 1 / p; a step is tried once, and the third trajectory has no pole in tspan.
    problem = ODEProblem(lambda u, p, t: [p[0] * u[0] ** 2], [1.0], (0.0, 3.0))
    sol = solve(EnsembleProblem(problem, p=np.array([[1.0], [2.0], [0.1]])), RK4(), dt=0.05, max_steps=500)
    assert sol.retcode.tolist() == ["Unstable", "Unstable", "Success"]
    assert sol.nreject.tolist() == [1, 1, 0]
    assert (sol.t_reached[:2] > [1.0, 0.5]).all() and (sol.t_reached[:2] < 1.5).all()
