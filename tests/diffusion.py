"""Diffusion with reaction in one process, by its matrix: -∇·(κ∇u) + c u, u = 0 outside, κ on faces the mean of both cells.

What the distributed solves are compared with. Derivatives are written out; second ones are complex steps of the first,
exact to rounding. NumPy and SciPy only.
"""

import itertools

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import spsolve


class Diffusion:
    """The operator on a whole grid, as a function of κ and c.

    `differences` takes the difference across each face, `means` the κ on it.
    """

    def __init__(self, shape):
        cells = np.arange(np.prod(shape)).reshape(shape)
        faces = []
        for axis, n in enumerate(shape):
            for place in range(n + 1):
                before = cells.take(place - 1, axis).ravel() if place > 0 else itertools.repeat(None)
                after = cells.take(place, axis).ravel() if place < n else itertools.repeat(None)
                faces.extend(itertools.islice(zip(before, after), cells.size // n))
        self.shape = shape
        self.differences, self.means = sp.lil_matrix((len(faces), cells.size)), sp.lil_matrix((len(faces), cells.size))
        for number, (before, after) in enumerate(faces):
            for cell, sign in ((before, -1), (after, 1)):
                if cell is not None:
                    self.differences[number, cell] = sign
                    self.means[number, cell] = 1 if before is None or after is None else 0.5
        self.differences, self.means = self.differences.tocsc(), self.means.tocsc()

    def matrix(self, kappa, c):
        d = self.differences
        return (d.T @ sp.diags(self.means @ kappa.ravel()) @ d + c * sp.identity(kappa.size)).tocsc()

    def solve(self, kappa, c, b):
        return spsolve(self.matrix(kappa, c), b.ravel()).reshape(self.shape)

    def gradient(self, kappa, c, b, w):
        """Return the derivatives of Σ w u² / 2 by κ, c and b."""
        u = self.solve(kappa, c, b)
        multiplier = self.solve(kappa, c, w * u)
        across = (self.differences @ multiplier.ravel()) * (self.differences @ u.ravel())
        return -(self.means.T @ across).reshape(self.shape), -np.sum(multiplier * u), multiplier

    def hessian_product(self, kappa, c, b, w, directions):
        """Return the derivatives of the gradient along (dκ, dc, db)."""
        h = 1e-30
        moved = [x + 1j * h * d for x, d in zip((kappa, c, b), directions)]
        return [np.imag(g) / h for g in self.gradient(*moved, w)]

    def tangent(self, kappa, c, b, directions):
        """Return the derivative of the solution along (dκ, dc, db)."""
        h = 1e-30
        return np.imag(self.solve(*[x + 1j * h * d for x, d in zip((kappa, c, b), directions)])) / h
