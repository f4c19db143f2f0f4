"""Messages and bytes of an exchange, counted; weak scaling on the ranks there are, and modelled for as many as one likes.

    mpiexec -n 2 python benchmarks/domain.py [--cells 256] [--steps 10] [--repeats 20]

First the messages that each rank sends in one exchange of three fields are counted while they are sent, by
`mpiad.debug.recorded`, and compared with what the plan of the exchange says: at most one to each neighbour in a round, the
same backwards. The plan is then asked for a rank in the middle of up to 10⁵ ranks.

Weak scaling: cells² for each rank, steps of a wave with `Domain.laplacian`, value and gradient; on one rank, the others
idle, and on all. The model of a step on P ranks is what one rank took for it, and for each round of messages, two in a step
and its adjoint,

    t = n (α + o) + bytes / β        n messages, α their latency, o what Python takes for one, β the bandwidth of a rank

and for each gradient three reductions of 2 α log₂ P. o is measured here as the time of an exchange of nothing but edges
(on one core for each rank); α and β are those of a usual network, given by `--latency` and `--bandwidth`.
"""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from reaches import report
from timing import seconds_of

import mpiad
import mpiad.debug
from mpiad.domain.partition import Partition, choose_dims
from mpiad.domain.routes import AT_ONCE, BY_AXIS, FACES_ONLY, Geometry, plan

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--cells", type=int, default=256, help="along each side of a rank's block")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--repeats", type=int, default=20)
parser.add_argument("--latency", type=float, default=2e-6, help="α in seconds")
parser.add_argument("--bandwidth", type=float, default=5e9, help="β in bytes per second")

WORLD = MPI.COMM_WORLD
FIELDS, HALO = 3, 2
SCHEMES = {"in turn": BY_AXIS, "at once": AT_ONCE, "faces": FACES_ONLY}


def exchanges(domain: mpiad.Domain) -> dict[str, Callable]:
    """Return each variant of the exchange, as a function of several fields."""
    return {
        "in turn": domain.exchange,
        "at once": lambda u: domain.end_exchange(domain.begin_exchange(u)),
        "faces": lambda u: domain.exchange(u, corners=False),
    }


def counted(run: Callable[[], object]) -> tuple[int, int]:
    """Return the messages that this rank sends, and their bytes."""
    with mpiad.debug.recorded():
        run()
    # A row counts what the rank sends and receives; both are equal in an exchange.
    rows = mpiad.debug.report(io.StringIO()).rows
    return sum(int(row.messages[WORLD.rank]) for row in rows) // 2, sum(int(row.nbytes[WORLD.rank]) for row in rows) // 2


def planned(geometry: Geometry, scheme: str, itemsize: int) -> tuple[int, int, int]:
    """Return rounds, messages that leave in them, and bytes."""
    stages = plan(geometry, scheme)
    room = np.empty(geometry.padded, np.int8)
    cells = sum(room[part].size for stage in stages for route in stage.routes for part in route.owned)
    for stage in stages:
        assert len(stage.routes) == len({route.peer for route in stage.routes}), "two messages to one neighbour in a round"
    return len(stages), sum(len(stage.routes) for stage in stages), cells * itemsize


def count_messages(shape: tuple[int, ...], periodic: bool) -> None:
    """Print messages and bytes of one exchange, forwards and backwards, and compare them with the plan."""
    domain = mpiad.Domain(shape, halo=HALO, periodic=periodic)
    fields = [np.ones(domain.local_shape) for _ in range(FIELDS)]
    geometry = Geometry(Partition(domain.shape, domain.dims, domain.periodic), WORLD.rank, domain.halo)
    for name, exchange in exchanges(domain).items():
        pull, padded = mpiad.make_vjp(exchange)(fields)
        rounds, messages, nbytes = planned(geometry, SCHEMES[name], 8 * FIELDS)
        forwards = counted(lambda: exchange(fields))  # noqa: B023
        backwards = counted(lambda: pull(padded))  # noqa: B023
        assert forwards == backwards == (messages, nbytes), (forwards, backwards, messages, nbytes)
        if WORLD.rank == 0:
            grid = "×".join(map(str, shape)) + (" periodic" if periodic else "")
            print(f"| {grid} | {name} | {rounds} | {messages} | {nbytes:,} |")


def wave_gradient(cells: int, steps: int, comm: MPI.Comm) -> tuple[Callable[[], object], mpiad.Domain]:
    """Return a function that takes a gradient through the steps of a wave, of cells² on each rank."""
    dims = choose_dims((cells * comm.size,) * 2, comm.size, (1, 1), (False, False))
    domain = mpiad.Domain([cells * p for p in dims], dims=dims, comm=comm)
    laplacian = domain.laplacian()
    start, square = np.random.default_rng(0).random(domain.local_shape), np.full(domain.local_shape, 0.2)

    def energy(square: np.ndarray) -> float:
        u = before = start
        for _ in range(steps):
            u, before = 2 * u - before + square * laplacian(u), u
        return domain.sum(u**2)

    gradient = mpiad.value_and_grad(energy, comm=comm)
    return lambda: gradient(square), domain


def python_per_message(repeats: int, comm: MPI.Comm) -> float:
    """Return what a message takes whose bytes don't count, beyond an exchange without messages."""
    alone = mpiad.Domain((4, 4), comm=MPI.COMM_SELF)
    domain = mpiad.Domain((4, 4 * comm.size), dims=(1, comm.size), comm=comm)
    sent = max(1, max(comm.allgather(len([n for pair in domain.neighbours for n in pair if n is not None]))))
    with_messages = seconds_of(lambda: domain.exchange(np.ones(domain.local_shape)), 50 * repeats, comm)
    without = seconds_of(lambda: alone.exchange(np.ones((4, 4))), 50 * repeats, comm)
    return (with_messages - without) / sent


def model(seconds: float, overhead: float, options: argparse.Namespace) -> None:
    """Print the modelled times of a step of the gradient on up to 10⁵ ranks, a block of cells² on each."""
    print("\n| ranks | messages in a round | bytes | step and adjoint, ms | weak scaling |\n|---|---|---|---|---|")
    for ranks in (1, 2, 16, 256, 4096, 16_384, 102_400):
        dims = choose_dims((options.cells * ranks,) * 2, ranks, (1, 1), (False, False)) or (ranks, 1)
        partition = Partition(tuple(options.cells * p for p in dims), dims, (False, False))
        middle = int(np.ravel_multi_index([p // 2 for p in dims], dims))
        _, messages, nbytes = planned(Geometry(partition, middle, (1, 1)), FACES_ONLY, 8)
        travel = 2 * (messages * (options.latency + overhead) + nbytes / options.bandwidth)
        reductions = 3 * 2 * options.latency * math.log2(ranks) / options.steps
        total = seconds / options.steps + travel + reductions
        part = seconds / options.steps / total
        print(f"| {ranks:,} | {messages} | {nbytes:,} | {1e3 * total:.2f} | {part:.0%} |")


def main() -> None:
    options = parser.parse_args()
    root = WORLD.rank == 0
    if root:
        print(f"exchange of {FIELDS} fields, halo {HALO}, on {WORLD.size} ranks; counted on rank 0, forwards = backwards")
        print("| grid | variant | rounds | messages | bytes |\n|---|---|---|---|---|")
    for shape, periodic in (((64,), False), ((64, 64), False), ((64, 64), True), ((24, 24, 24), True)):
        count_messages(shape, periodic)
    one = 0.0
    if root:
        one = seconds_of(wave_gradient(options.cells, options.steps, MPI.COMM_SELF)[0], options.repeats, MPI.COMM_SELF)
    WORLD.Barrier()
    every = seconds_of(wave_gradient(options.cells, options.steps, WORLD)[0], options.repeats, WORLD)
    overhead = python_per_message(options.repeats, WORLD) if WORLD.size > 1 else 20e-6
    if root:
        first, now = (1e3 * seconds / options.steps for seconds in (one, every))
        print(f"\nweak scaling, {options.cells}² on each rank, a step and its adjoint:")
        print(f"1 rank {first:.2f} ms, {WORLD.size} ranks {now:.2f} ms: {one / every:.0%}")
        report(f"weak scaling of a wave to {WORLD.size} ranks, {options.cells}² on each", one / every)
        network = f"α {1e6 * options.latency:g} µs, β {options.bandwidth / 1e9:g} GB/s"
        print(f"model: {network}, o {1e6 * overhead:.0f} µs for a message")
        model(one, overhead, options)


if __name__ == "__main__":
    main()
