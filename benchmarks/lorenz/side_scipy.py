"""SciPy's solve_ivp, one call after the other.

It has no gradient: integrated with the state are its derivatives with respect to ρ, which count in the control of the
steps. Of many trajectories 200 are computed and their time is scaled; the cost is that of the calls, one like another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import problem
from scipy.integrate import solve_ivp

TOLERANCES = {"rtol": problem.RTOL, "atol": problem.ATOL}


def lorenz(t: float, u: np.ndarray, rho: float) -> tuple:
    x, y, z = u
    return problem.SIGMA * (y - x), x * (rho - z) - y, x * y - problem.BETA * z


def with_tangent(t: float, u: np.ndarray, rho: float) -> tuple:
    """Return the time derivative of the state and of its derivative with respect to ρ."""
    x, y, z, dx, dy, dz = u
    return (
        *lorenz(t, u[:3], rho),
        problem.SIGMA * (dy - dx),
        dx * (rho - z) + x * (1 - dz) - dy,
        dx * y + x * dy - problem.BETA * dz,
    )


def integrate(rho: np.ndarray, method: str = "RK45", **tolerances: float) -> tuple[np.ndarray, np.ndarray]:
    """Return end states, shape (len(rho), 3), and the gradient of Σ|u(1)|², shape (len(rho),)."""
    start = (*problem.START, 0.0, 0.0, 0.0)
    ends = [solve_ivp(with_tangent, (problem.T0, problem.T1), start, method, args=(r,), **tolerances).y[:, -1] for r in rho]
    end, tangent = np.split(np.array(ends), 2, axis=1)
    return end, 2 * np.sum(end * tangent, axis=1)


def forward(n: int) -> Callable[[], problem.Answer]:
    members = problem.sample(n)

    def solve() -> problem.Answer:
        runs = [
            solve_ivp(lorenz, (problem.T0, problem.T1), problem.START, "RK45", args=(rho,), **TOLERANCES)
            for rho in problem.parameters(n)[members]
        ]
        return {
            "end": np.array([run.y[:, -1] for run in runs]),
            "steps": np.array([len(run.t) - 1 for run in runs]),
            "scale": np.array(n / len(members)),
            "members": members,
        }

    return solve


def gradient(n: int) -> Callable[[], problem.Answer]:
    members = problem.sample(n)

    def solve() -> problem.Answer:
        end, slope = integrate(problem.parameters(n)[members], **TOLERANCES)
        return {"end": end, "gradient": slope, "scale": np.array(n / len(members)), "members": members}

    return solve


def reference(n: int) -> Callable[[], problem.Answer]:
    """Return what the others' errors are taken against: a method of order 8 with the smallest tolerance that it takes."""
    members = problem.sample(n)

    def solve() -> problem.Answer:
        end, slope = integrate(problem.parameters(n)[members], "DOP853", rtol=1e-13, atol=1e-15)
        return {"end": end, "gradient": slope, "members": members}

    return solve


if __name__ == "__main__":
    problem.main({"forward": forward, "gradient": gradient, "reference": reference})
