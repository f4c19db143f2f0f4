"""Updates of parts of arrays as linked kernels (see `cache`): out = factor · x + value, or out += factor · x."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.arguments import address_of
from mpiad.compiling.cache import Kernel, Source, kernels_of

_AXES = 4  # the number of nested loops


class StridedUpdate(NamedTuple):
    """An update of a part of an array at a fixed address, which may have any strides."""

    kernel: Kernel
    arrays: tuple[Array, ...]  # its arguments
    adds: bool

    @classmethod
    def of(cls, out: Array, x: Array | complex, factor: complex, value: Array, adds: bool) -> StridedUpdate | None:
        """Return the update with x broadcast to the shape of `out`; None if there is no kernel for it.

        With `adds` the value is ignored.
        """
        if isinstance(factor, complex) or isinstance(value, complex):
            return None
        if not isinstance(x, np.ndarray):
            x = np.full((1,) * out.ndim, x, out.dtype)
        real = out.real.dtype
        is_complex = real != out.dtype
        if real.char not in "fd" or x.dtype != out.dtype or is_complex and value:
            return None
        axes = list(zip(out.shape, out.strides, np.broadcast_to(x, out.shape).strides))
        axes = _merged([*axes, (2, real.itemsize, real.itemsize)] if is_complex else axes)
        if len(axes) > _AXES or not out.size:
            return None
        lengths, *strides = zip(*[(1, 0, 0)] * (_AXES - len(axes)), *axes)
        numbers = np.array([*lengths, *[stride // real.itemsize for each in strides for stride in each]])
        # Adding -0.0 changes no number, while 0.0 would change the sign of -0.0.
        return cls(_kernels(real.name)[adds], (out, x, numbers, np.array([factor, value or -0.0], real)), adds)

    def words(self, address: int, errors: int, number: int) -> list[int]:
        """Return the words of a linked kernel's block; for the arguments see `LinkedCall.words`."""
        return [0, 0, *[word for x in self.arrays for word in (address_of(x), x.size)]]


def _merged(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the length and both strides of as few axes as possible that contain the same entries in the same order."""
    merged: list[tuple[int, int, int]] = []
    for n, *strides in axes:
        if merged and list(merged[-1][1:]) == [n * stride for stride in strides]:
            n *= merged.pop()[0]
        if n != 1:
            merged.append((n, strides[0], strides[1]))
    return merged


@cache
def _kernels(dtype: str) -> list[Kernel]:
    """Return the kernels that store and that add."""
    target, source = (" + ".join(f"n[{_AXES * k + axis}] * i{axis}" for axis in range(_AXES)) for k in (1, 2))
    heads = "".join(f"{'    ' * (axis + 1)}for i{axis} in range(n[{axis}]):\n" for axis in range(_AXES))
    bodies = [f"f[0] * x[{source}] + f[1]", f"out[{target}] + f[0] * x[{source}]"]
    signature = f"linked({dtype}[::1], {dtype}[::1], int64[::1], {dtype}[::1])"
    texts = [f"def update(out, x, n, f):\n{heads}{'    ' * (_AXES + 1)}out[{target}] = {body}\n" for body in bodies]
    return kernels_of([Source(text, "update", signature) for text in texts])
