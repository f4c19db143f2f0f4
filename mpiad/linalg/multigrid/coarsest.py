"""The coarsest level, on one rank: a sparse factorisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import splu

from mpiad._typing import Shape
from mpiad.linalg.multigrid.stencil import offsets

__all__ = ["Coarsest"]


class Coarsest:
    """A factorised operator.

    Parameters
    ----------
    stack : array of shape (1 + offsets, *shape)
        Its diagonal and its couplings.
    periodic : tuple of bool
    singular : bool
        Whether constants are in its kernel; the last point's value is then fixed.
    """

    def __init__(self, stack: np.ndarray, periodic: tuple[bool, ...], singular: bool):
        self._shape, self._periodic = stack.shape[1:], periodic
        # Without one row and column the rest of a singular operator of this kind isn't singular.
        self._kept = stack[0].size - singular
        self._factors = splu(_matrix(stack, periodic)[: self._kept, : self._kept]) if self._kept else None

    def solve(self, f: np.ndarray) -> np.ndarray:
        """Return the solution with one layer around it.

        Parameters
        ----------
        f : array of the operator's shape
        """
        # The point that was left out has zero: any constant may be added, and `Multigrid` takes the mean away.
        u = np.zeros(f.size)
        if self._factors is not None:
            u[: self._kept] = self._factors.solve(f.ravel()[: self._kept])
        out = u.reshape(self._shape)
        for axis, periodic in enumerate(self._periodic):
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
