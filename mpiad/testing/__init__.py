"""Checks of derivatives over all ranks, independent of the code that computes the derivatives."""

from mpiad.testing.derivative_checks import AdjointError, GradientError, check_adjoint, check_grads
from mpiad.testing.diagnosis import Diagnosis, WrongAdjoint, diagnose
from mpiad.testing.objective_description import ObjectiveReport, describe_objective

__all__ = ["AdjointError", "Diagnosis", "GradientError", "ObjectiveReport", "WrongAdjoint", "check_adjoint", "check_grads"]
__all__ += ["describe_objective", "diagnose"]
__dir__ = __all__.copy
