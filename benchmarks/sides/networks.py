"""Value and gradient of one step of small networks: one program for mpiad and JAX, one for PyTorch; one thread.

    python benchmarks/sides/networks.py {mpiad,jitted,jax,torch} CASE {float32,float64} [--budget 1]

Prints a line of JSON: the least milliseconds of a step, the value, the norm of the gradient, and by how many MB the process
has grown in its largest step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import numpy

BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 8, 64, 128, 4, 512
IMAGES, SIDE, CHANNELS, FILTERS, REACH = 32, 16, 8, 16, 3
ROWS, LAYERS = 256, (512, 512, 512, 10)
np: Any = None  # autograd.numpy, jax.numpy or torch


def normalized(x: Any, scale: Any, shift: Any) -> Any:
    if np.__name__ == "torch":
        return np.nn.functional.layer_norm(x, (x.shape[-1],), scale, shift)
    centered = x - np.mean(x, axis=-1, keepdims=True)
    return scale * centered / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + 1e-5) + shift


def softmax(scores: Any) -> Any:
    if np.__name__ == "torch":
        return np.softmax(scores, -1)
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def rectified(x: Any) -> Any:
    return np.relu(x) if np.__name__ == "torch" else np.maximum(x, 0)


def attention_by_einsum(p: Any, x: Any) -> Any:
    q, k, v = (np.einsum("btd,dhk->bthk", x, p[name]) for name in ("query", "key", "value"))
    weights = softmax(np.einsum("bqhk,bphk->bhqp", q, k) / math.sqrt(q.shape[-1]))
    return np.einsum("bqhk,hkd->bqd", np.einsum("bhqp,bphk->bqhk", weights, v), p["out"])


def attention_by_matmul(p: Any, x: Any) -> Any:
    def by_head(w: Any) -> Any:
        return np.swapaxes(np.reshape(x @ np.reshape(w, (WIDTH, WIDTH)), (*x.shape[:2], HEADS, -1)), 1, 2)

    q, k, v = (by_head(p[name]) for name in ("query", "key", "value"))
    weights = softmax(q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1]))
    return np.reshape(np.swapaxes(weights @ v, 1, 2), x.shape) @ np.reshape(p["out"], (WIDTH, WIDTH))


def block(p: Any, x: Any, attention: Callable[..., Any], product: Callable[..., Any]) -> Any:
    x = x + attention(p, normalized(x, p["scale1"], p["shift1"]))
    hidden = rectified(product(normalized(x, p["scale2"], p["shift2"]), p["first"]) + p["offset"])
    return np.mean((x + product(hidden, p["second"])) ** 2)


def block_by_einsum(p: Any, x: Any) -> Any:
    return block(p, x, attention_by_einsum, lambda x, w: np.einsum("btd,df->btf", x, w))


def block_by_matmul(p: Any, x: Any) -> Any:
    return block(p, x, attention_by_matmul, lambda x, w: x @ w)


def convolution(p: Any, images: Any) -> Any:
    """A convolution as one product with the neighborhoods of all pixels (im2col), a nonlinearity, and another one."""
    for weights in (p["first"], p["second"]):
        if np.__name__ == "torch":
            images = np.nn.functional.conv2d(images, weights)
        else:
            rows, columns = (n - REACH + 1 for n in images.shape[1:3])
            near = [images[:, i : i + rows, j : j + columns] for i in range(REACH) for j in range(REACH)]
            images = np.concatenate(near, axis=-1) @ weights
        images = rectified(images)
    return np.mean(images**2)


def perceptron(p: Any, x: Any) -> Any:
    for weights, offset in p[:-1]:
        x = np.tanh(x @ weights + offset)
    return np.mean((x @ p[-1][0] + p[-1][1]) ** 2)


def projection(p: Any, x: Any) -> Any:
    return np.sum((x @ p) ** 2)


def flattened(p: Any, x: Any) -> Any:
    return np.sum((np.reshape(x, (-1, x.shape[-1])) @ p) ** 2)


def given(case: str, rng: numpy.random.Generator) -> tuple[Any, Any]:
    """Return parameters and data of a case."""
    draw = rng.normal
    if case.startswith("block"):
        heads = (WIDTH, HEADS, WIDTH // HEADS)
        shapes = {
            "query": heads, "key": heads, "value": heads, "out": (*heads[1:], WIDTH), "first": (WIDTH, HIDDEN),
            "second": (HIDDEN, WIDTH), "offset": HIDDEN, "shift1": WIDTH, "shift2": WIDTH, "scale1": WIDTH, "scale2": WIDTH,
        }  # fmt: skip
        return {name: draw(size=shape) / 8 for name, shape in shapes.items()}, draw(size=(BATCH, TOKENS, WIDTH))
    if case == "convolution":
        patch = REACH * REACH * CHANNELS, REACH * REACH * FILTERS
        return {"first": draw(size=(patch[0], FILTERS)) / 8, "second": draw(size=(patch[1], FILTERS)) / 8}, draw(
            size=(IMAGES, SIDE, SIDE, CHANNELS)
        )
    if case == "perceptron":
        sizes = zip(LAYERS, LAYERS[1:])
        return [(draw(size=(n, m)) / math.sqrt(n), draw(size=m)) for n, m in sizes], draw(size=(ROWS, LAYERS[0]))
    return draw(size=(256, 1024)) / 16, draw(size=(64, 64, 256))


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "block, einsum": block_by_einsum,
    "block, matmul": block_by_matmul,
    "convolution": convolution,
    "perceptron": perceptron,
    "projection": projection,
    "projection, flattened": flattened,
}


def mapped(x: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(x, dict):
        return {name: mapped(part, leaf) for name, part in x.items()}
    return type(x)([mapped(part, leaf) for part in x]) if isinstance(x, (list, tuple)) else leaf(x)


def leaves(x: Any) -> list[Any]:
    found: list[Any] = []
    mapped(x, found.append)
    return found


def step_of(side: str, loss: Callable[[Any, Any], Any], p: Any, x: Any) -> Callable[[], tuple[float, Any]]:
    """Return a function that computes the value, and the gradient as arrays of NumPy's."""
    global np
    if side == "torch":
        import torch as np

        np.set_num_threads(1)
        if loss is convolution:  # channels first
            by_filter = (weights.reshape(REACH, REACH, -1, FILTERS).transpose(3, 2, 0, 1) for weights in p.values())
            p, x = dict(zip(p, by_filter)), x.transpose(0, 3, 1, 2)
        p, x = (mapped(part, lambda y: np.tensor(numpy.ascontiguousarray(y))) for part in (p, x))
        mapped(p, lambda y: y.requires_grad_())

        def step() -> tuple[float, Any]:
            value = loss(p, x)
            return value.item(), [g.numpy() for g in np.autograd.grad(value, leaves(p))]

        return step
    if side == "jax":
        import jax
        import jax.numpy as np

        jax.config.update("jax_enable_x64", True)
        both = jax.jit(jax.value_and_grad(loss))
        p, x = mapped(p, np.asarray), np.asarray(x)
        return lambda: jax.block_until_ready(both(p, x))
    import autograd.numpy as np

    import mpiad

    both = mpiad.value_and_grad(mpiad.jit(loss) if side == "jitted" else loss)
    return lambda: both(p, x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("mpiad", "jitted", "jax", "torch"))
    parser.add_argument("case", choices=CASES)
    parser.add_argument("dtype", choices=("float32", "float64"))
    parser.add_argument("--budget", type=float, default=1.0, help="seconds")
    options = parser.parse_args()
    p, x = mapped(given(options.case, numpy.random.default_rng(0)), lambda y: y.astype(options.dtype))
    step = step_of(options.side, CASES[options.case], p, x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        value, gradient = step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    norm = math.sqrt(sum(float(numpy.sum(numpy.asarray(g, float) ** 2)) for g in leaves(gradient)))
    best, end = math.inf, time.perf_counter() + options.budget
    while time.perf_counter() < end:
        start = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - start)
    print(json.dumps({"ms": 1e3 * best, "value": float(value), "norm": norm, "MB": grown}))


if __name__ == "__main__":
    main()
