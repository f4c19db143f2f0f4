"""Transport in one process, by its dense matrix: ν(4 u - neighbours) + w (u east - u west) + c u, u = 0 outside.

What the methods without symmetry are compared with. The matrix is linear in its parameters, so that its derivative by one
of them is the matrix of the unit vector. NumPy only.
"""

import numpy as np


def matrix(shape, nu, w, c):
    """Return the matrix on the cells of a grid, in row-major order; w and c are fields, ν a number."""
    rows, columns = shape
    total = np.zeros((rows * columns,) * 2, np.result_type(nu, w, c, float))
    for i in range(rows):
        for j in range(columns):
            here = i * columns + j
            total[here, here] = 4 * nu + c[i, j]
            for k, m, wind in ((i - 1, j, 0), (i + 1, j, 0), (i, j - 1, -1), (i, j + 1, 1)):
                if 0 <= k < rows and 0 <= m < columns:
                    total[here, k * columns + m] = -nu + wind * w[i, j]
    return total


def gradient(shape, params, b, weight):
    """Return u, and the derivatives of Σ weight |u|² by ν, w, c and b: of complex ones without conjugation."""
    a = matrix(shape, *params)
    u = np.linalg.solve(a, b.ravel())
    multiplier = np.linalg.solve(a.T, 2 * weight.ravel() * u.conj())
    zero = 0.0, np.zeros(shape), np.zeros(shape)
    of_nu = -multiplier @ matrix(shape, 1.0, *zero[1:]) @ u
    fields = []
    for place in (1, 2):
        found = np.zeros(u.size, u.dtype)
        for cell in range(u.size):
            unit = [0.0, np.zeros(shape), np.zeros(shape)]
            unit[place].ravel()[cell] = 1.0
            found[cell] = -multiplier @ matrix(shape, *unit) @ u
        fields.append(found.reshape(shape))
    return u.reshape(shape), of_nu, *fields, multiplier.reshape(shape)
