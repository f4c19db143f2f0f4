"""Distributed linear and nonlinear solves, differentiated by the implicit function theorem."""

from mpiad.linalg import petsc
from mpiad.linalg.additive_schwarz import AdditiveSchwarz
from mpiad.linalg.distributed_matrix import DistributedMatrix
from mpiad.linalg.eigenpairs import EigenPairs, eigsh
from mpiad.linalg.factorized import Factorized, factorized
from mpiad.linalg.multigrid import Elliptic, Multigrid, solve_elliptic
from mpiad.linalg.newton import newton
from mpiad.linalg.solve import solve
from mpiad.linalg.sparse_products import sparse_matmul

__all__ = [
    "AdditiveSchwarz", "EigenPairs", "Elliptic", "DistributedMatrix", "Factorized", "Multigrid", "eigsh", "factorized",
    "newton", "petsc", "solve", "solve_elliptic", "sparse_matmul",
]  # fmt: skip
__dir__ = __all__.copy
