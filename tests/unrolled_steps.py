"""The steps of one trajectory, unrolled in plain autograd.numpy: what the gradient of a solve is compared with.

Nothing of the library's is used but the times between which it stepped. The coefficients are SciPy's.
"""

import autograd.numpy as anp
import numpy as np
from scipy.integrate import RK45 as scipy_rk45

DORMAND_PRINCE = ([*scipy_rk45.A[1:], scipy_rk45.B], [*scipy_rk45.C, 1.0], scipy_rk45.P)
# Kutta's rule; Hermite's cubic through both ends and the slopes there.
CLASSIC = (
    [[0.5], [0, 0.5], [0, 0, 1], [1 / 6, 1 / 3, 1 / 3, 1 / 6]],
    [0, 0.5, 0.5, 1, 1],
    np.array([[1, -1.5, 2 / 3], [0, 1, -2 / 3], [0, 1, -2 / 3], [0, 0.5, -1 / 3], [0, -1, 1]]),
)


def stages(f, u, p, t, h, table):
    """Return the stages of a step, the one at the new state included, and the new state."""
    rows, c, _ = table
    k = [anp.array(f(u, p, t))]
    for row, part in zip(rows, c[1:]):
        new = u + h * sum(a * stage for a, stage in zip(row, k))
        k.append(anp.array(f(new, p, t + part * h)))
    return k, new


def inside(u, h, k, x, table):
    """Return the state at the part x of a step."""
    weights = [sum(a * x ** (i + 1) for i, a in enumerate(row)) for row in table[2]]
    return u + h * sum(w * stage for w, stage in zip(weights, k))


def unrolled(f, u0, p, times, saveat=(), table=DORMAND_PRINCE, start=None, end=None):
    """Return the states at the saved times and at the end.

    The sizes of all steps are fixed, but for the last one, which ends at `end`; they begin at `start`.
    """
    start = times[0] if start is None else start
    end = times[-1] if end is None else end
    t, u, saved = start, u0, [u0 for time in saveat if time == times[0]]
    for n, (before, after) in enumerate(zip(times[:-1], times[1:])):
        h = end - t if n == len(times) - 2 else after - before
        k, new = stages(f, u, p, t, h, table)
        for time in saveat:
            if (before < time < after) or (after < time < before):
                saved.append(inside(u, h, k, (time - t) / h, table))
            elif time == after:
                saved.append(new)
        t, u = t + h, new
    return saved, u
