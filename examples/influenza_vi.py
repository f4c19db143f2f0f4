"""How contagious was the influenza in a boarding school in 1978? The posterior, by variational inference over the
ranks.

    mpiexec -n 2 python examples/influenza_vi.py

S' = -β S I / 763, I' = β S I / 763 - γ I with 3 boys ill on the first day; the boys in bed on 14 days are normal
around I with a standard deviation of 20, and log β, log γ have the priors N(log 1.5, 1), N(log 0.5, 1). A normal
posterior of both with full covariance is fitted by derivatives of the adaptive solves. It is compared with a long
Markov chain made without mpiad (`examples/data/influenza_posterior.py`): means within a tenth of the standard
deviation, standard deviations within 15 %.
"""

import argparse
import json
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.ensemble import ODEProblem, solve
from mpiad.parallel import Adam
from mpiad.vi import VI, FullRankGaussian

DATA = Path(__file__).with_name("data")
DAYS, IN_BED = numpy.loadtxt(DATA / "influenza_1978.csv", delimiter=",", skiprows=1, unpack=True)
BOYS, ILL_AT_FIRST, NOISE = 763, 3.0, 20.0

parser = argparse.ArgumentParser(description="Infer the rates of an epidemic.")
parser.add_argument("--n_epochs", type=int, default=120)
parser.add_argument("--n_samples_per_epoch", type=int, default=4)
parser.add_argument("--history", type=Path, help="write the objective of each epoch to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/influenza_vi.png"))


def epidemic(u, p, t):
    """Return the time derivatives of the susceptible and the ill; p holds the logarithms of β and γ."""
    beta, gamma = np.exp(p)
    infections = beta * u[0] * u[1] / BOYS
    return -infections, infections - gamma * u[1]


def in_bed(theta):
    """Return how many are ill on each day."""
    start = numpy.array([BOYS - ILL_AT_FIRST, ILL_AT_FIRST])
    problem = ODEProblem(epidemic, start, (float(DAYS[0]), float(DAYS[-1])), theta)
    return solve(problem, saveat=DAYS, rtol=1e-6, atol=1e-4).u[:, 1]


def loss(theta, observed):
    """Return the negative log likelihood."""
    misfit = np.sum((in_bed(theta) - observed) ** 2) / NOISE**2
    return 0.5 * misfit + len(observed) * np.log(NOISE * np.sqrt(2 * np.pi))


def draw_picture(path, result, reference):
    """Write the marginals beside the chain's, and the bands of curves and of data to expect beside the data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for k, axes in enumerate(panels[:2]):
        axes.hist(numpy.exp(result.samples[:, k]), 50, density=True, label="variational")
        x = numpy.linspace(*axes.get_xlim(), 200)
        mean, sd = reference["mean"][k], reference["sd"][k]
        density = numpy.exp(-0.5 * ((x - mean) / sd) ** 2) / sd / numpy.sqrt(2 * numpy.pi)
        axes.plot(x, density, "C3", label="chain's moments")
        axes.set(xlabel=("β per day", "γ per day")[k], ylim=(0, 1.3 * density.max()))
    panels[0].legend(fontsize="small")
    curves = numpy.array([in_bed(theta) for theta in result.samples[:100]])
    noise = NOISE * numpy.random.default_rng(0).standard_normal((40, *curves.shape))
    for kind, values, shade in (
        ("data to expect\n(parameters and noise)", (curves + noise).reshape(-1, len(DAYS)), 0.2),
        ("the model's curves\n(posterior of the parameters)", curves, 0.5),
    ):
        low, high = numpy.quantile(values, [0.05, 0.95], axis=0)
        panels[2].fill_between(DAYS, low, high, color="C0", alpha=shade, linewidth=0, label=f"90 % of {kind}")
    panels[2].plot(DAYS, IN_BED, "k.", label="observed")
    panels[2].set(xlabel="day", ylabel="boys in bed", ylim=(-50, 480))
    panels[2].legend(fontsize="small", loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    reference = json.loads((DATA / "influenza_posterior.json").read_text())
    start, prior = numpy.log([1.5, 0.5]), [("norm", numpy.log(1.5), 1.0), ("norm", numpy.log(0.5), 1.0)]
    posterior = FullRankGaussian(2, mean=start, sd=0.05)
    optimizer = Adam(lambda k: 0.1 * (1 + numpy.cos(numpy.pi * k / options.n_epochs)) / 2)
    inference = VI(loss, posterior, prior, optimizer, 1.0, options.n_samples_per_epoch, divergence="path", rng=0)
    result = inference.run(IN_BED, options.n_epochs, n_samples=4000, progress=True)
    if mpiad.mpi_rank() != 0:
        return
    rates = numpy.exp(result.draw(20000, rng=1))
    for k, name in enumerate(("beta", "gamma")):
        mean, sd = rates[:, k].mean(), rates[:, k].std(ddof=1)
        gap, ratio = abs(mean - reference["mean"][k]) / reference["sd"][k], sd / reference["sd"][k]
        print(f"{name}: {mean:.4f} ± {sd:.4f}, by the chain {reference['mean'][k]:.4f} ± {reference['sd'][k]:.4f}")
        assert options.n_epochs < 120 or (gap < 0.1 and 0.85 < ratio < 1.15), (name, gap, ratio)
    if options.history:
        numpy.savetxt(options.history, result.history["objective"], fmt="%.17e")
    try:
        draw_picture(options.picture, result, reference)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
