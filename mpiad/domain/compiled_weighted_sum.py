"""The arithmetic of a stencil compiled: one loop adds, multiplies and completes sums, in one pass through memory.

Results are equal to those of `weighted_sum` in every bit: the same operations in the same order. The source of a loop
depends on the number of offsets per weight; their values and the box are data, so that blocks of all shapes share a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from mpiad._typing import LocalArray, Shape
from mpiad.compiling.cache import kernel_of
from mpiad.domain.weighted_sum import Box, Finish, Terms

# Cells of a block below which the kernel is loaded in more time than it saves.
_LARGE = 1 << 13
_MOST_TERMS = 32  # more addresses than that are too many for the processor's registers
_AXES = 3
_DTYPES = {np.dtype(np.float64): "float64", np.dtype(np.float32): "float32"}


def is_compiled(out: LocalArray, terms: int, cells: Shape) -> bool:
    """Return whether sums of this number of terms are compiled for such a block."""
    return (
        type(out) is np.ndarray and out.dtype in _DTYPES and len(cells) <= _AXES and math.prod(cells) >= _LARGE
        and 0 < terms <= _MOST_TERMS
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
        own = [np.ascontiguousarray(array[place]) for array in given]
        _run(kernel, numbers, weights, source[place], out[place], *own)


def compiled_varying_sum(padded: LocalArray, weights: LocalArray, out: LocalArray) -> None:
    """Write the sums with weights per cell; equal to those of `varying_sum` in every bit but the sign of a zero."""
    ndim = weights.ndim // 2
    offsets, cells = tuple(np.ndindex(weights.shape[:ndim])), weights.shape[ndim:]
    whole = tuple([(0, n) for n in cells])
    numbers, _ = _tables(((1.0, offsets),), padded.shape[padded.ndim - ndim :], cells, whole, out.dtype)
    kernel, factors = _varying_kernel(len(offsets), _DTYPES[out.dtype]), np.ascontiguousarray(weights)
    for place in np.ndindex(out.shape[: out.ndim - ndim]):
        _run(kernel, numbers, factors, np.ascontiguousarray(padded[place]), out[place])


def _run(kernel: Callable[[int], None], *arrays: np.ndarray) -> None:
    """Run a linked kernel on contiguous arrays."""
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
    """Return the strides along each of three axes, in entries."""
    whole = (1,) * (_AXES - len(shape)) + shape
    return [math.prod(whole[axis + 1 :]) for axis in range(_AXES)]


@functools.cache
def _kernel(groups: tuple[int, ...], form: tuple[str, str] | None, dtype: str) -> Callable[[int], None]:
    """Return the kernel for these numbers of offsets per weight."""
    names, completed = form or ("", "total")
    products, k = [], 0
    for number, group in enumerate(groups):
        products.append(f"({' + '.join(f'p{piece}[i]' for piece in range(k, k + group))}) * w{number}")
        k += group
    lines = [f"    total = {' + '.join(products)}", *(["    kept_[i] = total"] if "kept" in names else [])]
    begin = [f"w{number} = weights[{number}]" for number in range(len(groups))]
    return _compiled(k, ["source", "out", *names.split()], begin, [], [*lines, f"    out_[i] = {completed}"], dtype)


@functools.cache
def _varying_kernel(terms: int, dtype: str) -> Callable[[int], None]:
    """Return the kernel for this number of offsets, each with a weight per cell."""
    views = [f"v{k} = weights[{k} * size + here : {k} * size + here + cells]" for k in range(terms)]
    total = " + ".join(f"p{k}[i] * v{k}[i]" for k in range(terms))
    begin = ["size = numbers[0] * numbers[1] * numbers[2]"]
    return _compiled(terms, ["source", "out"], begin, views, [f"    out_[i] = {total}"], dtype)


def _compiled(
    pieces: int, arrays: list[str], begin: list[str], views: list[str], lines: list[str], dtype: str
) -> Callable[[int], None]:
    """Return a kernel that goes over rows of cells, with views of so many shifted pieces of the source."""
    row = ["there = numbers[3] + plane * numbers[4] + row * numbers[5]"]
    row += ["here = numbers[6] + plane * numbers[7] + row * numbers[8]"]
    row += [f"p{k} = source[there + numbers[{9 + k}] : there + numbers[{9 + k}] + cells]" for k in range(pieces)]
    row += [*views, *(f"{name}_ = {name}[here : here + cells]" for name in arrays[1:])]
    text = f"def sums(numbers, weights, {', '.join(arrays)}):\n    cells = numbers[2]\n"
    text += "".join(f"    {line}\n" for line in begin)
    text += "    for plane in range(numbers[0]):\n        for row in range(numbers[1]):\n"
    text += "".join(f"            {line}\n" for line in [*row, "for i in range(cells):", *lines])
    signature = f"linked({', '.join(['int64[::1]'] + [f'{dtype}[::1]'] * (1 + len(arrays)))})"
    return kernel_of(text, "sums", signature).function
