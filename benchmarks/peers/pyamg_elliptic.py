"""Set-up and solve of PyAMG's Ruge-Stüben multigrid with conjugate gradients, of the media that it is given.

    python benchmarks/peers/pyamg_elliptic.py MEDIA.npz [--rounds 3]

MEDIA.npz holds κ by name, and the right-hand side "b". Prints a JSON object: for each medium the smallest time in seconds
and the iterations to a residual of 1e-8.
"""

import argparse
import json
import time

import numpy as np
import pyamg
import scipy.sparse as sp


def matrix(kappa):
    """Return -∇·(κ∇u) with u = 0 outside and unit spacing; κ on a face is the mean of both points."""
    n, m = kappa.shape
    padded = np.pad(kappa, 1, mode="edge")
    rows = (padded[1:, 1:-1] + padded[:-1, 1:-1]) / 2
    columns = (padded[1:-1, 1:] + padded[1:-1, :-1]) / 2
    diagonal = rows[1:] + rows[:-1] + columns[:, 1:] + columns[:, :-1]
    down, right = rows[1:-1].ravel(), columns[:, 1:].copy()
    right[:, -1] = 0
    right = right.ravel()[:-1]
    return sp.diags([-down, -right, diagonal.ravel(), -right, -down], [-m, -1, 0, 1, m], format="csr")


def measured(a, b, rounds):
    """Return the smallest time and the number of iterations."""
    times, residuals = [], []
    for _ in range(rounds):
        residuals.clear()
        start = time.perf_counter()
        pyamg.ruge_stuben_solver(a).solve(b, tol=1e-8, accel="cg", residuals=residuals, maxiter=100)
        times.append(time.perf_counter() - start)
    return min(times), len(residuals) - 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("media")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    media = dict(np.load(arguments.media))
    b = media.pop("b").ravel()
    print(json.dumps({name: measured(matrix(kappa), b, arguments.rounds) for name, kappa in media.items()}))
