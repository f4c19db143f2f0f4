"""Distributed solves, linear and not, differentiated by the implicit function theorem."""

from mpiad.linalg.newton import newton
from mpiad.linalg.solve import solve

__all__ = ["newton", "solve"]
