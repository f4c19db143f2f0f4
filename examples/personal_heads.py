"""Personalised federated learning: a trunk that all clients share, and a head of each client's own.

    mpiexec -n 4 python examples/personal_heads.py

Sixteen clients have 84 images of handwritten digits each (scikit-learn's), and each client names the ten digits in its own
way, by a permutation that the others don't know. A network, 64 → 64 relu → 10, is trained in three ways: each client
alone, one network for all, and a shared trunk with a head for each client (Arivazhagan et al., "Federated Learning with
Personalization Layers", 2019). The clients are divided among the ranks; heads never leave their rank. The mean accuracy on
449 other images must be 0.9 at least with own heads, and 0.02 higher than alone; one head for all can't be right.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from sklearn.datasets import load_digits

import mpiad
from mpiad.parallel import AdamW, DistributedOptimizer, value

CLIENTS, IMAGES, BATCH, HIDDEN, RATE = 16, 84, 21, 64, 2e-2

parser = argparse.ArgumentParser(description="Train a shared trunk and a head of each client's own.")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--history", type=Path, help="write the accuracies to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/personal_heads.png"))


def digits(clients):
    """Return the images (n, 84, 64) and names of digits of this rank's clients, and the test images with their names."""
    images, labels = load_digits(return_X_y=True)
    order = numpy.random.default_rng(0).permutation(len(labels))
    images, labels, tested = images[order] / 16, labels[order], len(labels) // 4
    names = numpy.array([numpy.random.default_rng([1, client]).permutation(10) for client in range(CLIENTS)])[clients]
    parts = [slice(tested + client * IMAGES, tested + (client + 1) * IMAGES) for client in clients]
    mine = numpy.array([images[part] for part in parts]).reshape(-1, IMAGES, 64)
    own_names = numpy.array([name[labels[part]] for name, part in zip(names, parts)], int).reshape(-1, IMAGES)
    return mine, own_names, images[:tested], names[:, labels[:tested]]


def layer(seeds, n, m):
    """Return a layer for each seed, stacked along the first axis, with weights as He et al. draw them."""
    weights = [numpy.random.default_rng([2, seed, n]).normal(size=(n, m)) * numpy.sqrt(2 / n) for seed in seeds]
    return numpy.array(weights).reshape(-1, n, m), numpy.zeros((len(weights), 1, m))


def scores(params, images):
    (w1, b1), (w2, b2) = params["trunk"], params["head"]
    return np.matmul(np.maximum(np.matmul(images, w1) + b1, 0), w2) + b2


def loss(params, images, names):
    """Return the mean cross entropy over this rank's clients, images (n, B, 64), which have equal numbers of images."""
    found = scores(params, images)
    found = found - np.max(mpiad.stop_gradient(found), axis=-1, keepdims=True)
    right = numpy.eye(10)[names]
    return np.mean(np.log(np.sum(np.exp(found), axis=-1)) - np.sum(found * right, axis=-1))


def accuracy(params, names, images):
    return numpy.mean(scores(params, images).argmax(axis=-1) == names)


def train(params, own, data, test, epochs):
    """Return trained parameters, and the mean accuracy of all clients after each epoch."""
    images, names = data
    steps = epochs * (IMAGES // BATCH)
    rule = AdamW(lambda k: RATE / 2 * (1 + numpy.cos(numpy.pi * k / steps)))
    optimizer = DistributedOptimizer(rule, own=own)
    state, accuracies = optimizer.setup(params), []
    for epoch in range(epochs):
        order = numpy.random.default_rng([3, epoch]).permutation(IMAGES)
        for k in range(0, IMAGES, BATCH):
            batch = order[k : k + BATCH]
            # The first axis is that of the clients, so a rank's weight in the mean is the number of its clients.
            state, params, _ = optimizer.step(state, params, loss, images[:, batch], names[:, batch])
        accuracies.append(value(accuracy)(params, test[1], test[0]))
    return params, accuracies


def draw_picture(path, curves, images, read):
    """Write the accuracies, and some test images with the names that the clients give to them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1))
    axes = left.subplots()
    for name, curve in curves.items():
        axes.plot(numpy.arange(1, len(curve) + 1), curve, label=name)
    axes.set(xlabel="epoch", ylabel="mean test accuracy of the clients", ylim=(0, 1))
    axes.legend(loc="center right")
    right.suptitle("the names that eight of the clients give to an image")
    panels = right.subplots(2, 4).ravel()
    for panel, image, names in zip(panels, images, read.T):
        panel.imshow(image.reshape(8, 8), cmap="gray_r")
        panel.set_title(" ".join(map(str, names[:8])), fontsize=9)
        panel.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    clients = numpy.array_split(numpy.arange(CLIENTS), mpiad.mpi_size())[mpiad.mpi_rank()]
    images, names, test_images, test_names = digits(clients)
    ways = {
        "own heads": ({"trunk": layer([0], 64, HIDDEN), "head": layer(clients, HIDDEN, 10)}, lambda path: "head" in path),
        "alone": ({"trunk": layer(clients, 64, HIDDEN), "head": layer(clients, HIDDEN, 10)}, lambda path: True),
        "one head": ({"trunk": layer([0], 64, HIDDEN), "head": layer([0], HIDDEN, 10)}, None),
    }
    trained, curves = {}, {}
    for way, (params, own) in ways.items():
        trained[way], curves[way] = train(params, own, (images, names), (test_images, test_names), options.epochs)
    read = mpiad.mpi_allgather(scores(trained["own heads"], test_images[::50][:8]).argmax(axis=-1), axis=0)
    if mpiad.mpi_rank() != 0:
        return
    print(f"{CLIENTS} clients on {mpiad.mpi_size()} rank(s), accuracy on {len(test_images)} other images:")
    for way, curve in curves.items():
        print(f"{way}: {curve[-1]:.4f}")
    best = curves["own heads"][-1]
    assert options.epochs < 30 or (best >= 0.9 and best > curves["alone"][-1] + 0.02 and curves["one head"][-1] < 0.5)
    if options.history:
        numpy.savetxt(options.history, list(curves.values()), fmt="%.17e")
    try:
        draw_picture(options.picture, curves, test_images[::50][:8], read)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
