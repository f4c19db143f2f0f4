"""Find what two actuators did to a viscous flow from how it moved: Burgers' equation, implicit steps, Newton in each.

    mpiexec -n 4 python examples/burgers_control.py

On the unit interval, u_t + (u²/2)_x = ν u_xx + Σ_j a_j(t) φ_j(x) with u = 0 at the ends. The actuators' shapes φ_j are
known, and so is u at all points after each step of time. Sought are the amplitudes a_j of each step.

The interval is divided among the ranks. A step is implicit (backward Euler): `newton` solves it by GMRES, preconditioned by
each rank's own block of the Jacobian, which has three diagonals. The loop over the steps is `scan`, which keeps a few
states for the gradient and computes the others again; a step's adjoint is one linear solve with the transposed Jacobian.
L-BFGS runs on the root. Any number of ranks gives the same amplitudes.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from scipy.linalg import solve_banded

import mpiad
import mpiad.linalg
import mpiad.timestepping

VISCOSITY, TIME, CHECKPOINTS = 0.02, 0.6, 4

parser = argparse.ArgumentParser(description="Recover the controls of Burgers' equation.")
parser.add_argument("--cells", type=int, default=64)
parser.add_argument("--steps", type=int, default=20, help="steps of time")
parser.add_argument("--iterations", type=int, default=40, help="L-BFGS stops here at the latest")
parser.add_argument("--picture", type=Path, default=Path("demo/burgers_control.png"))
parser.add_argument("--save", type=Path, help="write the amplitudes to this file")
parser.add_argument("--most", type=float, default=0.02, help="fail if the relative error of the amplitudes is larger")


class Flow:
    """Burgers' equation on an interval that is divided among the ranks."""

    def __init__(self, cells, steps):
        self.domain, self.h = mpiad.Domain(cells), 1.0 / (cells + 1)
        self.steps, self.dt = steps, TIME / steps
        (self.x,) = self.domain.coordinates(self.h, self.h)
        self.shapes = numpy.stack([numpy.exp(-60 * (self.x - place) ** 2) for place in (0.3, 0.6)])
        self.start = 0.5 * numpy.sin(numpy.pi * self.x)

    def residual(self, new, old, push):
        """Return what is left of the equation in a step from `old` to `new`, for this rank's cells."""
        v = self.domain.exchange(new)
        flux = (v[2:] ** 2 - v[:-2] ** 2) / (4 * self.h)
        friction = VISCOSITY * (v[2:] - 2 * new + v[:-2]) / self.h**2
        return new - old + self.dt * (flux - friction - push)

    def step(self, u, k, amplitudes):
        """Return the state after one step."""
        push = np.dot(amplitudes, self.shapes)
        return mpiad.linalg.newton(
            self.residual, mpiad.stop_gradient(u), u, push, rtol=1e-12, atol=1e-12, preconditioner=self.precondition,
            preconditioner_transpose=self.precondition_transposed,
        )  # fmt: skip

    def diagonals(self, u):
        """Return those of this rank's block of the Jacobian: above, on and below the diagonal, by column."""
        friction, wind = self.dt * VISCOSITY / self.h**2, self.dt * u / (2 * self.h)
        return numpy.stack([wind - friction, 1 + 2 * friction + 0 * wind, -wind - friction])

    def precondition(self, r, u, old, push):
        return solve_banded((1, 1), self.diagonals(u), r)

    def precondition_transposed(self, r, u, old, push):
        above, on, below = self.diagonals(u)
        return solve_banded((1, 1), numpy.stack([numpy.roll(below, 1), on, numpy.roll(above, -1)]), r)

    def history(self, amplitudes):
        """Return the states after all steps, this rank's cells, shape (steps, cells)."""
        _, states = mpiad.timestepping.scan(
            self.step, self.start, self.steps, inputs=amplitudes, observe=lambda u, k: u, checkpoints=CHECKPOINTS
        )
        return states


def true_amplitudes(steps):
    t = (numpy.arange(steps) + 0.5) / steps
    return 4.0 * numpy.stack([numpy.sin(2 * numpy.pi * t), numpy.where(t > 0.4, 1.0, 0.0)], axis=1)


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def draw_picture(path, truth, found, states, borders, history):
    """Write the picture of the amplitudes, the flow and the loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    t = (numpy.arange(len(truth)) + 0.5) * TIME / len(truth)
    for j in range(truth.shape[1]):
        left.step(t, truth[:, j], f"C{j}", where="mid", label=f"true $a_{j + 1}$")
        left.plot(t, found[:, j], f"C{j}o", fillstyle="none", label=f"recovered $a_{j + 1}$")
    left.set(title="amplitudes of the actuators", xlabel="t")
    left.legend()
    image = middle.imshow(states, "RdBu_r", vmin=-1.5, vmax=1.5, aspect="auto", origin="lower", extent=(0, 1, 0, TIME))
    figure.colorbar(image, ax=middle, label="u")
    middle.vlines(borders[0] / states.shape[1], 0, TIME, colors="0.2", linewidths=1.0, linestyles="--")
    middle.set(title="the observed flow", xlabel="x", ylabel="t")
    right.semilogy(history.loss)
    right.set(title="convergence of L-BFGS", xlabel="iteration", ylabel="loss")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    flow, truth = Flow(options.cells, options.steps), true_amplitudes(options.steps)
    observed = flow.history(truth)
    scale = mpiad.mpi_allreduce(numpy.sum(observed**2))

    def loss(amplitudes):
        """Return this rank's share of the misfit."""
        return np.sum((flow.history(amplitudes) - observed) ** 2) / scale

    start, limits = numpy.zeros_like(truth), {"maxiter": options.iterations, "gtol": 0.0, "ftol": 0.0}
    result = mpiad.minimize(loss, start, objective="sum", options=limits, progress=True)
    states, borders = flow.domain.gather(observed), block_borders(flow.domain)
    error = numpy.linalg.norm(result.x - truth) / numpy.linalg.norm(truth)
    if mpiad.mpi_rank() == 0:
        print(f"{options.cells} cells, {options.steps} steps on {mpiad.mpi_size()} ranks")
        print(f"{result.nit} iterations  loss {result.fun:.3e}  relative error of the amplitudes {error:.6f}")
        if options.save:
            numpy.savez(options.save, true=truth, found=result.x)
        draw_picture(options.picture, truth, result.x, states, borders, result.history)
    if error > options.most:
        raise SystemExit(f"the amplitudes were not recovered: their relative error is {error:.3f}")


if __name__ == "__main__":
    main()
