"""Exchange, scatter and gather as one process sees them: which cell of the whole grid each entry is. NumPy only."""

import itertools

import numpy as np

WRAP = "wrap"


def owned(shape, dims, rank):
    """Return the cells of a rank: ranks in row-major order, the first blocks longer."""
    place = np.unravel_index(rank, dims)
    parts = [np.array_split(np.arange(n), p)[i] for n, p, i in zip(shape, dims, place)]
    return tuple(slice(int(cells[0]), int(cells[-1]) + 1) for cells in parts)


def modes(ndim, periodic, boundary):
    """Return how numpy.pad fills each dimension; numbers and zero are "constant"."""
    wraps = np.broadcast_to(periodic, ndim)
    kinds = boundary if isinstance(boundary, tuple) else (boundary,) * ndim
    return [WRAP if w else k if k in ("edge", "reflect") else "constant" for w, k in zip(wraps, kinds)]


class Exchange:
    """The exchange of all ranks, as places in the whole grid: -1 where a value was filled in, -2 in corners left out."""

    def __init__(self, shape, dims, halo, periodic, boundary, corners=True):
        ndim = len(shape)
        self.shape, self.size = shape, int(np.prod(dims))
        halos = np.broadcast_to(halo, ndim)
        places = np.arange(np.prod(shape)).reshape(shape)
        for axis, mode in enumerate(modes(ndim, periodic, boundary)):
            width = [(0, 0)] * ndim
            width[axis] = (halos[axis],) * 2
            places = np.pad(places, width, mode, **({"constant_values": -1} if mode == "constant" else {}))
        self.places = []
        for rank in range(self.size):
            cells = owned(shape, dims, rank)
            block = places[tuple(slice(c.start, c.stop + 2 * h) for c, h in zip(cells, halos))].copy()
            if not corners:
                sides = [(i < h) | (i >= n - h) for i, n, h in zip(np.indices(block.shape), block.shape, halos)]
                block[np.sum(sides, axis=0) > 1] = -2
            self.places.append(block)

    def __call__(self, u, value=0.0):
        """Return every rank's block with its halo."""
        return [np.where(p < 0, np.where(p == -1, value, 0), u.ravel()[p]) for p in self.places]

    def adjoint(self, padded):
        """Return the cotangent of the whole grid, of all ranks' cotangents of their blocks with halo."""
        total = np.zeros(np.prod(self.shape), np.result_type(*padded))
        for p, g in zip(self.places, padded):
            np.add.at(total, p[p >= 0], g[p >= 0])
        return total.reshape(self.shape)


def factorisations(size, ndim):
    """Return all grids of `size` ranks."""
    return [dims for dims in itertools.product(range(1, size + 1), repeat=ndim) if np.prod(dims) == size]
