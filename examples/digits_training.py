"""Data-parallel training on real data: a network learns to read handwritten digits, scikit-learn's 1,797 images.

    mpiexec -n 4 python examples/digits_training.py

A multilayer perceptron, 64 → 128 relu → 10, by AdamW with a falling rate; batches of 128 images of all ranks together, so
that any number of ranks trains alike. A quarter of the images is kept for the test. The accuracy there must be 0.97 at
least.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from sklearn.datasets import load_digits

import mpiad
from mpiad.parallel import AdamW, DistributedDataContainer, DistributedOptimizer

BATCH, HIDDEN, RATE = 128, 128, 1e-2

parser = argparse.ArgumentParser(description="Train a network on scikit-learn's digits.")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--history", type=Path, help="write the losses to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/digits_training.png"))


def digits():
    """Return training and test images in [0, 1] with their labels, divided the same way on all ranks."""
    images, labels = load_digits(return_X_y=True)
    order = numpy.random.default_rng(0).permutation(len(labels))
    images, labels, tested = images[order] / 16, labels[order], len(labels) // 4
    return (images[tested:], labels[tested:]), (images[:tested], labels[:tested])


def initial():
    """Return weights as He et al. draw them, the same on all ranks."""
    rng = numpy.random.default_rng(1)
    layers = ((64, HIDDEN), (HIDDEN, 10))
    return [(rng.normal(size=(n, m)) * numpy.sqrt(2 / n), numpy.zeros(m)) for n, m in layers]


def scores(params, images):
    (w1, b1), (w2, b2) = params
    return np.maximum(images @ w1 + b1, 0) @ w2 + b2


def loss(params, images, labels):
    """Return the mean cross entropy."""
    found = scores(params, images)
    # Less the highest, so that no exponential overflows: a constant, which the result doesn't depend on.
    found = found - np.max(mpiad.stop_gradient(found), axis=1, keepdims=True)
    return np.mean(np.log(np.sum(np.exp(found), axis=1)) - found[np.arange(len(labels)), labels])


def train(params, loss, scores, data, test, epochs):
    """Return trained parameters, the loss of each step and the accuracy after each epoch."""
    steps = epochs * len(data)
    optimizer = DistributedOptimizer(AdamW(lambda k: RATE / 2 * (1 + numpy.cos(numpy.pi * k / steps))))
    state, losses, accuracies = optimizer.setup(params), [], []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        for batch in data:
            state, params, mean = optimizer.step(state, params, loss, *batch)
            losses.append(mean)
        accuracies.append(numpy.mean(scores(params, test[0]).argmax(axis=1) == test[1]))
    return params, losses, accuracies


def draw_picture(path, losses, accuracies, params, test):
    """Write the learning curve, and images of the test that are read wrongly."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.2, 1))
    axes = left.subplots()
    axes.semilogy(numpy.arange(len(losses)) * len(accuracies) / len(losses), losses, linewidth=0.6)
    axes.set(xlabel="epoch", ylabel="mean loss of the batch")
    other = axes.twinx()
    other.plot(numpy.arange(1, len(accuracies) + 1), accuracies, "C1")
    other.set(ylabel="test accuracy", ylim=(0.8, 1))
    read = scores(params, test[0]).argmax(axis=1)
    wrong = numpy.flatnonzero(read != test[1])[:8]
    right.suptitle(f"{numpy.sum(read != test[1])} of {len(read)} are read wrongly")
    panels = right.subplots(2, 4).ravel()
    for panel in panels:
        panel.axis("off")
    for k, panel in zip(wrong, panels):
        panel.imshow(test[0][k].reshape(8, 8), cmap="gray_r")
        panel.set(title=f"{test[1][k]} as {read[k]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    training, test = digits()
    data = DistributedDataContainer(training, batch_size=BATCH, shuffle=True, rng=2)
    params, losses, accuracies = train(initial(), loss, scores, data, test, options.epochs)
    if mpiad.mpi_rank() != 0:
        return
    print(f"{len(losses)} steps on {mpiad.mpi_size()} rank(s): loss {losses[0]:.4f} -> {losses[-1]:.6f}")
    print(f"test accuracy {accuracies[-1]:.4f}")
    assert options.epochs < 40 or accuracies[-1] >= 0.97, accuracies
    if options.history:
        numpy.savetxt(options.history, losses, fmt="%.17e")
    try:
        draw_picture(options.picture, losses, accuracies, params, test)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
