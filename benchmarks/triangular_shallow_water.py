"""Shallow water on triangles: the compiled step compared with the same scheme by hand, and with ANUGA.

    mpiexec -n 2 python benchmarks/triangular_shallow_water.py [--refine 1 2] [--steps 20] [--rounds 10]

The flood of examples/triangular_shallow_water.py. By hand: NumPy, with indices of a rank's triangles and their ghosts,
`Isend` and `Irecv` between the ranks that share edges, and SciPy's product with a matrix of ones for the sums of fluxes.
The gradient is that of the sum of squared depths with respect to all friction coefficients. The sides alternate; a time is
that of the slowest rank, and the smallest counts. ANUGA is timed on one rank if .venv-peers has it (`make bench-peers`):
its own step of first order, on one thread, in a process of its own; its time steps and fluxes are others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import autograd.numpy as anp
import numpy as np
import scipy.sparse
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad
from mpiad.timestepping import scan

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

BY_HAND, GRADIENT, ANUGA = 1.3, 4.0, 0.5
PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
BEFORE = 100  # steps that aren't timed, in which the water begins to run
comm = MPI.COMM_WORLD.Dup()
rank, size = comm.rank, comm.size


def valley_of(refine: int) -> Any:
    """Return the example's `Valley` on a refined mesh."""
    from triangular_shallow_water import Mesh, Valley, bisection

    with np.load(HERE.parent / "examples" / "data" / "valley_mesh.npz") as file:
        mesh = Mesh(file["points"].astype(float), file["triangles"].astype(int))
    for _ in range(refine):
        mesh = mesh.refined()
    return Valley(mesh, bisection(mesh.centers, size), 240)


class Halo:
    """The exchange of ghosts, behind the rank's own entries, by hand."""

    def __init__(self, owner: np.ndarray, cells: np.ndarray, ghosts: np.ndarray):
        # `ghosts` are sorted by owner and number.
        self.count, self.own = len(ghosts), len(cells)
        wanted = comm.alltoall([ghosts[owner[ghosts] == peer] for peer in range(size)])
        starts = np.searchsorted(owner[ghosts], range(size + 1))
        self.received = [(peer, slice(*starts[peer : peer + 2])) for peer in range(size) if np.any(owner[ghosts] == peer)]
        self.sent = [(peer, np.searchsorted(cells, numbers)) for peer, numbers in enumerate(wanted) if len(numbers)]

    def exchange(self, x: np.ndarray) -> None:
        """Receive the entries of x (own + ghosts, 3) behind the rank's own."""
        ghosts = x[self.own :]
        requests = [comm.Irecv(ghosts[part], peer) for peer, part in self.received]
        packed = [x[indices] for _, indices in self.sent]
        requests += [comm.Isend(part, peer) for (peer, _), part in zip(self.sent, packed)]
        MPI.Request.Waitall(requests)


def step_by_hand(valley: Any) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return the step of the same scheme: ``step(water, roughness)``."""
    from triangular_shallow_water import GRAVITY, THIN, TINY

    mesh, owner, cells = valley.mesh, valley.owner, valley.cells
    edges = np.flatnonzero((owner[mesh.left] == rank) | (owner[mesh.right] == rank))
    left, right, walls = mesh.left[edges], mesh.right[edges], mesh.walls[edges]
    others = np.unique(np.concatenate([left, right]))
    others = others[owner[others] != rank]
    others = others[np.argsort(owner[others], kind="stable")]
    halo = Halo(owner, cells, others)
    place = np.empty(len(owner), int)
    place[np.concatenate([cells, others])] = np.arange(len(cells) + len(others))
    left, right = place[left], place[right]
    x, y = mesh.normal[edges].T.copy()
    mirror, length = np.where(walls, -1.0, 1.0), mesh.length[edges]
    bed = valley.bed[np.concatenate([cells, others])]
    top = np.maximum(bed[left], bed[right])
    drop0, drop1 = top - bed[left], top - bed[right]
    # Row: a triangle; column: what flows out on an edge's left side, then what flows in on its right.
    weights = np.concatenate([-length, np.where(walls, 0, length)])
    sums = scipy.sparse.csr_array((weights, (np.concatenate([left, right]), np.arange(2 * len(edges)))))[: len(cells)]
    sums = scipy.sparse.diags_array(valley.model.time_step / valley.model.areas) @ sums
    state, flux, m = np.empty((len(bed), 3)), np.empty((2 * len(edges), 3)), len(edges)

    def step(water: np.ndarray, roughness: np.ndarray) -> np.ndarray:
        h, p, q = water.T
        per_depth = 2 * h / (h * h + np.maximum(h, THIN) ** 2)
        own = state[: len(cells)]
        own[:, 0], own[:, 1], own[:, 2] = h, per_depth * p, per_depth * q
        halo.exchange(state)
        (d0, p0, q0), (d1, p1, q1) = np.take(state, left, axis=0).T, np.take(state, right, axis=0).T
        h0, h1 = np.maximum(d0 - drop0, 0), np.maximum(d1 - drop1, 0)
        u0, v0 = x * p0 + y * q0, x * q0 - y * p0
        u1, v1 = mirror * (x * p1 + y * q1), x * q1 - y * p1
        speed = np.maximum(np.abs(u0) + np.sqrt(GRAVITY * h0 + TINY), np.abs(u1) + np.sqrt(GRAVITY * h1 + TINY))
        m0, m1 = h0 * u0, h1 * u1
        normal = (m0 * u0 + m1 * u1 - speed * (m1 - m0)) / 2
        along = (m0 * v0 + m1 * v1 - speed * (h1 * v1 - h0 * v0)) / 2
        pressure = GRAVITY / 4 * (h1 * h1 - h0 * h0)
        flux[:m, 0] = flux[m:, 0] = (m0 + m1 - speed * (h1 - h0)) / 2
        for part, n in ((flux[:m], normal + pressure), (flux[m:], normal - pressure)):
            part[:, 1], part[:, 2] = x * n - y * along, y * n + x * along
        moved = water + sums @ flux
        h, p, q = moved.T
        a = valley.model.time_step * GRAVITY * roughness / np.maximum(h, THIN) ** (7 / 3)
        moved[:, 1:] *= (2 / (1 + np.sqrt(1 + 4 * a * np.sqrt(p * p + q * q + TINY))))[:, None]
        return moved

    return step


def times_of(valley: Any, steps: int, rounds: int) -> dict[str, float]:
    """Return the time of a step of each side in milliseconds."""
    roughness, hand, start = np.full(len(valley.cells), 0.05**2), step_by_hand(valley), valley.start
    for k in range(BEFORE):
        start = valley.step(start, k, roughness)

    def ours() -> np.ndarray:
        water = start
        for k in range(steps):
            water = valley.step(water, k, roughness)
        return water

    def by_hand() -> np.ndarray:
        water = start
        for _ in range(steps):
            water = hand(water, roughness)
        return water

    def loss(roughness: np.ndarray) -> float:
        return anp.sum(scan(valley.step, start, steps, roughness)[:, 0] ** 2)

    np.testing.assert_allclose(ours(), by_hand(), rtol=1e-10, atol=1e-12)
    gradient = mpiad.value_and_grad(loss, objective="sum")
    sides = {"mpiad": ours, "by hand": by_hand, "with the gradient": lambda: gradient(roughness)}
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            best[name] = min(best[name], seconds_of(side, 1, comm))
    return {name: 1e3 * seconds / steps for name, seconds in best.items()}


def anuga_time(valley: Any, steps: int, rounds: int) -> float | None:
    """Return the time of a step of ANUGA in milliseconds, or None if it isn't installed."""
    if not PEERS.exists() or subprocess.run([PEERS, "-c", "import anuga"], capture_output=True).returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file, mesh = Path(folder) / "valley.npz", valley.mesh
        np.savez(file, points=mesh.points, triangles=mesh.triangles, bed=valley.bed, depth=valley.start[:, 0])
        spans = [str(count * valley.model.time_step) for count in (BEFORE, steps)]
        command = [PEERS, HERE / "peers" / "anuga_valley.py", file, *spans, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--refine", type=int, nargs="+", default=[1, 2], help="divide each triangle into four, so many times"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    for refine in options.refine:
        valley = valley_of(refine)
        times = times_of(valley, options.steps, options.rounds)
        name = f"shallow water on {len(valley.mesh.areas)} triangles, {size} rank{'s' * (size > 1)}"
        if rank > 0:
            continue
        peer = anuga_time(valley, options.steps, options.rounds) if size == 1 else None
        times |= {"ANUGA": peer} if peer else {}
        print(f"{name}, ms per step: " + ", ".join(f"{side} {time:.3f}" for side, time in times.items()), flush=True)
        report(f"{name}: mpiad over NumPy by hand", times["mpiad"] / times["by hand"], at_most=BY_HAND)
        report(f"{name}: gradient over forward", times["with the gradient"] / times["mpiad"], at_most=GRADIENT)
        if peer:
            report(f"{name}: mpiad over ANUGA", times["mpiad"] / peer, at_most=ANUGA)
        elif size == 1:
            report_missing(f"{name}: mpiad over ANUGA", "peer not installed")


if __name__ == "__main__":
    main()
