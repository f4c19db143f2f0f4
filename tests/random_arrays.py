"""Random programs of arrays: slices, pads, rolls, joins, reductions, whole calls of NumPy, and some with messages."""

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np

import mpiad

MOST_ENTRIES = 120


def _opaque(x: Any) -> Any:
    return anp.cumsum(x, axis=0) if anp.ndim(x) else x * 1.0


def _written(x: Any, y: Any, key: Any) -> Any:
    made = x * 1.0
    made[key] = y
    made[key] += 0.5
    return made


OPERATIONS: dict[str, Callable[..., Any]] = {
    "sin": anp.sin,
    "square": lambda x: anp.sin(x) ** 2 / (2 + x * x),
    "add": lambda x, y: x + 0.5 * y,
    "times": lambda x, y: anp.sin(x * y),
    "larger": anp.maximum,
    "where": lambda x, y: anp.where(x > y, x, 2 * y),
    "take": lambda x, key: x[key],
    "pad": lambda x, widths: anp.pad(x, widths, "constant"),
    "roll": lambda x, by, axis: anp.roll(x, by, axis),
    "join": lambda x, y, axis: anp.concatenate([x, y, x], axis=axis),
    "stack": lambda x, y, axis: anp.stack([x, y], axis=axis),
    "turn": anp.transpose,
    "reshape": anp.reshape,
    "sum": lambda x, axis, keep: anp.sum(x, axis=axis, keepdims=keep),
    "max": lambda x, axis, keep: anp.max(x, axis=axis, keepdims=keep),
    "mean": lambda x, axis, keep: anp.mean(x, axis=axis, keepdims=keep),
    "opaque": _opaque,
    "send": lambda x: mpiad.mpi_allreduce(x),
    "write": _written,
}


def random_program(seed: int, writes: bool = False) -> tuple[Callable, list[np.ndarray]]:
    """Return a function and its arguments; with `writes`, entries are set in place, which has no derivative."""
    rng = np.random.default_rng(seed)
    ndim = int(rng.integers(1, 4))
    shape = tuple(rng.integers(1, 7 if ndim < 3 else 5, ndim).tolist())
    args = [rng.standard_normal(shape) for _ in range(int(rng.integers(1, 3)))]
    steps: list[tuple] = []
    arrays: list[Any] = list(args)
    names = [name for name in OPERATIONS if name != "write"] + ["write", "write", "write"] * writes
    while len(steps) < rng.integers(3, 14):
        drawn = _drawn(rng, str(rng.choice(names)), arrays)
        if drawn is None:
            continue
        name, places, rest = drawn
        made = OPERATIONS[name](*[arrays[k] for k in places], *rest)
        if np.size(made) > MOST_ENTRIES:
            continue
        steps.append(drawn)
        arrays.append(made)
    outputs = [len(arrays) - 1, *rng.choice(len(arrays), int(rng.integers(0, 3))).tolist()]

    def run(*args: Any) -> Any:
        found = list(args)
        for name, places, rest in steps:
            found.append(OPERATIONS[name](*[found[k] for k in places], *rest))
        return [found[k] for k in outputs]

    return run, args


def _drawn(rng: np.random.Generator, name: str, arrays: list) -> tuple[str, list[int], list[Any]] | None:
    """Return an operation with the places of its arrays and its other arguments; None where they don't fit."""
    k = int(rng.integers(max(0, len(arrays) - 4), len(arrays)))
    x = arrays[k]
    shape, ndim = np.shape(x), np.ndim(x)
    axis = int(rng.integers(ndim)) if ndim else None
    if name in ("sin", "square", "opaque", "send"):
        return name, [k], []
    if name in ("add", "times", "larger", "where"):
        fitting = [j for j, y in enumerate(arrays) if _broadcasts(shape, np.shape(y))]
        return name, [k, int(rng.choice(fitting))], []
    if not ndim:
        return None
    if name == "write":
        key = _key(rng, shape, steps=False)
        part = np.shape(x[key])
        fitting = [j for j, y in enumerate(arrays) if _broadcasts(np.shape(y), part) == part]
        return (name, [k, int(rng.choice(fitting))], [key]) if fitting else None
    if name == "take":
        return name, [k], [_key(rng, shape)]
    if name == "pad":
        return name, [k], [tuple([tuple(rng.integers(0, 3, 2).tolist()) for _ in shape])]
    if name == "roll":
        return name, [k], [int(rng.integers(-3, 4)), axis]
    if name in ("join", "stack"):
        like = [j for j, y in enumerate(arrays) if np.ndim(y) == ndim]
        if name == "join":
            like = [j for j in like if all(a == b for i, (a, b) in enumerate(zip(shape, np.shape(arrays[j]))) if i != axis)]
        else:
            like = [j for j in like if np.shape(arrays[j]) == shape]
        return (name, [k, int(rng.choice(like))], [axis]) if ndim < 3 or name == "join" else None
    if name == "turn":
        return name, [k], [tuple(rng.permutation(ndim).tolist())]
    if name == "reshape":
        size = int(np.prod(shape))
        first = int(rng.choice([d for d in range(1, size + 1) if size % d == 0] or [1]))
        return name, [k], [(first, size // first)]
    if not shape[axis]:
        return None
    some = axis if rng.random() < 0.7 else None
    return name, [k], [some, bool(rng.integers(2))]


def _key(rng: np.random.Generator, shape: tuple[int, ...], steps: bool = True) -> tuple:
    key = []
    for n in shape:
        kind = rng.integers(4) if n else 1
        if kind == 0:
            key.append(int(rng.integers(-n, n)))
        elif kind == 1:
            key.append(slice(None))
        else:
            start = int(rng.integers(0, n))
            stop = int(rng.integers(start, n + 1))
            step = int(rng.choice([-2, -1, 2])) if kind == 3 and steps else 1
            key.append(slice(start, stop, step) if step > 0 else slice(None, None, step))
    return tuple(key)


def _broadcasts(a: tuple, b: tuple) -> Any:
    try:
        return np.broadcast_shapes(a, b) or True
    except ValueError:
        return None
