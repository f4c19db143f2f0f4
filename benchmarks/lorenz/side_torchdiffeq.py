"""torchdiffeq: dopri5 for the whole batch, with one step that all trajectories share.

Its error norm is a mean over the batch, so a trajectory's own error may be larger than asked for: compare that column
too. `gradient` goes back through the solver's steps; `gradient, continuous` integrates the adjoint equation backwards.
"""

from __future__ import annotations

from collections.abc import Callable

import problem
import torch
from torchdiffeq import odeint, odeint_adjoint

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)

TIMES = torch.tensor([problem.T0, problem.T1])
OPTIONS = {"method": "dopri5", "rtol": problem.RTOL, "atol": problem.ATOL}


class Lorenz(torch.nn.Module):
    """The right-hand side; counts its calls."""

    def __init__(self, n: int):
        super().__init__()
        self.rho = torch.nn.Parameter(torch.as_tensor(problem.parameters(n)))
        self.start = torch.tensor(problem.START).expand(n, 3).contiguous()
        self.calls = 0

    def forward(self, t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x, y, z = u.unbind(1)
        return torch.stack((problem.SIGMA * (y - x), x * (self.rho - z) - y, x * y - problem.BETA * z), dim=1)


def forward(n: int) -> Callable[[], problem.Answer]:
    lorenz = Lorenz(n)

    def solve() -> problem.Answer:
        lorenz.calls = 0
        with torch.no_grad():
            end = odeint(lorenz, lorenz.start, TIMES, **OPTIONS)[-1]
        # Two calls choose the first step, and each step makes six: rejected ones are counted here too.
        return {"end": end.numpy(), "steps": torch.tensor([(lorenz.calls - 2) // 6]).numpy()}

    return solve


def gradient(n: int, solver: Callable = odeint, **options: object) -> Callable[[], problem.Answer]:
    lorenz = Lorenz(n)

    def solve() -> problem.Answer:
        lorenz.rho.grad = None
        end = solver(lorenz, lorenz.start, TIMES, **OPTIONS, **options)[-1]
        (end**2).sum().backward()
        return {"end": end.detach().numpy(), "gradient": lorenz.rho.grad.numpy()}

    return solve


problem.main({"forward": forward, "gradient": gradient, "gradient, continuous": lambda n: gradient(n, odeint_adjoint)})
