"""Implicit steps: mpiad's solvers and SciPy with an assembled matrix.

    python benchmarks/implicit.py [--cells 18 64 256]

(I - τ Δ) u⁺ = u on n² cells with zero boundary values and τ = 10 cells², one rank, relative residual 1e-8. mpiad
solves it by `linalg.solve` with CG, and by `linalg.factorized`; SciPy by its CG and with an LU factorization
that is computed once.
The gradient of a step, with respect to u, takes a second solve on both sides.

The second problem is a reaction-diffusion equation, -0.1 Δu + k u³ = b, to a relative residual of 1e-10: Newton's method of
mpiad with products, and with a sparse Jacobian, and with SciPy's LU factors of the Jacobian in each step. Measured are the
value of ‖u‖² and its gradient with respect to k. The sides alternate, and the smallest time of each counts.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
import numpy
import scipy.sparse
import scipy.sparse.linalg
from reaches import report

import mpiad
from mpiad.linalg import factorized, newton, solve

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, nargs="+", default=(18, 64, 256))
parser.add_argument("--repeats", type=int, default=9)
TAU, RTOL = 10.0, 1e-8


def steps_of(n: int):
    """Return a step with mpiad, as a user writes it: by CG, and with factors that are computed once."""
    domain = mpiad.Domain((n, n))

    def operator(u):
        p = domain.exchange(u)
        return u + TAU * (4.0 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2])

    return lambda u: solve(operator, u, method="cg", rtol=RTOL), factorized(operator, numpy.zeros((n, n)), pattern=domain)


def matrix_of(n: int) -> scipy.sparse.csc_array:
    second = scipy.sparse.diags_array((-1.0, 2.0, -1.0), offsets=(-1, 0, 1), shape=(n, n))
    one = scipy.sparse.eye_array(n)
    laplacian = scipy.sparse.kron(second, one) + scipy.sparse.kron(one, second)
    return (scipy.sparse.eye_array(n * n) + TAU * laplacian).tocsc()


def reaction(n: int, repeats: int) -> None:
    """Print the times of a nonlinear problem's value and gradient."""
    domain, rng = mpiad.Domain((n, n)), numpy.random.default_rng(n)
    k, b = numpy.exp(0.3 * rng.standard_normal((n, n))), 10.0 * rng.random((n, n))
    diffusion = 0.1 * n**2 * (matrix_of(n) - scipy.sparse.eye_array(n * n)) / TAU

    @mpiad.jit
    def residual(u, k):
        p = domain.exchange(u)
        return 0.1 * n**2 * (4.0 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2]) + k * u**3 - b

    def with_mpiad(**settings):
        def loss(k):
            return np.sum(newton(residual, numpy.zeros((n, n)), k, rtol=1e-10, **settings) ** 2)

        return lambda: mpiad.value_and_grad(loss)(k)[1]

    def jacobian(u):
        return (diffusion + scipy.sparse.diags_array(3.0 * k.ravel() * u**2)).tocsc()

    def with_scipy():
        u = numpy.zeros(n * n)
        f = first = -b.ravel()
        while numpy.linalg.norm(f) > 1e-10 * numpy.linalg.norm(first):
            u = u - scipy.sparse.linalg.splu(jacobian(u)).solve(f)
            f = diffusion @ u + k.ravel() * u**3 - b.ravel()
        return -(scipy.sparse.linalg.splu(jacobian(u)).solve(2.0 * u, "T") * u**3).reshape(n, n)

    kept = {"jacobian": "sparse", "pattern": domain}
    sides = {
        "products": with_mpiad(), "sparse": with_mpiad(**kept), "sparse, reuse=10": with_mpiad(**kept, reuse=10),
        "SciPy": with_scipy,
    }  # fmt: skip
    best, reference = dict.fromkeys(sides, float("inf")), with_scipy()
    for _ in range(repeats):
        for side, call in sides.items():
            start = time.perf_counter()
            found = call()
            best[side] = min(best[side], time.perf_counter() - start)
            assert numpy.abs(found - reference).max() <= 1e-6 * numpy.abs(reference).max(), side
    for side in sides:
        print(f"| {n}² | reaction-diffusion, {side} | | {1e3 * best[side]:.3g} |")
        if side != "SciPy":
            report(f"reaction-diffusion value and gradient, {n}², {side} over SciPy", best[side] / best["SciPy"])


def main() -> None:
    options = parser.parse_args()
    print("| cells | side | step, ms | with gradient, ms |\n|---|---|---|---|")
    for n in options.cells:
        matrix, (step, kept) = matrix_of(n), steps_of(n)
        factors = scipy.sparse.linalg.splu(matrix)
        u = numpy.random.default_rng(n).standard_normal((n, n))
        gradient = mpiad.value_and_grad(lambda u: np.sum(step(u) ** 2))  # noqa: B023
        kept_gradient = mpiad.value_and_grad(lambda u: np.sum(kept(u) ** 2))  # noqa: B023

        def scipy_cg(u):
            return scipy.sparse.linalg.cg(matrix, u.ravel(), rtol=RTOL)[0].reshape(n, n)  # noqa: B023

        def scipy_lu(u):
            return factors.solve(u.ravel()).reshape(n, n)  # noqa: B023

        sides = {
            "mpiad, CG": (lambda: step(u), lambda: gradient(u)[1]),  # noqa: B023
            "mpiad, factorized": (lambda: kept(u), lambda: kept_gradient(u)[1]),  # noqa: B023
            "SciPy, CG": (lambda: scipy_cg(u), lambda: scipy_cg(2 * scipy_cg(u))),  # noqa: B023
            "SciPy, LU kept": (lambda: scipy_lu(u), lambda: scipy_lu(2 * scipy_lu(u))),  # noqa: B023
        }
        best = {(side, k): float("inf") for side in sides for k in range(2)}
        for _ in range(options.repeats):
            for side, calls in sides.items():
                for k, call in enumerate(calls):
                    start = time.perf_counter()
                    found = call()
                    best[side, k] = min(best[side, k], time.perf_counter() - start)
                    reference = sides["SciPy, LU kept"][k]()
                    assert numpy.abs(found - reference).max() <= 1e-5 * numpy.abs(reference).max(), side
        for side in sides:
            print(f"| {n}² | {side} | {1e3 * best[side, 0]:.3g} | {1e3 * best[side, 1]:.3g} |")
        for ours, side in (("CG", "SciPy, CG"), ("CG", "SciPy, LU kept"), ("factorized", "SciPy, LU kept")):
            for k, name in enumerate(("step", "step and gradient")):
                report(f"implicit heat {name}, {n}², {ours} over {side}", best[f"mpiad, {ours}", k] / best[side, k])
        reaction(n, options.repeats)


if __name__ == "__main__":
    main()
