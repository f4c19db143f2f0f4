"""torchode: Dopri5 with a step for each trajectory; all wait until the slowest is done.

`gradient` goes back through the solver's steps; `gradient, continuous` integrates the adjoint equation backwards.
"""

from __future__ import annotations

from collections.abc import Callable

import problem
import torch
import torchode

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)


def lorenz(t: torch.Tensor, u: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    x, y, z = u.unbind(-1)
    return torch.stack((problem.SIGMA * (y - x), x * (rho - z) - y, x * y - problem.BETA * z), dim=-1)


class WithParameter(torch.nn.Module):
    """The right-hand side with ρ as a fourth component at rest: continuous adjoints give no other gradient by row."""

    def forward(self, t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        # Backwards it is mapped over the rows, and then sees one of them.
        return torch.cat((lorenz(t, u[..., :3], u[..., 3]), torch.zeros_like(u[..., 3:])), dim=-1)


def parts(term: torchode.ODETerm) -> tuple:
    """Return the term, its step method and its controller."""
    controller = torchode.IntegralController(atol=problem.ATOL, rtol=problem.RTOL, term=term)
    return term, torchode.Dopri5(term=term), controller


def initial(start: torch.Tensor) -> torchode.InitialValueProblem:
    times = [torch.full((len(start),), t) for t in (problem.T0, problem.T1)]
    return torchode.InitialValueProblem(y0=start, t_start=times[0], t_end=times[1])


def starts(n: int) -> torch.Tensor:
    return torch.tensor(problem.START).expand(n, 3).contiguous()


def forward(n: int) -> Callable[[], problem.Answer]:
    rho, start = torch.as_tensor(problem.parameters(n)), initial(starts(n))
    _, step, controller = parts(torchode.ODETerm(lorenz, with_args=True))
    solver = torchode.AutoDiffAdjoint(step, controller)

    def solve() -> problem.Answer:
        with torch.no_grad():
            solution = solver.solve(start, args=rho)
        return {"end": solution.ys[:, -1].numpy(), "steps": solution.stats["n_accepted"].numpy()}

    return solve


def gradient(n: int) -> Callable[[], problem.Answer]:
    rho, start = torch.as_tensor(problem.parameters(n)).requires_grad_(), initial(starts(n))
    _, step, controller = parts(torchode.ODETerm(lorenz, with_args=True))
    solver = torchode.AutoDiffAdjoint(step, controller)

    def solve() -> problem.Answer:
        end = solver.solve(start, args=rho).ys[:, -1]
        (slope,) = torch.autograd.grad((end**2).sum(), rho)
        return {"end": end.detach().numpy(), "gradient": slope.numpy()}

    return solve


def continuous(n: int) -> Callable[[], problem.Answer]:
    rho = torch.as_tensor(problem.parameters(n)).requires_grad_()
    solver = torchode.BacksolveAdjoint(*parts(torchode.ODETerm(WithParameter())))

    def solve() -> problem.Answer:
        end = solver.solve(initial(torch.cat([starts(n), rho[:, None]], dim=1))).ys[:, -1, :3]
        (slope,) = torch.autograd.grad((end**2).sum(), rho)
        return {"end": end.detach().numpy(), "gradient": slope.numpy()}

    return solve


problem.main({"forward": forward, "gradient": gradient, "gradient, continuous": continuous})
