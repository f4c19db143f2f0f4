"""The result of a solve, the same on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from mpiad.optimize.history import History
from mpiad.optimize.points import Counts
from mpiad.optimize.variables import Packing

__all__ = ["finished", "outcome_of"]


def outcome_of(result: scipy.optimize.OptimizeResult, history: History, counts: Counts) -> dict[str, Any]:
    """Return what the root tells the other ranks of SciPy's result."""
    outcome = dict(result)
    outcome["x"] = np.array(outcome["x"], dtype=float)
    outcome["history"] = history
    outcome["evaluations"] = dict(counts)
    return outcome


def finished(outcome: dict[str, Any], packing: Packing) -> scipy.optimize.OptimizeResult:
    """Return the result with variables and gradient in the form of x0."""
    result = scipy.optimize.OptimizeResult(outcome)
    result.x = packing.unpack(outcome["x"])
    for name in ("jac", "grad"):  # "trust-constr" calls the gradient grad, and the constraints' Jacobians jac
        gradient = outcome.get(name)
        if isinstance(gradient, np.ndarray) and gradient.shape == (packing.size,):
            result[name] = packing.unpack_gradient(gradient)
    return result
