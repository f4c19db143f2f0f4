"""The posterior of an agent-based epidemic by variational inference, the simulations divided among the ranks.

    mpiexec -n 4 python examples/sir_vi.py

Agents stand on a Watts-Strogatz graph (10 neighbours, a tenth of the edges rewired). Each day an infected agent
infects each susceptible neighbour, and recovers, with some probability; a random choice goes through by the Gumbel-
softmax relaxation, its value hard, its derivative soft. Three parameters are looked for by their log10: how many
are infected at first, how infectious they are, how fast they recover, each 0.05 in truth. The posterior is a
normalizing flow with 4 spline layers, the prior N(-2, 1) in each, the divergence weighs 100 agents squared, AdamW
has the rate 1e-3 (as in BlackBIRDS' example), which takes a thousand epochs; with `--learning_rate 1e-2
--n_epochs 60` it takes half a minute. On the host, all days are one program compiled by `jit`.
"""

import argparse
import functools
from pathlib import Path

import networkx
import numpy

import mpiad
import mpiad.device.numpy as np
from mpiad.device import is_device_array, to_device, to_host
from mpiad.extend import custom_operator, defvjp
from mpiad.parallel import AdamW
from mpiad.vi import VI, Flow, LULinear, SplineAutoregressive

TRUTH = numpy.log10([0.05, 0.05, 0.05])
NAMES = ["log10 initial", "log10 infection", "log10 recovery"]
NEIGHBOURS, REWIRED, TEMPERATURE = 10, 0.1, 0.5

parser = argparse.ArgumentParser(description="Infer the parameters of an epidemic among agents.")
parser.add_argument("--n_epochs", type=int, default=1000)
parser.add_argument("--n_agents", type=int, default=1000)
parser.add_argument("--n_timesteps", type=int, default=40)
parser.add_argument("--n_samples_per_epoch", type=int, default=8)
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--device_ids", nargs="+", help="a name for each rank, cpu or cuda:0 and so on; by default cpu")
parser.add_argument("--history", type=Path, help="write the objective of each epoch to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/sir_vi.png"))


@custom_operator
def neighbours_infected(graph, infected):
    """Return how many of each agent's neighbours are infected."""
    return graph @ infected


defvjp(neighbours_infected, None, lambda ans, graph, infected: lambda g: neighbours_infected(graph.T, g))


def chosen(probability, noise):
    """Return ones with this probability: hard in value, with the derivative of the Gumbel-softmax relaxation."""
    probability = np.clip(probability, 1e-12, 1 - 1e-12)
    logits = np.log(probability) - np.log(1 - probability) + noise
    soft = 1 / (1 + np.exp(-logits / TEMPERATURE))
    return soft + mpiad.stop_gradient(np.round(mpiad.stop_gradient(soft)) - soft)


def logistic(rng, n_timesteps, n_agents):
    """Return the random numbers of an epidemic: for the start, and two for each agent and day."""
    uniform = rng.random((1 + 2 * n_timesteps, n_agents))
    return numpy.log(uniform) - numpy.log1p(-uniform)


def epidemic(theta, graph, noise):
    """Return the numbers of infected and of recovered agents at the end of each day, shape (2, days).

    It runs where `theta`, `graph` and `noise` are, on the host or on a device.
    """
    initial, infection, recovery = 10 ** theta[0], 10 ** theta[1], 10 ** theta[2]
    ones = noise[0] * 0 + 1
    infected = chosen(np.minimum(initial, 1.0) * ones, noise[0])
    susceptible, recovered = 1 - infected, 0 * ones
    days = []
    for day in range(len(noise) // 2):
        pressure = infection * neighbours_infected(graph, infected)
        new = susceptible * chosen(1 - np.exp(-pressure), noise[1 + 2 * day])
        ended = infected * chosen(np.minimum(recovery, 1.0) * ones, noise[2 + 2 * day])
        susceptible, infected, recovered = susceptible - new, infected + new - ended, recovered + ended
        days.append(np.stack([np.sum(infected), np.sum(recovered)]))
    return np.stack(days, axis=1)


def beside(theta, x):
    """Return constants where a draw is."""
    plain = mpiad.stop_gradient(theta)
    return to_device(x, like=plain) if is_device_array(plain) else x


def generator_for(theta):
    """Return random numbers that belong to a draw, whichever rank runs it."""
    return numpy.random.default_rng(numpy.frombuffer(to_host(mpiad.stop_gradient(theta)).tobytes(), numpy.uint32))


def draw_picture(path, result, predict, data, days):
    """Write the marginals of the posterior, and what it predicts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for k, axes in enumerate(panels.ravel()[:3]):
        axes.hist(numpy.random.default_rng(0).normal(-2, 1, 4000), 60, density=True, color="0.85", label="prior")
        axes.hist(result.samples[:, k], 40, density=True, label="posterior")
        axes.axvline(TRUTH[k], color="C3", label="truth")
        axes.set(title=NAMES[k], xlim=(-4, 0))
    panels[0, 0].legend()
    curves = numpy.array([predict(theta)[0] for theta in result.samples[:100]])
    axes = panels[1, 1]
    low, high = numpy.quantile(curves, [0.05, 0.95], axis=0)
    axes.fill_between(days, low, high, alpha=0.3, linewidth=0, label="90 % of simulations (parameters and agents' chance)")
    axes.plot(days, numpy.median(curves, axis=0), label="their median")
    axes.plot(days, data[0], "k.", label="observed")
    axes.set(xlabel="day", ylabel="infected")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    edges = networkx.watts_strogatz_graph(options.n_agents, NEIGHBOURS, REWIRED, seed=1)
    graph = networkx.to_scipy_sparse_array(edges, dtype=float, format="csr")
    size = options.n_timesteps, options.n_agents
    data = epidemic(TRUTH, graph, logistic(numpy.random.default_rng(2), *size))
    # The random numbers are arguments: they differ from call to call.
    compiled = mpiad.jit(lambda theta, noise: epidemic(theta, graph, noise))

    @functools.cache
    def graph_on_device():
        from cupyx.scipy.sparse import csr_matrix

        return csr_matrix(graph)

    def predict(theta):
        noise = logistic(generator_for(theta), *size)
        if is_device_array(mpiad.stop_gradient(theta)):
            return epidemic(theta, graph_on_device(), beside(theta, noise))
        return compiled(theta, noise)

    def loss(theta, data):
        return np.sum((predict(theta) - beside(theta, data)) ** 2)

    layers = [layer for _ in range(4) for layer in (SplineAutoregressive(hidden=16), LULinear())]
    posterior = Flow(3, layers, mean=-2.0, sd=0.5)
    optimizer = AdamW(options.learning_rate)
    devices = options.device_ids
    inference = VI(
        loss, posterior, ("norm", -2.0, 1.0), optimizer, 100.0, options.n_samples_per_epoch, devices=devices, rng=0
    )
    result = inference.run(data, options.n_epochs, n_samples=400, progress=True)
    if mpiad.mpi_rank() != 0:
        return
    print(result.summary(NAMES))
    first, last = numpy.mean(result.history["loss"][:10]), numpy.mean(result.history["loss"][-10:])
    print(f"squared error of the predicted counts: {first:.4g} in the first epochs, {last:.4g} in the last")
    assert options.n_epochs * options.learning_rate < 0.5 or last < 0.1 * first, (first, last)
    if options.history:
        numpy.savetxt(options.history, result.history["objective"], fmt="%.17e")
    try:
        draw_picture(options.picture, result, predict, data, numpy.arange(1, options.n_timesteps + 1))
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
