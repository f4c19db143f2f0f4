"""Checks of derivatives over all ranks, independent of the code that computes the derivatives."""

from mpiad.testing.adjoint import AdjointError, check_adjoint
from mpiad.testing.objective_description import ObjectiveReport, describe_objective
from mpiad.testing.taylor import GradientError, check_grads

__all__ = ["AdjointError", "GradientError", "ObjectiveReport", "check_adjoint", "check_grads", "describe_objective"]
