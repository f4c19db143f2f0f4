"""Implicit steps: mpiad's solvers and SciPy with an assembled matrix.

    python benchmarks/implicit.py [--cells 18 64 256]

(I - τ Δ) u⁺ = u on n² cells with zero boundary values and τ = 10 cells², one rank, relative residual 1e-8. mpiad
solves it by `linalg.solve` with CG, GMRES and BiCGSTAB, and by `linalg.factorized`; SciPy by the same methods, and with an
LU factorization that is computed once. The gradient of a step, with respect to u, takes a second solve on both sides; with
kept factors it is also compiled.
The set-up of a solve is measured with an operator that needs one iteration.

A compiled loop of 20 steps u⁺ = (I - τ Δ)⁻¹ (u + 0.01 sin u) uses kept factors. A Gauss-Newton product is the product with
its Jacobian and then with the transpose, by `linearize`; also measured are 16 products together.

The second problem is a reaction-diffusion equation, -0.1 Δu + k u³ = b, to a relative residual of 1e-10: Newton's method of
mpiad with products, and with a sparse Jacobian, and with SciPy's LU factors of the Jacobian in each step. Measured are the
value of ‖u‖² and its gradient with respect to k. The sides alternate, and the smallest time of each counts.

Three applications follow, with SciPy programs written by hand, which contain derivatives: incremental 4D-Var for Lorenz and
Emanuel's model (SciPy: `least_squares`), flows in a network of pipes by Newton's method, with the gradient with respect to
the conductances, and a conductivity from potentials on the boundary, by L-BFGS.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
import numpy
import scipy.optimize
import scipy.sparse
import scipy.sparse.linalg
from reaches import report
from timing import fastest

import mpiad
from mpiad.linalg import factorized, newton, solve, sparse_matmul
from mpiad.timestepping import scan

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
        report(f"set-up of a solve and one iteration, {name}, 18², µs", 1e6 * seconds, at_most=100.0)


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


def observations():
    """Return mpiad's and SciPy's solution of incremental 4D-Var; see docs/howto/four_d_var.md."""
    domain = mpiad.Domain(24, halo=2, periodic=True)

    def rate(u):
        p = domain.exchange(u)
        return (p[3:-1] - p[:-4]) * p[1:-3] - u + 8.0

    @mpiad.jit
    def step(u):
        a = rate(u)
        b = rate(u + 0.025 * a)
        c = rate(u + 0.025 * b)
        return u + 0.05 / 6 * (a + 2 * b + 2 * c + rate(u + 0.05 * c))

    def trajectory(u, steps):
        return scan(lambda u, k: step(u), u, steps, observe=lambda u, k: u)

    truth, _ = trajectory(8.0 + domain.normal(rng=1), 200)
    background, sites = truth + domain.normal(rng=2), numpy.arange(24) % 2 == 0
    observed = trajectory(truth, 8)[1] + 0.2 * numpy.stack([domain.normal(seed) for seed in range(3, 11)])

    @mpiad.jit
    def misfits(u):
        return np.concatenate([u - background, np.ravel(sites * (trajectory(u, 8)[1] - observed) / 0.2)])

    def with_tangents(u, v):
        """Return the rate, and its derivative times the columns of v."""
        left, right, before = numpy.roll(u, 2), numpy.roll(u, -1), numpy.roll(u, 1)
        of_v = numpy.roll(v, -1, 0) - numpy.roll(v, 2, 0), numpy.roll(v, 1, 0)
        return (right - left) * before - u + 8.0, of_v[0] * before[:, None] + (right - left)[:, None] * of_v[1] - v

    def by_hand(u):
        v = numpy.eye(24)
        values, rows = [u - background], [v]
        for k in range(8):
            a, a_v = with_tangents(u, v)
            b, b_v = with_tangents(u + 0.025 * a, v + 0.025 * a_v)
            c, c_v = with_tangents(u + 0.025 * b, v + 0.025 * b_v)
            d, d_v = with_tangents(u + 0.05 * c, v + 0.05 * c_v)
            u, v = u + 0.05 / 6 * (a + 2 * b + 2 * c + d), v + 0.05 / 6 * (a_v + 2 * b_v + 2 * c_v + d_v)
            values.append(sites * (u - observed[k]) / 0.2)
            rows.append(sites[:, None] * v / 0.2)
        return numpy.concatenate(values), numpy.concatenate(rows)

    def with_scipy():
        return scipy.optimize.least_squares(lambda u: by_hand(u)[0], background, lambda u: by_hand(u)[1]).x

    settings = {"method": "Newton-CG-sharded", "options": {"product": "gauss-newton"}}
    return {"mpiad": lambda: domain.minimize(misfits, background, **settings).x, "SciPy": with_scipy}, 1e-3


def pipes(n: int = 12):
    """Return the gradients of the sum of all heads in a network of n² nodes with respect to the pipes' conductances."""
    second, one = scipy.sparse.diags_array((-1.0, 1.0), offsets=(0, 1), shape=(n - 1, n)), scipy.sparse.eye_array(n)
    pipes = scipy.sparse.vstack([scipy.sparse.kron(second, one), scipy.sparse.kron(one, second)]).tocsc()
    given, pipes = 50.0 * pipes[:, [0]].toarray()[:, 0], pipes[:, 1:].tocsr()  # the head of the first node is given
    nodes, rng = pipes.T.tocsr(), numpy.random.default_rng(0)
    k, demand = numpy.exp(0.3 * rng.standard_normal(pipes.shape[0])), 0.1 * rng.random(pipes.shape[1])
    start = 50.0 - 0.1 * numpy.arange(pipes.shape[1])

    @mpiad.jit
    def residual(h, k):
        drop = sparse_matmul(pipes, h) + given
        return sparse_matmul(nodes, k * drop * (drop * drop + 1e-4) ** -0.23) + demand  # Hazen and Williams's law

    def with_mpiad(**settings):
        settings = {"jacobian": "sparse", "pattern": abs(nodes) @ abs(pipes), **settings}
        gradient = mpiad.grad(lambda k: np.sum(newton(residual, start, k, rtol=1e-10, **settings)))
        return lambda: gradient(k)

    def by_hand(h):
        drop = pipes @ h + given
        square = drop * drop + 1e-4
        slope = k * (square**-0.23 - 0.46 * drop * drop * square**-1.23)
        f = nodes @ (k * drop * square**-0.23) + demand
        return f, numpy.linalg.norm(f), (nodes @ scipy.sparse.diags_array(slope) @ pipes).tocsc(), drop * square**-0.23

    def with_scipy():
        h = start
        f, norm, jacobian, flows = by_hand(h)
        first = norm
        while norm > 1e-10 * first:
            step, length = scipy.sparse.linalg.splu(jacobian).solve(f), 2.0
            before, found = norm, (f, numpy.inf, None, None)
            while found[1] > (1.0 - 1e-4 * length) * before:
                length *= 0.5
                found = by_hand(h - length * step)
            h, (f, norm, jacobian, flows) = h - length * step, found
        return -(pipes @ scipy.sparse.linalg.splu(jacobian).solve(numpy.ones(len(h)), "T")) * flows

    return {"mpiad": with_mpiad(), "mpiad, reuse=3": with_mpiad(reuse=3), "SciPy": with_scipy}, 1e-6


def tomography(n: int = 16, count: int = 8):
    """Return 60 iterations of L-BFGS for a conductivity, from potentials on the boundary for eight currents through it."""
    domain, index = mpiad.Domain((n, n)), numpy.arange(n * n).reshape(n, n)
    around = numpy.concatenate([index[0], index[1:, -1], index[-1, -2::-1], index[-2:0:-1, 0]])
    currents, on_boundary = numpy.zeros((count, n * n)), numpy.isin(index, around) * 1.0
    for m, row in enumerate(currents):
        row[around[m * len(around) // (2 * count)]], row[around[m * len(around) // (2 * count) + len(around) // 2]] = 1, -1
    y, x = numpy.indices((n, n))
    truth = numpy.log(1.0 + 2.0 * ((y - 5) ** 2 + (x - 10) ** 2 < 9))

    @mpiad.jit
    def operator(u, sigma):
        p, s = domain.exchange([u, sigma])  # no current flows through the sides, since the halo of sigma is zero
        total = 1e-3 * u
        for i, j in ((0, 1), (2, 1), (1, 0), (1, 2)):
            other = s[i : i + n, j : j + n]
            total = total + 2.0 * sigma * other / (sigma + other) * (u - p[i : i + n, j : j + n])
        return total

    def potentials(m):
        b = currents.reshape(count, n, n)
        return factorized(operator, b[0], np.exp(m), pattern=domain)(b)

    data = potentials(truth)

    def loss(m):
        return 1e4 * np.sum(on_boundary * (potentials(m) - data) ** 2) + 0.01 * np.sum(m**2)

    one, other = (numpy.concatenate([a.ravel(), b.ravel()]) for a, b in
                  ((index[:, :-1], index[:-1]), (index[:, 1:], index[1:])))  # fmt: skip
    pairs = numpy.arange(len(one))
    entries = numpy.repeat([-1.0, 1.0], len(one)), (numpy.tile(pairs, 2), numpy.concatenate([one, other]))
    differences, weights = scipy.sparse.csr_array(entries, shape=(len(one), n * n)), on_boundary.ravel()[:, None]

    def by_hand(m):
        a, b = numpy.exp(m)[one], numpy.exp(m)[other]
        faces = scipy.sparse.diags_array(2.0 * a * b / (a + b))
        factors = scipy.sparse.linalg.splu(
            (differences.T @ faces @ differences + 1e-3 * scipy.sparse.eye_array(n * n)).tocsc()
        )
        u = factors.solve(currents.T)
        gap = weights * (u - data.reshape(count, -1).T)
        slope = -((differences @ u) * (differences @ factors.solve(2e4 * gap))).sum(axis=1)
        gradient = numpy.bincount(one, slope * 2.0 * b**2 / (a + b) ** 2, n * n) * numpy.exp(m)
        gradient += numpy.bincount(other, slope * 2.0 * a**2 / (a + b) ** 2, n * n) * numpy.exp(m)
        return 1e4 * numpy.sum(gap**2) + 0.01 * numpy.sum(m**2), gradient + 0.02 * m

    settings: dict = {"method": "L-BFGS-B", "options": {"maxiter": 60, "gtol": 0.0, "ftol": 0.0}}

    def with_scipy():
        return scipy.optimize.minimize(by_hand, numpy.zeros(n * n), jac=True, **settings).x.reshape(n, n)

    return {"mpiad": lambda: mpiad.minimize(loss, numpy.zeros((n, n)), **settings).x, "SciPy": with_scipy}, 1e-3


def applications(repeats: int) -> None:
    """Print the times of three inverse problems and designs."""
    problems = {"4D-Var, 24 unknowns": observations, "network of 144 nodes, value and gradient": pipes,
                "impedance tomography, 16²": tomography}  # fmt: skip
    for name, problem in problems.items():
        sides, tolerance = problem()
        reference = sides["SciPy"]()
        for side, call in sides.items():
            assert numpy.abs(call() - reference).max() <= tolerance * numpy.abs(reference).max(), (name, side)
        times = dict(zip(sides, fastest(list(sides.values()), repeats)))
        for side, seconds in times.items():
            print(f"| {name} | {side} | {1e3 * seconds:.3g} | |")
            if side != "SciPy":
                report(f"{name}, {side} over SciPy", seconds / times["SciPy"], at_most=2.0)


def main() -> None:
    options = parser.parse_args()
    print("| cells | side | step, ms | with gradient, ms |\n|---|---|---|---|")
    set_up()
    applications(options.repeats)
    for n in options.cells:
        matrix, steps = matrix_of(n), steps_of(n)
        factors = scipy.sparse.linalg.splu(matrix)
        u = numpy.random.default_rng(n).standard_normal((n, n))
        sides = {}
        for name, step in steps.items():
            gradient = mpiad.value_and_grad(lambda u, step=step: np.sum(step(u) ** 2))
            sides[f"mpiad, {name}"] = lambda step=step: step(u), lambda gradient=gradient: gradient(u)[1]  # noqa: B023
            if name == "factorized":
                compiled, compiled_gradient = mpiad.jit(step), mpiad.jit(gradient)
                sides["mpiad, factorized, compiled"] = lambda: compiled(u), lambda: compiled_gradient(u)[1]  # noqa: B023

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
        most = 2.0 if n <= 64 else 1.2
        pairs = [(name, f"SciPy, {name}", most) for name in METHODS]
        pairs += [(name, "SciPy, LU kept", None if name == "CG" else most)
                  for name in ("CG", "factorized", "factorized, compiled")]  # fmt: skip
        for ours, side, at_most in pairs:
            for k, name in enumerate(("step", "step and gradient")):
                ratio = best[f"mpiad, {ours}"][k] / best[side][k]
                report(f"implicit heat {name}, {n}², {ours} over {side}", ratio, at_most=at_most)
        products(n, steps["factorized"], factors, max(2, repeats * 32 // n))
        reaction(n, options.repeats)


if __name__ == "__main__":
    main()
