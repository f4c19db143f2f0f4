"""A finite-element model for topology optimization: half of the MBB beam, as in the published 88-line code.

Bilinear square elements of unit size in plane stress, numbered by columns from the top left; the left edge is a plane of
symmetry, the bottom right corner rests on a roller, and a unit force points down at the top left corner. Densities are
filtered by cones of the given radius. Young's modulus of an element is 1e-9 + ρ³ (1 - 1e-9), and Poisson's ratio is 0.3.

References
----------
.. [1] E. Andreassen, A. Clausen, M. Schevenels, B. S. Lazarov and O. Sigmund, "Efficient topology optimization in MATLAB
   using 88 lines of code", Struct. Multidisc. Optim. 43 (2011), section 2 and figure 3.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from autograd.extend import defvjp, primitive
from scipy.sparse.linalg import splu

_WEAK = 1e-9


def element_stiffness(poisson: float = 0.3) -> np.ndarray:
    """Return the stiffness matrix of a unit square by 2 x 2 Gauss points, corners counterclockwise from the bottom left."""
    elastic = np.array([[1.0, poisson, 0.0], [poisson, 1.0, 0.0], [0.0, 0.0, 0.5 * (1.0 - poisson)]]) / (1.0 - poisson**2)
    corners, stiffness = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]), np.zeros((8, 8))
    for point in corners / np.sqrt(3.0):
        slopes = 0.25 * corners * (1.0 + corners[:, ::-1] * point[::-1]) * 2.0  # for edges of length one
        strain = np.zeros((3, 8))
        strain[0, ::2] = strain[2, 1::2] = slopes[:, 0]
        strain[1, 1::2] = strain[2, ::2] = slopes[:, 1]
        stiffness += 0.25 * strain.T @ elastic @ strain
    return stiffness


class Beam:
    """The beam of nx by ny elements: `filter` maps variables to densities, and `compliance` is the work of the force."""

    def __init__(self, nx: int, ny: int, radius: float):
        columns, rows = (part.ravel() for part in np.meshgrid(np.arange(nx), np.arange(ny), indexing="ij"))
        self.size, upper = nx * ny, (ny + 1) * columns + rows  # the node at the top left of each element
        nodes = np.stack([upper + 1, upper + ny + 2, upper + ny + 1, upper], axis=1)
        self._unknowns = np.stack([2 * nodes, 2 * nodes + 1], axis=2).reshape(-1, 8)
        count = 2 * (nx + 1) * (ny + 1)
        self._free = np.setdiff1d(np.arange(count), [*range(0, 2 * (ny + 1), 2), count - 1])
        self._stiffness, self._force = element_stiffness(), np.zeros(count)
        self._force[1] = -1.0
        distance = np.hypot(columns[:, None] - columns, rows[:, None] - rows)
        weights = np.maximum(radius - distance, 0.0)
        self._last: tuple[np.ndarray, tuple[float, np.ndarray]] | None = None
        self.filter = weights / weights.sum(axis=1, keepdims=True)
        self.compliance: Any = primitive(lambda density: self.with_gradient(density)[0])
        defvjp(self.compliance, lambda _, density: lambda cotangent: cotangent * self.with_gradient(density)[1])

    def with_gradient(self, density: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the compliance of physical densities, and its gradient; those of the last densities are kept."""
        if self._last is None or not np.array_equal(self._last[0], density):
            self._last = density.copy(), self._solved(density)
        return self._last[1]

    def _solved(self, density: np.ndarray) -> tuple[float, np.ndarray]:
        modulus = _WEAK + density**3 * (1.0 - _WEAK)
        entries = (modulus[:, None, None] * self._stiffness).ravel()
        pairs = np.repeat(self._unknowns, 8, axis=1).ravel(), np.tile(self._unknowns, (1, 8)).ravel()
        matrix = scipy.sparse.csc_matrix((entries, pairs), shape=(len(self._force),) * 2)[self._free][:, self._free]
        displacement = np.zeros_like(self._force)
        displacement[self._free] = splu(matrix.tocsc()).solve(self._force[self._free])
        local = displacement[self._unknowns]
        energy = np.einsum("ei,ij,ej->e", local, self._stiffness, local)
        return float(modulus @ energy), -3.0 * density**2 * (1.0 - _WEAK) * energy
