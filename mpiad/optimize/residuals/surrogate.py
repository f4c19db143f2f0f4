"""The small problem that SciPy solves in place of the large one, with the same costs and the same steps.

With the triangle R of [f, J], whose first column is (‖f‖, 0, ..., 0) up to a sign, ‖f + J p‖ = ‖R e₁ + R[:, 1:] p‖ for all
p. So SciPy may have the first column for residuals, which is known before J is (a trial point needs only its norm), and
the others for Jacobian: n + 1 rows, whatever the number of residuals. Where a robust loss weighs them, a second row
carries the cost, which isn't the norm then; SciPy reads it through a loss of its own.
"""

from __future__ import annotations

import numpy as np

__all__ = ["carried", "jacobian", "residuals"]


def residuals(sums: np.ndarray, size: int, robust: bool) -> np.ndarray:
    """Return what stands for the residuals, shape (n + 1,), or (n + 2,) under a robust loss.

    Parameters
    ----------
    sums : array, shape (2,)
        Twice the cost, and the square of the residuals in its model.
    size : int
        Number of variables n.
    """
    out = np.zeros(size + 1 + robust)
    if np.all(np.isfinite(sums)):
        out[0] = np.sqrt(sums[1])
        if robust:
            out[1] = np.sqrt(sums[0])
    else:
        # SciPy's trust region shrinks where a cost isn't finite, whatever kind of it.
        out[0] = np.nan
    return out


def jacobian(triangle: np.ndarray, gradient: np.ndarray, norm: float, robust: bool) -> np.ndarray:
    """Return what stands for the Jacobian, shape (n + 1, n), or (n + 2, n) under a robust loss; `norm` is that of f."""
    rows = triangle[:, 1:].copy()
    if norm > 0.0:
        # With f = (norm, 0, ...) for residuals, J'f is then the gradient that was summed, and not what R has kept of it.
        rows[0] = gradient / norm
    return np.insert(rows, 1, 0.0, axis=0) if robust else rows


def carried(z: np.ndarray) -> np.ndarray:
    """Return the loss that SciPy gets under a robust one: the second entry is the cost, the others are weighed already."""
    rho = np.zeros((3, z.size))
    rho[0, 1] = z[1]
    rho[1] = 1.0
    return rho
