"""mpiad's own side: the 31³ modes that aren't dropped, transformed to 48³ points by padding; compiled steps in `scan`."""

from __future__ import annotations

import autograd.numpy as np
import numpy
import timing
import vortex

import mpiad
from mpiad.fft import DistributedFFT
from mpiad.timestepping import scan

options = vortex.arguments()
modes = 2 * vortex.MODES + 1
fft = DistributedFFT((modes,) * 3, padding=vortex.POINTS / modes)
start = vortex.start()[(slice(None), *fft.owned)].copy()
k = fft.wavenumbers()
square = sum(axis**2 for axis in k)
inverse_square = 1 / numpy.where(square == 0, 1, square)


def coefficients():
    """Return the factors of ETDRK4, by contour integrals around the decay rates times the step (Kassam and Trefethen)."""
    decay = -vortex.VISCOSITY * vortex.STEP * square
    r = decay[..., None] + numpy.exp(1j * numpy.pi * (numpy.arange(16) + 0.5) / 16)  # by symmetry on half of the circle
    e, cube, mean = numpy.exp(r), r**3, lambda f: vortex.STEP * f.real.mean(axis=-1)
    half = mean((numpy.exp(r / 2) - 1) / r)
    first = mean((-4 - r + e * (4 - 3 * r + r**2)) / cube)
    middle = 2 * mean((2 + r + e * (r - 2)) / cube)
    last = mean((-4 - 3 * r - r**2 + e * (4 - r)) / cube)
    return numpy.exp(decay), numpy.exp(decay / 2), half, first, middle, last


whole_decay, half_decay, half, first, middle, last = coefficients()
for table in (whole_decay, half_decay, half, first, middle, last, square, inverse_square):
    table.flags.writeable = False  # a compiled program compares writable arrays in each call


def products(m):
    """Return the modes of -∇·(u uᵀ), without the part with a divergence, which isn't changed by the subtraction of w²."""
    x, y, z = (1j * axis for axis in k)
    u, v, w = fft.backward(m)
    a, b, c, d, e = fft.forward(np.stack([u * u - w * w, v * v - w * w, u * v, u * w, v * w]))
    found = np.stack([-x * a - y * c - z * d, -x * c - y * b - z * e, -x * d - y * e])
    potential = sum(axis * found[i] for i, axis in enumerate(k)) * inverse_square
    return found - np.stack([axis * potential for axis in k])


def step(m, n=None):
    """Return the modes after one step."""
    f = products(m)
    a = half_decay * m + half * f
    g = products(a)
    h = products(half_decay * m + half * g)
    return whole_decay * m + first * f + middle * (g + h) + last * products(half_decay * a + half * (2 * h - f))


compiled = mpiad.jit(step)


def energy(u):
    """Return the mean energy after the steps."""
    u = fft.backward(scan(compiled, fft.forward(u), options.steps))
    return mpiad.mpi_allreduce(np.sum(u**2)) / (2 * vortex.POINTS**3)


gradient = mpiad.value_and_grad(energy)


def check():
    """Return J and the gradient's norm."""
    return vortex.check(*gradient(start))


timing.measure("mpiad", options, {"forward": lambda: energy(start), "gradient": lambda: gradient(start)}, check)
