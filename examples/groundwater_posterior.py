"""Sample the posterior of an aquifer under real terrain, and compare it with its Laplace approximation.

    mpiexec -n 2 python examples/groundwater_posterior.py

The aquifer, its prior and the Laplace approximation are those of `groundwater_uncertainty.py`, on a coarser grid, with
fewer boreholes and a noise of 8 m. The flow is nonlinear in m, so the posterior is no Gaussian, and the approximation is
wrong to some extent. Here a Markov chain, informed by the approximation, draws samples of the posterior itself:

1. The most probable m by Gauss-Newton's method, and the Laplace approximation around it.
2. A chain by `mpiad.inverse.sample` (h-MALA by default), divided among the ranks like the field. At each sample it records
   m at two points, and the heads in the boreholes that were left out.
3. Standard deviations, marginals and predictions of both. How many of the heads that were left out lie in the chain's
   bands that are to hold 95 % is the check.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from groundwater_uncertainty import BAND, CORRELATION, Aquifer, Heads, terrain

import mpiad
from mpiad.inverse import Bilaplacian, laplace_approximation, sample

POINTS = numpy.array([[0.22, 0.3], [0.9, 0.93]])  # (y, x), relative to the region
COLORS = {"Laplace": "0.6", "chain": "C0"}

parser = argparse.ArgumentParser(description="Sample the posterior of an aquifer under the Jacksboro terrain.")
parser.add_argument("--coarsen", type=int, default=12, help="cells of the elevation model in one of ours, each way")
parser.add_argument("--boreholes", type=int, default=80, help="every other one is left out and predicted")
parser.add_argument("--pairs", type=int, default=40, help="eigenpairs of the Laplace approximation")
parser.add_argument("--noise", type=float, default=8.0, help="standard deviation of the measured heads, in meters")
parser.add_argument("--method", default="hmala", choices=["hpcn", "hmala", "dr"])
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--warmup", type=int, default=200, help="steps before them, in which step sizes are adapted")
parser.add_argument("--draws", type=int, default=200, help="samples of the Laplace approximation that predict heads")
parser.add_argument("--picture", type=Path, default=Path("demo/groundwater_posterior.png"))
parser.add_argument("--checkpoint", type=Path, help="continue a chain from this file, and write it there")
parser.add_argument("--progress", action="store_true")
parser.add_argument("--least", type=float, default=0.85, help="fail if fewer of the heads left out are in their bands")


def most_probable(aquifer, prior, pairs):
    """Return the Laplace approximation around the most probable field."""
    result = aquifer.domain.minimize(
        aquifer.residuals,
        prior.mean,
        method="Newton-CG-sharded",
        options={"product": "gauss-newton", "regularizer": prior, "inner_product": prior, "gtol": 1e-2},
    )
    kept = mpiad.linearize(aquifer.residuals)(result.x)
    products = lambda vs: kept.vjp(kept.jvp(vs, batch=True), batch=True)  # noqa: E731
    return laplace_approximation(products, result.x, prior, pairs, batch=True)


def values_at_points(aquifer, m):
    """Return m at the two points, on all ranks."""
    places = POINTS * aquifer.shape * numpy.array(aquifer.cell)
    return mpiad.mpi_allreduce(aquifer.domain.interpolate(m, places, aquifer.cell, centred=True, result="share"))


def draw_picture(path, aquifer, fields, points, heads):
    """Write the picture of the standard deviations, the marginals and the predictions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15.5, 9), layout="constrained")
    height, width = (n * h / 1000 for n, h in zip(aquifer.shape, aquifer.cell))
    limit = numpy.abs(fields["mean"]).max()
    panels = [
        (axes[0, 0], "deviation of Laplace", "standard deviation of m, Laplace approximation", ("magma", 0, 1)),
        (axes[0, 1], "deviation", "standard deviation of m, chain", ("magma", 0, 1)),
        (axes[0, 2], "shift", "mean of the chain minus MAP estimate", ("coolwarm", -0.5 * limit, 0.5 * limit)),
    ]
    for axis, name, title, (colors, low, high) in panels:
        image = axis.imshow(fields[name], colors, vmin=low, vmax=high, extent=(0, width, height, 0))
        axis.set(title=title, xlabel="east (km)", ylabel="south (km)")
        figure.colorbar(image, ax=axis, shrink=0.8)
    for k, (y, x) in enumerate(POINTS * (height, width)):
        for axis in axes[0, :2]:
            axis.plot(x, y, "co", markeredgecolor="black")
            axis.annotate(f"{k + 1}", (x, y), xytext=(6, 6), textcoords="offset points")
        axes[1, k].hist(points["chain"][:, k], 40, density=True, color=COLORS["chain"], alpha=0.6, label="chain")
        mean, deviation = points["Laplace"][:, k].mean(), points["Laplace"][:, k].std()
        m = numpy.linspace(mean - 4 * deviation, mean + 4 * deviation, 100)
        density = numpy.exp(-0.5 * ((m - mean) / deviation) ** 2) / (numpy.sqrt(2 * numpy.pi) * deviation)
        axes[1, k].plot(m, density, color="black", label="Laplace")
        axes[1, k].set(title=f"m at point {k + 1}", xlabel="m", ylabel="probability density")
        axes[1, k].legend()
    order = numpy.argsort(heads["chain"].mean)
    center, place = heads["chain"].mean[order], numpy.arange(len(order))
    for shift, (name, each) in zip((-0.2, 0.2), heads.items()):
        away, bars = each.mean[order] - center, BAND * each.deviation[order]
        axes[1, 2].errorbar(place + shift, away, bars, fmt="none", color=COLORS[name], label=name)
    axes[1, 2].plot(place, heads["chain"].measured[order] - center, "k.", label="measured")
    axes[1, 2].set(
        title="held-out heads minus the chain's mean, 95 % intervals", xlabel="borehole, by its head", ylabel="meters"
    )
    axes[1, 2].margins(y=0.2)
    axes[1, 2].legend(loc="upper center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    options = parser.parse_args()
    elevation, cell = terrain(options.coarsen)
    aquifer = Aquifer(elevation, cell, options.boreholes, options.noise)
    domain, left_out = aquifer.domain, aquifer.left_out
    prior = Bilaplacian(domain, CORRELATION, 1.0, spacing=cell)
    posterior = most_probable(aquifer, prior, options.pairs)

    def misfit(m):  # this rank's term of minus the log likelihood
        return 0.5 * np.sum(aquifer.residuals(m) ** 2)

    result = sample(
        misfit,
        prior,
        method=options.method,
        n_samples=options.samples,
        warmup=options.warmup,
        posterior=posterior,
        objective="sum",
        rng=2,
        quantities={
            "points": lambda m: values_at_points(aquifer, m),
            "heads": lambda m: aquifer.observed(m)[left_out],
        },
        checkpoint=options.checkpoint,
        progress=options.progress,
    )

    draws = [posterior.sample(100 + k) for k in range(options.draws)]
    points = {"Laplace": numpy.stack([values_at_points(aquifer, m) for m in draws]), "chain": result.quantities["points"]}
    predicted = {
        "Laplace": numpy.stack([aquifer.observed(m)[left_out] for m in draws]),
        "chain": result.quantities["heads"],
    }
    heads = {
        name: Heads(aquifer.heads[left_out], (each.mean(0), each.std(0)), options.noise) for name, each in predicted.items()
    }
    deviations = numpy.sqrt(posterior.variance), numpy.sqrt(result.variance)
    ratio = domain.mean(deviations[1] / deviations[0])
    shift = domain.norm((result.mean - posterior.mean) / deviations[0]) / numpy.sqrt(elevation.size)
    fields = {"deviation of Laplace": deviations[0], "deviation": deviations[1], "mean": result.mean}
    fields = {name: domain.gather(each) for name, each in (fields | {"shift": result.mean - posterior.mean}).items()}
    if mpiad.mpi_rank() != 0:
        return
    import arviz

    found = result.to_arviz()
    sizes = arviz.ess(found, var_names=["points", "heads"])
    smallest = min(sizes.points.values.min(), sizes.heads.values.min())
    accepted = ", ".join(f"{rate:.2f}" for rate in numpy.atleast_1d(result.acceptance))
    print(f"{domain.shape[0]} x {domain.shape[1]} cells on {mpiad.mpi_size()} ranks, {numpy.sum(~left_out)} boreholes")
    print(f"{options.samples} samples by {options.method}: accepted {accepted}; {result.solves['misfit']} solves, ", end="")
    print(f"{result.solves['gradient']} with a gradient; at least {smallest:.0f} effective samples of points and heads")
    print(
        f"standard deviation over that of Laplace: {ratio:.3f}; mean {shift:.2f} standard deviations from the MAP estimate"
    )
    for name, each in heads.items():
        error = numpy.sqrt(numpy.mean((each.mean - each.measured) ** 2))
        print(
            f"{name}: {each.coverage:.1%} of {len(each.mean)} heads left out in the band of 95 %; root mean square ", end=""
        )
        print(
            f"of their errors: {error:.2f} m, {each.deviation.mean():.2f} m expected with a noise of {options.noise:.0f} m"
        )
    draw_picture(options.picture, aquifer, fields, points, heads)
    print(f"written: {options.picture}")
    if not heads["chain"].coverage >= options.least:
        raise SystemExit(f"not covered: {heads['chain'].coverage:.1%} of the heads left out are in the band of 95 %")


if __name__ == "__main__":
    main()
