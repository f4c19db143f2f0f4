"""What can be had on one core: a kernel in numba written for this problem alone, sixteen trajectories side by side.

Their numbers lie in one flat buffer at constant distances, so that the loop over lanes becomes vector instructions. A
second loop accepts or refuses, lane by lane, and puts the next trajectory where one has arrived. Steps are chosen as
SciPy's RK45 chooses them, with the error of the mean square. Nothing is general: no parameters but ρ, no saved times,
no checks.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import problem

W = 16
S, B, T1, RTOL, ATOL = problem.SIGMA, problem.BETA, problem.T1, problem.RTOL, problem.ATOL
# Fields: 0-2 u, 3-5 k1, 6-8 new u, 9-11 last k, 12-14 tangent, 15-17 new tangent, 18 ρ, 19 step, 20 mean square.
FIELDS = 21

inlined = numba.njit(forceinline=True, error_model="numpy", fastmath={"contract"})


@inlined
def f(x, y, z, r):
    return S * (y - x), x * (r - z) - y, x * y - B * z


@inlined
def df(x, y, z, r, a, b, c):
    return S * (b - a), a * (r - z) + x * (1.0 - c) - b, a * y + x * b - B * c


@inlined
def size(a, b, c, x, y, z):
    a, b, c = a / (ATOL + RTOL * abs(x)), b / (ATOL + RTOL * abs(y)), c / (ATOL + RTOL * abs(z))
    return np.sqrt((a * a + b * b + c * c) / 3)


@inlined
def first_step(x, y, z, r, a, b, c):
    d0, d1 = size(x, y, z, x, y, z), size(a, b, c, x, y, z)
    h = 1e-6 if d0 < 1e-5 or d1 < 1e-5 else 0.01 * d0 / d1
    e, g, i = f(x + h * a, y + h * b, z + h * c, r)
    steepest = max(d1, size(e - a, g - b, i - c, x, y, z) / h)
    return min(100 * h, (0.01 / steepest) ** 0.2, T1)


def stage(i: int, weights: tuple[float, ...], k: str, u: str, y: str) -> str:
    """Return lines on the argument of a stage."""
    return "".join(
        f"        {y}{c} = {u}{c} + h * (" + " + ".join(f"{w!r} * {k}{j}{c}" for j, w in enumerate(weights) if w) + ")\n"
        for c in range(3)
    )


def step(tangent: bool) -> str:
    """Return the loop over lanes: stages, tangents where wanted, the error."""
    rows = [
        (1 / 5,), (3 / 40, 9 / 40), (44 / 45, -56 / 15, 32 / 9), (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    ]  # fmt: skip
    error = (-71 / 57600, 0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40)
    text = "def advance(b):\n    for l in range(W):\n        h, r = b[19 * W + l], b[18 * W + l]\n"
    for c in range(3):
        text += f"        u{c}, k0{c}, v{c} = b[{c} * W + l], b[{3 + c} * W + l], b[{12 + c} * W + l]\n"
    text += "        l00, l01, l02 = df(u0, u1, u2, r, v0, v1, v2)\n" if tangent else ""
    for i, row in enumerate(rows, 1):
        text += stage(i, row, "k", "u", "y") + f"        k{i}0, k{i}1, k{i}2 = f(y0, y1, y2, r)\n"
        if tangent:
            text += stage(i, row, "l", "v", "w")
            text += f"        l{i}0, l{i}1, l{i}2 = df(y0, y1, y2, r, w0, w1, w2)\n" if i < 6 else ""
    for c in range(3):
        total = " + ".join(f"{w!r} * k{j}{c}" for j, w in enumerate(error) if w)
        text += f"        e{c} = h * ({total}) / (ATOL + RTOL * max(abs(u{c}), abs(y{c})))\n"
        text += f"        b[{6 + c} * W + l] = y{c}\n        b[{9 + c} * W + l] = k6{c}\n"
        text += f"        b[{15 + c} * W + l] = w{c}\n" if tangent else ""
    return text + "        b[20 * W + l] = (e0 * e0 + e1 * e1 + e2 * e2) / 3\n"


def kernel(tangent: bool) -> Callable[..., None]:
    """Return the compiled solve of all trajectories."""
    space = dict(globals())
    exec(step(tangent), space)  # the text is generated above
    advance = inlined(space["advance"])

    @numba.njit(error_model="numpy", fastmath={"contract"})
    def run(rho, end, slope, steps):
        b, t = np.zeros(FIELDS * W), np.zeros(W)
        ids, refused = np.full(W, -1), np.zeros(W, np.bool_)
        waiting, live = 0, 0
        while True:
            for l in range(W):
                if ids[l] < 0 and waiting < rho.size:
                    x, y, z = problem_start
                    r = rho[waiting]
                    a, p, q = f(x, y, z, r)
                    for k, value in enumerate((x, y, z, a, p, q)):
                        b[k * W + l] = value
                    for k in range(12, 15):
                        b[k * W + l] = 0.0
                    b[18 * W + l], b[19 * W + l] = r, first_step(x, y, z, r, a, p, q)
                    t[l], ids[l], refused[l], steps[waiting] = 0.0, waiting, False, 0
                    waiting += 1
                    live += 1
            if not live:
                return
            advance(b)
            for l in range(W):
                i = ids[l]
                if i < 0:
                    continue
                q, h = b[20 * W + l], b[19 * W + l]
                factor = 10.0 if q == 0.0 else min(10.0, max(0.2, 0.9 * q**-0.1))
                if q < 1.0:
                    steps[i] += 1
                    t[l] += h
                    for k in range(6):
                        b[k * W + l] = b[(6 + k) * W + l]
                    for k in range(12, 15):
                        b[k * W + l] = b[(3 + k) * W + l]
                    factor = min(1.0, factor) if refused[l] else factor
                refused[l] = not q < 1.0
                left = T1 - t[l]
                b[19 * W + l] = min(h * factor, left)
                if left < 1e-14:
                    for k in range(3):
                        end[i, k] = b[k * W + l]
                    slope[i] = 2 * (b[l] * b[12 * W + l] + b[W + l] * b[13 * W + l] + b[2 * W + l] * b[14 * W + l])
                    ids[l], b[19 * W + l] = -1, 0.0
                    live -= 1

    return run


problem_start = problem.START


def solved(n: int, tangent: bool) -> Callable[[], problem.Answer]:
    rho, run = problem.parameters(n), kernel(tangent)

    def call() -> problem.Answer:
        end, slope, steps = np.empty((n, 3)), np.empty(n), np.empty(n, np.int64)
        run(rho, end, slope, steps)
        return {"gradient": slope} if tangent else {"end": end, "steps": steps}

    return call


problem.main({"forward": lambda n: solved(n, False), "gradient": lambda n: solved(n, True)})
