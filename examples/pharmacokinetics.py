"""How do patients differ in the way in which they eliminate a drug? A fit per patient, each with its own doses.

    mpiexec -n 4 python examples/pharmacokinetics.py

A drug is injected into the blood (volume V₁), from which it is eliminated with the clearance CL, and exchanged with tissue
(volume V₂) at the flow Q: a two-compartment model of the amounts. Each patient has an own schedule of injections, which
are events at given times, and an own set of ten blood samples, with errors of 10 %. `fit` estimates the logarithms of CL,
V₁, Q and V₂ of all patients at once. The covariance by linearization at a fit gives the band of the patient's curve. From
the mean and the covariance of all fits, new patients are drawn for a visual predictive check: their levels must be
distributed like the measured ones.

The fit of the first patient is checked against one that knows nothing of mpiad: SciPy's least_squares on the closed form.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from scipy.linalg import expm
from scipy.optimize import least_squares

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, Event, ODEProblem, Tsit5, fit, remake, solve

HOURS, DOSES, SAMPLES = 72.0, 6, 10
TYPICAL = numpy.log([4.0, 12.0, 6.0, 25.0])  # CL (l/h), V1 (l), Q (l/h), V2 (l)
SPREAD = numpy.array([0.3, 0.2, 0.25, 0.2])  # between patients
ERROR = 0.1  # relative error of a sample
NAMES = "CL V1 Q V2".split()
SEED = 11
TOLERANCES = {"rtol": 1e-7, "atol": 1e-8}

parser = argparse.ArgumentParser(description="Fit a two-compartment model to patients with own schedules of doses.")
parser.add_argument("--patients", type=int, default=60)
parser.add_argument("--draws", type=int, default=10, help="new patients per patient, for the predictive check")
parser.add_argument("--picture", type=Path, default=Path("demo/pharmacokinetics.png"))


def two_compartments(u, p, t):
    """Return the time derivatives of the amounts (mg) in blood and tissue; p["x"] holds the logarithms."""
    clearance, blood, flow, tissue = np.exp(p["x"])
    exchanged = flow * (u[0] / blood - u[1] / tissue)
    return [-clearance * u[0] / blood - exchanged, exchanged]


ONE = ODEProblem(
    two_compartments, [0.0, 0.0], (0.0, HOURS), {"x": TYPICAL, "times": numpy.zeros(DOSES), "dose": numpy.ones(1)}
)
INJECTIONS = Event(
    times=lambda p: [p["times"][i] for i in range(DOSES)], affect=lambda u, p, t: [u[0] + p["dose"][0], u[1]]
)


def drawn_patients(count, rng):
    """Return schedules, times of samples, and true parameters; the later doses of some patients are omitted."""
    intervals = rng.choice([6.0, 8.0, 12.0], (count, 1)) + rng.uniform(-1.0, 1.0, (count, DOSES))
    times = numpy.cumsum(intervals, axis=1) - intervals[:, :1]
    times[numpy.arange(DOSES) >= rng.integers(3, DOSES + 1, (count, 1))] = numpy.inf
    samples = numpy.sort(rng.uniform(0.3, HOURS, (count, SAMPLES)), axis=1)
    samples[:, :3] = rng.uniform([0.3, 1.0, 3.0], [0.8, 2.5, 6.0], (count, 3))  # the first dose tells both rates apart
    samples.sort(axis=1)
    schedules = {"times": times, "dose": rng.choice([100.0, 200.0], (count, 1))}
    return schedules, samples, TYPICAL + SPREAD * rng.standard_normal((count, 4))


def levels(x, schedules, times):
    """Return the levels (mg/l) in the blood of many patients."""
    many = EnsembleProblem(ONE, p={"x": x, **schedules})
    sol = solve(many, Tsit5(), EnsembleMPI(), saveat=times, events=INJECTIONS, **TOLERANCES)
    return sol.u[:, :, 0] / numpy.exp(x[:, 1:2])


def with_variables(problem, x):
    return remake(problem, p={**problem.p, "x": x})


def residuals(u, x, data):
    return (np.log(u[:, 0]) - x[1] - data) / ERROR


def fitted(schedules, samples, measured):
    count = len(samples)
    given = {"x": numpy.tile(TYPICAL, (count, 1)), **schedules}
    return fit(
        EnsembleProblem(ONE, p=given), residuals, given["x"], Tsit5(), EnsembleMPI(), data=numpy.log(measured),
        saveat=samples, events=INJECTIONS, prob_generator=with_variables, bounds=(TYPICAL - 3.0, TYPICAL + 3.0),
        ftol=1e-12, xtol=1e-10, compile=True, **TOLERANCES,
    )  # fmt: skip


def of_scipy(times, dose, samples, measured):
    """Return the fit of one patient to the closed form, by differences."""

    def deviations(x):
        clearance, blood, flow, tissue = numpy.exp(x)
        rates = numpy.array([[-(clearance + flow) / blood, flow / tissue], [flow / blood, -flow / tissue]])
        level = [sum(expm(rates * (t - start))[0, 0] for start in times if start <= t) * dose / blood for t in samples]
        return (numpy.log(level) - numpy.log(measured)) / ERROR

    return least_squares(deviations, TYPICAL, xtol=1e-12, ftol=1e-12, gtol=1e-12)


def repeated(schedules, count):
    return {name: numpy.repeat(part, count, axis=0) for name, part in schedules.items()}


def bands(found, schedules, patients, grid, rng):
    """Return, for some patients, the quantiles of the curves of parameters drawn from the covariance of the fit."""
    roots = numpy.linalg.cholesky(found.covariance(absolute_sigma=True)[patients])
    draws = found.p[patients][:, None] + rng.standard_normal((len(patients), 100, 4)) @ numpy.swapaxes(roots, 1, 2)
    some = {name: part[patients] for name, part in schedules.items()}
    curves = levels(draws.reshape(-1, 4), repeated(some, 100), grid)
    return numpy.quantile(curves.reshape(len(patients), 100, -1), [0.025, 0.5, 0.975], axis=1)


def predicted(found, schedules, samples, draws, rng):
    """Return the levels of new patients, with the errors of samples, shape (patients, draws, samples)."""
    good = found.p[found.success]
    # The fits scatter more than the patients, by the errors of the fits.
    errors = found.covariance(absolute_sigma=True)[found.success].mean(axis=0)
    values, vectors = numpy.linalg.eigh(numpy.cov(good.T) - errors)
    root = vectors * numpy.sqrt(numpy.maximum(values, 0.0))
    x = good.mean(axis=0) + rng.standard_normal((len(samples) * draws, 4)) @ root.T
    exact = levels(x, repeated(schedules, draws), numpy.repeat(samples, draws, axis=0))
    return (exact * numpy.exp(ERROR * rng.standard_normal(exact.shape))).reshape(len(samples), draws, -1)


def draw_picture(path, found, data, shown, grid, band, simulated):
    """Write the curves of some patients with their bands, and the quantiles of measured and predicted levels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    schedules, samples, measured = data
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axis, patient, (low, middle, high) in zip(axes, shown, numpy.swapaxes(band, 0, 1)):
        axis.fill_between(grid, low, high, alpha=0.3, label="95 % (parameters)")
        axis.plot(grid, middle, label="fit")
        axis.plot(samples[patient], measured[patient], "ko", ms=4, label="samples")
        for time in schedules["times"][patient]:
            if time < HOURS:
                axis.axvline(time, color="0.8", lw=0.8, zorder=0)
        axis.set(xlabel="hours", ylabel="mg / l", yscale="log", ylim=(0.02, 40), title=f"patient {patient + 1}")
    axes[0].legend()
    edges = numpy.quantile(samples, numpy.linspace(0, 1, 9))
    centers, check = 0.5 * (edges[1:] + edges[:-1]), axes[2]
    bins = numpy.clip(numpy.searchsorted(edges, samples) - 1, 0, 7)
    for level, color in zip((0.05, 0.5, 0.95), ("C0", "C1", "C0")):
        of_bin = [numpy.quantile(simulated[bins[:, None].repeat(simulated.shape[1], 1) == b], level) for b in range(8)]
        check.plot(centers, [numpy.quantile(measured[bins == b], level) for b in range(8)], "o", color=color)
        check.plot(centers, of_bin, color=color, label=f"{level:.0%} quantile")
    check.set(xlabel="hours", ylabel="mg / l", yscale="log", title="measured (dots) and predicted")
    check.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options, rng = parser.parse_args(), numpy.random.default_rng(SEED)
    schedules, samples, truth = drawn_patients(options.patients, rng)
    exact = levels(truth, schedules, samples)
    measured = exact * numpy.exp(ERROR * rng.standard_normal(exact.shape))
    found = fitted(schedules, samples, measured)
    deviations = numpy.sqrt(numpy.einsum("nii->ni", found.covariance(absolute_sigma=True)))
    within = numpy.abs(found.p - truth) < 1.96 * deviations
    simulated = predicted(found, schedules, samples, options.draws, rng)
    shown, grid = [0, 1], numpy.linspace(0.01, HOURS, 200)
    band = bands(found, schedules, shown, grid, rng)
    if mpiad.mpi_rank() != 0:
        return
    expected = of_scipy(schedules["times"][0], schedules["dose"][0, 0], samples[0], measured[0])
    for j, name in enumerate(NAMES):
        held = within[found.success, j].mean()
        print(f"{name:3} {numpy.exp(found.p[0, j]):12.6f}   SciPy {numpy.exp(expected.x[j]):12.6f}   95 % hold {held:.2f}")
    # The share of measured levels below the median of the predictions for the same patient and time.
    below = numpy.mean(measured < numpy.median(simulated, axis=1))
    print(f"{found}; below the predicted median: {below:.2f} of the levels")
    assert numpy.allclose(found.p[0], expected.x, atol=1e-5), "this is not where SciPy's fit ends"
    try:
        draw_picture(options.picture, found, (schedules, samples, measured), shown, grid, band, simulated)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
