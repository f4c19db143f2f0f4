"""Three fused loops by hand, compiled by numba, on one rank: what fusing alone brings to the forward run."""

from __future__ import annotations

import channel
import numba
import numpy as np
import timing

options = channel.arguments()
given = channel.start(options.north, options.east, options.dtype)
compiled = numba.njit(fastmath={"contract", "nsz", "arcp"})
number = options.dtype.type
CELL, DEPTH, GRAVITY = number(channel.CELL), number(channel.DEPTH), number(channel.GRAVITY)
STEP, FRICTION = number(channel.STEP), number(channel.FRICTION)
half, quarter, four = number(0.5), number(0.25), number(4)


@compiled
def fill(p, edge):
    """Fill a halo: around the channel, then beyond the walls."""
    n, m = p.shape
    for i in range(n):
        p[i, 0], p[i, m - 1] = p[i, m - 2], p[i, 1]
    for j in range(m):
        p[0, j], p[n - 1, j] = p[1, j] * edge, p[n - 2, j] * edge


@compiled
def fluxes(h, u, v, coriolis, fe, fn, q, k):
    for i in range(1, h.shape[0] - 1):
        for j in range(1, h.shape[1] - 1):
            here, right, above = h[i, j], h[i, j + 1], h[i + 1, j]
            fe[i, j] = u[i, j] * (here + right) * half
            fn[i, j] = v[i, j] * (here + above) * half
            turning = coriolis[i - 1, j - 1] + (v[i, j + 1] - v[i, j] - u[i + 1, j] + u[i, j]) / CELL
            q[i, j] = turning / ((here + right + above + h[i + 1, j + 1]) * quarter)
            k[i, j] = (u[i, j] ** 2 + u[i, j - 1] ** 2 + v[i, j] ** 2 + v[i - 1, j] ** 2) * quarter


@compiled
def advance(h, u, v, fe, fn, q, k, old, new, now, before):
    """Write the rates and add them; of the height in place, of the winds to what friction reads."""
    dh, du, dv, u_next, v_next = new
    n = h.shape[0]
    for i in range(1, n - 1):
        for j in range(1, h.shape[1] - 1):
            east = q[i, j] * (fn[i, j] + fn[i, j + 1]) + q[i - 1, j] * (fn[i - 1, j] + fn[i - 1, j + 1])
            north = q[i, j] * (fe[i, j] + fe[i + 1, j]) + q[i, j - 1] * (fe[i, j - 1] + fe[i + 1, j - 1])
            x = (GRAVITY * (h[i, j + 1] - h[i, j]) + k[i, j + 1] - k[i, j]) / CELL
            y = (GRAVITY * (h[i + 1, j] - h[i, j]) + k[i + 1, j] - k[i, j]) / CELL
            dh[i, j] = (fe[i, j - 1] - fe[i, j] + fn[i - 1, j] - fn[i, j]) / CELL
            du[i, j] = east * quarter - x
            dv[i, j] = -north * quarter - y
            u_next[i, j] = u[i, j] + STEP * (now * du[i, j] + before * old[1][i, j])
            v_next[i, j] = v[i, j] + STEP * (now * dv[i, j] + before * old[2][i, j])
    for i in range(1, n - 1):
        for j in range(1, h.shape[1] - 1):
            h[i, j] += STEP * (now * dh[i, j] + before * old[0][i, j])
    v_next[n - 2] = 0


@compiled
def rub(u, v, u_next, v_next):
    for i in range(1, u.shape[0] - 1):
        for j in range(1, u.shape[1] - 1):
            for w, x in ((u, u_next), (v, v_next)):
                around = x[i, j + 1] + x[i, j - 1] + x[i + 1, j] + x[i - 1, j]
                w[i, j] = x[i, j] + FRICTION * (around - four * x[i, j])
    v[u.shape[0] - 2] = 0


def padded(field=None):
    made = np.zeros((options.north + 2, options.east + 2), options.dtype)
    if field is not None:
        made[1:-1, 1:-1] = field
    return made


memory = [padded() for _ in range(6)]
rates = [tuple(padded() for _ in range(3)) for _ in range(2)]


def run():
    """Return the height at the end."""
    h, u, v = (padded(field) for field in given[:3])
    fe, fn, q, k, u_next, v_next = memory
    new, old = rates
    for array in old:
        array[...] = 0
    for now, before in channel.weights(options.steps, options.dtype):
        for p in (h, u, v):
            fill(p, number(1))
        fluxes(h, u, v, given.coriolis, fe, fn, q, k)
        for p in (fe, fn, q, k):
            fill(p, number(0))
        advance(h, u, v, fe, fn, q, k, old, (*new, u_next, v_next), now, before)
        for p in (u_next, v_next):
            fill(p, number(1))
        rub(u, v, u_next, v_next)
        new, old = old, new
    return h[1:-1, 1:-1]


timing.measure("loops", options, {"forward": run}, lambda: [float(np.sum((run() - DEPTH) ** 2))])
