"""Where a rank runs: its node, its cores, its threads, its GPU, and the versions of what it runs."""

from __future__ import annotations

import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import threadpoolctl

from mpiad._typing import Rank
from mpiad.transport.gpus import gpus_of_node
from mpiad.transport.malloc import huge_pages
from mpiad.transport.threads import cores

PACKAGES = ("mpiad", "numpy", "autograd", "scipy", "mpi4py", "llvmlite")
_OPTIONAL = ("cupy", "cupy-cuda12x", "cupy-cuda13x", "cupy-rocm-5-0", "petsc4py")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Place(NamedTuple):
    """Where one rank runs."""

    # `rank`, `local_rank`: in the world, and among the ranks of its node.
    rank: Rank
    local_rank: Rank
    node: str
    cores: tuple[int, ...]  # the numbers of the cores that it may use
    quota: float  # how many cores' time it may take (of a container), inf where there is no limit
    threads: dict[str, int]  # the number of threads of each thread pool (of BLAS, of OpenMP) that is loaded
    huge_pages: str  # whether its arrays lie in huge pages
    gpus: list[str]  # names of the node's GPUs; on the first rank of each node
    gpu: str  # the one that this rank uses: the first, second, ... of those it may see, by its `local_rank`
    python: str  # the interpreter
    versions: dict[str, str]  # of Python and of each package; optional packages only where they are installed


def place(rank: Rank, local_rank: Rank) -> Place:
    """Return where this process runs."""
    # One process of a node asks for its GPUs; the others only count those they are allowed.
    gpus = gpus_of_node() if local_rank == 0 else []
    return Place(
        rank, local_rank, socket.gethostname(), tuple(sorted(cores())), _quota(), _threads(), huge_pages(), gpus, "",
        sys.executable, versions(),
    )  # fmt: skip


def _quota() -> float:
    try:
        time, period = _QUOTA.read_text().split()  # microseconds of all cores in each period, as "200000 100000" for two
        return float("inf") if time == "max" else int(time) / int(period)
    except (OSError, ValueError):
        return float("inf")


def _threads() -> dict[str, int]:
    found: dict[str, int] = {}
    for pool in threadpoolctl.threadpool_info():
        name = pool["internal_api"]
        found[name] = max(pool["num_threads"], found.get(name, 0))
    return found


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    found = {"python": sys.version.split()[0]}
    for name in (*PACKAGES, *_OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            module = sys.modules.get(name)
            if name in PACKAGES:  # used from its folder, without an installation
                found[name] = getattr(module, "__version__", "not installed")
    return found
