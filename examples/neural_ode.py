"""A neural network as the right-hand side of an ODE: one state, columns of states, and training over the ranks.

    mpiexec -n 4 python examples/neural_ode.py

The network takes 2 numbers through 50 tanh to 2. First it is solved, untrained, from [2, 0], then from the columns
[[0, 1, 2], [0, 0, 0]] as one state with one step size, in float64 and in float32; each is compared with SciPy's DOP853.
The gradient of the columns' squared ends is compared with differences of SciPy's solutions.

Then it learns a spiral, u' = A u³, from 16 trajectories that start around a circle: Adam, every rank with its share of
the trajectories and a copy of the weights. In the end the trained network is solved by SciPy too, for its loss.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, solve

SPIRAL = numpy.array([[-0.1, 2.0], [-2.0, -0.1]])
SPAN, TIMES = (0.0, 1.5), numpy.linspace(0.0, 1.5, 16)
COLUMNS = numpy.array([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
STARTS = 16

parser = argparse.ArgumentParser(description="Solve and train a neural ODE.")
parser.add_argument("--iterations", type=int, default=150, help="steps of Adam")
parser.add_argument("--history", type=Path, help="write the losses to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/neural_ode.png"))


def untrained(dtype=float):
    """Return weights, the same on all ranks."""
    rng = numpy.random.default_rng(50)
    weights = {
        "in": rng.standard_normal((50, 2)) / 2**0.5,
        "in bias": 0.1 * rng.standard_normal((50, 1)),
        "out": rng.standard_normal((2, 50)) / 50**0.5,
        "out bias": numpy.zeros((2, 1)),
    }
    return {name: values.astype(dtype) for name, values in weights.items()}


def network(u, weights, t):
    """Return the derivative of states in columns, shape (2, n)."""
    return weights["out"] @ np.tanh(weights["in"] @ u + weights["in bias"]) + weights["out bias"]


def spiral(u, matrix, t):
    return matrix @ u**3


def by_scipy(f, u0, p, times=TIMES):
    """Return states at the times, shape (n, len(times), 2), from u0 of shape (n, 2)."""
    runs = [
        solve_ivp(lambda t, u: f(u[:, None], p, t)[:, 0], SPAN, one, "DOP853", t_eval=times, rtol=1e-12, atol=1e-13)
        for one in u0
    ]
    return numpy.array([run.y.T for run in runs])


def compare_precisions():
    """Solve from one state and from columns, in both precisions; return the largest differences from SciPy's."""
    exact = by_scipy(network, COLUMNS.T, untrained(), SPAN)[:, -1].T
    for dtype, tolerance in ((numpy.float64, 1e-8), (numpy.float32, 1e-5)):
        weights, options = untrained(dtype), {"rtol": tolerance, "atol": tolerance}
        single = solve(ODEProblem(network, COLUMNS[:, 2].astype(dtype), SPAN, weights), **options).u_end
        columns = solve(ODEProblem(network, COLUMNS.astype(dtype), SPAN, weights), **options).u_end
        errors = numpy.abs(single - exact[:, 2]).max(), numpy.abs(columns - exact).max()
        yield dtype.__name__, single.dtype == columns.dtype == dtype, errors


def compare_gradients():
    """Return the derivative of the columns' squared ends along one direction of the weights, and SciPy's difference."""
    weights, rng = untrained(), numpy.random.default_rng(51)
    direction = {name: rng.standard_normal(values.shape) for name, values in weights.items()}

    def squares(weights):
        return np.sum(solve(ODEProblem(network, COLUMNS, SPAN, weights), rtol=1e-10, atol=1e-10).u_end ** 2)

    def moved(step):
        near = {name: values + step * direction[name] for name, values in weights.items()}
        return numpy.sum(by_scipy(network, COLUMNS.T, near, SPAN)[:, -1] ** 2)

    gradient = mpiad.grad(squares, shared=True)(weights)
    # All ranks solve the same, but only the root's solution counts.
    slope = sum(numpy.sum(gradient[name] * direction[name]) for name in weights)
    return slope, (moved(2e-5) - moved(-2e-5)) / 4e-5


def train(u0, observed, iterations, rate=0.05, decay=(0.9, 0.999)):
    """Return trained weights, the losses on the way, and how the first and the last step of the training were solved.

    The first steps are solved with arrays. When these have cost as much as a compilation, the loop goes on with kernels.
    """
    over_ranks, executions = EnsembleMPI(), []

    def loss(weights):
        many = EnsembleProblem(ODEProblem(network, u0[0], SPAN, weights), u0=u0)
        found = solve(many, ensemblealg=over_ranks, trajectories=len(u0), saveat=TIMES, rtol=1e-5, atol=1e-5)
        executions.append(str(found.execution))
        return np.mean((found.u - observed) ** 2)

    weights, step = untrained(), mpiad.value_and_grad(loss, shared=True)
    mean, square = (dict.fromkeys(weights, 0.0) for _ in range(2))
    losses = []
    for k in range(1, iterations + 1):
        value, gradient = step(weights)
        losses.append(value)
        for name, g in gradient.items():
            mean[name] = decay[0] * mean[name] + (1 - decay[0]) * g
            square[name] = decay[1] * square[name] + (1 - decay[1]) * g**2
            length = numpy.sqrt(square[name] / (1 - decay[1] ** k)) + 1e-8
            weights[name] = weights[name] - rate * mean[name] / (1 - decay[0] ** k) / length
    solved = executions[0], executions[-1]
    return weights, [*losses, loss(weights)], solved


def draw_picture(path, losses, observed, learned):
    """Write the loss, and the observed and learned trajectories."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    left.semilogy(losses)
    left.set(xlabel="iteration of Adam", ylabel="loss")
    right.plot(*observed.transpose(2, 1, 0), "k.", markersize=3)
    right.plot(*learned.transpose(2, 1, 0), "C0", linewidth=0.8)
    right.set(title="observed (dots) and learned", aspect="equal")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    angles = 2 * numpy.pi * numpy.arange(STARTS) / STARTS
    u0 = 1.5 * numpy.stack([numpy.cos(angles), numpy.sin(angles)], axis=1)
    observed = by_scipy(spiral, u0, SPIRAL)
    precisions, slopes = list(compare_precisions()), compare_gradients()
    weights, losses, solved = train(u0, observed, options.iterations)
    if mpiad.mpi_rank() != 0:
        return
    for name, kept, errors in precisions:
        print(f"{name}: beside SciPy, from [2, 0] {errors[0]:.1e}, from the columns {errors[1]:.1e}")
        assert kept and max(errors) < {"float64": 1e-7, "float32": 1e-4}[name], (name, kept, errors)
    print(f"derivative of the columns along one direction: {slopes[0]:.8f}, by differences {slopes[1]:.8f}")
    assert abs(slopes[0] / slopes[1] - 1) < 1e-6, slopes
    learned = by_scipy(network, u0, weights)
    exact = numpy.mean((learned - observed) ** 2)
    print(f"loss {losses[0]:.8f} at first, {losses[-1]:.8f} after {options.iterations} steps; SciPy says {exact:.8f}")
    assert abs(losses[-1] - exact) < 1e-4 * numpy.sqrt(exact), (losses[-1], exact)
    print(f"first step: {solved[0]}; last step: {solved[1]}")
    if options.history:
        numpy.savetxt(options.history, losses, fmt="%.17e")
    try:
        draw_picture(options.picture, losses, observed, learned)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
