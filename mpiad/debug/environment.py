"""`environment`: a description of the machine, libraries and launch of a program, with a test of a gradient.

``python -m mpiad`` prints one report for all ranks. It has a time limit, and its exit code is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import socket
import sys
import threading
import timeit
from collections.abc import Callable, Mapping
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import autograd.numpy as anp
import numpy as np
import threadpoolctl

from mpiad._typing import Array, Comm, Rank, Scalar
from mpiad.differentiation import value_and_grad
from mpiad.environment_variables import VARIABLES
from mpiad.primitives import (
    mpi_allreduce,
    mpi_bcast,
    mpi_exchange,
    mpi_irecv,
    mpi_isend,
    mpi_rank,
    mpi_recv,
    mpi_send,
    mpi_size,
    mpi_sum,
    mpi_wait,
)
from mpiad.primitives.operation import suspended
from mpiad.transport import Channel, channel, world
from mpiad.transport.core.channels import make_communicator
from mpiad.transport.core.fault_tolerance import flush_streams
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices import staging
from mpiad.transport.devices.device_arrays import ArrayModule, selected_arrays
from mpiad.transport.devices.device_messages import way_to
from mpiad.transport.devices.device_settings import Library, device_of, gpus_of_node, library, visible
from mpiad.transport.launcher import Launcher, family_of, launcher, mpiexec_of_library, output_of
from mpiad.transport.resources import cores, huge_pages
from mpiad.transport.watch.call_agreement import rank_ranges

PACKAGES = ("mpiad", "numpy", "autograd", "scipy", "mpi4py", "llvmlite")
_OPTIONAL = ("cupy", "cupy-cuda12x", "cupy-cuda13x", "petsc4py")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class RankInfo(NamedTuple):
    """The node, cores, threads, GPU and package versions of one rank's process."""

    rank: Rank  # in the world
    local_rank: Rank  # among the ranks of its node
    node: str
    cores: tuple[int, ...]  # the numbers of the cores on which the process may run
    quota: float  # a container's limit of CPU time, as a number of cores; infinity if there is no limit
    threads: dict[str, int]  # the number of threads of each loaded thread pool (BLAS, OpenMP)
    huge_pages: str  # description of the use of huge pages for the arrays of the process
    gpus: list[str]  # names of all GPUs of the node; empty unless this is the first rank of the node
    gpu: str  # the GPU of this rank, chosen by `local_rank` among the visible GPUs
    python: str  # path of the interpreter
    versions: dict[str, str]  # versions of Python, the packages, and the optional packages that are installed


def rank_info(rank: Rank, local_rank: Rank) -> RankInfo:
    """Return the description of this process."""
    # Only one process per node queries the GPUs of the node.
    gpus = gpus_of_node() if local_rank == 0 else []
    quota = float("inf")
    with contextlib.suppress(OSError, ValueError):
        time, period = _QUOTA.read_text(
            encoding="utf-8"
        ).split()  # CPU time per period, and the period: "200000 100000" for two cores
        quota = float("inf") if time == "max" else int(time) / int(period)
    # Of several pools of one kind, the last one, which has the most threads, is kept.
    pools = sorted(threadpoolctl.threadpool_info(), key=itemgetter("num_threads"))
    threads = {pool["internal_api"]: pool["num_threads"] for pool in pools}
    node, own_cores = socket.gethostname(), tuple(sorted(cores()))
    return RankInfo(rank, local_rank, node, own_cores, quota, threads, huge_pages(), gpus, "", sys.executable, versions())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    versions = {"python": sys.version.split()[0]}
    for name in (*PACKAGES, *_OPTIONAL):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in PACKAGES:  # imported from its source folder, without an installation
                versions[name] = getattr(sys.modules.get(name), "__version__", "not installed")
    return versions


_LARGE_MESSAGE = 4 << 20  # bytes
_MEASUREMENT_SECONDS = 0.15  # duration of each measurement


class Speed(NamedTuple):
    """The measured speed of messages."""

    latency: float  # seconds for 8 bytes from rank 0 to rank 1
    bandwidth: float  # bytes per second, for a message of 4 MiB between these ranks
    allreduce: float  # seconds for a reduction of 8 bytes over all ranks

    def __str__(self) -> str:
        return (
            f"8 bytes from rank 0 to 1 in {1e6 * self.latency:.1f} µs, 4 MiB at {1e-9 * self.bandwidth:.1f} GB/s; "
            f"allreduce of 8 bytes in {1e6 * self.allreduce:.1f} µs"
        )


def speed_of(channel: Channel) -> Speed | None:
    """Measure the messages of a communicator; collective. The result is the same on all ranks; None for a single rank."""
    if channel.size == 1:
        return None
    # A duplicate, so that the messages of the measurement can't match receives of the program.
    comm = make_communicator(channel.user.Dup)
    try:
        small, large = (_fastest(comm, _ping_pong, np.zeros(count)) / 2 for count in (1, _LARGE_MESSAGE // 8))
        reduction = _fastest(comm, lambda comm, array: comm.Allreduce(array, np.empty_like(array)), np.zeros(1))
        return comm.bcast(Speed(small, _LARGE_MESSAGE / large, reduction), 0)
    finally:
        comm.Free()


def _fastest(comm: Comm, exchange: Callable[[Comm, np.ndarray], object], array: np.ndarray) -> float:
    """Return the shortest time of several repetitions; rank 0 determines their number in a first measurement."""

    def times(count: int) -> list[float]:
        return timeit.repeat(lambda: exchange(comm, array), repeat=count, number=1)

    return min(times(comm.bcast(max(3, min(1000, int(_MEASUREMENT_SECONDS / sum(times(3)) * 3))), 0)))


def _ping_pong(comm: Comm, array: np.ndarray) -> None:
    if comm.rank == 0:
        comm.Send(array, 1)
        comm.Recv(array, 1)
    elif comm.rank == 1:
        comm.Recv(array, 0)
        comm.Send(array, 0)


_LARGE_ARRAY = 64 << 20  # bytes
_MOST_SHIFTS = 8  # each rank is tried with so many ranks after it and before it


def device_messages_of(group: Channel) -> str:
    """Try messages of device arrays between ranks in both directions, and return their ways and speeds; collective."""
    if group.size == 1:
        return "none: there is only one rank"
    arrays: ArrayModule = None  # type: ignore[assignment]
    reason = ""
    try:
        arrays = selected_arrays()
    except Exception as error:  # noqa: BLE001 - CuPy may raise anything while it is loaded
        reason = str(error).partition(":")[0] or type(error).__name__
    if missing := [(rank, text) for rank, text in enumerate(group.data.allgather(reason)) if text]:
        return f"none: {missing[0][1]} on rank {missing[0][0]}"
    ways: dict[bool, set[str]] = {True: set(), False: set()}
    for shift in range(1, min(group.size, _MOST_SHIFTS + 1)):
        after, before = (group.rank + shift) % group.size, (group.rank - shift) % group.size
        for _ in range(3):  # the first ones are staged, so that a rank can answer
            mpi_exchange(arrays.full((1,), group.rank, float), after, before, comm=group.user)
            group.data.Barrier()
        here, way = way_to(group, after, arrays)
        ways[here].add(way)
    every = group.data.allgather(ways)
    inside, between = (sorted(set().union(*[found[here] for found in every])) for here in (True, False))
    small, large = (_device_ping_pong(group, arrays, nbytes) for nbytes in (8, _LARGE_ARRAY))
    speed = f"{1e-9 * _LARGE_ARRAY / large:.3g} GB/s, {1e6 * small:.3g} µs from rank 0 to 1"
    text = " or ".join(inside) or "no two ranks on a node"
    return f"{text}; between nodes: {' or '.join(between)}; {speed}" if between else f"{text}; {speed}"


def _device_ping_pong(group: Channel, arrays: ArrayModule, nbytes: int) -> float:
    """Return the shortest time of a message of device arrays from rank 0 to rank 1, in seconds, on all ranks."""
    x, least = arrays.full((nbytes // 8,), 0, float), float("inf")
    for _ in range(20):
        arrays.synchronize()
        group.data.Barrier()
        start = perf_counter()
        if group.rank < 2:
            for sends in (group.rank == 0, group.rank == 1):
                if sends:
                    mpi_send(x, 1 - group.rank, comm=group.user)
                else:
                    x = mpi_recv(x, 1 - group.rank, comm=group.user)
            arrays.synchronize()
            least = min(least, perf_counter() - start)
    return group.data.bcast(least, 0) / 2


_TOLERANCE = 1e-12
_SELFTEST_LENGTH = 5


class SelfTest(NamedTuple):
    """The largest relative error, over all ranks, of the value and gradient of a small program with a closed form."""

    error: float  # NaN or infinite if a rank's result isn't a finite number
    rank: int  # the rank with the largest error

    @property
    def passed(self) -> bool:
        """Whether the error is at the level of rounding."""
        return self.error < _TOLERANCE

    def __str__(self) -> str:
        verdict = "right" if self.passed else f"WRONG on rank {self.rank}"
        return f"{verdict} (error {self.error:.1e}): allreduce, bcast, isend, irecv and sum against a closed form"


def run_selftest(comm: Comm = None) -> SelfTest:
    """Compare the value and gradient of a test program, which calls several primitives, with closed forms; collective."""
    rank, size = mpi_rank(comm), mpi_size(comm)
    previous, following = (rank - 1) % size, (rank + 1) % size

    def loss(x: Array) -> Scalar:
        received = mpi_irecv(x, previous, tag=7, comm=comm)
        sent = mpi_isend(x, following, tag=7, comm=comm)
        squares = mpi_allreduce(anp.sum(x**2), comm=comm)
        last = mpi_bcast(x, root=size - 1, comm=comm)
        mixed = anp.sum(anp.sin(x) * mpi_wait(received))
        mpi_wait(sent)
        return mpi_sum(mixed, comm=comm) + squares * anp.sum(last)

    xs = [0.5 + np.sin(1.0 + r + np.arange(_SELFTEST_LENGTH) ** 2) / 3 for r in range(size)]
    value, gradient = value_and_grad(loss, comm=comm)(xs[rank])
    expected_value, expected = _closed_form(xs, rank)
    value_error, gradient_error = abs(value - expected_value) / abs(expected_value), np.abs(gradient - expected)
    error = np.maximum(value_error, gradient_error.max() / np.abs(expected).max())  # propagates NaN
    errors = mpi_allreduce(np.where(np.arange(size) == rank, error, 0.0), comm=comm)
    worst = int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    return SelfTest(float(errors[worst]), worst)


def _closed_form(xs: list[np.ndarray], rank: int) -> tuple[float, np.ndarray]:
    size = len(xs)
    squares, last = sum(np.sum(x**2) for x in xs), np.sum(xs[-1])
    value = sum(np.sum(np.sin(xs[r]) * xs[r - 1]) for r in range(size)) + squares * last
    # This rank's x occurs in this rank's sine, in the factor of the next rank's sine, and in `squares`. The x of the last
    # rank also occurs in `last`.
    gradient = np.cos(xs[rank]) * xs[rank - 1] + np.sin(xs[(rank + 1) % size]) + 2 * xs[rank] * last
    return float(value), gradient + (squares if rank == size - 1 else 0.0)


_FAMILY_NAMES = {"mpich": "MPICH", "openmpi": "Open MPI"}
_IN_VERSION = {"openmpi": ("Open MPI", "OpenRTE", "prte", "PRRTE"), "mpich": ("HYDRA", "Intel(R) MPI", "MVAPICH")}


class Mistake(NamedTuple):
    """A mistake in starting a program, which causes errors or slowness."""

    severity: str  # "error": results are wrong or missing; "warning": the program is slow or may fail
    text: str  # description and remedy


def launch_mistakes(library: Library, launcher: Launcher, size: int) -> list[Mistake]:
    """Return mistakes in the combination of launcher and MPI library."""
    mistakes = []
    # The most common mistake: each of n processes is rank 0 of a separate world, and computes everything.
    if launcher.size > 1 and size == 1:
        remedy = ", or install an mpi4py that is built for the MPI of this launcher"
        if launcher.name.startswith("Slurm"):
            remedy = ", or with another `srun --mpi=` (`srun --mpi=list` lists them)"
        text = (
            f"{launcher.name} started {launcher.size} processes, but each of them is a world of one rank: mpi4py loads "
            f"{library.vendor} {library.version}, which this launcher doesn't support. Start the program with "
            f"{_mpiexec_of(library)}{'' if mpiexec_of_library(library.path) else remedy}."
        )
        mistakes.append(Mistake("error", text))
    elif launcher.name and launcher.size != size:
        text = f"{launcher.name} says that it started {launcher.size} processes, but the world has {size}."
        mistakes.append(Mistake("warning", text))
    if library.threads == "single":
        text = (
            "MPI was initialized without thread support: minimize can't detect ranks that wait for a failed rank. "
            "Leave mpi4py.rc.threads at True, or call MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )
        mistakes.append(Mistake("warning", text))
    return mistakes


def _mpiexec_of(library: Library) -> str:
    return mpiexec_of_library(library.path) or f"the mpiexec of {library.vendor}"


def mpiexec_mistakes(library: Library, environment: Mapping[str, str] = os.environ) -> list[Mistake]:
    """Return a mistake if the `mpiexec` in the search path belongs to another MPI than the library."""
    program = shutil.which("mpiexec", path=environment.get("PATH"))
    # The version text identifies the MPI implementation: the program has the same name in all MPIs, and may be a link.
    text, expected = output_of(program, "--version") if program else "", family_of(library.vendor)
    family = next((family for family, names in _IN_VERSION.items() if any(name in text for name in names)), "")
    if not family or not expected or family == expected:
        return []
    text = (
        f"`mpiexec` is {program}, of {_FAMILY_NAMES[family]}, but mpi4py loads {library.vendor}: "
        f"processes started by this `mpiexec` won't find each other. Use {_mpiexec_of(library)}."
    )
    return [Mistake("warning", text)]


def placement_mistakes(places: list[RankInfo]) -> list[Mistake]:
    """Return mistakes in the distribution of cores and threads to the ranks of each node."""
    nodes = dict.fromkeys(place.node for place in places)
    texts = {node: _node_mistake([place for place in places if place.node == node]) for node in nodes}
    return [Mistake("warning", f"{node}: {text}") for node, text in texts.items() if text]


def _node_mistake(ranks: list[RankInfo]) -> str:
    cores = len({core for place in ranks for core in place.cores})
    # A limit of CPU time doesn't change the set of cores that the processes of a container may use.
    usable = min(cores, ranks[0].quota)
    threads = sum(max(place.threads.values(), default=1) for place in ranks)
    listed = f"{usable:g} core{'s' * (usable != 1)}" + (" (a limit of the container)" if usable < cores else "")
    if len(ranks) > usable:
        return (
            f"{len(ranks)} ranks share {listed}. MPI busy-waits, so each message takes milliseconds. "
            f"Start at most {max(int(usable), 1)} on this node, or use more nodes."
        )
    if threads > usable:
        share = max(int(usable) // len(ranks), 1)
        return (
            f"the thread pools of {len(ranks)} rank{'s' * (len(ranks) > 1)} have {threads} threads for {listed}. "
            f"Set OMP_NUM_THREADS={share} (or leave it unset: mpiad then limits the threads itself)."
        )
    bound_cores = [place.cores for place in ranks if len(place.cores) < cores]
    if len(bound_cores) != len(set(bound_cores)):
        return (
            "several ranks are bound to the same cores. Let the launcher bind each rank to a separate core: "
            "mpiexec --bind-to core (both MPICH and Open MPI), srun --cpu-bind=cores."
        )
    return ""


def version_mistakes(places: list[RankInfo]) -> list[Mistake]:
    """Return a mistake for each package whose version differs between ranks."""
    mistakes = []
    for name in dict.fromkeys(("python", *places[0].versions)):
        values = {place.versions.get(name, "not installed") for place in places}
        if len(values) > 1:
            text = (
                f"{name} isn't the same on all ranks: {', '.join(sorted(values))}. Use one environment on all nodes "
                f"(rank 0 runs {places[0].python or Path(sys.executable)})."
            )
            mistakes.append(Mistake("error", text))
    return mistakes


class Environment(NamedTuple):
    """The machine and libraries of a program; ``str(environment())`` is the report of ``python -m mpiad``.

    Attributes
    ----------
    library : Library
        The MPI library.
    launcher : Launcher
        The program that started the processes.
    places : list of RankInfo
        The node, cores, GPU and package versions of each rank.
    speed : Speed or None
        Latency and bandwidth of messages; None for a single rank.
    selftest : SelfTest
        The largest error of a value and gradient compared with closed forms.
    mistakes : list of Mistake
        Mistakes that cause errors or slowness, with remedies.
    device_messages : str
        How device arrays travel between ranks of a node and between nodes, with measured speeds.
    """

    library: Library
    launcher: Launcher
    places: list[RankInfo]
    speed: Speed | None
    selftest: SelfTest
    mistakes: list[Mistake]
    device_messages: str

    @property
    def ok(self) -> bool:
        """Whether there is no error; there may be warnings."""
        return self.selftest.passed and not any(mistake.severity == "error" for mistake in self.mistakes)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def environment(comm: Comm = None) -> Environment:
    """Describe the machine and libraries of this program, measure messages and test a gradient.

    Returns
    -------
    Environment
        The description, the same on all ranks. ``print(environment())`` prints the report of ``python -m mpiad``.

    Ranks
    -----
    All ranks of `comm` call it. The call takes about a second.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> here = mpiad.debug.environment()
    >>> print(len(here.places) == size, here.selftest.passed)
    True True
    """
    with restoring_state(), suspended():
        return _inspect(channel(comm, "environment"), lambda stage: None)


def _inspect(group: Channel, begin_stage: Callable[[str], None]) -> Environment:
    """Implement `environment`; `begin_stage` is called with a description of each stage before the stage begins."""
    begin_stage("exchanging host names and cores")
    info = rank_info(group.rank, world.local_rank())
    count = {other.node: len(other.gpus) for other in group.data.allgather(info) if other.gpus}.get(info.node, 0)
    gpu, gpus = device_of(info.local_rank, count), info.gpus if visible(count) else []
    places = group.data.allgather(info._replace(gpu=gpu, gpus=gpus))
    begin_stage("measuring messages")
    speed = speed_of(group)
    begin_stage("trying messages of device arrays")
    between_devices = device_messages_of(group)
    begin_stage("comparing a gradient with its closed form")
    selftest = run_selftest(group.user)
    begin_stage("collecting the results")
    started_by, mpi = launcher(), library()._replace(takes_device_buffers=staging.device_access())
    mistakes = launch_mistakes(mpi, started_by, group.size) + placement_mistakes(places) + version_mistakes(places)
    mistakes += [Mistake("warning", text) for text in unknown_variables()]
    # If no launcher started the program, check the `mpiexec` in the search path.
    if not started_by.name:
        mistakes += mpiexec_mistakes(mpi)
    # All ranks get rank 0's result, because the exit code must be the same on all ranks.
    return Environment(*group.data.bcast((mpi, started_by, places, speed, selftest, mistakes, between_devices), 0))


def _lines(result: Environment) -> list[str]:
    places, mpi = result.places, result.library
    versions = places[0].versions
    nodes = list(dict.fromkeys(place.node for place in places))
    verdict = "all is well" if result.ok else "something is wrong"
    if result.ok and any(mistake.severity == "warning" for mistake in result.mistakes):
        verdict = "works, with warnings"
    others = [f"{name} {version}" for name, version in versions.items() if name not in (*PACKAGES, "python")]
    return [
        f"mpiad {versions['mpiad']} on {_counted(len(places), 'rank')} and {_counted(len(nodes), 'node')}: {verdict}",
        f"  Python    {versions['python']} ({places[0].python})",
        f"  packages  {', '.join([f'{name} {versions[name]}' for name in PACKAGES[1:]] + others)}",
        f"  MPI       {mpi.vendor} {mpi.version}, standard {mpi.standard}, threads: {mpi.threads}"
        + (f" ({mpi.path})" if mpi.path else ""),
        f"  launcher  {result.launcher.name or 'none: a single process'}",
        f"  GPU memory in messages  {mpi.takes_device_buffers}",
        f"  device messages  {result.device_messages}",
        *[line for node in nodes for line in _node_lines(node, [place for place in places if place.node == node])],
        f"  messages  {result.speed or 'none: there is only one rank'}",
        f"  gradient  {result.selftest}",
        *[f"  {mistake.severity}: {mistake.text}" for mistake in result.mistakes],
    ]


def _node_lines(node: str, ranks: list[RankInfo]) -> list[str]:
    cores = len({core for place in ranks for core in place.cores})
    pools = {name: count for place in ranks for name, count in place.threads.items()}
    threads = ", ".join(f"{count} of {name}" for name, count in pools.items()) or "none"
    numbers = rank_ranges([place.rank for place in ranks])
    gpus = ranks[0].gpus
    listed = f"{_counted(cores, 'core')}; threads per rank: {threads}; {_counted(len(gpus), 'GPU') if gpus else 'no GPU'}"
    chosen = ", ".join(f"rank {place.rank}: {place.gpu or 'none'}" for place in ranks)
    return [
        f"  node      {node}: rank{'s' * (len(ranks) > 1)} {numbers}; {listed}",
        f"  memory    huge pages: {ranks[0].huge_pages}",
        *([f"  GPUs      {', '.join(dict.fromkeys(gpus))}; {chosen}"] if gpus else []),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each environment variable whose name starts with MPIAD but isn't a variable of the library."""
    return [
        f"{name}={environment[name]!r} isn't a variable of mpiad and has no effect. The closest name is "
        f"{difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.0)[0]}."
        for name in sorted(environment)
        if name.upper().startswith("MPIAD") and name not in VARIABLES
    ]


_REPORT_TIMEOUT = 30.0  # seconds; the report takes about two seconds


def main(limit: float = _REPORT_TIMEOUT) -> int:
    """Print the report on one process; return the exit code, the same on all, or exit after `limit` seconds."""
    stages = ["starting"]

    def abort() -> None:
        flush_streams(
            f"mpiad: not finished after {limit:g} s: process {launcher().rank} of {launcher().size} waits for others while "
            f"{stages[-1]}. The others run another program, or their messages don't arrive (a firewall, different network "
            "interfaces on the nodes).\n"
        )
        # sys.exit would end only this thread, and MPI_Finalize would wait for the other ranks.
        os._exit(1)

    timer = threading.Timer(limit, abort)
    timer.daemon = True
    timer.start()
    result = _inspect(channel(None, "python -m mpiad"), stages.append)
    timer.cancel()
    # If each process is rank 0 of a separate world, only the launcher's rank distinguishes the processes.
    if result.places[0].rank == 0 and launcher().rank == 0:
        sys.stdout.write(f"{result}\n")
        sys.stdout.flush()
    return 0 if result.ok else 1
