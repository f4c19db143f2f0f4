"""The classic mistakes of starting an MPI program: how each is recognised, and how it is mended."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpiad.debug.place import Place
from mpiad.transport.launcher import Launcher, family_of, mpiexec_beside
from mpiad.transport.library import Library

_ANSWER_SECONDS = 3
_OF_FAMILY = {"mpich": "MPICH", "openmpi": "Open MPI"}


class Mistake(NamedTuple):
    """Something that is wrong, or slow, with the way a program was started."""

    # {"error", "warning", "note"}. Whether results are wrong or missing; whether it is slow or risky; or whether it will
    # matter elsewhere.
    severity: str
    text: str  # what it is, and how to mend it


def of_start(library: Library, found: Launcher, size: int) -> list[Mistake]:
    """Return what is wrong between the launcher and the library."""
    mistakes = []
    # The commonest one: a job of n ranks that are all rank 0, each of which computes everything.
    if found.size > 1 and size == 1:
        mistakes.append(Mistake("error", (
            f"{found.name} started {found.size} processes, but each of them is a world of one rank: mpi4py loads "
            f"{library.vendor} {library.version}, which that launcher doesn't start. {_right_launcher(library, found)}"
        )))  # fmt: skip
    elif found.name and found.size != size:
        told = f"{found.name} says that it started {found.size} processes, but the world has {size}."
        mistakes.append(Mistake("warning", told))
    if library.threads == "single":
        mistakes.append(Mistake("warning", (
            "MPI was initialised without thread support: minimize can't find ranks that wait for one that failed. "
            "Leave mpi4py.rc.threads at True, or call MPI.Init_thread(MPI.THREAD_MULTIPLE)."
        )))  # fmt: skip
    return mistakes


def _right_launcher(library: Library, found: Launcher) -> str:
    beside = mpiexec_beside(library.path)
    if beside:
        return f"Start it with {beside}."
    name = f"the mpiexec of {library.vendor}"
    if found.name.startswith("Slurm"):
        return f"Start it with {name}, or with another `srun --mpi=` (`srun --mpi=list` shows which there are)."
    return f"Start it with {name}, or install an mpi4py that is built for the MPI of this launcher."


def of_mpiexec(library: Library, cores: int, environment: Mapping[str, str] = os.environ) -> list[Mistake]:
    """Return what will be wrong once this program is started with the `mpiexec` that the shell finds."""
    program = shutil.which("mpiexec", path=environment.get("PATH"))
    if not program:
        return []
    family, wanted = _family_of_mpiexec(program), family_of(library.vendor)
    if family and wanted and family != wanted:
        beside = mpiexec_beside(library.path) or f"the mpiexec of {library.vendor}"
        return [Mistake("warning", (
            f"`mpiexec` is {program}, of {_OF_FAMILY[family]}, but mpi4py loads {library.vendor}: "
            f"the processes that it starts won't find each other. Use {beside}."
        ))]  # fmt: skip
    if family == "openmpi":
        return _of_openmpi(cores, environment)
    return []


def _of_openmpi(cores: int, environment: Mapping[str, str]) -> list[Mistake]:
    mistakes = []
    allowed = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if hasattr(os, "getuid") and os.getuid() == 0 and not all(environment.get(name) == "1" for name in allowed):
        mistakes.append(Mistake("warning", (
            "Open MPI's mpiexec refuses to start for root. Where that is meant, as in a container: "
            f"export {allowed[0]}=1 {allowed[1]}=1."
        )))  # fmt: skip
    policy = environment.get("PRTE_MCA_rmaps_default_mapping_policy", "")
    if "oversubscribe" not in policy.lower() and environment.get("OMPI_MCA_rmaps_base_oversubscribe") != "1":
        mistakes.append(Mistake("note", (
            f"Open MPI's mpiexec refuses to start more ranks than there are slots, {cores} here unless a host file says "
            "otherwise. Where more are meant: mpiexec --oversubscribe."
        )))  # fmt: skip
    return mistakes


def _family_of_mpiexec(program: str) -> str:
    try:
        # By what it says of itself: its path may be a link, and its name is the same everywhere.
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = done.stdout + done.stderr
    if any(name in text for name in ("Open MPI", "OpenRTE", "prte", "PRRTE")):
        return "openmpi"
    return "mpich" if any(name in text for name in ("HYDRA", "Intel(R) MPI", "MVAPICH")) else ""


def of_places(places: list[Place]) -> list[Mistake]:
    """Return what is wrong with the ranks' shares of their nodes."""
    mistakes = []
    for node in dict.fromkeys(place.node for place in places):
        mistakes += _of_node(node, [place for place in places if place.node == node])
    return mistakes


def _of_node(node: str, ranks: list[Place]) -> list[Mistake]:
    cores = len({core for place in ranks for core in place.cores})
    # A container's limit on processor time isn't seen in the cores that it may run on.
    usable = min(cores, ranks[0].quota)
    threads = sum(max(place.threads.values(), default=1) for place in ranks)
    counted = f"{usable:g} core{'s' * (usable != 1)}" + (" (a limit of the container)" if usable < cores else "")
    if len(ranks) > usable:
        return [Mistake("warning", (
            f"{node}: {len(ranks)} ranks share {counted}. MPI waits by spinning, so that each message takes milliseconds. "
            f"Start at most {max(int(usable), 1)} there, or use more nodes."
        ))]  # fmt: skip
    if threads > usable:
        share = max(int(usable) // len(ranks), 1)
        return [Mistake("warning", (
            f"{node}: the thread pools of {len(ranks)} rank{'s' * (len(ranks) > 1)} have {threads} threads for {counted}. "
            f"Set OMP_NUM_THREADS={share} (or leave it unset: mpiad then limits them itself)."
        ))]  # fmt: skip
    pinned = [place.cores for place in ranks if len(place.cores) < cores]
    if len(pinned) != len(set(pinned)):
        return [Mistake("warning", (
            f"{node}: several ranks are bound to the same cores. Let the launcher spread them: "
            "mpiexec --bind-to core (both MPICH and Open MPI), srun --cpu-bind=cores."
        ))]  # fmt: skip
    return []


def of_versions(places: list[Place]) -> list[Mistake]:
    """Return which packages are of other versions on other ranks."""
    mistakes = []
    for name in ("python", *places[0].versions):
        found = {place.versions.get(name, "not installed") for place in places}
        if len(found) > 1 and not any(name in mistake.text for mistake in mistakes):
            mistakes.append(Mistake("error", (
                f"{name} isn't the same on all ranks: {', '.join(sorted(found))}. Use one environment on all nodes "
                f"(rank 0 runs {places[0].python or Path(sys.executable)})."
            )))  # fmt: skip
    return mistakes
