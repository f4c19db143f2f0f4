"""Inverse problems on a grid that is divided among ranks: priors, regularization, and the uncertainty of solutions."""

from mpiad.inverse.bilaplacian import Bilaplacian
from mpiad.inverse.gaussian_prior import GaussianPrior
from mpiad.inverse.h1 import H1
from mpiad.inverse.laplace_approximation import Posterior, laplace_approximation
from mpiad.inverse.linear_posterior import LinearPosterior
from mpiad.inverse.sampling import Samples, sample
from mpiad.inverse.shift_invariant_map import ShiftInvariantMap
from mpiad.inverse.total_variation import TotalVariation

__all__ = ["H1", "Bilaplacian", "GaussianPrior", "Posterior", "Samples", "TotalVariation"]
__all__ += ["LinearPosterior", "ShiftInvariantMap", "laplace_approximation", "sample"]
__dir__ = __all__.copy
