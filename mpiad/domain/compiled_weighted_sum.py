"""The arithmetic of a stencil compiled: one loop adds, multiplies and completes sums, in one pass through memory.

The bits are those of `weighted_sum`: the same operations in the same order. How many offsets share each weight decides the
text of a loop; where they lie, and in which box, are numbers in memory, so that blocks of all shapes share a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from mpiad._typing import LocalArray, Shape
from mpiad.compiling.cache import kernel_of
from mpiad.domain.weighted_sum import Box, Finish, Terms

__all__ = ["compiled_weighted_sum", "is_compiled"]

# Cells of a block below which the kernel is loaded in more time than it saves.
_LARGE = 1 << 13
_MOST_TERMS = 32  # more addresses than that are too many for the processor's registers
_AXES = 3
_DTYPES = {np.dtype(np.float64): "float64", np.dtype(np.float32): "float32"}


def is_compiled(out: LocalArray, terms: Terms, cells: Shape) -> bool:
    """Tell whether the sums of such a block are compiled."""
    return (
        type(out) is np.ndarray and out.dtype in _DTYPES and len(cells) <= _AXES and math.prod(cells) >= _LARGE
        and 0 < sum(len(offsets) for _, offsets in terms) <= _MOST_TERMS and find_spec("llvmlite") is not None
    )  # fmt: skip


def compiled_weighted_sum(
    source: LocalArray, terms: Terms, out: LocalArray, box: Box, finish: Finish | None = None
) -> None:
    """Write the weighted sums of a box of cells; see `weighted_sum`."""
    ndim, bounds = len(box), tuple([(cells.start, cells.stop) for cells in box])
    given = [] if finish is None else [array for array in finish if array is not None]
    shapes = source.shape[source.ndim - ndim :], out.shape[out.ndim - ndim :]
    numbers, weights = _tables(terms, *shapes, bounds, out.dtype)
    kernel = _kernel(tuple([len(offsets) for _, offsets in terms]), finish and finish.form(), _DTYPES[out.dtype])
    for place in np.ndindex(out.shape[: out.ndim - ndim]):
        arrays = [numbers, weights, source[place], out[place], *[np.ascontiguousarray(array[place]) for array in given]]
        words = [0, 0]
        for array in arrays:
            words += [array.__array_interface__["data"][0], array.size]
        block = np.array(words, np.int64)
        kernel(block.__array_interface__["data"][0])


@functools.lru_cache
def _tables(
    terms: Terms, padded: Shape, cells: Shape, bounds: tuple[tuple[int, int], ...], dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's numbers and weights; most blocks have a few boxes, which come in every step."""
    there, here = (_steps(shape) for shape in (padded, cells))
    axes = slice(_AXES - len(bounds), None)
    first = [sum(start * step for (start, _), step in zip(bounds, steps[axes])) for steps in (there, here)]
    shifts = [sum(o * step for o, step in zip(offset, there[axes])) for _, offsets in terms for offset in offsets]
    counts = [1] * (_AXES - len(bounds)) + [stop - start for start, stop in bounds]
    numbers = np.array([*counts, first[0], *there[:2], first[1], *here[:2], *shifts], np.int64)
    return numbers, np.array([weight for weight, _ in terms], dtype)


def _steps(shape: Shape) -> list[int]:
    """Return by how many entries neighbours along each of three axes are apart."""
    whole = (1,) * (_AXES - len(shape)) + shape
    return [math.prod(whole[axis + 1 :]) for axis in range(_AXES)]


@functools.cache
def _kernel(groups: tuple[int, ...], form: tuple[str, str] | None, dtype: str) -> Callable[[int], None]:
    """Return the kernel for so many offsets of each weight."""
    names, completed = form or ("", "total")
    arrays = ["source", "out", *names.split()]
    views, products, k = [], [], 0
    for number, group in enumerate(groups):
        pieces = range(k, k + group)
        views += [
            f"p{piece} = source[there + numbers[{9 + piece}] : there + numbers[{9 + piece}] + cells]" for piece in pieces
        ]
        products.append(f"({' + '.join(f'p{piece}[i]' for piece in pieces)}) * w{number}")
        k += group
    views += [f"{name}_ = {name}[here : here + cells]" for name in arrays[1:]]
    lines = [*views, "for i in range(cells):", f"    total = {' + '.join(products)}"]
    lines += ["    kept_[i] = total"] if "kept" in arrays else []
    lines += [f"    out_[i] = {completed}"]
    text = f"def sums(numbers, weights, {', '.join(arrays)}):\n    cells = numbers[2]\n"
    text += "".join(f"    w{number} = weights[{number}]\n" for number in range(len(groups)))
    text += "    for plane in range(numbers[0]):\n        for row in range(numbers[1]):\n"
    text += "            there = numbers[3] + plane * numbers[4] + row * numbers[5]\n"
    text += "            here = numbers[6] + plane * numbers[7] + row * numbers[8]\n"
    text += "".join(f"            {line}\n" for line in lines)
    signature = f"linked({', '.join(['int64[::1]'] + [f'{dtype}[::1]'] * (1 + len(arrays)))})"
    return kernel_of(text, "sums", signature).function
