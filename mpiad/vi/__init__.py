"""Variational inference: the root draws parameters and updates the posterior; all ranks evaluate the model."""

from mpiad.vi.flow import AffineCoupling, Flow, LULinear, Planar, SplineAutoregressive, SplineCoupling
from mpiad.vi.inference import VI
from mpiad.vi.posterior import FullRankGaussian, MeanFieldGaussian
from mpiad.vi.prior import Prior
from mpiad.vi.result import VIResult

__all__ = ["VI", "FullRankGaussian", "MeanFieldGaussian", "Prior", "VIResult"]
__all__ += ["AffineCoupling", "Flow", "LULinear", "Planar", "SplineAutoregressive", "SplineCoupling"]
__dir__ = __all__.copy
