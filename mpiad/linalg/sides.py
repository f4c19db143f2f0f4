"""From which side the preconditioner M stands in a method without symmetry: A M, or M A.

From the right (the usual one) the residual is the true one. From the left it is M r, whose target is scaled by what M makes
of the norm at the start; the true one is looked at when it has met that.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.system import System

__all__ = ["preconditioned_product", "preconditioned_start"]


def preconditioned_product(system: System, v: LocalArray) -> tuple[LocalArray, LocalArray]:
    """Return what is added to the solution for v, and the product of v with operator and preconditioner."""
    if system.settings.side == "left":
        return v, system.precondition(system.apply(v))
    z = system.precondition(v)
    return z, system.apply(z)


def preconditioned_start(
    system: System, r: LocalArray, norms: np.ndarray
) -> tuple[LocalArray, np.ndarray, np.ndarray]:
    """Return the residual that the method sees, its norms, and what these are of the true ones."""
    if system.settings.side != "left" or not system.preconditioned:
        return r, norms, np.ones_like(norms)
    seen = system.precondition(r)
    found = system.norms(seen)
    if not np.isfinite(found).all():
        system.require_finite(float(found.sum()), seen, "what preconditioner returned")
    return seen, found, np.where((norms > 0.0) & (found > 0.0), found / np.where(norms > 0.0, norms, 1.0), 1.0)
