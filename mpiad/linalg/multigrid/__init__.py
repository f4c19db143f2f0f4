"""Geometric multigrid for -∇·(κ∇u) + c u on a domain, with interpolation that depends on κ."""

from mpiad.linalg.multigrid.elliptic import Elliptic
from mpiad.linalg.multigrid.preconditioner import Multigrid, solve_elliptic

__all__ = ["Elliptic", "Multigrid", "solve_elliptic"]
