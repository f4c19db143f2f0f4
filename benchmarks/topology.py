"""Topology optimization: the beam of the 88-line code by mpiad's MMA and by mmapy, and a cantilever in three dimensions.

    mpiexec -n 2 python benchmarks/topology.py [--elements 48 24 24] [--iterations 8] [--json FILE]

The beam has 60 x 20 elements, and its model is that of the tests (`tests/beam.py`), a sparse factorization per evaluation.
Both methods take 50 iterations with the same parameters, mpiad on all ranks and mmapy on rank 0. mmapy solves its
subproblems by an interior-point method, whose tolerance is set to 1e-11 in place of 1e-7 here, and variables within 1e-7 of
a bound are set to the bound. Target: equal compliances, to 1e-6. The time of an iteration without the evaluation is that of
the method alone.

The cantilever is that of `examples/topology_3d.py`. Measured are the time of an iteration, and for the last body a solve to
a relative residual of 1e-6, with its set-up: by the V-cycle of the example, by PETSc's algebraic multigrid (GAMG) if
petsc4py is installed, and on one rank by PyAMG's smoothed aggregation. Both peers get the assembled matrix and the six
rigid-body modes, and the time of the assembly isn't theirs. The peers are left out, and said so, if they aren't installed
(pip install mmapy pyamg petsc4py).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as anp
import numpy as np
import scipy.optimize
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import topology_3d
from beam import Beam

WORLD = MPI.COMM_WORLD
ITERATIONS = 50  # of the beam
RTOL = 1e-6


def imported(name: str) -> Any:
    """Return a module; None if it isn't installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Timed:
    """A function, and the seconds that its calls have taken."""

    def __init__(self, fun: Callable[..., Any]):
        self._fun, self.seconds = fun, 0.0

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        out = self._fun(*args)
        self.seconds += time.perf_counter() - start
        return out


def beam_by_mpiad(beam: Beam) -> tuple[float, float, float]:
    """Return the compliance after the last iteration, the seconds per iteration, and those without the evaluation."""
    ends = np.linspace(0, beam.size, WORLD.size + 1).astype(int)
    volumes = beam.filter.mean(axis=0)[None, ends[WORLD.rank] : ends[WORLD.rank + 1]] / 0.5

    def compliance(x: Any) -> Any:
        return beam.compliance(anp.dot(beam.filter, mpiad.mpi_allgather(x, axis=0)))

    evaluated = Timed(mpiad.value_and_grad(compliance))
    start = time.perf_counter()
    result = mpiad.minimize(
        evaluated, np.full(volumes.size, 0.5), jac=True, method="MMA-sharded", bounds=scipy.optimize.Bounds(0.0, 1.0),
        constraints=scipy.optimize.LinearConstraint(volumes, -np.inf, 1.0), options={"maxiter": ITERATIONS, "xtol": 0.0},
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return result.fun, seconds / ITERATIONS, (seconds - evaluated.seconds) / ITERATIONS


def beam_by_mmapy(beam: Beam, mma: Any) -> tuple[float, float, float]:
    """Return the same of mmapy in this process."""
    n, subproblem = beam.size, mma.subsolv
    ones, zeros, x = np.ones((n, 1)), np.zeros((n, 1)), np.full((n, 1), 0.5)
    low, high, last, earlier = zeros, ones, x, x
    slope = beam.filter.mean(axis=0, keepdims=True) / 0.5
    evaluated = Timed(lambda x: beam.with_gradient(beam.filter @ x[:, 0]))
    mma.subsolv = lambda m, n, tolerance, *rest: subproblem(m, n, 1e-11, *rest)
    start = time.perf_counter()
    for k in range(1, ITERATIONS + 1):
        value, gradient = evaluated(x)
        of_filter = (beam.filter.T @ gradient)[:, None]
        new, *_, low, high = mma.mmasub(
            1, n, k, x, zeros, ones, last, earlier, value, of_filter, slope @ x - 1.0, slope, low, high,
            1.0, np.zeros((1, 1)), np.full((1, 1), 1e5), np.zeros((1, 1)),
        )  # fmt: skip
        new = np.where(new < 1e-7, 0.0, np.where(new > 1.0 - 1e-7, 1.0, new))
        last, earlier, x = x, last, new
    value, _ = evaluated(x)
    seconds = time.perf_counter() - start
    mma.subsolv = subproblem
    return value, seconds / ITERATIONS, (seconds - evaluated.seconds) / ITERATIONS


def compare_beams(rounds: int) -> dict[str, tuple[float, float, float]]:
    """Print and return the compliance and the smallest times of each method."""
    beam, mma, found = Beam(60, 20, radius=2.4), imported("mmapy.mma"), {}
    for _ in range(rounds):
        runs = {"mpiad": beam_by_mpiad(beam)}
        if mma is not None and WORLD.rank == 0:
            runs["mmapy"] = beam_by_mmapy(beam, mma)
        WORLD.Barrier()
        for name, run in runs.items():
            found[name] = run[0], *map(min, run[1:], found.get(name, run)[1:])
    if WORLD.rank:
        return found
    print(f"beam of 60 x 20 elements, {ITERATIONS} iterations; mpiad on {WORLD.size} ranks, mmapy on one")
    for name, (value, seconds, own) in found.items():
        print(f"  {name}: compliance {value:.8f}, {1e3 * seconds:.2f} ms per iteration, {1e3 * own:.2f} without evaluation")
    if mma is None:
        print("  mmapy isn't installed")
        report_missing("MMA compared with mmapy", "peer not installed")
        return found
    gap, ratio = abs(found["mpiad"][0] / found["mmapy"][0] - 1.0), found["mpiad"][2] / found["mmapy"][2]
    print(f"  relative difference {gap:.1e}; time without evaluation over mmapy's {ratio:.2f}")
    report(f"MMA and mmapy: difference after {ITERATIONS} iterations, beam 60 x 20, ranks: {WORLD.size}", gap, at_most=1e-6)
    report(f"iteration of MMA without evaluation, over mmapy's, ranks: {WORLD.size}", ratio)
    return found


class Body:
    """The system of a cantilever's displacements, for this library and for peers."""

    def __init__(self, cantilever: Any, x: np.ndarray):
        self.cantilever, self.grid = cantilever, cantilever.grid
        self.modulus = topology_3d.WEAKEST + (1 - topology_3d.WEAKEST) * cantilever.filtered(x) ** 3
        with_next = self.grid.with_next(self.modulus)
        self.matrix = self.grid.matrix((with_next.reshape(-1, 1, 1) * topology_3d.STIFFNESS).reshape(-1, 24, 24))
        planes, height, width = self.grid.nodes.local_shape
        first = self.grid.nodes.owned[0].start
        places = np.stack(np.meshgrid(first + 1.0 + np.arange(planes), np.arange(1.0 * height), np.arange(1.0 * width),
                                      indexing="ij"), axis=-1)  # fmt: skip
        self.places = places.reshape(-1, 3)
        self.load = np.moveaxis(cantilever.load, 0, -1).reshape(-1)
        self.count = 0

    def work(self, u: np.ndarray) -> float:
        return WORLD.allreduce(float(self.load @ u))

    def by_mpiad(self) -> float:
        norms: list[float] = []
        u = mpiad.linalg.solve(
            self.grid.forces, self.cantilever.load, self.grid.with_next(self.modulus), rtol=RTOL, callback=norms.append,
            preconditioner=topology_3d.VCycle(self.cantilever.grids, self.modulus),
        )  # fmt: skip
        self.count = len(norms)
        return self.work(np.moveaxis(u, 0, -1).reshape(-1))

    def by_petsc(self, petsc: Any) -> float:
        rows, total = self.matrix.local_rows().tocsr(), self.matrix.shape[0]
        sizes, index = (rows.shape[0], total), petsc.IntType
        csr = rows.indptr.astype(index), rows.indices.astype(index), rows.data
        matrix = petsc.Mat().createAIJ((sizes, sizes), bsize=3, csr=csr, comm=WORLD)
        places = petsc.Vec().createWithArray(self.places.reshape(-1), bsize=3, comm=WORLD)
        matrix.setNearNullSpace(petsc.NullSpace().createRigidBody(places))
        ksp = petsc.KSP().create(WORLD)
        ksp.setOperators(matrix)
        ksp.setType("cg")
        ksp.getPC().setType("gamg")
        ksp.setNormType(petsc.KSP.NormType.UNPRECONDITIONED)
        ksp.setTolerances(rtol=RTOL)
        b, u = petsc.Vec().createWithArray(self.load, bsize=3, comm=WORLD), matrix.createVecRight()
        ksp.solve(b, u)
        self.count = ksp.getIterationNumber()
        return self.work(u.getArray())

    def by_pyamg(self, pyamg: Any) -> float:
        modes = np.zeros((len(self.places), 3, 6))
        modes[:, :, :3] = np.eye(3)
        for k in range(3):
            modes[:, :, 3 + k] = np.cross(np.eye(3)[k], self.places - self.places.mean(axis=0))
        norms: list[float] = []
        levels = pyamg.smoothed_aggregation_solver(self.matrix.local_rows().tobsr((3, 3)), B=modes.reshape(-1, 6))
        u = levels.solve(self.load, tol=RTOL, accel="cg", residuals=norms, maxiter=500)
        self.count = len(norms) - 1
        return self.work(u)


def measure_cantilever(shape: tuple[int, int, int], iterations: int) -> dict[str, Any]:
    """Print and return the time of an iteration, and those of one solve by each library."""
    cantilever = topology_3d.Cantilever(shape, 1.9)
    domain, times = cantilever.elements, [time.perf_counter()]
    result = domain.minimize(
        cantilever.compliance, np.full(domain.local_shape, 0.2), method="MMA-sharded", bounds=scipy.optimize.Bounds(0, 1),
        constraints={"type": "ineq", "fun": lambda x: 1 - domain.mean(cantilever.filtered(x)) / 0.2},
        options={"maxiter": iterations, "move": 0.2, "xtol": 0}, callback=lambda x: times.append(time.perf_counter()),
    )  # fmt: skip
    steps = np.diff(times)[1:]  # without the first, which also evaluates the start
    found: dict[str, Any] = {"iteration": float(np.median(steps)), "compliance": result.fun}
    name = " x ".join(map(str, shape))
    line = f"iteration of the cantilever, {name} elements, ranks: {WORLD.size}, s"
    if WORLD.rank == 0:
        report(line, found["iteration"])
        print(f"cantilever of {name} elements on {WORLD.size} ranks: {np.median(steps):.2f} s per iteration in the median, "
              f"{min(steps):.2f} at the least; compliance {result.fun:.6f} after {result.nit} iterations")  # fmt: skip
    body = Body(cantilever, result.x)
    expected = body.by_mpiad()
    petsc4py, pyamg = imported("petsc4py.PETSc"), imported("pyamg") if WORLD.size == 1 else None
    solves: dict[str, Callable[[], float]] = {"mpiad": body.by_mpiad}
    if petsc4py is not None:
        solves["PETSc GAMG"] = lambda: body.by_petsc(petsc4py)
    if pyamg is not None:
        solves["PyAMG"] = lambda: body.by_pyamg(pyamg)
    for label, solve in solves.items():
        gap = abs(solve() / expected - 1.0)
        if gap > 1e-4:
            raise SystemExit(f"{label}: another compliance, relative difference {gap:.1e}")
        found[label] = seconds_of(solve, 3), body.count
        if WORLD.rank == 0:
            print(f"  {label}: set-up and solve {found[label][0]:.2f} s, {body.count} iterations of conjugate gradients")
            if label != "mpiad":
                ratio = found["mpiad"][0] / found[label][0]
                report(f"cantilever's displacements, time over that of {label}, ranks: {WORLD.size}", ratio)
    if WORLD.rank == 0:
        for label, module in (("PETSc GAMG", petsc4py), ("PyAMG", pyamg)):
            if module is None and (label != "PyAMG" or WORLD.size == 1):
                print(f"  {label}: not installed")
                report_missing(f"cantilever's displacements, {label}", "peer not installed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--elements", type=int, nargs=3, default=(48, 24, 24), help="of the cantilever")
    parser.add_argument("--iterations", type=int, default=8, help="of the cantilever")
    parser.add_argument("--rounds", type=int, default=2, help="runs of the beam")
    parser.add_argument("--json")
    options = parser.parse_args()
    beams, cantilever = compare_beams(options.rounds), measure_cantilever(tuple(options.elements), options.iterations)
    if options.json and WORLD.rank == 0:
        Path(options.json).write_text(json.dumps({"beam": beams, "cantilever": cantilever}))


if __name__ == "__main__":
    main()
