"""-∇·(κ∇u) + c u in one process, by its matrix, and black-box multigrid by its definition, point by point.

What multigrid is compared with. NumPy and SciPy only.
"""

import itertools

import numpy as np
import scipy.sparse as sp


def elliptic_matrix(kappa, c=0.0, spacing=1.0, fixed=True, centred=False, periodic=False):
    """Return the operator; `fixed` says for each dimension and side (or for all) whether u is zero beyond it."""
    ndim, shape = kappa.ndim, kappa.shape
    steps, wraps = np.broadcast_to(spacing, ndim), np.broadcast_to(periodic, ndim)
    fixed = np.broadcast_to(fixed, (ndim, 2))
    number = np.arange(kappa.size).reshape(shape)
    rows, columns, values = [], [], []

    def add(row, column, value):
        rows.append(np.ravel(row)), columns.append(np.ravel(column)), values.append(np.ravel(value))

    add(number, number, np.broadcast_to(c, shape))
    for axis in range(ndim):
        n, h = shape[axis], steps[axis]
        for i in range(n if wraps[axis] else n - 1):
            here, there = number.take(i, axis), number.take((i + 1) % n, axis)
            face = (kappa.take(i, axis) + kappa.take((i + 1) % n, axis)) / 2 / h**2
            for one, other in ((here, there), (there, here)):
                add(one, one, face)
                add(one, other, -face)
        for place, given in zip((0, -1), fixed[axis]):
            if given and not wraps[axis]:
                here = number.take(place, axis)
                add(here, here, kappa.take(place, axis) / h**2 * (2 if centred else 1))
    triplets = tuple(map(np.concatenate, ((values, rows, columns))))
    return sp.coo_matrix((triplets[0], triplets[1:]), (kappa.size,) * 2).tocsr()


def interpolation_matrix(matrix, shape, periodic=False):
    """Return Dendy's interpolation from the points of even indices, for an operator that couples neighbours."""
    wraps = np.broadcast_to(periodic, len(shape))
    coarse = tuple((n + 1) // 2 for n in shape)
    number = {x: k for k, x in enumerate(itertools.product(*map(range, shape)))}
    column = {x: k for k, x in enumerate(itertools.product(*map(range, coarse)))}
    weights = {}

    def neighbour(x, offset):
        y = tuple((i + o) % n if w else i + o for i, o, n, w in zip(x, offset, shape, wraps))
        return y if y in number else None

    for x in sorted(number, key=lambda x: sum(i % 2 for i in x)):
        if not any(i % 2 for i in x):
            weights[x] = {tuple(i // 2 for i in x): 1.0}
            continue
        # Couplings are summed up over the dimensions in which x has an even index.
        collapsed = dict.fromkeys(itertools.product((-1, 0, 1), repeat=len(shape)), 0.0)
        for offset in tuple(collapsed):
            y = neighbour(x, offset)
            if y is not None:
                along = tuple(o if i % 2 else 0 for o, i in zip(offset, x))
                collapsed[along] += matrix[number[x], number[y]]
        centre = collapsed.pop((0,) * len(shape))
        weights[x] = {}
        for along, value in collapsed.items():
            if value:
                for target, weight in weights[neighbour(x, along)].items():
                    weights[x][target] = weights[x].get(target, 0.0) - value * weight / centre
    out = sp.lil_matrix((len(number), len(column)))
    for x, parts in weights.items():
        for target, weight in parts.items():
            out[number[x], column[target]] = weight
    return out.tocsr(), coarse


def blocks(shape, rng, count, jump=1e4):
    """Return κ that is 1 or `jump` on random blocks, `count` along each dimension, which no coarse grid follows."""
    values = np.where(rng.random((count,) * len(shape)) < 0.5, 1.0, jump)
    return values[np.ix_(*[np.arange(n) * count // n for n in shape])]


def disc(shape, jump=1e4):
    """Return κ that is `jump` in a disc (a ball) off the centre, and 1 around it."""
    places = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in shape], indexing="ij")
    return np.where(sum((x - 0.47) ** 2 for x in places) < 0.09, jump, 1.0)


def layers(shape, jump=1e4):
    """Return κ in layers across the first dimension."""
    along = np.where(np.floor((np.arange(shape[0]) + 0.5) / shape[0] * 7.3) % 2 == 0, jump, 1.0)
    return np.broadcast_to(along.reshape((-1,) + (1,) * (len(shape) - 1)), shape).copy()


def cross(shape, jump=1e4):
    """Return κ that is `jump` where one of the first two coordinates is near a line."""
    x, y = np.meshgrid(*[(np.arange(n) + 0.5) / n for n in shape[:2]], indexing="ij")
    inside = (abs(x - 0.43) < 0.07) | (abs(y - 0.57) < 0.07)
    return np.broadcast_to(np.where(inside, jump, 1.0).reshape(shape[:2] + (1,) * (len(shape) - 2)), shape).copy()


def fixed_sides(sides):
    """Return, for each dimension and side of `Elliptic.sides`, whether u is given."""
    return [[side.kind == "dirichlet" for side in pair] for pair in sides.pairs]
