"""The least that NumPy must do: all trajectories as columns, each with its own step, in one loop written for this problem.

Nothing is general here: no parameters but ρ, no saved times, no checks, no gradient. Every few turns the columns that
have arrived are stored and taken out, so that those still on their way don't pay for them. Steps are chosen as SciPy's
RK45 chooses them (Dormand and Prince, with the error of the mean square).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import problem

STAGES = [
    np.array(row)
    for row in (
        [1 / 5],
        [3 / 40, 9 / 40],
        [44 / 45, -56 / 15, 32 / 9],
        [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
        [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
        [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
    )
]
ERROR = np.array([-71 / 57600, 0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40])
TURNS = 4  # steps between two looks for columns that have arrived


def lorenz(u: np.ndarray, rho: np.ndarray) -> np.ndarray:
    slope = np.empty_like(u)
    x, y, z = u
    slope[0] = problem.SIGMA * (y - x)
    slope[1] = x * (rho - z) - y
    slope[2] = x * y - problem.BETA * z
    return slope


def mean_square(v: np.ndarray) -> np.ndarray:
    return np.einsum("ij,ij->j", v, v) / len(v)


def first_step(u: np.ndarray, slope: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """Return steps as SciPy guesses them, from the sizes of state, slope and curvature (Hairer, Nørsett, Wanner II.4)."""
    scale = problem.ATOL + problem.RTOL * np.abs(u)
    size, speed = np.sqrt(mean_square(u / scale)), np.sqrt(mean_square(slope / scale))
    guess = 0.01 * size / speed
    bend = np.sqrt(mean_square((lorenz(u + guess * slope, rho) - slope) / scale)) / guess
    return np.minimum(np.minimum(100 * guess, (0.01 / np.maximum(speed, bend)) ** 0.2), problem.T1 - problem.T0)


def step(u: np.ndarray, slopes: np.ndarray, h: np.ndarray, rho: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill `slopes` from its second row on; return the new state and the mean square of its scaled error."""
    for i, row in enumerate(STAGES, 1):
        new = np.tensordot(row, slopes[:i], 1)
        new *= h
        new += u
        slopes[i] = lorenz(new, rho)
    error = np.tensordot(ERROR, slopes, 1)
    error *= h
    error /= problem.ATOL + problem.RTOL * np.maximum(np.abs(u), np.abs(new))
    return new, mean_square(error)


def solve(rho: np.ndarray) -> problem.Answer:
    n = len(rho)
    end, steps = np.empty((3, n)), np.zeros(n, int)
    members = np.arange(n)
    u = np.repeat(np.array(problem.START)[:, None], n, axis=1)
    slope, t, rejected, turn = lorenz(u, rho), np.full(n, problem.T0), np.zeros(n, bool), 0
    h = first_step(u, slope, rho)
    while len(members):
        slopes = np.empty((7, *u.shape))
        slopes[0] = slope
        new, error = step(u, slopes, h, rho)
        # A column that has arrived takes part until it is taken out, with a step of no length.
        accepted = error <= 1
        on_the_way = t < problem.T1
        steps[members] += accepted & on_the_way
        t = np.where(accepted, t + h, t)
        u, slope = np.where(accepted, new, u), np.where(accepted, slopes[6], slope)
        # No growth in the step after a rejected one.
        most = np.where(rejected, 1.0, 10.0)
        h *= np.clip(0.9 * np.maximum(error, 1e-30) ** -0.1, 0.2, np.where(accepted, most, 1.0))
        np.minimum(h, problem.T1 - t, out=h)
        rejected, turn = ~accepted, turn + 1
        left = t < problem.T1
        if turn % TURNS == 0 or not left.any():
            end[:, members[~left]] = u[:, ~left]
            members, rho, t, h, rejected = members[left], rho[left], t[left], h[left], rejected[left]
            u, slope = u[:, left], slope[:, left]
    return {"end": end.T, "steps": steps}


def forward(n: int) -> Callable[[], problem.Answer]:
    rho = problem.parameters(n)
    return lambda: solve(rho)


if __name__ == "__main__":
    problem.main({"forward": forward})
