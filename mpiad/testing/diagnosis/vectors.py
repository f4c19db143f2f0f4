"""Inner products, norms and directions of values: arrays, numbers, pytrees of them, and sparse cotangents.

Inner products are in autograd's convention: Re Σ a b, without conjugation.
"""

from __future__ import annotations

import math

import numpy as np
from autograd.core import sparse_add, sparse_object_types
from autograd.extend import vspace

from mpiad._typing import Array, Tree
from mpiad.device import to_host
from mpiad.differentiation.rules.scatter_add import Scatter
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable
from mpiad.testing.derivative_checks import noise_like


def without_autograds_sparse_form(g: Tree) -> Tree:
    """Return a cotangent, dense if it is autograd's sparse object."""
    return sparse_add(vspace(g), None, g) if type(g) in sparse_object_types else g


def _flat(x: Array) -> np.ndarray:
    """Return an array or a number as a vector on the host."""
    return x.ravel() if type(x) is np.ndarray else np.ravel(to_host(x))


def product(g: Tree, x: Tree) -> float:
    """Return the inner product of a cotangent with a value; None in the cotangent is zero."""
    total = 0.0
    for part, value in zip(flatten(g)[0], flatten(x)[0]):
        if isinstance(part, Scatter):
            total += product(part.values, to_host(value)[part.idx])
        elif part is not None:
            total += float(np.dot(_flat(part), _flat(value)).real)
    return total


def norm(x: Tree) -> float:
    """Return the Euclidean norm of a value or a cotangent."""
    parts = [_flat(part.values if isinstance(part, Scatter) else part) for part in flatten(x)[0] if part is not None]
    return math.sqrt(sum([float(np.vdot(part, part).real) for part in parts]))


def eps_of(x: Tree) -> float:
    """Return the largest machine epsilon of some arrays, 0.0 if none has floating-point numbers."""
    return max([float(np.finfo(spec_like(leaf).dtype).eps) for leaf in flatten(x)[0] if is_variable(leaf)], default=0.0)


def direction_like(x: Tree, rng: np.random.Generator, is_uniform: bool = False) -> Tree:
    """Return a random direction with the size of x; if `is_uniform`, all its entries are nearly the same, if x is real."""
    leaves, build = flatten(x)
    noises = [noise_like(leaf, rng) for leaf in map(to_host, leaves)]
    scales = [_scale(to_host(leaf)) for leaf in leaves]
    directions = [scale * (1 + 0.1 * noise if is_uniform else noise) for scale, noise in zip(scales, noises)]
    return build([np.asarray(d, spec_like(leaf).dtype) for d, leaf in zip(directions, leaves)])


def _scale(x: Array) -> Array:
    """Return the size of a step for each entry of an array: that of the entry, or of the array if the entry is tiny."""
    rms = np.sqrt(np.mean(np.abs(x) ** 2)) if np.size(x) else 0.0
    return np.maximum(np.abs(x), 0.01 * rms) if 0 < rms < np.inf else np.ones(np.shape(x))


def moved(x: Tree, step: float, direction: Tree) -> Tree:
    """Return ``x + step * direction`` in the dtypes and on the devices of x."""
    leaves, build = flatten(x)
    return build([_moved(leaf, step, d) for leaf, d in zip(leaves, flatten(direction)[0])])


def _moved(x: Array, step: float, direction: Array) -> Array:
    spec = spec_like(x)
    new = np.asarray(to_host(x) + step * direction, spec.dtype)
    return new[()] if spec.arrays is None else spec.arrays.to_device(new)
