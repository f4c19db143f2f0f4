"""A transformer's block on real data: attention between the patches of handwritten digits, scikit-learn's 1,797 images.

    mpiexec -n 4 python examples/attention_digits.py

Each image of 8 x 8 pixels is 16 patches of 2 x 2. The patches are embedded with their positions, a block of attention with
four heads and a perceptron follows, and the mean over the patches is classified. The loss is compiled, and its contractions
are `einsum`s. AdamW with a falling rate, data-parallel with batches of 128 images of all ranks together, so that any number
of ranks trains alike. A quarter of the images is kept for the test. The accuracy there must be 0.97 at least.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from digits_training import BATCH, digits, train

import mpiad
from mpiad.parallel import DistributedDataContainer

PATCHES, PIXELS, WIDTH, HEADS, HIDDEN = 16, 4, 32, 4, 64

parser = argparse.ArgumentParser(description="Train a block of attention on scikit-learn's digits.")
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--history", type=Path, help="write the losses to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/attention_digits.png"))


def in_patches(images):
    """Return images of shape (n, 64) as patches of shape (n, 16, 4)."""
    return images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, PATCHES, PIXELS)


def initial():
    """Return weights, the same on all ranks."""
    rng, heads = numpy.random.default_rng(1), (WIDTH, HEADS, WIDTH // HEADS)
    shapes = {
        "embedding": (PIXELS, WIDTH), "position": (PATCHES, WIDTH), "query": heads, "key": heads, "value": heads,
        "out": (WIDTH, WIDTH), "first": (WIDTH, HIDDEN), "second": (HIDDEN, WIDTH), "last": (WIDTH, 10),
    }  # fmt: skip
    weights = {name: rng.normal(size=shape) / numpy.sqrt(shape[0]) for name, shape in shapes.items()}
    return weights | {"scales": numpy.ones((3, WIDTH)), "offset": numpy.zeros(10)}


def normalized(x, scale):
    """Divide by the root of the mean square over the features."""
    return scale * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def softmax(scores):
    weights = np.exp(scores - np.max(mpiad.stop_gradient(scores), axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def attention(params, x):
    """Return the weights of all patches for each patch, of shape (images, heads, patches, patches), and the values."""
    query, key, value = (np.einsum("npi,ihk->nphk", x, params[name]) for name in ("query", "key", "value"))
    return softmax(np.einsum("nphk,nqhk->nhpq", query, key) / numpy.sqrt(WIDTH // HEADS)), value


def scores(params, patches):
    x = patches @ params["embedding"] + params["position"]
    weights, value = attention(params, normalized(x, params["scales"][0]))
    mixed = np.reshape(np.einsum("nhpq,nqhk->nphk", weights, value), x.shape)
    x = x + mixed @ params["out"]
    x = x + np.maximum(normalized(x, params["scales"][1]) @ params["first"], 0) @ params["second"]
    return np.mean(normalized(x, params["scales"][2]), axis=1) @ params["last"] + params["offset"]


@mpiad.jit
def loss(params, patches, chosen):
    """Return the mean cross entropy; `chosen` has a one for each image's label."""
    return -np.mean(np.sum(chosen * np.log(softmax(scores(params, patches)) + 1e-30), axis=1))


def draw_picture(path, losses, accuracies, params, test):
    """Write the learning curve, and images with the attention that each patch receives on average."""
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
    patches = test[0][[list(test[1]).index(digit) for digit in (0, 3, 4, 7)]]
    x = normalized(patches @ params["embedding"] + params["position"], params["scales"][0])
    received = attention(params, x)[0].mean(axis=(1, 2)).reshape(-1, 4, 4)
    right.suptitle("images, and the attention that each patch receives")
    images = patches.reshape(-1, 4, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 8, 8)
    for panels, shown, colors in zip(right.subplots(2, 4), (images, received), ("gray_r", "viridis")):
        for panel, image in zip(panels, shown):
            panel.imshow(image, cmap=colors)
            panel.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    training, test = ((in_patches(images), labels) for images, labels in digits())
    arrays = training[0], numpy.eye(10)[training[1]]
    data = DistributedDataContainer(arrays, batch_size=BATCH, shuffle=True, rng=2)
    params, losses, accuracies = train(initial(), loss, scores, data, test, options.epochs)
    if mpiad.mpi_rank() != 0:
        return
    print(f"{len(losses)} steps on {mpiad.mpi_size()} rank(s): loss {losses[0]:.4f} -> {losses[-1]:.6f}")
    print(f"test accuracy {accuracies[-1]:.4f}")
    assert options.epochs < 30 or accuracies[-1] >= 0.97, accuracies
    if options.history:
        numpy.savetxt(options.history, losses, fmt="%.17e")
    try:
        draw_picture(options.picture, losses, accuracies, params, test)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
