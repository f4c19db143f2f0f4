"""A Gaussian prior with any covariance matrix, whose products take no solves."""

import numpy as np

import mpiad
from mpiad.inverse import GaussianPrior


class DensePrior(GaussianPrior):
    """A Gaussian with any covariance matrix, on one rank."""

    def __init__(self, covariance, mean):
        self.domain, self.mean, self.variance = mpiad.Domain(len(mean)), mean, np.diag(covariance).copy()
        self.covariance, self.precision = covariance, np.linalg.inv(covariance)
        self.root = np.linalg.cholesky(covariance)

    def apply(self, v):
        return v @ self.precision

    def solve(self, g):
        return g @ self.covariance

    def sqrt(self, xi):
        return self.root @ xi
