"""Implicit steps: mpiad's solvers and SciPy with an assembled matrix.

    python benchmarks/implicit.py [--cells 18 64 256]

(I - τ Δ) u⁺ = u on n² cells with zero boundary values and τ = 10 cells², one rank, relative residual 1e-8. mpiad
solves it by `linalg.solve` with CG, GMRES and BiCGSTAB, and by `linalg.factorized`; SciPy by the same methods, and with an
LU factorization that is computed once. The gradient of a step, with respect to u, takes a second solve on both sides.
The set-up of a solve is measured with an operator that needs one iteration.

A compiled loop of 20 steps u⁺ = (I - τ Δ)⁻¹ (u + 0.01 sin u) uses kept factors. A Gauss-Newton product is the product with
its Jacobian and then with the transpose, by `linearize`; also measured are 16 products together.

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
from timing import fastest

import mpiad
from mpiad.linalg import factorized, newton, solve

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, nargs="+", default=(18, 64, 256))
parser.add_argument("--repeats", type=int, default=9)
TAU, RTOL, STEPS = 10.0, 1e-8, 20
METHODS = {"CG": scipy.sparse.linalg.cg, "GMRES": scipy.sparse.linalg.gmres, "BiCGSTAB": scipy.sparse.linalg.bicgstab}


def steps_of(n: int):
    """Return steps with mpiad, as a user writes them: by Krylov methods, and with factors that are computed once."""
    domain = mpiad.Domain((n, n))

    def operator(u):
        p = domain.exchange(u)
        return u + TAU * (4.0 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2])

    steps = {name: (lambda u, name=name: solve(operator, u, method=name.lower(), rtol=RTOL)) for name in METHODS}
    return {**steps, "factorized": factorized(operator, numpy.zeros((n, n)), pattern=domain)}


def set_up() -> None:
    """Print the time of a solve with one iteration, for an operator that was seen before."""
    domain, u = mpiad.Domain((18, 18)), numpy.random.default_rng(0).standard_normal((18, 18))

    def operator(u):
        p = domain.exchange(u)
        return 2.0 * u + 0.0 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2])

    for name in ("CG", "BiCGSTAB"):
        (seconds,) = fastest([lambda: solve(operator, u, method=name.lower(), rtol=RTOL)], 1000)  # noqa: B023
        print(f"| 18² | set-up of a solve and one iteration, {name} | {1e3 * seconds:.3g} | |")
        report(f"set-up of a solve and one iteration, {name}, 18², µs", 1e6 * seconds, at_most=130.0)


def products(n: int, kept, factors, repeats: int) -> None:
    """Print the times of a loop of steps with kept factors, and of Gauss-Newton products."""
    u = numpy.random.default_rng(n).standard_normal((n, n))

    @mpiad.jit
    def loop(u):
        for _ in range(STEPS):
            u = kept(u + 0.01 * np.sin(u))
        return u

    def by_hand():
        v = u
        for _ in range(STEPS):
            v = factors.solve((v + 0.01 * numpy.sin(v)).ravel()).reshape(n, n)
        return v

    point, several = mpiad.linearize(loop)(u), numpy.stack([u] * 16)
    assert numpy.abs(loop(u) - by_hand()).max() <= 1e-8
    calls = (
        by_hand, lambda: loop(u), lambda: point.vjp(point.jvp(u)),
        lambda: point.vjp(point.jvp(several, batch=True), batch=True),
    )  # fmt: skip
    hand, forward, product, batch = fastest(calls, repeats)
    print(f"| {n}² | {STEPS} kept steps, by hand | {1e3 * hand:.3g} | |\n| {n}² | compiled loop | {1e3 * forward:.3g} | |")
    print(f"| {n}² | Gauss-Newton product | {1e3 * product:.3g} | |\n| {n}² | 16 products | {1e3 * batch:.3g} | |")
    report(f"{STEPS} kept implicit steps, {n}², over by hand", forward / hand)
    report(f"Gauss-Newton product through {STEPS} kept steps, {n}², over the loop", product / forward, at_most=2.2)
    report(f"16 Gauss-Newton products through {STEPS} kept steps, {n}², over the loop", batch / forward, at_most=6.0)


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
    set_up()
    for n in options.cells:
        matrix, steps = matrix_of(n), steps_of(n)
        factors = scipy.sparse.linalg.splu(matrix)
        u = numpy.random.default_rng(n).standard_normal((n, n))
        sides = {}
        for name, step in steps.items():
            gradient = mpiad.value_and_grad(lambda u, step=step: np.sum(step(u) ** 2))
            sides[f"mpiad, {name}"] = lambda step=step: step(u), lambda gradient=gradient: gradient(u)[1]  # noqa: B023

            def by_scipy(v, name=name):
                if name not in METHODS:
                    return factors.solve(v.ravel()).reshape(n, n)  # noqa: B023
                return METHODS[name](matrix, v.ravel(), rtol=RTOL)[0].reshape(n, n)  # noqa: B023

            calls = lambda by=by_scipy: by(u), lambda by=by_scipy: by(2 * by(u))  # noqa: B023
            sides[f"SciPy, {name if name in METHODS else 'LU kept'}"] = calls
        references = [call() for call in sides["SciPy, LU kept"]]
        for side, calls in sides.items():
            for call, reference in zip(calls, references):
                assert numpy.abs(call() - reference).max() <= 1e-5 * numpy.abs(reference).max(), side
        repeats = options.repeats * max(1, (64 // n) ** 2)
        times = fastest([call for calls in sides.values() for call in calls], repeats)
        best = dict(zip(sides, zip(times[::2], times[1::2])))
        for side, (value, gradient) in best.items():
            print(f"| {n}² | {side} | {1e3 * value:.3g} | {1e3 * gradient:.3g} |")
        pairs = [(name, f"SciPy, {name}") for name in METHODS] + [
            ("CG", "SciPy, LU kept"),
            ("factorized", "SciPy, LU kept"),
        ]
        for ours, side in pairs:
            for k, name in enumerate(("step", "step and gradient")):
                report(f"implicit heat {name}, {n}², {ours} over {side}", best[f"mpiad, {ours}"][k] / best[side][k])
        products(n, steps["factorized"], factors, max(2, repeats * 32 // n))
        reaction(n, options.repeats)


if __name__ == "__main__":
    main()
