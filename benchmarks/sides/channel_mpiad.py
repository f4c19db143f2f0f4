"""mpiad's own side: a step as a user writes it, interpreted and compiled."""

from __future__ import annotations

import autograd.numpy as np
import channel
import numpy
import timing
from channel import CELL, DEPTH, FRICTION, GRAVITY, STEP

import mpiad

options = channel.arguments()
given = channel.start(options.north, options.east, options.dtype)
for field in given:
    field.flags.writeable = False  # what can't change isn't compared at each call of a compiled function
domain = mpiad.Domain((options.north, options.east), periodic=(False, True), dims=(1, channel.COMM.size))


def here(p):
    return p[1:-1, 1:-1]


def east(p):
    return p[1:-1, 2:]


def west(p):
    return p[1:-1, :-2]


def north(p):
    return p[2:, 1:-1]


def south(p):
    return p[:-2, 1:-1]


def spread(p):
    """Return what friction adds to a wind."""
    return FRICTION * (east(p) + west(p) + north(p) + south(p) - 4 * here(p))


def step(state, now, before):
    """Return height, winds and their rates, one step later."""
    h, u, v, *rates = state
    hp, up, vp = domain.exchange([h, u, v], boundary="edge")
    flux_east, flux_north = u * (h + east(hp)) / 2, v * (h + north(hp)) / 2
    vorticity = given.coriolis + (east(vp) - v - north(up) + u) / CELL
    potential = vorticity / ((h + east(hp) + north(hp) + hp[2:, 2:]) / 4)
    energy = (u**2 + west(up) ** 2 + v**2 + south(vp) ** 2) / 4
    fe, fn, q, k = domain.exchange([flux_east, flux_north, potential, energy], boundary="zero")
    turned_u = potential * (flux_north + east(fn)) + south(q) * (south(fn) + fn[:-2, 2:])
    turned_v = potential * (flux_east + north(fe)) + west(q) * (west(fe) + fe[2:, :-2])
    new = (
        (west(fe) - flux_east + south(fn) - flux_north) / CELL,
        turned_u / 4 - (GRAVITY * (east(hp) - h) + east(k) - energy) / CELL,
        -turned_v / 4 - (GRAVITY * (north(hp) - h) + north(k) - energy) / CELL,
    )
    h, u, v = (x + STEP * (now * rate + before * old) for x, rate, old in zip((h, u, v), new, rates))
    v = v * given.open
    up, vp = domain.exchange([u, v], boundary="edge")
    return h, u + spread(up), (v + spread(vp)) * given.open, *new


compiled = mpiad.jit(step)
zero = np.zeros_like(given.h)


def run(step, h):
    """Return the state at the end."""
    state = (h, given.u, given.v, zero, zero, zero)
    for now, before in channel.weights(options.steps, options.dtype):
        state = step(state, now, before)
    return state


def gradient(step):
    """Return J and its gradient, as a function of the height at the start."""
    return mpiad.value_and_grad(lambda h: np.sum((run(step, h)[0] - DEPTH) ** 2), objective="sum")


def check():
    """Return J and the gradient's norm, once it is the same compiled."""
    (value, slope), (other, interpreted) = gradient(compiled)(given.h), gradient(step)(given.h)
    close = 1e-10 if options.dtype == numpy.float64 else 1e-3
    numpy.testing.assert_allclose(slope, interpreted, rtol=0, atol=close * np.abs(interpreted).max())
    numpy.testing.assert_allclose(value, other, rtol=close)
    return float(value), timing.total(np.sum(slope.astype(float) ** 2)) ** 0.5


def peaks():
    """Return what a gradient takes, in fields: compiled with all the buffers that stay, which its first replay makes."""
    found = {}
    for name, f in (("jitted", mpiad.jit(step)), ("interpreted", step)):
        both = gradient(f)
        both(given.h)
        found[name] = timing.peak(lambda both=both: both(given.h)) / given.h.nbytes
    return found


with_gradient = {name: gradient(f) for name, f in (("jitted", compiled), ("interpreted", step))}
cases = {
    "forward, jitted": lambda: run(compiled, given.h),
    "forward, interpreted": lambda: run(step, given.h),
    "gradient, jitted": lambda: with_gradient["jitted"](given.h),
    "gradient, interpreted": lambda: with_gradient["interpreted"](given.h),
}
timing.measure("mpiad", options, cases, check, peaks)
