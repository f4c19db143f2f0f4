"""mpiad's own side: the likelihood as a loop over the steps, compiled by `jit`."""

from __future__ import annotations

import time

import autograd.numpy as np
import epidemic
import numpy

import mpiad
from mpiad.parallel import Adam
from mpiad.vi import VI, FullRankGaussian

options = epidemic.arguments()
y = epidemic.measured()


@mpiad.jit
def loss(theta, y):
    """Return the negative log likelihood, up to a constant."""
    beta, gamma = np.exp(theta[0]), np.exp(theta[1])
    s, i, found = epidemic.SUSCEPTIBLE, epidemic.INFECTED, []
    for k in range(epidemic.STEPS):
        new, ended = epidemic.STEP * beta * s * i, epidemic.STEP * gamma * i
        s, i = s - new, i + new - ended
        if k % epidemic.EVERY == 0:
            found.append(i)
    return 0.5 * np.sum((np.stack(found) - y) ** 2) / epidemic.NOISE**2


begin = time.perf_counter()
posterior = FullRankGaussian(2, epidemic.START, epidemic.WIDTH)
optimizer = Adam(lambda k: epidemic.rate(k, options.epochs))
prior = [("norm", center, 1.0) for center in epidemic.START]
inference = VI(loss, posterior, prior, optimizer, 1.0, options.draws, divergence="path", rng=0)
params = inference.run(y, options.epochs).params
mean, covariance = posterior.moments(params)
if mpiad.mpi_rank() == 0:
    epidemic.show(time.perf_counter() - begin, mean, numpy.sqrt(numpy.diag(covariance)))
