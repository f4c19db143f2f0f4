"""Device arrays in messages: an allreduce and a ring with their adjoints, compared with bare copies to the host and back.

    mpiexec -n 2 python benchmarks/device.py [--kib 8 1024 65536 524288] [--json FILE]

Needs a GPU and CuPy on each rank, and ends with status 2 without. All in one run, the sides in turn:

    copies      an array to page-locked memory of the host and back, nothing else, on all ranks at once
    host        MPI's own call with page-locked arrays of the host
    staged      the primitive with a device array that is copied through the host
    adjoint     value and gradient of Σ (primitive(x))², staged: the message forward and back, and the arithmetic
    direct      the primitive with a device array that MPI takes as it is, if it does; with its adjoint

A time is that of the slowest rank, the smallest of several. The target is 0.7 of the rate of the copies. A staged message
can't be faster than MPI's call on the host either, so the share of the slower of the two is shown, too.
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
from reaches import report

import mpiad
import mpiad.device.numpy as dnp
from mpiad.transport.devices import device_settings, staging
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_named
from mpiad.transport.devices.device_settings import DeviceSettings

TARGET = 0.7
comm = MPI.COMM_WORLD.Dup()
AFTER, BEFORE = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
PRIMITIVES: dict[str, Callable[[Any], Any]] = {
    "allreduce": mpiad.mpi_allreduce,
    "ring": lambda x: mpiad.mpi_exchange(x, AFTER, BEFORE),
}


def device() -> ArrayModule:
    """Return what makes arrays on this rank's GPU; ends the program without one."""
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


def sides(arrays: ArrayModule, name: str, nbytes: int, direct: bool) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    numbers = np.arange(nbytes // 8, dtype=float) + comm.rank
    x, back = arrays.to_device(numbers), arrays.empty(numbers.shape, float)
    source, target = (arrays.pinned(nbytes).view(float) for _ in range(2))
    source[:] = numbers

    def copies() -> None:
        arrays.copy_to_host(x, target)
        arrays.synchronize()
        arrays.copy_to_device(target, back)

    def on_host() -> None:
        if name == "ring":
            comm.Sendrecv(source, AFTER, 0, target, BEFORE, 0)
        else:
            comm.Allreduce(source, target)

    primitive = PRIMITIVES[name]
    gradient = mpiad.value_and_grad(lambda x: dnp.sum(primitive(x) ** 2), objective="sum")

    def under(settings: DeviceSettings, call: Callable[[Any], Any]) -> Callable[[], Any]:
        def run() -> Any:
            before = device_settings.put(settings)
            try:
                return call(x)
            finally:
                device_settings.put(before)

        return run

    ways = {"staged": DeviceSettings(cuda_aware=False)} | (
        {"direct": DeviceSettings(cuda_aware=True, exchanged=4 << 20)} if direct else {}
    )
    found: dict[str, Callable[[], Any]] = {"copies": copies, "host": on_host}
    for way, settings in ways.items():
        found[way], found[f"{way}, adjoint"] = under(settings, primitive), under(settings, gradient)
    return found


def times(arrays: ArrayModule, found: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the least time of each side, that of the slowest rank."""
    least = dict.fromkeys(found, float("inf"))
    for _ in range(repeats):
        for name, run in found.items():
            arrays.synchronize()
            comm.Barrier()
            start = time.perf_counter()
            run()
            arrays.synchronize()
            least[name] = min(least[name], comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return least


def check(arrays: ArrayModule, direct: bool) -> None:
    """Compare values and gradients, staged and direct, with closed forms."""
    numbers = [np.arange(3e5) / 3e5 + rank for rank in range(comm.size)]
    right = {"allreduce": sum(numbers), "ring": numbers[BEFORE]}
    slope = {"allreduce": 2 * comm.size * sum(numbers), "ring": 2 * numbers[comm.rank]}
    for aware in (False, True) if direct else (False,):
        before = device_settings.put(DeviceSettings(cuda_aware=aware, exchanged=1 << 18 if aware else float("inf")))
        x = arrays.to_device(numbers[comm.rank])
        for name, primitive in PRIMITIVES.items():
            np.testing.assert_allclose(arrays.to_host(primitive(x)), right[name], rtol=1e-15)
            found = mpiad.grad(lambda x, p=primitive: dnp.sum(p(x) ** 2), objective="sum")(x)
            np.testing.assert_allclose(arrays.to_host(found), slope[name], rtol=1e-15)
        device_settings.put(before)


def table(name: str, nbytes: int, least: dict[str, float]) -> list[str]:
    """Return the report of one primitive and size, and report the shares of the copies' rate."""
    copies, bound = least["copies"], max(least["copies"], least["host"])
    lines = [f"{name}, {nbytes >> 10:,} KiB on {comm.size} ranks"]
    for side, seconds in least.items():
        lines.append(f"  {side:16}{1e3 * seconds:10.3f} ms{nbytes / seconds / 2**30:9.2f} GiB/s")
        if side not in ("copies", "host"):
            messages = 2 if "adjoint" in side else 1
            share = messages * copies / seconds
            lines[-1] += f"{share:8.2f} of the copies{messages * bound / seconds:8.2f} of the slower of copies and host"
            if nbytes >= 1 << 26:
                report(f"{name} of {nbytes >> 20} MiB on a GPU, {side}: share of the copies", share, at_least=TARGET)
    return lines


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", type=int, nargs="+", default=[8, 1024, 65_536, 524_288])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    arrays, measured = device(), {}
    direct = comm.allreduce(staging.takes_directly(arrays), MPI.LAND)
    check(arrays, direct)
    if comm.rank == 0:
        sys.stdout.write(f"{MPI.get_vendor()}; MPI takes device memory: {staging.device_access()}\n")
    for name in PRIMITIVES:
        for nbytes in (1024 * kib for kib in given.kib):
            repeats = 50 if nbytes < 1 << 22 else 10 if nbytes < 1 << 28 else 4
            least = times(arrays, sides(arrays, name, nbytes, direct), repeats)
            measured[f"{name} {nbytes}"] = least
            if comm.rank == 0:
                sys.stdout.write("\n".join(table(name, nbytes, least)) + "\n")
                sys.stdout.flush()
    if given.json and comm.rank == 0:
        given.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
