"""A polynomial whose terms are computed on different ranks: its value and its derivative.

    mpiexec -n 4 python examples/sum_of_powers.py

f(θ) = 1 + θ + ... + θ^(P-1) on P ranks: θ is broadcast from the root, each rank computes θ^rank, and the root adds up.
"""

import mpiad

rank, size = mpiad.mpi_rank(), mpiad.mpi_size()


def f(theta):
    theta = mpiad.mpi_bcast(theta)
    return mpiad.mpi_sum(theta**rank)


for theta in (1.0, 0.5):
    value, gradient = mpiad.value_and_grad(f)(theta)
    if rank == 0:
        print(f"theta = {theta}: f = {value:.6f}, df/dtheta = {gradient:.6f}")
        expected = sum(i * theta ** (i - 1) for i in range(1, size))
        assert abs(value - sum(theta**i for i in range(size))) < 1e-14 * value, value
        assert abs(gradient - expected) <= 1e-14 * expected, gradient
    else:
        # The other ranks' theta is only a template of the broadcast: the value is the same everywhere, the derivative
        # belongs to the root's theta.
        assert gradient == 0.0, gradient
