"""What data between any ranks costs beyond bare MPI.

    mpiexec -n 5 python benchmarks/redistribution.py [--rounds N]

`mpi_alltoall` with counts is timed beside mpi4py's `Alltoallv` into a new array, both after the gather that sorts entries
by rank; "learned" is the call in which the ranks exchange their counts first. `GhostExchange.fetch` and `accumulate` are
timed beside the same messages written by hand: `Isend`, `Irecv`, and NumPy's gathers and sums. The ghosts are 10⁵ doubles
of four other ranks, in increasing order. The sides alternate; a time is that of the slowest rank, and the smallest counts.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from reaches import report, report_missing
from timing import seconds_of

import mpiad

ALLTOALL, FETCH = 1.1, 1.3  # what is aimed at
comm = MPI.COMM_WORLD.Dup()
rank, size = comm.rank, comm.size


def times_of(sides: dict, rounds: int) -> dict[str, float]:
    """Return the time of each side in milliseconds."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            best[name] = min(best[name], seconds_of(side, 3, comm))
    return {name: 1e3 * seconds for name, seconds in best.items()}


def alltoall_sides(n: int) -> dict:
    """Return the sides for n doubles per rank, of which each rank sends more to the next ones."""
    share = np.roll(np.arange(1, size + 1), rank) * n // (size * (size + 1) // 2)
    share[rank] += n - share.sum()
    counts, received = share.tolist(), comm.alltoall(share.tolist())
    rng = np.random.default_rng(rank)
    x, order = rng.standard_normal(n), np.argsort(rng.integers(0, size, n), kind="stable")

    def bare() -> np.ndarray:
        out = np.empty(sum(received))
        comm.Alltoallv([x[order], (counts, None)], [out, (received, None)])
        return out

    def ours() -> np.ndarray:
        return mpiad.mpi_alltoall(x[order], counts, received=received)

    assert np.array_equal(ours(), bare()) and np.array_equal(mpiad.mpi_alltoall(x[order], counts), bare())
    return {"bare": bare, "mpiad": ours, "mpiad, learned": lambda: mpiad.mpi_alltoall(x[order], counts)}


def ghost_sides(n: int) -> tuple[dict, dict]:
    """Return the sides of a fetch of n ghosts of four other ranks, and of its transpose."""
    owned, per_rank = 3 * n, n // 4
    peers = sorted((rank + step) % size for step in (1, 2, -1, -2))
    chosen = {
        (owner, reader): np.sort(np.random.default_rng([owner, reader]).choice(owned, per_rank, replace=False))
        for owner, reader in [(peer, rank) for peer in peers] + [(rank, peer) for peer in peers]
    }
    needed = np.concatenate([owned * peer + chosen[peer, rank] for peer in peers])
    ghosts = mpiad.GhostExchange(needed, (owned * rank, owned * rank + owned))
    x, g = np.random.default_rng(rank).standard_normal(owned), np.random.default_rng(rank).standard_normal(n)
    parts = {peer: slice(k * per_rank, (k + 1) * per_rank) for k, peer in enumerate(peers)}
    sent = {peer: chosen[rank, peer] for peer in peers}

    def fetch_by_hand() -> np.ndarray:
        out = np.empty(n)
        requests = [comm.Irecv(out[parts[peer]], peer) for peer in peers]
        packed = [x[sent[peer]] for peer in peers]
        requests += [comm.Isend(part, peer) for part, peer in zip(packed, peers)]
        MPI.Request.Waitall(requests)
        return out

    def accumulate_by_hand() -> np.ndarray:
        out, buffers = np.zeros(owned), [np.empty(per_rank) for _ in peers]
        requests = [comm.Irecv(buffer, peer) for buffer, peer in zip(buffers, peers)]
        requests += [comm.Isend(g[parts[peer]], peer) for peer in peers]
        MPI.Request.Waitall(requests)
        for buffer, peer in zip(buffers, peers):
            out[sent[peer]] += buffer
        return out

    def begun() -> np.ndarray:
        return mpiad.mpi_wait(ghosts.begin_fetch(x))

    assert np.array_equal(ghosts.fetch(x), fetch_by_hand()) and np.array_equal(begun(), fetch_by_hand())
    assert np.array_equal(ghosts.accumulate(g), accumulate_by_hand())
    return (
        {"bare": fetch_by_hand, "mpiad": lambda: ghosts.fetch(x), "mpiad, begin_fetch": begun},
        {"bare": accumulate_by_hand, "mpiad": lambda: ghosts.accumulate(g)},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    cases = {f"mpi_alltoall, {n:.0e} doubles": (alltoall_sides(n), ALLTOALL) for n in (10**5, 10**6)}
    if size >= 5:
        fetch, accumulate = ghost_sides(10**5)
        cases["fetch of 10⁵ ghosts"] = fetch, FETCH
        cases["its transpose"] = accumulate, FETCH
    elif rank == 0:
        report_missing("fetch of 10⁵ ghosts", "needs 5 ranks")
    for name, (sides, target) in cases.items():
        times = times_of(sides, rounds)
        if rank == 0:
            shown = ", ".join(f"{side} {time:.3f} ms ({time / times['bare']:.2f})" for side, time in times.items())
            print(f"{name}, {size} ranks: {shown}", flush=True)
            report(f"{name}, {size} ranks: mpiad / bare MPI", times["mpiad"] / times["bare"], at_most=target)


if __name__ == "__main__":
    main()
