"""Learn the source term of a reaction-diffusion equation: a network of PyTorch in a model on a divided grid.

    mpiexec -n 2 python examples/hybrid_model.py

The density u of a population obeys u_t = D u_xx + s(u). Four states are measured, and s is unknown: it is a small network
with one weight vector for the whole grid. Each rank evaluates it on its cells, and `from_torch` makes the evaluation one
step of the reverse pass. It needs PyTorch: pip install torch.
"""

import autograd.numpy as np
import torch

import mpiad
from mpiad.interop import from_torch

N, STEPS, DT, DIFFUSION = 64, 40, 2e-3, 0.02
domain = mpiad.Domain((N,), periodic=True)
x = (np.arange(N)[domain.owned[0]] + 0.5) / N
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
start = {name: value.detach().numpy() for name, value in network.named_parameters()}
growth = from_torch(lambda weights, u: torch.func.functional_call(network, weights, (u[:, None],))[:, 0])


def simulated(source):
    """Return four states of this rank's cells, from two bumps."""
    u, states = np.exp(-100 * (x - 0.3) ** 2) + 0.5 * np.exp(-80 * (x - 0.7) ** 2), []
    for step in range(STEPS):
        p = domain.exchange(u)
        u = u + DT * (DIFFUSION * N**2 * (p[:-2] - 2 * u + p[2:]) + source(u))
        if step % 10 == 9:
            states.append(u)
    return np.stack(states)


measured = simulated(lambda u: 8 * u * (1 - u))  # the law that the network is to learn


def loss(weights):
    """Return the mean squared misfit of the four states, the same on all ranks."""
    return domain.sum((simulated(lambda u: growth(weights, u)) - measured) ** 2) / (4 * N)


if __name__ == "__main__":
    result = mpiad.minimize(loss, start, options={"maxiter": 60})
    source = growth(result.x, np.array([0.25, 0.5, 0.75]))
    if mpiad.mpi_rank() == 0:
        print(f"loss {result.fun:.1e} after {result.nit} iterations; source {source.round(2)}, true [1.5 2. 1.5]")
    assert result.fun < 1e-5, result.fun
    assert np.max(np.abs(source - [1.5, 2.0, 1.5])) < 0.2, source
