"""`environment`: what this program runs on, whether it was started as it should be, and whether gradients are right.

``python -m mpiad`` is one report of it for all ranks, within a time limit, with the same exit code everywhere.
"""

from __future__ import annotations

import difflib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpiad._typing import Comm
from mpiad.debug.mistakes import Mistake, of_mpiexec, of_places, of_start, of_versions
from mpiad.debug.place import PACKAGES, Place, place
from mpiad.debug.selftest import SelfTest, run_selftest
from mpiad.debug.speed import Speed, speed_of
from mpiad.environment_variables import VARIABLES
from mpiad.primitives.operation import suspended
from mpiad.transport import Channel, channel, cuda_aware, world
from mpiad.transport.gpus import device_of, visible
from mpiad.transport.guarded.rank_tables import rank_ranges
from mpiad.transport.launcher import Launcher, launcher
from mpiad.transport.library import Library, library
from mpiad.transport.tracing import restoring_state


class Environment(NamedTuple):
    """What a program runs on; `str` of it is the report of ``python -m mpiad``.

    Attributes
    ----------
    library : Library
        The MPI library.
    launcher : Launcher
        What started the processes.
    places : list of Place
        Where each rank runs, and with which versions.
    speed : Speed or None
        Latency and bandwidth; None with one rank.
    selftest : SelfTest
        A gradient against its closed form.
    mistakes : list of Mistake
        What is wrong or slow, and how to mend it.
    """

    library: Library
    launcher: Launcher
    places: list[Place]
    speed: Speed | None
    selftest: SelfTest
    mistakes: list[Mistake]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; something may be slow."""
        return self.selftest.passed and not any(mistake.severity == "error" for mistake in self.mistakes)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def environment(comm: Comm = None) -> Environment:
    """Find out what this program runs on, and test that messages and gradients work.

    Returns
    -------
    Environment
        The same on all ranks. ``print(environment())`` shows what ``python -m mpiad`` does.

    Ranks
    -----
    All ranks of `comm` call it. It takes about a second.

    Examples
    --------
    >>> here = mpiad.debug.environment()
    >>> print(len(here.places) == size, here.selftest.passed)
    True True
    """
    with restoring_state(), suspended():
        return _examined(channel(comm, "environment"), lambda stage: None)


def _examined(used: Channel, entered: Callable[[str], None]) -> Environment:
    """Do the work of `environment`; `entered` is told of each stage before it begins."""
    entered("telling each other where they run")
    places = _places(used)
    entered("measuring messages")
    speed = speed_of(used)
    entered("comparing a gradient with its closed form")
    selftest = run_selftest(used.user)
    entered("collecting what they found")
    found, loaded = launcher(), library()._replace(takes_device_buffers=cuda_aware.described())
    mistakes = of_start(loaded, found, used.size) + of_places(places) + of_versions(places)
    mistakes += [Mistake("warning", text) for text in misspelt()]
    # Not started by a launcher: so it can still be said what the one that the shell finds would do.
    if not found.name:
        mistakes += of_mpiexec(loaded, len(places[0].cores))
    # Rank 0's for all: what was measured differs a little on each, and all must come to the same exit code.
    return Environment(*used.data.bcast((loaded, found, places, speed, selftest, mistakes), 0))


def _places(used: Channel) -> list[Place]:
    mine = place(used.rank, world.local_rank())
    count = {found.node: len(found.gpus) for found in used.data.allgather(mine) if found.gpus}.get(mine.node, 0)
    gpu, gpus = device_of(mine.local_rank, count), mine.gpus if visible(count) else []
    return used.data.allgather(mine._replace(gpu=gpu, gpus=gpus))


def _lines(found: Environment) -> list[str]:
    places, loaded = found.places, found.library
    versions = places[0].versions
    nodes = list(dict.fromkeys(place.node for place in places))
    verdict = "all is well" if found.ok else "something is wrong"
    if found.ok and any(mistake.severity == "warning" for mistake in found.mistakes):
        verdict = "works, with warnings"
    others = [f"{name} {version}" for name, version in versions.items() if name not in (*PACKAGES, "python")]
    return [
        f"mpiad {versions['mpiad']} on {_counted(len(places), 'rank')} and {_counted(len(nodes), 'node')}: {verdict}",
        f"  Python    {versions['python']} ({places[0].python})",
        f"  packages  {', '.join([f'{name} {versions[name]}' for name in PACKAGES[1:]] + others)}",
        f"  MPI       {loaded.vendor} {loaded.version}, standard {loaded.standard}, threads: {loaded.threads}"
        + (f" ({loaded.path})" if loaded.path else ""),
        f"  launcher  {found.launcher.name or 'none: a single process'}",
        f"  GPU memory in messages  {loaded.takes_device_buffers}",
        *[line for node in nodes for line in _of_node(node, [place for place in places if place.node == node])],
        f"  messages  {found.speed or 'none: one rank has nobody to talk to'}",
        f"  gradient  {found.selftest}",
        *[f"  {mistake.severity}: {mistake.text}" for mistake in found.mistakes],
    ]


def _of_node(node: str, ranks: list[Place]) -> list[str]:
    cores = len({core for place in ranks for core in place.cores})
    pools = {name: count for place in ranks for name, count in place.threads.items()}
    threads = ", ".join(f"{count} of {name}" for name, count in pools.items()) or "none"
    numbers = rank_ranges([place.rank for place in ranks])
    gpus = ranks[0].gpus
    counted = f"{_counted(cores, 'core')}; threads per rank: {threads}; {_counted(len(gpus), 'GPU') if gpus else 'no GPU'}"
    lines = [f"  node      {node}: rank{'s' * (len(ranks) > 1)} {numbers}; {counted}"]
    lines.append(f"  memory    huge pages: {ranks[0].huge_pages}")
    if gpus:
        lines.append(
            f"  GPUs      {', '.join(dict.fromkeys(gpus))}; "
            + ", ".join(f"rank {place.rank}: {place.gpu or 'none'}" for place in ranks)
        )
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def misspelt(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable of the environment that looks like one of the library's and isn't."""
    said = []
    for name, value in sorted(environment.items()):
        if name.upper().startswith("MPIAD") and name not in VARIABLES:
            close = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.0)[0]
            said.append(f"{name}={value!r} means nothing to mpiad. The closest variable that does is {close}.")
    return said


_LIMIT = 30.0  # seconds; it takes about two


class _Watch:
    """Ends the process where a stage takes too long: a rank that doesn't answer would be waited for for ever."""

    def __init__(self, limit: float):
        self._limit, self._stage = limit, ""
        self._timer = threading.Timer(limit, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def enter(self, stage: str) -> None:
        self._stage = stage

    def _give_up(self) -> None:
        sys.stderr.write(
            f"mpiad: no end after {self._limit:g} s: process {launcher().rank} of {launcher().size} waits for others while "
            f"{self._stage}. They run another program, or their messages don't arrive (a firewall, another network "
            "interface on each node).\n"
        )
        sys.stderr.flush()
        # From a thread sys.exit would end that thread alone, and MPI's own end would wait for the others.
        os._exit(1)

    def end(self) -> None:
        self._timer.cancel()


def main(limit: float = _LIMIT) -> int:
    """Examine the environment, report on one process, and return the exit code of all."""
    watch = _Watch(limit)
    found = _examined(channel(None, "python -m mpiad"), watch.enter)
    watch.end()
    # In separate worlds each process is rank 0 of its own; the launcher's number tells them apart.
    if found.places[0].rank == 0 and launcher().rank == 0:
        sys.stdout.write(f"{found}\n")
        sys.stdout.flush()
    return 0 if found.ok else 1
