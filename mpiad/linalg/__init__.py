"""Distributed linear solves, differentiated by the implicit function theorem."""

from mpiad.linalg.solve import solve

__all__ = ["solve"]
