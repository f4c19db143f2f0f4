"""Find the stiffest cantilever of a given volume: topology optimization of an elastic body in three dimensions.

    mpiexec -n 4 python examples/topology_3d.py

A block of 48 x 24 x 24 elements is fixed at one end, and a load acts downwards along the lower edge of the other end. Each
element has a density between 0 and 1. Young's modulus is 1e-6 + ρ³ (SIMP), where ρ is the filtered density, a weighted mean
over the element and its neighbors. The compliance, which is the work of the load, is minimized for a given volume, the mean
of ρ.

1. The elements are cubes with eight nodes and three displacements per node. A product with the stiffness matrix computes
   the forces of each element and adds them; the matrix isn't assembled.
2. `linalg.solve` computes the displacements by conjugate gradients, preconditioned by a V-cycle of geometric multigrid. The
   stiffness of a coarse element is that of the eight elements in it, with displacements interpolated from its corners. The
   matrix of the coarsest grid is factored, `linalg.factorized`.
3. The gradient comes from `value_and_grad`, by the implicit function theorem. The derivative of the compliance with respect
   to the displacements is the load itself, so the adjoint solve starts at its solution and takes no iterations.
4. The method of moving asymptotes, "MMA-sharded", updates the densities. They are divided among the ranks, in slabs along
   the cantilever.

The number of ranks must divide the length of the coarsest grid. Any number of ranks gives the same body, to the tolerance
of the solves. The check is the compliance, compared with that of the block in which all densities are equal.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import NamedTuple

import autograd.numpy as np
import numpy
from autograd.extend import defvjp, primitive
from scipy.optimize import Bounds

import mpiad
from mpiad.linalg import DistributedMatrix, factorized, solve

WEAKEST, POISSON = 1e-6, 0.3  # the smallest Young's modulus; Poisson's ratio
CORNERS = numpy.array(list(itertools.product((0, 1), repeat=3)))
COARSEST = 4000  # the most unknowns on the grid whose matrix is factored

parser = argparse.ArgumentParser(description="Optimize the topology of a cantilever.")
parser.add_argument("--elements", type=int, nargs=3, default=(48, 24, 24), help="along the cantilever, in height and width")
parser.add_argument("--volume", type=float, default=0.2, help="share of the block that is filled")
parser.add_argument("--radius", type=float, default=1.9, help="of the density filter, in elements")
parser.add_argument("--iterations", type=int, default=30, help="of the method of moving asymptotes")
parser.add_argument("--most", type=float, default=0.05, help="fail if more of the first compliance is left")
parser.add_argument("--picture", type=Path, help="draw the body into this file")


def element_stiffness():
    """Return the stiffness matrix of a cube with edges of length 1, for E = 1: three displacements of each corner."""
    signs, stiffness, zero = 2 * CORNERS - 1, numpy.zeros((24, 24)), numpy.zeros(8)
    elastic = numpy.diag([1 - 2 * POISSON] * 3 + [0.5 - POISSON] * 3)
    elastic[:3, :3] += POISSON
    elastic /= (1 + POISSON) * (1 - 2 * POISSON)
    for point in signs / numpy.sqrt(3):  # of the Gauss quadrature
        parts = (1 + signs * point) / 2
        x, y, z = (signs[:, k] * numpy.delete(parts, k, 1).prod(1) for k in range(3))  # gradient of the shape functions
        strain = [(x, zero, zero), (zero, y, zero), (zero, zero, z), (y, x, zero), (zero, z, y), (z, zero, x)]
        strain = numpy.array(strain).transpose(0, 2, 1).reshape(6, 24)
        stiffness += strain.T @ elastic @ strain / 8
    return stiffness


def child_interpolation(child):
    """Return the matrix from displacements of a coarse element's corners to those of one of the eight elements in it."""
    weights = 1 - numpy.abs((CORNERS + child)[:, None] / 2 - CORNERS)
    return numpy.kron(weights.prod(axis=2), numpy.eye(3))


# Largest eigenvalue of an element's matrix divided by its diagonal: on the finest grid, and coarser ones, with any moduli
BOUNDS = 5.32, 6.55, 8.69
STIFFNESS = element_stiffness()
INTERPOLATIONS = [child_interpolation(child) for child in CORNERS]


class Grid:
    """Elements, and the nodes after each layer of elements; the nodes at the fixed end aren't unknowns.

    A rank computes the forces of its own elements and of the layer after them, so that forces needn't be exchanged.
    """

    def __init__(self, shape):
        settings = {"dims": (mpiad.mpi_size(), 1, 1), "halo": (1, 0, 0)}
        self.elements = mpiad.Domain(shape, **settings)
        self.nodes = mpiad.Domain((shape[0], shape[1] + 1, shape[2] + 1), **settings)
        self.unknowns = 3 * numpy.prod(self.nodes.shape)

    def coarser(self):
        """Return the grid with half as many elements each way."""
        shape, size = self.elements.shape, mpiad.mpi_size()
        if shape[0] % (2 * size) or shape[1] % 2 or shape[2] % 2:
            raise SystemExit(f"{shape} elements can't be halved each way on {size} ranks")
        return Grid(tuple(n // 2 for n in shape))

    def with_next(self, field):
        """Return a field (..., *local_shape) of the elements with the layer of elements after this rank's."""
        return self.elements.exchange(field)[..., 1:, :, :]

    def forces(self, u, stiffness):
        """Return the forces at the nodes, of the shape of u, for displacements u, (3, *nodes).

        `stiffness` is a factor of `STIFFNESS` for each element, or a matrix for each, (*elements, 24, 24).
        """
        corners = at_corners(self.nodes.exchange(u))
        if stiffness.ndim == 3:
            return added(np.reshape(STIFFNESS @ np.reshape(corners, (24, -1)), corners.shape) * stiffness)
        columns = numpy.moveaxis(corners.reshape(24, 1, *corners.shape[2:]), (0, 1), (3, 4))
        return added(numpy.moveaxis(stiffness @ columns, (3, 4), (0, 1)).reshape(corners.shape))

    def refined(self, u):
        """Return displacements on the next finer grid, interpolated linearly."""
        u = self.nodes.exchange(u)[:, :-1]
        for axis in (1, 2, 3):
            u = numpy.moveaxis(u, axis, 0)
            fine = numpy.empty((2 * len(u) - 1, *u.shape[1:]))
            fine[::2], fine[1::2] = u, (u[1:] + u[:-1]) / 2
            u = numpy.moveaxis(fine, 0, axis)
        return u[:, 1:]

    def coarsened(self, forces):
        """Return forces on the next coarser grid: the transpose of `refined`."""
        forces = numpy.pad(self.nodes.exchange(forces)[:, 1:], ((0, 0), (0, 0), (1, 1), (1, 1)))
        for axis in (1, 2, 3):
            f = numpy.moveaxis(forces, axis, 0)
            forces = numpy.moveaxis(f[1:-1:2] + (f[:-2:2] + f[2::2]) / 2, 0, axis)
        return forces

    def matrix(self, stiffness):
        """Return the matrix of this grid, with unknowns numbered node by node."""
        planes, height, width = self.nodes.local_shape
        first, last = self.nodes.owned[0].start, self.nodes.shape[0] - 1
        element = numpy.indices((planes + 1, height - 1, width - 1)).reshape(3, -1, 1)
        x, y, z = element + CORNERS.T[:, None]
        plane = first + x - 1  # -1 at the fixed end
        unknown = 3 * ((plane * height + y) * width + z)[:, :, None] + numpy.arange(3)
        row, column = unknown.reshape(-1, 24, 1), unknown.reshape(-1, 1, 24)
        own, free = (first <= plane) & (plane < first + planes), (plane >= 0) & (plane <= last)
        used = numpy.repeat(own, 3, axis=1)[:, :, None] & numpy.repeat(free, 3, axis=1)[:, None]
        row, column = (numpy.broadcast_to(part, used.shape)[used] for part in (row, column))
        matrix = DistributedMatrix.from_entries(row, column, stiffness[used], (self.unknowns, self.unknowns))
        return matrix.with_values(mpiad.stop_gradient(matrix.values))


@primitive
def at_corners(u):
    """Return the displacements at the corners of elements, (8, 3, *elements), from those of the nodes with their halo."""
    n, m, l = (length - 1 for length in u.shape[1:])
    return numpy.stack([u[:, i : i + n, j : j + m, k : k + l] for i, j, k in CORNERS])


@primitive
def added(forces):
    """Return the sums of the forces at the corners of elements, (8, 3, *elements), at the nodes of this rank."""
    return summed(forces)[:, 1:-1]


def summed(forces):
    n, m, l = forces.shape[2:]
    total = numpy.zeros((3, n + 1, m + 1, l + 1))
    for (i, j, k), part in zip(CORNERS, forces):
        total[:, i : i + n, j : j + m, k : k + l] += part
    return total


# Each is the transpose of the other, up to the halo: its nodes have displacements, but no forces.
defvjp(at_corners, lambda ans, u: summed)
defvjp(added, lambda ans, forces: lambda g: at_corners(numpy.pad(g, ((0, 0), (1, 1), (0, 0), (0, 0)))))


class Level(NamedTuple):
    """A grid of the multigrid hierarchy."""

    grid: Grid
    stiffness: numpy.ndarray  # as in `Grid.forces`
    inverse: numpy.ndarray  # of the diagonal
    bound: float  # of the largest eigenvalue of the matrix divided by its diagonal: that of the elements' matrices

    @classmethod
    def create(cls, grid, stiffness, number):
        if number == 0:
            diagonal = numpy.diag(STIFFNESS).reshape(8, 3, 1, 1, 1) * stiffness
        else:
            diagonal = numpy.moveaxis(numpy.diagonal(stiffness, axis1=3, axis2=4), 3, 0)
            diagonal = diagonal.reshape(8, 3, *diagonal.shape[1:])
        return cls(grid, stiffness, 1 / added(diagonal), BOUNDS[min(number, 2)])

    def residual(self, forces, u):
        return forces - self.grid.forces(u, self.stiffness)

    def smoothed(self, forces):
        """Return the Chebyshev polynomial of degree 2 that damps eigenvalues above a tenth of the bound."""
        u, center, half = self.inverse * forces, 0.55 * self.bound, 0.45 * self.bound
        product = self.inverse * self.grid.forces(u, self.stiffness)
        return (4 * center * u - 2 * product) / (2 * center**2 - half**2)


class VCycle:
    """A preconditioner: one symmetric cycle of multigrid for given moduli of the elements, of shape local_shape."""

    def __init__(self, grids, modulus):
        # Results of communication in a trace are traced, also those of plain values; `stop_gradient` returns plain values.
        self.levels, matrices = [Level.create(grids[0], mpiad.stop_gradient(grids[0].with_next(modulus)), 0)], None
        for number, grid in enumerate(grids[1:], 1):
            if matrices is None:
                children = [modulus[i::2, j::2, k::2] for i, j, k in CORNERS]
                matrices = numpy.tensordot(children, [P.T @ STIFFNESS @ P for P in INTERPOLATIONS], (0, 0))
            else:
                matrices = sum(P.T @ matrices[i::2, j::2, k::2] @ P for (i, j, k), P in zip(CORNERS, INTERPOLATIONS))
            exchanged = mpiad.stop_gradient(grid.with_next(numpy.moveaxis(matrices, (3, 4), (0, 1))))
            exchanged = numpy.ascontiguousarray(numpy.moveaxis(exchanged, (0, 1), (3, 4)))
            self.levels.append(Level.create(grid, exchanged, number))
        self.solve = factorized(grids[-1].matrix(exchanged.reshape(-1, 24, 24)))

    def __call__(self, forces, number=0):
        level = self.levels[number]
        if number == len(self.levels) - 1:
            rows = numpy.moveaxis(forces, 0, -1)
            return numpy.moveaxis(self.solve(rows.reshape(-1)).reshape(rows.shape), -1, 0)
        u = level.smoothed(forces)
        coarse = level.grid.coarsened(level.residual(forces, u))
        u = u + self.levels[number + 1].grid.refined(self(coarse, number + 1))
        return u + level.smoothed(level.residual(forces, u))


class Cantilever:
    """The compliance of the cantilever for given densities."""

    def __init__(self, shape, radius):
        self.grids = [Grid(shape)]
        while self.grids[-1].unknowns > COARSEST or len(self.grids) == 1:
            self.grids.append(self.grids[-1].coarser())
        self.grid = self.grids[0]
        self.elements, self.nodes = self.grid.elements, self.grid.nodes
        reach = int(numpy.ceil(radius)) - 1
        offsets = numpy.indices((2 * reach + 1,) * 3) - reach
        cone = self.elements.stencil(numpy.maximum(0, radius - numpy.sqrt(numpy.sum(offsets**2, axis=0))))
        self.cone, self.total = cone, cone(numpy.ones(self.elements.local_shape))
        self.load = numpy.zeros((3, *self.nodes.local_shape))
        if self.nodes.owned[0].stop == self.nodes.shape[0]:
            self.load[1, -1, -1] = 1 / self.nodes.shape[2]  # y points downwards
        self.last, self.norms = None, []

    def filtered(self, x):
        return self.cone(x) / self.total

    def compliance(self, x):
        modulus = WEAKEST + (1 - WEAKEST) * self.filtered(x) ** 3
        u = solve(
            self.grid.forces, self.load, self.grid.with_next(modulus),
            preconditioner=VCycle(self.grids, mpiad.stop_gradient(modulus)), x0=self.last, rtol=1e-6,
            callback=self.norms.append,
        )  # fmt: skip
        self.last = mpiad.stop_gradient(u)
        return self.nodes.dot(self.load, u)


def surface(solid):
    """Return the squares between solid cells and others, (squares, 4, 3), and the axis that each is orthogonal to."""
    padded, squares, normals = numpy.pad(solid, 1), [], []
    for axis, side in itertools.product(range(3), (0, 1)):
        cells = numpy.argwhere(padded & ~numpy.roll(padded, 1 - 2 * side, axis)) - 1
        around = numpy.insert([(0, 0), (0, 1), (1, 1), (1, 0)], axis, side, axis=1)
        squares.append(cells[:, None] + around)
        normals.append(numpy.full(len(cells), axis))
    return numpy.concatenate(squares), numpy.concatenate(normals)


def draw_picture(path, density, history):
    """Write the picture of the body, of three sections and of the compliance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    figure = pyplot.figure(figsize=(15, 9), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.9, 1))
    solid = density.transpose(0, 2, 1)[:, :, ::-1] > 0.5  # with the height upwards
    squares, normals = surface(solid)
    colors = numpy.array([(0.42, 0.5, 0.6), (0.58, 0.68, 0.8), (0.76, 0.84, 0.92)])[normals]
    body = above.add_axes((0, 0, 0.62, 1), projection="3d")
    body.add_collection3d(Poly3DCollection(squares, facecolors=colors, edgecolors=0.85 * colors, linewidths=0.3))
    length, width, height = solid.shape
    body.set(xlim=(0, length), ylim=(0, width), zlim=(0, height))
    body.set_box_aspect(solid.shape, zoom=1.12)
    body.view_init(elev=22, azim=-50)
    body.set_axis_off()
    axis = above.add_axes((0.68, 0.12, 0.3, 0.76))
    axis.semilogy(history, ".-")
    axis.set(title="compliance", xlabel="iteration")

    sections = {
        "density: lengthwise section in the middle": density[:, :, width // 2].T,
        "lengthwise section at a side": density[:, :, 0].T,
        "cross section in the middle": density[length // 2],
    }
    for panel, (title, section) in zip(below.subplots(1, 3, width_ratios=(length, length, 1.3 * width)), sections.items()):
        image = panel.imshow(section, "gray_r", vmin=0, vmax=1)
        panel.set(title=title, xticks=[], yticks=[])
        for k in range(1, mpiad.mpi_size() if "lengthwise" in title else 1):
            panel.axvline(k * length // mpiad.mpi_size() - 0.5, color="tab:red", linestyle="--", linewidth=1)
    figure.colorbar(image, ax=panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main():
    options = parser.parse_args()
    began = time.perf_counter()
    cantilever = Cantilever(tuple(options.elements), options.radius)
    domain, rank = cantilever.elements, mpiad.mpi_rank()
    result = domain.minimize(
        cantilever.compliance,
        numpy.full(domain.local_shape, options.volume),
        method="MMA-sharded",
        bounds=Bounds(0, 1),
        constraints={"type": "ineq", "fun": lambda x: 1 - domain.mean(cantilever.filtered(x)) / options.volume},
        options={"maxiter": options.iterations, "move": 0.2, "xtol": 0},
    )
    seconds, first = time.perf_counter() - began, result.history.loss[0]
    density = cantilever.filtered(result.x)
    volume, gray, whole = domain.mean(density), domain.mean(4 * density * (1 - density)), domain.gather(density)
    if rank > 0:
        return
    size = " x ".join(map(str, domain.shape))
    print(f"{size} elements, {cantilever.grid.unknowns} displacements on {mpiad.mpi_size()} ranks")
    print(f"compliance {first:.4f} -> {result.fun:.5f} in {result.nit} iterations, volume {volume:.4f}, gray {gray:.3f}")
    inner, each = len(cantilever.norms) / result.nfev, seconds / result.nfev
    print(f"{inner:.1f} iterations of conjugate gradients per solve; {each:.2f} s per iteration, {seconds:.1f} s in all")
    if options.picture:
        draw_picture(options.picture, whole, result.history.loss)
        print(f"written: {options.picture}")
    if not result.fun <= options.most * first:
        raise SystemExit(f"not stiff: {result.fun / first:.3f} of the first compliance is left")


if __name__ == "__main__":
    main()
