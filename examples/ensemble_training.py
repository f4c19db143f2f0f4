"""Choose the start and the rate of growth of 100 curves so that all stay near one, with the curves over the ranks.

    mpiexec -n 4 python examples/ensemble_training.py

It is the problem of SciML's tutorial on parallel training: u' = 1.01 θ₂ u on (0, 1), u_i(0) = 0.5 + i/100 θ₁ for
i = 1 to 100, saved every 0.1; the loss is the sum of (1 - u)² over all that is saved. From θ = (3, 1), Adam takes 100
steps of 0.1; then L-BFGS starts at the same place. `--ensemble` says how the curves are solved: one after the other, all
at once, in threads, or over the ranks. The loss is the same however it is done.

The curves have a closed form, u_i(t) = u_i(0) exp(1.01 θ₂ t), and so has the loss: what was found is checked against it.
"""

import argparse
from pathlib import Path

import autograd.numpy as np

import mpiad
from mpiad.ensemble import (
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    ODEProblem,
    remake,
    solve,
)

WAYS = {
    "serial": EnsembleSerial(),
    "vectorized": EnsembleVectorized(),
    "threads": EnsembleThreads(),
    "mpi": EnsembleMPI(),
}
CURVES = 100
START = np.array([3.0, 1.0])

parser = argparse.ArgumentParser(description="Train two parameters through an ensemble of ODEs.")
parser.add_argument("--ensemble", choices=WAYS, default="mpi", help="how the curves are solved")
parser.add_argument("--iterations", type=int, default=100, help="steps of Adam, and at most of L-BFGS")
parser.add_argument("--history", type=Path, help="write the losses of Adam to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/ensemble_training.png"))


def growth(u, p, t):
    return 1.01 * u * p


def curves(theta, way):
    """Return the solutions; `u` has shape (100, 11, 1)."""
    one = ODEProblem(growth, theta[:1], (0.0, 1.0), theta[1:])
    many = EnsembleProblem(one, prob_func=lambda one, i, repeat: remake(one, u0=0.5 + i / 100 * one.u0))
    return solve(many, ensemblealg=way, trajectories=CURVES, saveat=0.1, rtol=1e-9, atol=1e-9)


def closed_form(theta):
    i, t = np.arange(1, CURVES + 1)[:, None], np.linspace(0.0, 1.0, 11)
    return np.sum((1 - (0.5 + i / 100 * theta[0]) * np.exp(1.01 * theta[1] * t)) ** 2)


def adam(loss_and_gradient, theta, iterations, rate=0.1, decay=(0.9, 0.999)):
    """Return the parameters after some steps (Kingma and Ba 2015), and the losses on the way."""
    mean, square, losses = np.zeros_like(theta), np.zeros_like(theta), []
    for k in range(1, iterations + 1):
        loss, gradient = loss_and_gradient(theta)
        losses.append(loss)
        mean = decay[0] * mean + (1 - decay[0]) * gradient
        square = decay[1] * square + (1 - decay[1]) * gradient**2
        unbiased = mean / (1 - decay[0] ** k), square / (1 - decay[1] ** k)
        theta = theta - rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    return theta, losses


def draw_picture(path, losses, solutions):
    """Write the way of the loss, and the curves at the start, after Adam and after L-BFGS."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.semilogy(losses)
    left.set(title="Adam", xlabel="iteration", ylabel="loss")
    for (label, solution), colour in zip(solutions.items(), ("C7", "C0", "C1")):
        lines = right.plot(solution.t, solution.u[::9, :, 0].T, colour, linewidth=0.8)
        lines[0].set_label(label)
    right.axhline(1.0, color="k", linestyle=":")
    right.set(title="every ninth curve", xlabel="t", ylabel="u", ylim=(0, 4))
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    way, root = WAYS[options.ensemble], mpiad.mpi_rank() == 0

    def loss(theta):
        return np.sum(np.abs(1 - curves(theta, way).u) ** 2)

    found, losses = adam(mpiad.value_and_grad(loss, shared=True), START, options.iterations)
    best = mpiad.minimize(loss, START if root else None, options={"maxiter": options.iterations, "ftol": 1e-14})
    ends = {"start": START, "Adam": found, "L-BFGS": best.x}
    solutions = {name: curves(theta, way) for name, theta in ends.items()}
    if not root:
        return
    for name, theta in ends.items():
        value, exact = loss_of(solutions[name]), closed_form(theta)
        print(f"{name:8} theta = {theta[0]:.8f} {theta[1]:.8f}  loss = {value:.8f}  closed form {exact:.8f}")
        assert abs(value - exact) < 1e-7 * exact, name
    if options.history:
        np.savetxt(options.history, losses, fmt="%.17e")
    try:
        draw_picture(options.picture, losses, solutions)
    except ImportError:
        print("no picture: matplotlib isn't installed")


def loss_of(solution):
    return np.sum((1 - solution.u) ** 2)


if __name__ == "__main__":
    main()
