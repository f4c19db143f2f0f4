"""Checks of derivatives over all ranks, independent of the code that computes the derivatives."""

from mpiad.testing.derivative_checks import AdjointError, GradientError, check_adjoint, check_grads
from mpiad.testing.objective_description import ObjectiveReport, describe_objective

__all__ = ["AdjointError", "GradientError", "ObjectiveReport", "check_adjoint", "check_grads", "describe_objective"]
__dir__ = __all__.copy
