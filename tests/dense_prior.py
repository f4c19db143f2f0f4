"""A Gaussian prior with any covariance matrix, on each rank alone."""

import numpy as np
from mpi4py import MPI

import mpiad
from mpiad.inverse import GaussianPrior


class DensePrior(GaussianPrior):
    """Multiplies by dense matrices."""

    def __init__(self, covariance, mean):
        self.domain, self.mean, self.variance = (
            mpiad.Domain(len(mean), comm=MPI.COMM_SELF),
            mean,
            np.diag(covariance).copy(),
        )
        self.covariance, self.precision = covariance, np.linalg.inv(covariance)
        self.root = np.linalg.cholesky(covariance)

    def apply(self, v):
        return v @ self.precision

    def solve(self, g):
        return g @ self.covariance

    def sqrt(self, xi):
        return self.root @ xi
