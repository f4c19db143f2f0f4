"""The coarsest level, on one rank: a sparse factorisation, SciPy's and so the host's.

On a device a small level is solved by a product with its inverse, which is copied there once. For larger ones each solve
copies the right-hand side to the host and the solution back.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import splu

from mpiad._typing import LocalArray, Shape
from mpiad.linalg.host_and_device import through_host
from mpiad.linalg.multigrid.level_stencil import offsets
from mpiad.transport.device_arrays import ArrayModule

_DENSE = 512  # points: an inverse of 2 MiB, read in less time than a copy to the host and back takes


class Coarsest:
    """A factorised operator.

    `stack`, of shape (1 + offsets, *shape): its diagonal and its couplings. `singular`: whether constants are in its
    kernel; the last point's value is then fixed.
    """

    def __init__(self, stack: np.ndarray, periodic: tuple[bool, ...], singular: bool):
        self._shape, self._periodic = stack.shape[1:], periodic
        # Without one row and column the rest of a singular operator of this kind isn't singular.
        self._kept = stack[0].size - singular
        self._factors = splu(_matrix(stack, periodic)[: self._kept, : self._kept]) if self._kept else None
        self._inverse: Any = None

    def on(self, home: ArrayModule) -> Coarsest:
        """Return the same on a device."""
        other, count = copy.copy(self), math.prod(self._shape)
        if count <= _DENSE:
            other._inverse = home.to_device(self._solved(np.eye(count)))
        return other

    def solve(self, f: LocalArray) -> LocalArray:
        """Return the solutions with one layer around them, of right-hand sides of shape (systems, *shape)."""
        if self._inverse is not None:
            return self._surrounded(f.reshape(len(f), -1) @ self._inverse.T)
        return through_host(lambda f: self._surrounded(self._solved(f.reshape(len(f), -1).T).T), f)

    def _solved(self, f: np.ndarray) -> np.ndarray:
        # The point that was left out has zero: any constant may be added, and `Multigrid` takes the mean away.
        u = np.zeros(f.shape)
        if self._factors is not None:
            u[: self._kept] = self._factors.solve(f[: self._kept])
        return u

    def _surrounded(self, u: LocalArray) -> LocalArray:
        out = u.reshape(-1, *self._shape)
        for axis, periodic in enumerate(self._periodic, 1):
            width = [(1, 1) if other == axis else (0, 0) for other in range(out.ndim)]
            out = np.pad(out, width, mode="wrap" if periodic else "constant")
        return out


def _matrix(stack: np.ndarray, periodic: tuple[bool, ...]) -> Any:
    shape: Shape = stack.shape[1:]
    points = np.indices(shape)
    here = np.arange(stack[0].size)
    rows, columns, values = [here], [here], [stack[0].ravel()]
    for offset, coupling in zip(offsets(len(shape)), stack[1:]):
        there = [along + step for along, step in zip(points, offset)]
        inside = np.ones(shape, bool)
        for axis, n in enumerate(shape):
            if periodic[axis]:
                there[axis] = there[axis] % n
            inside &= (there[axis] >= 0) & (there[axis] < n)
        # On a ring of one or two points an offset leads to the point itself, or two to the same: entries are added up.
        inside &= coupling != 0
        rows.append(here.reshape(shape)[inside])
        columns.append(np.ravel_multi_index([along[inside] for along in there], shape))
        values.append(-coupling[inside])
    triplets = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return sp.coo_array(triplets, (here.size, here.size)).tocsc()
