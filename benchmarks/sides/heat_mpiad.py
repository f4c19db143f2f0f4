"""mpiad's side: a loop over a compiled step, with its messages and on the same block without them; NumPy with mpi4py."""

from __future__ import annotations

import autograd.numpy as np
import heat
import numpy
import timing
from heat import AFTER, BEFORE, COMM, DIFFUSION

import mpiad
from mpiad.timestepping import scan

options = heat.arguments()
start = heat.start(options.cells)
start.flags.writeable = False  # what can't change isn't compared at each call of a compiled function


def after_step(above, u, below):
    """Return this rank's rows one step later, from those of the neighbors."""
    f = np.pad(np.concatenate([above[None], u, below[None]]), ((0, 0), (1, 1)))
    return u + DIFFUSION * (f[2:, 1:-1] + f[:-2, 1:-1] + f[1:-1, 2:] + f[1:-1, :-2] - 4.0 * u)


def exchanged(u):
    """Return the neighbors' rows, zero beyond the edges."""
    above = mpiad.mpi_exchange(u[-1], dest=AFTER, source=BEFORE)
    below = mpiad.mpi_exchange(u[0], dest=BEFORE, source=AFTER)
    return (0.0 * u[0] if BEFORE < 0 else above), (0.0 * u[0] if AFTER < 0 else below)


@mpiad.jit
def step(u):
    above, below = exchanged(u)
    return after_step(above, u, below)


@mpiad.jit
def step_alone(u):
    return after_step(0.0 * u[0], u, 0.0 * u[0])


def term(step):
    """Return this rank's term of J as a function of the initial values."""
    return lambda u: np.sum(np.tanh(scan(lambda u, k: step(u), u, options.steps)) ** 2)


def plain():
    """Run forward with NumPy and mpi4py."""
    rows, cells = start.shape
    f, new = numpy.zeros((rows + 2, cells + 2)), start.copy()
    for _ in range(options.steps):
        f[1:-1, 1:-1] = new
        COMM.Sendrecv(new[-1], AFTER, recvbuf=f[0, 1:-1], source=BEFORE)
        COMM.Sendrecv(new[0], BEFORE, recvbuf=f[-1, 1:-1], source=AFTER)
        new = new + DIFFUSION * (f[2:, 1:-1] + f[:-2, 1:-1] + f[1:-1, 2:] + f[1:-1, :-2] - 4.0 * new)
    return numpy.sum(numpy.tanh(new) ** 2)


def check():
    """Return J and the gradient's norm, once J is that of NumPy."""
    value, slope = gradient(start)
    numpy.testing.assert_allclose(timing.total(plain()), value, rtol=1e-12)
    return float(value), timing.total(np.sum(slope**2)) ** 0.5


gradient = mpiad.value_and_grad(term(step), objective="sum")
gradient_alone = mpiad.value_and_grad(term(step_alone), objective="sum")
cases = {
    "forward": lambda: term(step)(start),
    "gradient": lambda: gradient(start),
    "forward without messages": lambda: term(step_alone)(start),
    "gradient without messages": lambda: gradient_alone(start),
    "NumPy and mpi4py": plain,
}
timing.measure("mpiad", options, cases, check)
