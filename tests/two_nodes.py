"""What knows of nodes, on four ranks of which the even ones are on one node and the odd ones on another.

MPICH plays the nodes (MPIR_CVAR_ODD_EVEN_CLIQUES=1). Each gets what nodes have of their own: the first argument is a folder
in which compiled kernels have a place for each node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import autograd.numpy as anp
import numpy as np
from device_double import on_device, on_host
from device_ways import sharing
from mpi4py import MPI
from ode_systems import decay

import mpiad
from mpiad import mpi_allreduce, mpi_exchange, mpi_local_rank, mpi_recv, mpi_send, value_and_grad
from mpiad.compiling import cache
from mpiad.device import to_host
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, solve
from mpiad.transport.devices import device_messages

WORLD = MPI.COMM_WORLD
RANK, NODE = WORLD.rank, WORLD.rank % 2
LONG = 1 << 17  # doubles: beyond all lengths from which long arrays go another way
OWN = Path(sys.argv[1]).absolute() / str(NODE)


def of_one_node() -> MPI.Comm:
    """Check who is where, and return the communicator of this rank's node."""
    node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert node.allgather(RANK) == [NODE, NODE + 2], "MPICH doesn't play two nodes"
    assert mpi_local_rank() == RANK // 2
    return node


def minimise(comm: MPI.Comm, ranks: list[int]) -> None:
    """Find the least Σ (1 + r) |x - c_r|² of some ranks, where the last one drives: the mean of c_r with these weights."""
    root = comm.size - 1
    centres = {r: np.sin(np.arange(LONG) * (1.0 + r)) for r in ranks}
    found = mpiad.minimize(
        lambda x: (1.0 + RANK) * anp.sum((x - centres[RANK]) ** 2), np.zeros(LONG), objective="sum", root=root, comm=comm,
        options={"gtol": 1e-9, "ftol": 0.0},
    )  # fmt: skip
    expected = sum((1.0 + r) * centres[r] for r in ranks) / sum(1.0 + r for r in ranks)
    np.testing.assert_allclose(found.x, expected, rtol=0.0, atol=1e-10)


def exchange_in_pairs(comm: MPI.Comm, ranks: list[int]) -> None:
    """Differentiate the sum of two ranks' long arrays, whole numbers, by each rank's own."""
    values = {r: (np.arange(LONG) * (r + 2) + 7.0 * r) % 1000 for r in ranks}
    weights = {r: np.arange(LONG) % (5.0 + r) for r in ranks}
    J, gradient = value_and_grad(
        lambda x: anp.sum(weights[RANK] * mpi_allreduce(x, comm=comm)), objective="sum", comm=comm
    )(values[RANK])
    total_weight, total = (np.sum([*arrays.values()], axis=0) for arrays in (weights, values))
    assert J == total_weight @ total and np.array_equal(gradient, total_weight)


def receive_from_anyone(rounds: int = 20) -> None:
    """Have rank 2 receive from whoever comes, and the cotangents go back to who it was."""

    def loss(x: np.ndarray) -> float:
        if RANK != 2:
            for entry in x:
                mpi_send(entry, 2, tag=7)
            return 0.0
        return sum(mpi_recv(0.0, MPI.ANY_SOURCE, tag=7) ** 3 for _ in range(3 * rounds))

    values = [np.arange(rounds) + 10.0 * r for r in range(4)]
    J, gradient = value_and_grad(loss, objective="sum")(values[RANK])
    assert J == sum((values[r] ** 3).sum() for r in (0, 1, 3))
    assert np.array_equal(gradient, 3.0 * values[RANK] ** 2 if RANK != 2 else np.zeros(rounds))


def place_blocks() -> None:
    """Divide a grid whose blocks differ, and compare the blocks with their halos with NumPy's padding of the whole."""
    domain = mpiad.Domain((7, 9))
    whole = np.arange(63.0).reshape(7, 9) ** 2
    u = domain.scatter(whole if RANK == 2 else None, root=2)
    padded = np.pad(whole, 1, mode="reflect")
    block = tuple(slice(cells.start, cells.stop + 2) for cells in domain.owned)
    assert np.array_equal(domain.exchange(u, "reflect"), padded[block])
    gathered = domain.gather(u, root=1)
    assert RANK != 1 or np.array_equal(gathered, whole)


def solve_ensembles(node: MPI.Comm) -> None:
    """Solve compiled ensembles over the ranks: on each node the first rank compiles a kernel, and the other takes it."""
    p = np.linspace(0.1, 3.0, 41)[:, None]
    ensemble = EnsembleProblem(ODEProblem(decay, [2.0], (0.0, 1.0)), p=p)
    tolerances = {"rtol": 1e-10, "atol": 1e-12}
    for turn in range(node.size):
        if node.rank == turn:
            solve(ensemble, **tolerances, compile=True)
        node.Barrier()
    first, again = (solve(ensemble, ensemblealg=EnsembleMPI(), **tolerances, compile=True) for _ in range(2))
    np.testing.assert_allclose(first.u_end, 2.0 * np.exp(-p), rtol=1e-8)
    assert first.u.tobytes() == again.u.tobytes() == WORLD.bcast(first.u.tobytes(), 3)
    origins = [sorted(found) for found in zip(*node.allgather([kernel.origin for kernel in cache._loaded.values()]))]
    assert origins and all(found == ["compiled", "disk"] for found in origins), origins


def send_from_devices() -> None:
    """Exchange arrays on devices with all ranks: ranks of the node read them there, the others get what is staged."""
    with sharing(introduced=False) as memory:
        for turn in range(5):
            stored = memory.copies
            for shift in (1, 2, 3):
                there, back = (RANK + shift) % 4, (RANK - shift) % 4
                x = on_device(np.arange(LONG) + 100.0 * RANK + turn)
                came = mpi_exchange(x, there, back)
                assert np.array_equal(on_host(came), np.arange(LONG) + 100.0 * back + turn)
                del came
            assert turn < 3 or memory.copies == stored + 1, (turn, stored, memory.copies)
        opened = {owner for owner, _ in device_messages.present()._opened}
        assert opened == {1 - RANK // 2}  # the node's other rank
        J, gradient = value_and_grad(lambda x: to_host(np.sum(mpi_exchange(x * x, (RANK + 2) % 4, (RANK + 2) % 4))),
                                     objective="sum")(x)  # fmt: skip
        assert np.array_equal(on_host(gradient), 2 * on_host(x)) and J > 0


def main() -> None:
    node = of_one_node()
    (OWN / "kernels").mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["MPIAD_CACHE"] = str(OWN / "kernels")
    minimise(WORLD, [0, 1, 2, 3])
    minimise(node, [NODE, NODE + 2])
    for color, ranks in ((RANK // 2, [RANK - NODE, RANK - NODE + 1]), (NODE, [NODE, NODE + 2])):
        pair = WORLD.Split(color, RANK)
        exchange_in_pairs(pair, ranks)
    receive_from_anyone()
    place_blocks()
    send_from_devices()
    solve_ensembles(node)
    print(f"rank {RANK}: all is right")


if __name__ == "__main__":
    main()
