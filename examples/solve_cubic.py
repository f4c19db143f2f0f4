"""Solve 1 + θ + θ² + θ³ = 2 for θ, each term on a rank of its own, by least squares from θ = 1.

    mpiexec -n 4 python examples/solve_cubic.py

Rank 0 holds θ and moves it; the others wait until it asks for the objective or for its gradient. On P ranks the
polynomial has P terms.
"""

import mpiad

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()


def f(theta):
    """Return the squared misfit on the root, where the terms of all ranks arrive."""
    return (mpiad.mpi_sum(theta**rank) - 2.0) ** 2


g = mpiad.grad(f, shared=True)  # by the one θ of which each rank has a copy

result = mpiad.mpi_optimize(f, g, 1.0, method="L-BFGS", options={"gtol": 1e-14, "ftol": 0.0})
if rank == 0:
    print(f"theta = {result.x:.15f}, misfit {result.fun:.1e}, {result.nfev} evaluations")
assert abs(sum(result.x**k for k in range(size)) - 2.0) < 1e-12, result
if size == 4:
    assert abs(result.x - 0.543689012692076) < 1e-14, result
