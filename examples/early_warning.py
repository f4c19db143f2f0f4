"""Early warning of a tsunami: the uplift of the sea floor, and a forecast at a harbor, as pressures at gauges arrive.

    mpiexec -n 4 python examples/early_warning.py
    mpiexec -n 4 python examples/early_warning.py --picture early_warning.png

Long waves (linear shallow water on staggered cells) over a sea floor with the relief of the Jacksboro fault elevation
model, enlarged to 200 km. The source is the uplift of the floor in each interval of twenty seconds, in space and time, in a
zone along the fault; a few pressure gauges on the floor measure the water above them with an error of 1 cm. The wave's map
from sources to pressures doesn't change with time, so all that doesn't depend on the data is computed before the event:
one adjoint run per gauge, and a factor of the covariance of the data. When pressures arrive, mean and standard deviation of
the uplift and the forecast at the harbor follow in milliseconds.

The true event isn't drawn from the prior: it is a rupture that runs along the zone. For `--events` events that are drawn
from the prior, the program counts how often the truth is in the bands of 95 %.
"""

import argparse
import time
from pathlib import Path

import autograd.numpy as np
import numpy
from matplotlib import cbook

import mpiad
from mpiad.inverse import Bilaplacian, LinearPosterior, ShiftInvariantMap

GRAVITY, SIZE, DT, INTERVAL = 9.81, 200e3, 5.0, 4  # m/s², m, s, steps
ERROR, SCALE, CORRELATION = 0.01, 0.1, 0.5  # m; m of uplift in an interval; between successive intervals
BAND, ROUNDING = 1.96, 1e-6  # m: heights before the first wave are certain

parser = argparse.ArgumentParser(description="Early warning from pressure gauges.")
parser.add_argument("--cells", type=int, default=48, help="in each direction")
parser.add_argument("--gauges", type=int, default=24)
parser.add_argument("--times", type=int, default=90, help="intervals of twenty seconds")
parser.add_argument("--events", type=int, default=200, help="events of the prior, for the coverage of the bands")
parser.add_argument("--least", type=float, default=0.9, help="fail if the uplift correlates less with the true one")
parser.add_argument("--picture", type=Path)
parser.add_argument("--save", type=Path, help="write the results to this file")


class Sea:
    """Long waves on a grid that is divided among the ranks."""

    def __init__(self, cells):
        self.domain, self.h = mpiad.Domain((cells, cells)), SIZE / cells
        with cbook.get_sample_data("jacksboro_fault_dem.npz") as data:
            relief = data["elevation"].astype(float)
        rows, columns = (numpy.arange(cells) * (n - 1) // (cells - 1) for n in relief.shape)
        relief = relief[numpy.ix_(rows, columns)]
        relief = (relief - relief.min()) / (relief.max() - relief.min())
        y, x = (numpy.arange(cells) + 0.5) / cells, (numpy.arange(cells)[:, None] + 0.5).T / cells
        depth = 200.0 + 3000.0 * (1.0 - x) * (1.0 - 0.3 * relief)  # shallower towards the coast in the east
        self.zone = numpy.exp(-(((x - 0.3 - 0.1 * y[:, None]) / 0.12) ** 4)) + 0 * relief
        self.depth, owned = depth, self.domain.owned
        padded = numpy.pad(depth, ((0, 1), (0, 1)), mode="edge")
        # On the northern and eastern faces of the cells; no water flows through the sides of the sea.
        north, east = (padded[:-1, :-1] + padded[1:, :-1]) / 2, (padded[:-1, :-1] + padded[:-1, 1:]) / 2
        north[-1], east[:, -1] = 0.0, 0.0
        self.north, self.east, self.lifted = north[owned], east[owned], self.zone[owned]
        edge = numpy.minimum(numpy.minimum(y, 1 - y)[:, None], numpy.minimum(x, 1.0))
        self.kept = (1.0 - 0.1 * numpy.clip(1.0 - edge / 0.08, 0.0, 1.0) ** 2)[
            owned
        ]  # waves leave in the west, north, south

    def step(self, state, k, m):
        """Return height, fluxes and the floor's uplift one step later; m: the uplift in an interval."""
        height, north, east, floor = state
        rise = self.lifted * m / INTERVAL
        n, e = self.domain.exchange([north, east], "zero", corners=False)
        height = self.kept * (height + rise - DT / self.h * (north - n[:-2, 1:-1] + east - e[1:-1, :-2]))
        p = self.domain.exchange(height, "edge", corners=False)
        north = self.kept * (north - GRAVITY * DT / self.h * self.north * (p[2:, 1:-1] - height))
        east = self.kept * (east - GRAVITY * DT / self.h * self.east * (p[1:-1, 2:] - height))
        return height, north, east, floor + rise

    def map(self, observed, points, times):
        """Return the map from uplifts to what `observed` takes of the state at some points."""
        zero = numpy.zeros(self.domain.local_shape)
        observe = mpiad.jit(lambda state: self.domain.interpolate(observed(state), points))
        return ShiftInvariantMap(mpiad.jit(self.step), observe, (zero,) * 4, zero, times, interval=INTERVAL)


def rupture(sea, times):
    """Return the whole uplift in each interval: a front that runs northwards along the zone for 100 s."""
    y, x = numpy.meshgrid(*[(numpy.arange(n) + 0.5) / n for n in sea.domain.shape], indexing="ij")
    return numpy.stack([
        0.8 * (k < 5) * numpy.exp(-(((y - 0.3 - 0.1 * k) / 0.1) ** 2) - ((x - 0.3 - 0.1 * y) / 0.06) ** 2)
        for k in range(times)
    ])  # fmt: skip


def coverage(posterior, harbor_map, forecast, k, events):
    """Return how many of the heights at the harbor, of events of the prior, are in the bands of forecasts from k times."""
    F, prior, hits = posterior.F, posterior.prior, []
    for event in range(events):
        seeds = range(1000 * event, 1000 * event + F.n)
        m = numpy.stack([prior.sample(seed) for seed in seeds])
        for t in range(1, F.n):
            m[t] += CORRELATION * m[t - 1]
        random = numpy.random.default_rng(event)
        d = F(m) + F.offset + ERROR * random.standard_normal(F.offset.shape)
        found, truth = forecast(d[:k]), harbor_map(m) + harbor_map.offset
        hits.append(numpy.abs(found.mean - truth) <= BAND * found.std + ROUNDING)
    return float(numpy.mean(hits))


def draw(path, sea, fields, records, gauges, harbor):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8.5), layout="constrained")
    axes, extent = figure.subplots(2, 3), (0, SIZE / 1e3, 0, SIZE / 1e3)
    most = numpy.abs(fields["true uplift"]).max()
    for ax, (name, field) in zip(axes.flat, fields.items()):
        deviation = name.startswith("standard")
        image = ax.imshow(
            field, origin="lower", extent=extent, cmap="magma" if deviation else "RdBu_r",
            vmin=0 if deviation else -most, vmax=None if deviation else most,
        )  # fmt: skip
        ax.plot(*(gauges[:, ::-1].T + 0.5) * sea.h / 1e3, "k^", markersize=5, label="gauges")
        ax.plot(*(harbor[:, ::-1].T + 0.5) * sea.h / 1e3, "g*", markersize=13, label="harbor")
        ax.set(title=f"{name}, m", xlabel="km", ylabel="km")
        figure.colorbar(image, ax=ax)
    axes[0, 0].legend(loc="lower right")
    ax = axes[1, 2]
    seconds = DT * INTERVAL * (1 + numpy.arange(len(records["truth"])))
    ax.plot(seconds, records["truth"], "k", label="true")
    for colour, (name, (mean, std)) in zip(("C0", "C1", "C2"), records["forecasts"].items()):
        ax.plot(seconds, mean, colour, label=f"forecast after {name}")
        ax.fill_between(seconds, mean - BAND * std, mean + BAND * std, color=colour, alpha=0.2)
    ax.set(title="height at the harbor, m, with bands of 95 %", xlabel="seconds")
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    options = parser.parse_args()
    root, n, cells = mpiad.mpi_rank() == 0, options.times, options.cells
    sea = Sea(cells)
    domain = sea.domain
    random = numpy.random.default_rng(4)
    gauges = (
        numpy.stack([random.uniform(0.08, 0.92, options.gauges), random.uniform(0.1, 0.6, options.gauges)], axis=1) * cells
    )
    harbor = numpy.array([[0.55, 0.93]]) * cells
    prior = Bilaplacian(domain, 0.12 * SIZE, SCALE, spacing=sea.h)

    began = time.perf_counter()
    F = sea.map(lambda state: state[0] - state[3], gauges, n)  # the column of water above a gauge
    posterior = LinearPosterior(F, prior, ERROR, correlation=CORRELATION)
    harbor_map = sea.map(lambda state: state[0], harbor, n)
    forecast = posterior.forecast(harbor_map)
    deviation = numpy.sqrt(posterior.variance(of=np.ones(n))) * sea.lifted
    offline = time.perf_counter() - began

    whole = rupture(sea, n)
    truth = whole[(slice(None), *domain.owned)]
    d = F(truth) + F.offset + ERROR * numpy.random.default_rng(0).standard_normal(F.offset.shape)
    heights = (harbor_map(truth) + harbor_map.offset)[:, 0]
    online, means, forecasts = 0.0, {}, {}
    for k in range(1, n + 1):  # the pressures arrive
        began = time.perf_counter()
        found = forecast(d[:k])
        online = max(online, time.perf_counter() - began)
        if k in (n // 15, n // 5, n):
            seconds = f"{k * DT * INTERVAL:g} s"
            began = time.perf_counter()
            means[seconds] = sea.lifted * numpy.sum(posterior.condition(d[:k]).mean, axis=0)
            inversion = time.perf_counter() - began
            forecasts[seconds] = found.mean[:, 0], found.std[:, 0]
    total = sea.lifted * numpy.sum(truth, axis=0)
    fields = {"true uplift": total} | {f"mean after {seconds}": field for seconds, field in means.items()}
    last = list(means.values())[-1]
    correlation = domain.sum(last * total) / (domain.norm(last) * domain.norm(total))
    fields = {
        name: domain.gather(field) for name, field in (fields | {"standard deviation after all data": deviation}).items()
    }
    share = coverage(posterior, harbor_map, forecast, n // 5, options.events)
    inside = numpy.mean(numpy.abs(found.mean[:, 0] - heights) <= BAND * found.std[:, 0] + ROUNDING)
    if not root:
        return
    print(f"{n} × {cells} × {cells} sources, {len(gauges)} gauges × {n} times on {mpiad.mpi_size()} ranks")
    print(f"before the event {offline:.2f} s")
    print(f"a forecast takes at most {1e3 * online:.2f} ms, the mean uplift {1e3 * inversion:.1f} ms")
    print(f"correlation with the true uplift {correlation:.3f}; height at the harbor in the band {inside:.0%} of the time")
    print(f"{options.events} events of the prior: {share:.1%} of the heights at the harbor are in the bands of 95 %")
    if options.save:
        records = {f"forecast after {seconds}": np.array(pair) for seconds, pair in forecasts.items()}
        numpy.savez(options.save, **fields, **records, truth=heights, share=share)
    if options.picture:
        draw(options.picture, sea, fields, {"truth": heights, "forecasts": forecasts}, gauges, harbor)
        print(f"written: {options.picture}")
    if not correlation >= options.least:
        raise SystemExit(f"not recovered: the correlation is {correlation:.3f}")


if __name__ == "__main__":
    main()
