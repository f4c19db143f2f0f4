"""How fast device arrays travel: the staged allreduce beside the bare copies, and the direct one where MPI can.

    mpiexec -n 2 python benchmarks/device.py [--mebibytes 64] [--json FILE]

Needs a GPU and CuPy for each rank, and ends with status 2 where there is none. In one process and one run, alternated:

    copies     64 MiB to page-locked memory of the host and back, nothing else
    allreduce  of host arrays, in place
    staged     `mpi_allreduce` of a device array, copied through the host, by the bytes of a piece
    direct     `mpi_allreduce` of a device array that MPI is given as it is, where it takes it

A time is that of the slowest rank, the smallest over the repeats. The aim is a staged allreduce with 0.7 of the copies'
bandwidth. It can't be faster than MPI's own sum on the host either, so the share of the slower of the two is shown, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiad
from mpiad.transport import cuda_aware, device_settings
from mpiad.transport.device_arrays import ArrayModule, arrays_named
from mpiad.transport.device_settings import DeviceSettings

REPEATS = 15
CHUNKS = [1 << 20, 4 << 20, 16 << 20, 1 << 30]
REACH = 0.7
comm = MPI.COMM_WORLD.Dup()


def device() -> ArrayModule:
    """Return what makes arrays on this rank's GPU; ends the program where there is none."""
    try:
        import cupy

        mpiad.device.select()
        cupy.cuda.runtime.getDeviceCount()
        return arrays_named("CuPy")
    except Exception as error:  # noqa: BLE001 - no CuPy, no driver, no device
        if comm.rank == 0:
            sys.stderr.write(f"benchmarks/device.py needs a GPU and CuPy: {type(error).__name__}: {error}\n")
        comm.Barrier()
        sys.exit(2)


def sides(arrays: ArrayModule, nbytes: int) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    numbers = np.arange(nbytes // 8, dtype=float) + comm.rank
    x, pinned = arrays.to_device(numbers), arrays.pinned(nbytes).view(float)
    back, host = arrays.empty(x.shape, x.dtype), numbers.copy()

    def copies() -> None:
        arrays.copy_to_host(x, pinned)
        arrays.synchronize()
        arrays.copy_to_device(pinned, back)

    def travelling(settings: DeviceSettings) -> Callable[[], Any]:
        def run() -> Any:
            before = device_settings.put(settings)
            try:
                return mpiad.mpi_allreduce(x)
            finally:
                device_settings.put(before)

        return run

    found: dict[str, Callable[[], Any]] = {"copies": copies, "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, host)}
    for chunk in CHUNKS:
        found[_named(chunk, nbytes)] = travelling(DeviceSettings(cuda_aware=False, chunk=chunk))
    if comm.allreduce(cuda_aware.takes_directly(arrays), MPI.LAND):
        found["direct"] = travelling(DeviceSettings(cuda_aware=True))
    return found


def _named(chunk: int, nbytes: int) -> str:
    return f"staged, {chunk >> 20} MiB" if chunk < nbytes else "staged, whole"


def times(arrays: ArrayModule, found: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the least time of each side, that of the slowest rank."""
    least = dict.fromkeys(found, float("inf"))
    for _ in range(REPEATS):
        for name, run in found.items():
            arrays.synchronize()
            comm.Barrier()
            start = time.perf_counter()
            run()
            arrays.synchronize()
            least[name] = min(least[name], comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return least


def check(arrays: ArrayModule) -> None:
    """Compare a sum in pieces with NumPy's."""
    x = arrays.to_device(np.arange(3e5) + comm.rank)
    before = device_settings.put(DeviceSettings(cuda_aware=False, chunk=1 << 18))
    total = arrays.to_host(mpiad.mpi_allreduce(x))
    device_settings.put(before)
    np.testing.assert_array_equal(total, sum(np.arange(3e5) + rank for rank in range(comm.size)))


def lines(nbytes: int, least: dict[str, float]) -> list[str]:
    """Return the report."""
    copies, bound = least["copies"], max(least["copies"], least["allreduce"])
    head = f"{nbytes / 2**20:.0f} MiB on {comm.size} ranks; MPI takes device memory: {cuda_aware.described()}"
    table = [
        f"  {name:16}{1e3 * seconds:9.2f} ms{nbytes / seconds / 2**30:9.2f} GiB/s"
        + (f"{copies / seconds:8.2f} of the copies{bound / seconds:8.2f} of the slower" if "staged" in name else "")
        for name, seconds in least.items()
    ]
    reached = max(copies / seconds for name, seconds in least.items() if name.startswith("staged"))
    return [head, *table, f"  aim {REACH:.2f}: {'reached' if reached >= REACH else 'NOT reached'}"]


def measure(arrays: ArrayModule, nbytes: int) -> dict[str, float]:
    """Check, time and report one size."""
    check(arrays)
    least = times(arrays, sides(arrays, nbytes))
    if comm.rank == 0:
        sys.stdout.write("\n".join(lines(nbytes, least)) + "\n")
    return least


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    least = measure(device(), given.mebibytes << 20)
    if given.json and comm.rank == 0:
        given.json.write_text(json.dumps(least, indent=2) + "\n")


if __name__ == "__main__":
    main()
