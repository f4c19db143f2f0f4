"""Messages of device arrays between two ranks of a node, compared with bare calls of the driver that move the same.

    mpiexec -n 2 python benchmarks/device_messages.py [--mib 64] [--cells 256] [--repeats 30]

Needs a GPU and CuPy on each rank (both may share one), and ends with status 2 without. All in one run, the sides in turn:

    signals     a ping-pong of one write of a flag and one wait for it on each rank: no data, no MPI
    copies      each rank copies an array from the memory of the other one, at the same time
    staged      the same messages with MPIAD_CUDA_IPC=0
    shared      the messages of mpiad: a ping-pong of 8 bytes, and of large arrays by mpi_send; mpi_exchange; a halo
    steps       a compiled step of a wave, whose interior runs while the halo is exchanged, and one that isn't divided

Times are those of the slowest rank, the smallest of several. Without MPS, ranks on one GPU take turns (time slices), also
in the bare calls.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from device import comm, device
from mpi4py import MPI
from reaches import report, report_missing

import mpiad
from mpiad.programs import device_replay
from mpiad.transport.devices import device_messages, device_settings
from mpiad.transport.devices.device_arrays import ArrayModule
from mpiad.transport.devices.device_messages import Arena, DeviceMessages

PEER = 1 - comm.rank
HOST_SECONDS = 3e-6  # that 8 bytes may take in addition to the signals


def least(arrays: ArrayModule, run: Callable[[], Any], repeats: int, times: int = 1) -> float:
    """Return the smallest time of a run, that of the slowest rank; a run consists of so many `times` of something."""
    found = float("inf")
    for _ in range(repeats):
        arrays.synchronize()
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(times):
            run()
        arrays.synchronize()
        found = min(found, comm.allreduce(time.perf_counter() - start, MPI.MAX) / times)
    return found


def connected(arrays: ArrayModule) -> DeviceMessages | None:
    """Exchange arrays until both ranks read each other's memory; None if they can't."""
    for _ in range(4):
        mpiad.mpi_exchange(arrays.full((1,), 0, float), PEER, PEER)
        comm.Barrier()
    found = device_messages.present()
    reads = found is not None and found.arena is not None and found.arena.board["answers"][PEER] == 1
    return found if comm.allreduce(bool(reads), MPI.LAND) else None


class Bare:
    """Calls of the driver with the memory that both ranks have open."""

    def __init__(self, messages: DeviceMessages, nbytes: int):
        self.arena: Arena = messages.arena  # type: ignore[assignment]
        self.memory, mine = self.arena.memory, self.arena.take(nbytes)
        assert mine is not None
        theirs = comm.sendrecv(mine, PEER, source=PEER)
        self.mine, self.theirs = (messages._flag("packed", found) for found in (mine, theirs))
        self.source = messages._address(PEER, int(theirs["block"])) + int(theirs["start"])
        self.number = int(max(mine["number"], theirs["number"])) + 1
        self.target = self.arena.arrays.empty((nbytes // 8,), float)

    def signals(self) -> None:
        """Write and wait for a flag, rank 0 first."""
        self.number += 1
        for writes in (comm.rank == 0, comm.rank == 1):
            if writes:
                self.memory.write(self.mine, self.number)
            else:
                self.memory.wait(self.theirs, self.number)

    def copy(self) -> None:
        """Copy the other rank's array."""
        self.memory.load(self.target, self.source)

    def copy_faces(self, nbytes: int) -> None:
        """Copy two faces of the other rank, with signals in both directions."""
        self.number += 1
        self.memory.write(self.mine, self.number)
        self.memory.wait(self.theirs, self.number)
        for part in (self.target[: nbytes // 8], self.target[nbytes // 8 : nbytes // 4]):
            self.memory.load(part, self.source)


def ping_pong(x: Any) -> None:
    """Send from rank 0 to rank 1 and back."""
    for sends in (comm.rank == 0, comm.rank == 1):
        if sends:
            mpiad.mpi_send(x, PEER)
        else:
            mpiad.mpi_recv(x, PEER)


def wave_step(domain: mpiad.Domain, u: Any, is_divided: bool) -> Callable[[], Any]:
    """Return a function that runs a compiled step of a wave."""

    @mpiad.jit
    def step(u: Any, v: Any) -> Any:
        p = domain.exchange(u, corners=False)
        near = p[2:, 1:-1, 1:-1] + p[:-2, 1:-1, 1:-1] + p[1:-1, 2:, 1:-1] + p[1:-1, :-2, 1:-1]
        return 2 * u - v + 0.1 * (near + p[1:-1, 1:-1, 2:] + p[1:-1, 1:-1, :-2] - 6 * u)

    before, device_replay._LARGE = device_replay._LARGE, 1 if is_divided else sys.maxsize
    step(u, u)
    device_replay._LARGE = before
    return lambda: step(u, u)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--cells", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    if comm.size != 2:
        sys.exit("benchmarks/device_messages.py needs two ranks.")
    arrays = device()
    measure(arrays, given.mib << 20, given.cells, given.repeats)


def measure(arrays: ArrayModule, nbytes: int, cells: int, repeats: int) -> dict[str, float]:
    """Return the times in seconds, and print them with the targets."""
    messages = connected(arrays)
    if messages is None:
        why = device_messages.way_to(mpiad.transport.channel(None, "benchmark"), PEER, arrays)[1]
        if comm.rank == 0:
            report_missing("messages in device memory", why)
            print(f"the ranks don't read each other's device memory: {why}")
        return {}
    small, large = (arrays.full((n // 8,), comm.rank, float) for n in (8, nbytes))
    domain = mpiad.Domain((2 * cells, cells, cells), halo=1, periodic=True, dims=(2, 1, 1))
    block = arrays.full(domain.local_shape, comm.rank, float)
    check(arrays, large)
    bare = Bare(messages, nbytes)
    face = 8 * (cells + 2) ** 2
    found = {
        "signals": least(arrays, bare.signals, repeats, times=100),
        "copies": least(arrays, bare.copy, repeats),
        "copies of two faces": least(arrays, lambda: bare.copy_faces(min(face, nbytes // 2)), repeats),
    }
    runs: dict[str, Callable[[], Any]] = {
        "8 bytes": lambda: ping_pong(small),
        "mpi_send": lambda: ping_pong(large),
        "mpi_exchange": lambda: mpiad.mpi_exchange(large, PEER, PEER),
        "halo": lambda: domain.exchange(block),
        "step": wave_step(domain, block, True),
        "undivided step": wave_step(domain, block, False),
    }
    for way in ("shared", "staged"):
        before = device_settings.put(device_settings.present()._replace(ipc=way == "shared"))
        for name, run in runs.items():
            run()
            found[f"{name}, {way}"] = least(arrays, run, repeats, times=20 if name == "8 bytes" else 1)
        device_settings.put(before)
    if comm.rank == 0:
        show(found, nbytes)
    return found


def check(arrays: ArrayModule, x: Any) -> None:
    """Compare what is exchanged with what the other rank has."""
    for _ in range(3):
        np.testing.assert_array_equal(arrays.to_host(mpiad.mpi_exchange(x, PEER, PEER)), float(PEER))


def show(found: dict[str, float], nbytes: int) -> None:
    """Print the times, and report the ratios that are aimed at."""
    for name, seconds in found.items():
        print(f"{name:24}{1e6 * seconds:14.1f} µs")
    latency = (found["8 bytes, shared"] / 2 - HOST_SECONDS) / (found["signals"] / 2)
    report("8 bytes between devices, less 3 µs: ratio to bare signals", latency, at_most=1.5)
    share, mib = found["copies"] / found["mpi_exchange, shared"], nbytes >> 20
    report(f"{mib} MiB by mpi_exchange: share of bare copies", share, at_least=0.8)
    report(f"{mib} MiB by mpi_send: share of bare copies", 2 * found["copies"] / found["mpi_send, shared"], at_least=0.45)
    halo = found["halo, shared"] / found["copies of two faces"]
    report("halo of a block: ratio to bare copies and signals of two faces", halo, at_most=1.5)
    for way in ("shared", "staged"):
        ratio = found[f"undivided step, {way}"] / found[f"step, {way}"]
        report(f"step of a wave, {way}: undivided, ratio to divided", ratio)
    for name in ("8 bytes", "mpi_send", "mpi_exchange", "halo"):
        report(f"{name} between devices: staged, ratio to shared", found[f"{name}, staged"] / found[f"{name}, shared"])


if __name__ == "__main__":
    main()
