"""Data-parallel training in one page: a small network learns y = x² from the samples of all ranks.

    mpiexec -n 4 python examples/regression_quickstart.py

Dense(1, 2, tanh), Dense(2, 1); 16 samples on each rank; Adam with rate 1e-3; 100 epochs, each one step with all samples.
At the end the whole data set is trained on again in one process, by the formulas of Adam's paper, and must give the same.
"""

import autograd.numpy as np
import numpy
from autograd import grad

import mpiad
from mpiad.parallel import Adam, DistributedDataContainer, DistributedOptimizer, synchronize

SAMPLES_PER_RANK, EPOCHS, RATE = 16, 100, 1e-3


def initial(seed):
    """Return weights as Glorot and Bengio draw them."""
    rng = numpy.random.default_rng(seed)
    return {
        "w1": rng.uniform(-1, 1, (1, 2)) * numpy.sqrt(6 / 3), "b1": numpy.zeros(2),
        "w2": rng.uniform(-1, 1, (2, 1)) * numpy.sqrt(6 / 3), "b2": numpy.zeros(1),
    }  # fmt: skip


def loss(p, x, y):
    hidden = np.tanh(x[:, None] @ p["w1"] + p["b1"])
    return np.mean(((hidden @ p["w2"] + p["b2"])[:, 0] - y) ** 2)


def train(data):
    """Train on this rank's part of the data, with the others; return the parameters and the losses."""
    params = synchronize(initial(seed=mpiad.mpi_rank()))  # the root's
    optimizer = DistributedOptimizer(Adam(RATE))
    state, losses = optimizer.setup(params), []
    for _ in range(EPOCHS):
        for x, y in data:
            state, params, mean = optimizer.step(state, params, loss, x, y)
            losses.append(mean)
    return params, losses


def in_one_process(x, y):
    """Return the parameters that one process finds with all samples."""
    params = initial(seed=0)
    first = second = dict.fromkeys(params, 0.0)
    for k in range(1, EPOCHS + 1):
        g = grad(loss)(params, x, y)
        first = {name: 0.9 * first[name] + 0.1 * g[name] for name in g}
        second = {name: 0.999 * second[name] + 0.001 * g[name] ** 2 for name in g}
        for name in g:
            root = numpy.sqrt(second[name] / (1 - 0.999**k)) + 1e-8
            params[name] = params[name] - RATE * first[name] / (1 - 0.9**k) / root
    return params


def main():
    x = numpy.random.default_rng(1).uniform(-1, 1, SAMPLES_PER_RANK * mpiad.mpi_size())
    params, losses = train(DistributedDataContainer((x, x**2), batch_size=len(x)))
    exact = in_one_process(x, x**2)
    difference = max(numpy.abs(params[name] - exact[name]).max() for name in exact)
    assert difference < 1e-12, difference
    assert losses[-1] < losses[0], losses
    mpiad.mpi_print(f"rank {mpiad.mpi_rank()}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
