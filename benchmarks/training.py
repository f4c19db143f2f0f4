"""Data-parallel training on all ranks beside one rank, and the fused reduction beside a bare Allreduce.

    mpiexec -n 2 python benchmarks/training.py

- `digits`: steps of the network of `examples/digits_training.py` with 512 images on each rank, beside one rank that
  computes all of the batch (to reach on 2 ranks: 1.7);
- `reduction`: 200 arrays added up together, beside one Allreduce of their total size (to reach: the Allreduce + 60 µs +
  three copies of that size); and a whole update of them by an optimizer that does nothing;
- `compiled`: steps with a jitted loss, whose gradient and sums over the ranks are one program, beside the same steps
  interpreted (to reach: 1.0), and beside one rank that computes all of the batch (to reach on 2 ranks with 512 units:
  0.55).

Both sides take turns in the same processes; times are those of the slowest rank, the smallest of many.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
import numpy
from mpi4py import MPI
from reaches import report

import mpiad
from mpiad.parallel import Adam, DistributedOptimizer
from mpiad.parallel.buckets import BUCKET_BYTES, Plan, Sums
from mpiad.primitives.cotangents import spec_like
from mpiad.transport import channel

comm = MPI.COMM_WORLD.Dup()
PER_RANK, HIDDEN = 512, 128
FASTER, MORE = 1.7, 60  # times one rank, on two; µs beyond an Allreduce and three copies


class Nothing:
    """An optimizer that leaves the parameters as they are: what remains is the reduction."""

    def setup(self, params: Any) -> None:
        return None

    def update(self, state: None, params: Any, gradient: Any) -> tuple[None, Any]:
        return None, params


def loss(params: Any, images: Any, labels: Any) -> Any:
    for w, b in params[:-1]:
        images = np.maximum(images @ w + b, 0)
    w, b = params[-1]
    found = images @ w + b
    # Less the highest, so that no exponential overflows: a constant, which the result doesn't depend on.
    found = found - np.max(mpiad.stop_gradient(found), axis=1, keepdims=True)
    return np.mean(np.log(np.sum(np.exp(found), axis=1)) - found[np.arange(len(labels)), labels])


def sleep_until_all_are_here() -> None:
    """Wait without taking a core from those that work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0002)


def slowest(call: Callable[[], Any], repeats: int, alone: bool = False) -> float:
    """Return the least time of a call in microseconds, each time that of the slowest rank."""
    best = float("inf")
    for _ in range(repeats):
        if alone:
            sleep_until_all_are_here()
        else:
            comm.Barrier()
        start = time.perf_counter()
        if not alone or comm.rank == 0:
            call()
        taken = time.perf_counter() - start
        best = min(best, comm.allreduce(taken, MPI.MAX) if not alone else taken)
        if alone:
            sleep_until_all_are_here()
    return comm.bcast(best) * 1e6


def digits() -> None:
    rng = numpy.random.default_rng(0)
    images, labels = rng.random((PER_RANK * comm.size, 64)), rng.integers(0, 10, PER_RANK * comm.size)
    layers = (64, HIDDEN), (HIDDEN, 10)
    params = [(rng.normal(size=layer) / 8, numpy.zeros(layer[1])) for layer in layers]
    own = slice(PER_RANK * comm.rank, PER_RANK * (comm.rank + 1))
    together, alone = DistributedOptimizer(Adam(), comm=comm), DistributedOptimizer(Adam(), comm=MPI.COMM_SELF)
    state, other = together.setup(params), alone.setup(params)
    best = {"one": float("inf"), "all": float("inf")}
    for _ in range(5):
        best["all"] = min(best["all"], slowest(lambda: together.step(state, params, loss, images[own], labels[own]), 20))
        best["one"] = min(best["one"], slowest(lambda: alone.step(other, params, loss, images, labels), 20, alone=True))
    if comm.rank == 0:
        one, every = best["one"], best["all"]
        print(f"digits, {PER_RANK} images a rank: one rank {one:.0f} µs a step, {comm.size} ranks {every:.0f} µs, ", end="")
        print(f"{one / every:.2f} x one rank")
        report("training of digits, over one rank", one / every, at_least=FASTER if comm.size == 2 else None)


def compiled(layers: list[tuple[int, int]], per_rank: int, repeats: int, beside_one: float | None = None) -> None:
    rng, batch = numpy.random.default_rng(0), per_rank * comm.size
    images, labels = rng.random((batch, layers[0][0])), rng.integers(0, 10, batch)
    params = [(rng.normal(size=layer) / layer[0] ** 0.5, numpy.zeros(layer[1])) for layer in layers]
    own = slice(per_rank * comm.rank, per_rank * (comm.rank + 1))
    together, alone = DistributedOptimizer(Adam(), comm=comm), DistributedOptimizer(Adam(), comm=MPI.COMM_SELF)
    states, shared, single = (together.setup(params), alone.setup(params)), mpiad.jit(loss), mpiad.jit(loss)
    steps = {
        "interpreted": lambda: together.step(states[0], params, loss, images[own], labels[own]),
        "jitted": lambda: together.step(states[0], params, shared, images[own], labels[own]),
        "jitted, one rank": lambda: alone.step(states[1], params, single, images, labels),
    }
    numpy.testing.assert_allclose(steps["jitted"]()[2], steps["interpreted"]()[2], rtol=1e-12)
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(5):
        for name, step in steps.items():
            best[name] = min(best[name], slowest(step, repeats, alone=name.endswith("one rank")))
    if comm.rank == 0:
        name = f"{len(layers)} layers of {layers[0][1]}, {per_rank} images a rank"
        times = ", ".join(f"{step} {taken:.0f} µs" for step, taken in best.items())
        print(f"{name}: {times}; jitted {best['jitted'] / best['interpreted']:.2f} of interpreted, ", end="")
        print(f"{best['jitted'] / best['jitted, one rank']:.2f} of one rank")
        report(f"jitted step, {name}, over interpreted", best["jitted"] / best["interpreted"], at_most=1.0)
        if beside_one is not None and comm.size == 2:
            report(f"jitted step, {name}, over one rank", best["jitted"] / best["jitted, one rank"], at_most=beside_one)


def reduction(length: int, count: int = 200) -> None:
    gradient = [numpy.full(length, float(comm.rank + k)) for k in range(count)]
    params = [numpy.zeros(length)] * count
    optimizer = DistributedOptimizer(Nothing(), reduction="sum", comm=comm)
    state = optimizer.setup(params)
    whole = numpy.concatenate(gradient)
    out, copy = numpy.empty_like(whole), numpy.empty_like(whole)
    repeats = 200 if length < 1000 else 50
    best = [float("inf")] * 4
    plan, used = Plan(tuple([spec_like(array) for array in gradient]), BUCKET_BYTES), channel(comm, "benchmark")

    def summed() -> None:
        sums = Sums(used, plan)
        sums.add_all(gradient)
        sums.wait()

    for _ in range(5):
        best[0] = min(best[0], slowest(lambda: comm.Allreduce(whole, out), repeats))
        best[1] = min(best[1], slowest(lambda: numpy.copyto(copy, whole), repeats))
        best[2] = min(best[2], slowest(summed, repeats))
        best[3] = min(best[3], slowest(lambda: optimizer.update(state, params, gradient), repeats))
    if comm.rank == 0:
        allowed = best[0] + MORE + 3 * best[1]
        report(f"{count} arrays of {length:,} added up, over what is allowed", best[2] / allowed, at_most=1.0)
        print(
            f"{count} arrays of {length}: {best[2]:.0f} µs; one Allreduce {best[0]:.0f} µs, a copy {best[1]:.0f} µs; "
            f"{best[2] / allowed:.2f} of what is allowed ({allowed:.0f} µs); a whole update {best[3]:.0f} µs"
        )


if __name__ == "__main__":
    digits()
    compiled([(64, 128), (128, 10)], 32, 100)
    compiled([(64, HIDDEN), (HIDDEN, 10)], PER_RANK, 20)
    compiled([(512, 512), (512, 512), (512, 10)], 4096 // comm.size, 2, beside_one=0.55)
    for length in (10, 1_000, 10_000):
        reduction(length)
