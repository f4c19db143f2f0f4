"""mpiad's own side: the step by slices of an exchanged block, as a user writes it, compiled and as it stands."""

from __future__ import annotations

import math

import acoustics
import autograd.numpy as np
import numpy
import timing

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan

options = acoustics.arguments()
start, square = acoustics.fields(options.cells)
start.flags.writeable = False  # what can't change isn't compared at each call of a compiled function
domain = mpiad.Domain(options.cells)
root = math.isqrt(options.steps)


def shifted(p, axis, by):
    """Return the neighbours in one direction."""
    return p[tuple(slice(1 + by, p.shape[k] - 1 + by) if k == axis else slice(1, -1) for k in range(p.ndim))]


def step(state, k, square):
    """Return the next step's field and this one's."""
    u, before = state
    p = domain.exchange(u)
    around = sum(shifted(p, axis, by) for axis in range(u.ndim) for by in (1, -1))
    return 2.0 * u - before + square * (around - 2.0 * u.ndim * u), u


compiled = mpiad.jit(step)


def energy(step, checkpoints=None):
    """Return J as a function of the squares."""
    return lambda s: np.sum(scan(step, (start, start), options.steps, s, checkpoints=checkpoints)[0] ** 2)


def gradient(step, checkpoints=None):
    """Return J and its gradient, as a function of the squares."""
    return mpiad.value_and_grad(energy(step, checkpoints), objective="sum")


def check():
    """Return J and the gradient's norm, once they are the same by each way."""
    value, slope = gradients["gradient, jitted"](square)
    for name, other in gradients.items():
        again, found = other(square)
        numpy.testing.assert_allclose(found, slope, rtol=0, atol=1e-10 * np.abs(slope).max(), err_msg=name)
        numpy.testing.assert_allclose(again, value, rtol=1e-10, err_msg=name)
    return float(value), float(np.sum(slope**2) ** 0.5)


gradients = {
    "gradient, jitted": gradient(compiled),
    "gradient, interpreted": gradient(step),
    "gradient from √n checkpoints, jitted": gradient(compiled, CheckpointSchedule(root, recorded=root)),
}
cases = {
    "forward, jitted": lambda: energy(compiled)(square),
    "forward, interpreted": lambda: energy(step)(square),
    **{name: lambda both=both: both(square) for name, both in gradients.items()},
}
timing.measure("mpiad", options, cases, check)
