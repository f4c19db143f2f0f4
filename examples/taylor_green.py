"""Simulate the Taylor-Green vortex, and find the perturbation of it that grows most.

    mpiexec -n 4 python examples/taylor_green.py
    mpiexec -n 4 python examples/taylor_green.py --picture taylor_green.png

An incompressible flow in a periodic box obeys the equations of Navier and Stokes,

    u_t = u × ω - ∇p + ν Δu,   ∇·u = 0,   ω the curl of u.

The velocity is stored as its Fourier modes, in which derivatives are products with wavenumbers, and the pressure only
removes the part with a divergence. The products u × ω are computed at the points of the grid: `mpiad.fft.DistributedFFT`
transforms twice 3 fields there and 3 fields back per stage of a Runge-Kutta step, with one all-to-all each (on slabs), or
with one for each field if these are large.

1. The kinetic energy of the vortex on 64³ points after ten steps is compared with a published value (that of spectralDNS,
   M. Mortensen and H. P. Langtangen, Comput. Phys. Commun. 203, 2016).
2. On a coarser grid, with products on 3/2 as many points along each axis, so that they aren't aliased: the initial
   perturbation, of a given energy, whose energy grows most by a given time (nonlinear optimal growth). The gradient is the
   adjoint of all time steps, which `scan` recomputes from a few checkpoints. Each rank has only its part of the
   perturbation.

Any number of ranks gives the same flow, to rounding.
"""

import argparse
import time
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.fft import DistributedFFT
from mpiad.timestepping import scan

PUBLISHED = 0.124953117517  # mean kinetic energy after ten steps of 0.01
VISCOSITY, BOX = 0.000625, numpy.array([2, 4, 4]) * numpy.pi
SIZE, SEED = 0.05, 3  # root mean square of the perturbation's velocity
CHECKPOINTS = 5

parser = argparse.ArgumentParser(description="Simulate the Taylor-Green vortex, and find its fastest perturbation.")
parser.add_argument("--points", type=int, default=64, help="points of the simulation along each axis")
parser.add_argument("--coarse", type=int, nargs=3, default=(10, 16, 16), help="points for the perturbation")
parser.add_argument("--steps", type=int, default=20, help="steps of 0.1 in which the perturbation grows")
parser.add_argument("--iterations", type=int, default=10, help="the most iterations of L-BFGS")
parser.add_argument("--least", type=float, default=3.0, help="fail if the optimal growth isn't larger than this")
parser.add_argument("--picture", type=Path, help="draw the perturbation into this file")


class Flow:
    """A flow in a periodic box; states are the modes of the three velocities, (3, *local_spectral_shape)."""

    def __init__(self, points, viscosity, step_size, padding=None):
        self.fft, self.products = DistributedFFT(points), DistributedFFT(points, padding=padding)
        self.viscosity, self.step_size = viscosity, step_size
        self.k = self.fft.wavenumbers(BOX)
        self.square = sum(k**2 for k in self.k)
        self.inverse_square = 1 / numpy.where(self.square == 0, 1, self.square)  # k = 0: the mean, without a pressure
        indices = numpy.indices(points, float)[(slice(None), *self.fft.owned)]
        self.coordinates = [2 * numpy.pi * i * length / n / BOX[0] for i, n, length in zip(indices, points, BOX)]

    def vortex(self):
        """Return the modes of the Taylor-Green vortex."""
        x, y, z = self.coordinates
        u, v = np.sin(x) * np.cos(y) * np.cos(z), -np.cos(x) * np.sin(y) * np.cos(z)
        return self.fft.forward(np.stack([u, v, 0 * u]))

    def solenoidal(self, modes):
        """Return a field without its part with a divergence."""
        potential = sum(k * modes[i] for i, k in enumerate(self.k)) * self.inverse_square
        return modes - np.stack([k * potential for k in self.k])

    def curl(self, modes):
        x, y, z = (1j * k for k in self.k)
        u, v, w = modes[0], modes[1], modes[2]
        return np.stack([y * w - z * v, z * u - x * w, x * v - y * u])

    def rates(self, modes):
        """Return the time derivatives of the modes."""
        u, v, w = self.products.backward(modes)
        a, b, c = self.products.backward(self.curl(modes))
        products = self.products.forward(np.stack([v * c - w * b, w * a - u * c, u * b - v * a]))
        return self.solenoidal(products) - self.viscosity * self.square * modes

    def step(self, modes, k=None):
        """Return the modes after one step of the classical Runge-Kutta method."""
        first = self.rates(modes)
        second = self.rates(modes + self.step_size / 2 * first)
        third = self.rates(modes + self.step_size / 2 * second)
        fourth = self.rates(modes + self.step_size * third)
        return modes + self.step_size / 6 * (first + 2 * second + 2 * third + fourth)

    def energy(self, modes):
        """Return the mean kinetic energy, the same on all ranks."""
        u = self.fft.backward(modes)
        return mpiad.mpi_allreduce(np.sum(u**2)) / (2 * numpy.prod(self.fft.shape))


class Growth:
    """The growth of perturbations of the vortex."""

    def __init__(self, points, steps):
        self.flow, self.steps = Flow(points, 0.02, 0.1, padding=3 / 2), steps
        self.step = mpiad.jit(self.flow.step)
        self.start = self.flow.vortex()
        self.undisturbed = self.evolved(self.start)

    def evolved(self, modes):
        return scan(self.step, modes, self.steps, checkpoints=CHECKPOINTS)

    def perturbation(self, field):
        """Return the modes of a perturbation of size SIZE in the direction of a field (3, *local_shape)."""
        modes = self.flow.solenoidal(self.flow.fft.forward(field))
        return modes * (SIZE / np.sqrt(2 * self.flow.energy(modes)))

    def final(self, field):
        return self.evolved(self.start + self.perturbation(field)) - self.undisturbed

    def __call__(self, field):
        """Return the factor by which the energy of a perturbation grows."""
        return 2 * self.flow.energy(self.final(field)) / SIZE**2


def draw_picture(path, fields, history):
    """Write the picture: sections through the perturbation before and after, and the growth during the minimization."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 3.2), layout="constrained", width_ratios=(2, 2, 1))
    for axis, (title, field) in zip(axes, fields.items()):
        speed = numpy.sqrt((field**2).sum(axis=0))[:, :, 0]
        image = axis.imshow(speed, "magma", origin="lower", extent=(0, BOX[1], 0, BOX[0]), interpolation="bicubic")
        axis.set(title=title, xlabel="y", ylabel="x")
        figure.colorbar(image, ax=axis, label="speed, z = 0")
    axes[2].plot(numpy.exp(-numpy.array(history)), "k.-")
    axes[2].set(title="growth of the energy", xlabel="iteration", ylabel="factor")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def whole(fft, field):
    """Return the whole physical array (3, *shape) on all ranks."""
    array = numpy.zeros((3, *fft.shape))
    array[(slice(None), *fft.owned)] = field
    return mpiad.mpi_allreduce(array)


def main():
    options = parser.parse_args()
    began = time.perf_counter()
    flow = Flow((options.points,) * 3, VISCOSITY, 0.01)
    modes = flow.vortex()
    for _ in range(10):
        modes = flow.step(modes)
    energy = flow.energy(modes)

    growth = Growth(tuple(options.coarse), options.steps)
    fft = growth.flow.fft
    start = numpy.random.default_rng(SEED).standard_normal((3, *fft.shape))[(slice(None), *fft.owned)].copy()
    start = fft.backward(fft.forward(start) * numpy.exp(-growth.flow.square / 4))  # smooth
    result = mpiad.minimize(
        lambda field: -np.log(growth(field)), start, method="L-BFGS-sharded", objective="root",
        options={"maxiter": options.iterations},
    )  # fmt: skip
    before, after = growth(start), growth(result.x)
    fields = {
        "perturbation that grows most": whole(fft, fft.backward(growth.perturbation(result.x))),
        f"after {options.steps} steps": whole(fft, fft.backward(growth.final(result.x))),
    }
    if mpiad.mpi_rank() > 0:
        return
    print(f"{options.points}³ points: energy after ten steps {energy:.12f}, published for 64³ {PUBLISHED}")
    print(f"growth by {options.steps} steps: random {before:.6f}, optimal {after:.6f}, {result.nit} iterations")
    print(f"{mpiad.mpi_size()} ranks, {time.perf_counter() - began:.1f} s")
    if options.picture:
        draw_picture(options.picture, fields, result.history.loss)
        print(f"written: {options.picture}")
    if options.points == 64 and abs(energy - PUBLISHED) > 5e-8:
        raise SystemExit(f"the energy, {energy:.12f}, isn't the published one")
    if not after > options.least:
        raise SystemExit(f"the growth, {after:.3f}, isn't larger than {options.least:g}")


if __name__ == "__main__":
    main()
