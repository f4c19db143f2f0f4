"""The divergence of the posterior from the prior: in closed form where there is one, else from draws."""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Tree
from mpiad.vi.posterior import FullRankGaussian, MeanFieldGaussian, Posterior
from mpiad.vi.prior import Prior

__all__ = ["closed_form", "has_closed_form"]


def has_closed_form(posterior: Posterior, prior: Prior) -> bool:
    """Tell whether KL(q‖prior) is known: both are normal."""
    # By class: one of the user's with such attributes may mean something else by them.
    known = isinstance(posterior, (MeanFieldGaussian, FullRankGaussian)) and isinstance(prior, Prior)
    return known and prior.normal is not None


def closed_form(posterior: Any, params: Tree, prior: Any) -> Array:
    """Return KL(q‖prior) of two normal distributions."""
    mean, covariance = posterior.moments(params)
    centre, inverse = (one.beside(mean) for one in prior.inverse)
    # KL = ½ (tr(Σₚ⁻¹ Σ_q) + gapᵀ Σₚ⁻¹ gap - dim + log det Σₚ - log det Σ_q).
    gap = mean - centre
    log_volume = 2 * np.sum(params["log_sd"])  # of both families: L has these on its diagonal
    trace = np.sum(inverse * covariance)  # of the product, both being symmetric
    log_volume_of_prior = float(numpy.linalg.slogdet(prior.normal[1])[1])
    return 0.5 * (trace + np.dot(gap, np.dot(inverse, gap)) - len(centre) + log_volume_of_prior - log_volume)
