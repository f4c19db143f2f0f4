"""mpiad's own side: all trajectories advance together, each with its own step, in one process.

`gradient` carries the derivative with respect to ρ along; `gradient, adjoint` sweeps back over the accepted steps. By
kernels; `vectorised` means without.
"""

from __future__ import annotations

from collections.abc import Callable

import autograd.numpy as np
import problem

import mpiad
from mpiad import ensemble

START = np.array(problem.START)


def lorenz(u, p, t):
    x, y, z = u
    return problem.SIGMA * (y - x), x * (p[0] - z) - y, x * y - problem.BETA * z


def integrate(rho, **options):
    """Return the solution for each ρ."""
    one = ensemble.ODEProblem(lorenz, START, (problem.T0, problem.T1), np.zeros(1))
    many = ensemble.EnsembleProblem(one, p=np.reshape(rho, (-1, 1)))
    tolerances = {"rtol": problem.RTOL, "atol": problem.ATOL}
    return ensemble.solve(many, trajectories=len(rho), **tolerances, **options)


def forward(n: int, **options: bool) -> Callable[[], problem.Answer]:
    rho = problem.parameters(n)

    def call() -> problem.Answer:
        solution = integrate(rho, **options)
        return {"end": solution.u_end, "steps": solution.naccept}

    return call


def gradient(n: int, **options: str | bool) -> Callable[[], problem.Answer]:
    rho = problem.parameters(n)
    slope = mpiad.grad(lambda rho: np.sum(integrate(rho, **options).u_end ** 2))
    return lambda: {"gradient": slope(rho)}


problem.main(
    {
        "forward": forward,
        "forward, vectorised": lambda n: forward(n, compile=False),
        "gradient": lambda n: gradient(n, gradient="tangent"),
        "gradient, adjoint": lambda n: gradient(n, gradient="adjoint"),
        "gradient, vectorised": lambda n: gradient(n, gradient="tangent", compile=False),
        "gradient, vectorised adjoint": lambda n: gradient(n, gradient="adjoint", compile=False),
    }
)
