"""Fixtures, and how the tests run on several ranks.

A test runs on all ranks at once. The whole suite runs each on one number of ranks: without parameter sets on several, on
three or on two (`ON_TWO`); with three sets or more every fourth one there, and the others on one rank; with two sets one of
them on several ranks, the other on one. In addition, what differs on two or four ranks runs there (`ALSO_ON`; of the sets
another fourth), and a test that asks whether `size == 1` runs on one rank. Tests of most packages (`EACH_VALUE`) run with
each value of each of their parameters, but not with each combination, or with a few of their sets (`few`); what others show
in less time runs with `--thorough` only (`thorough`). With `--thorough`, or if files are named, all tests run on every
number of ranks. Marks: `mpi(min_size=2)` for a test that needs more than one rank; `also_on(2)` for one that differs on two
ranks; `not_on(4)` for one that doesn't differ on four, in a file of tests that do; `one_rank` for one whose result on
several ranks is shown by others; `launches` for one that starts its own mpiexec (on one rank only); `limit(seconds)` for
one that may take longer than MPIAD_TEST_TIMEOUT (60 s). With `-n auto` the one-rank run's files are divided among processes
of one rank each.

In the whole suite, kernels are compiled without LLVM's optimizations, which take long, but for the tests in `OPTIMIZED`.
Programs that tests start, and all of `--thorough`, have them.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import combinations, count
from pathlib import Path
from subprocess import CompletedProcess

import hypothesis
import hypothesis.internal.conjecture.providers as hypothesis_providers
import jitted_ways
import launch
import numpy as np
import pytest
import short_turns
from agreement import Agreement
from jitted import forget_programs
from mpi4py import MPI
from time_limit import TimeLimit, open_report

from mpiad import mpi_init
from mpiad.compiling import cache as kernel_cache
from mpiad.transport import channel
from mpiad.transport.core import random_keys
from mpiad.transport.watch import switch
from mpiad.transport.watch.watch_settings import Settings, present

if os.environ.get("DEVICE_ARRAYS") == "cupy":
    # Tests that are written for the stand-in take CuPy's arrays in its place.
    sys.modules["device_double"] = importlib.import_module("device_on_cupy")
device_kinds = importlib.import_module("device_kinds")

WORLD = MPI.COMM_WORLD

# What runs on two ranks instead of three, which takes less than half the time on two cores: ranks compute
# different parts there, but only their sums, or halos of a domain, depend on how many there are.
ON_TWO = (
    "differentiation/test_kept_products.py", "differentiation/test_orders.py", "differentiation/test_threads.py",
    "ensemble", "inverse", "linalg", "optimize", "parallel", "primitives/test_device.py", "programs/test_batching.py",
    "programs/test_falling_back.py", "programs/test_gathers.py", "programs/test_operation.py", "programs/test_values.py",
    "programs/test_memory_plan.py", "programs/test_opaque_calls.py", "programs/test_overlap.py",
    "programs/test_shape_recorder.py", "programs/test_tiling.py", "programs/test_transforms.py",
    "redistribution/test_fft.py", "test_memory.py", "timestepping", "transport/core/test_random_keys.py",
    "transport/exits/test_exits_in_composites.py", "vi",
)  # fmt: skip

# What runs on a number of ranks in addition. Two ranks exchange what more send round, and each is the other's neighbour on
# both sides; four are the fewest that divide a grid along two axes, as solvers see it.
ALSO_ON = {
    2: ("transport/watch/test_message_headers.py", "transport/core/test_channels.py",
        "transport/core/test_extremes.py", "transport/core/test_long_collectives.py",
        "transport/devices/test_device_messages.py",
        "primitives/test_allreduce.py", "primitives/test_allgather.py", "primitives/test_reduce_scatter.py",
        "primitives/test_exchange.py", "primitives/test_sendrecv.py", "domain/test_halo.py"),
    4: ("domain", "linalg/multigrid", "linalg/test_solve.py", "linalg/test_additive_schwarz.py"),
}  # fmt: skip

# What runs with each value of each parameter, of methods, devices and problems for example, in as few combinations as
# have all of them: combinations are further examples there, or take a kernel of their own, or a solve to tight tolerances.
# Such tests of other packages are marked `each_value`; tests of these packages whose combinations have code of their own
# are marked `each_combination`. Tests whose parameters are further examples of the same, and that take more than half a
# second together, are marked `few(n)`: n of the parameter sets run.
EACH_VALUE = (
    "debug", "domain", "ensemble", "inverse", "linalg", "optimize", "parallel", "redistribution", "tasks", "timestepping",
    "transport", "vi",
)  # fmt: skip

# What has LLVM's optimizations: tests of the compiler, those whose kernels run for long, and those of kernels in which an
# optimization could go wrong, since loops overwrite what they read, or trajectories share the arrays of a kernel.
OPTIMIZED = (
    "compiling", "inverse", "ensemble/test_taylor.py", "ensemble/compiled/test_kernel_solver.py",
    "linalg/test_compiled_iterations.py", "linalg/test_sparse_factors.py", "linalg/multigrid/test_cycle.py",
    "programs/test_memory_plan.py", "programs/test_loops.py", "programs/test_rounding.py", "timestepping/test_snapshots.py",
)  # fmt: skip

# A file all of whose tests run on one rank only.
OF_ONE_RANK = re.compile(r"^pytestmark = .*\bmark\.(launches|serial|one_rank)\b", re.MULTILINE)

ON_ONE_RANK = {"launches", "serial", "one_rank"}  # marks of tests that several ranks leave out
UNDIVIDED = {"mpi", "also_on"}  # marks of tests all of whose parameter sets run on several ranks

# All ranks must draw the same examples, and none may go on to search a smaller one while the others wait.
hypothesis.settings.register_profile(
    "ranks",
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile("ranks")
# Nor may what they draw depend on the numbers in those modules of the library that a rank happens to have loaded, which
# takes each process seconds to read.
hypothesis_providers.is_local_module_file = lambda path: False  # pyright: ignore[reportPrivateImportUsage]


pytest_generate_tests = jitted_ways.generate
objectives = jitted_ways.objectives


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run every test on every number of ranks")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    expected = int(os.environ.get("MPIAD_LAUNCH_RANKS", WORLD.size))
    if WORLD.size != expected:
        raise pytest.UsageError(f"{expected} ranks were started, and MPI's world has {WORLD.size}")
    if launch.KERNELS in os.environ:
        # Kernels are compiled once in a launch, for all its jobs, their processes and what these start.
        os.environ["MPIAD_CACHE"] = os.environ[launch.KERNELS]
    mpi_init()
    short_turns.take()
    # For the programs that tests start, so that other tests have the cores; this process has initialized its MPI.
    os.environ |= launch.SLEEPING_WAITS
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it hands the tests out to other processes, which keep their times
    gc.disable()  # until the tests are collected: the objects that stay would be looked through again and again
    report, launched = open_report(config)
    limit = TimeLimit(report, launched, getattr(config, "workerinput", {}).get("workerid", ""))
    limit.restart()
    config.pluginmanager.register(limit, "time-limit")
    if WORLD.size > 1:
        config.pluginmanager.register(Agreement(report, launched), "agreement")
    if WORLD.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False  # its summary of forty lines; ours is pytest_report_header


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Let `-n auto` divide the one-rank run among the cores; more ranks are at work on all cores already.

    Two processes for each core: tests that start programs mostly wait, for starts, deadlines and ends.
    """
    return min(2 * len(os.sched_getaffinity(0)), 6) if WORLD.size == 1 else 0


def pytest_report_header() -> str:
    vendor, version = MPI.get_vendor()
    return f"mpi: {vendor} {'.'.join(map(str, version))}, {WORLD.size} ranks, Python {sys.version.split()[0]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = _is_whole_suite(config)
    if whole:
        _leave_out(config, items, {item for item in items if item.get_closest_marker("thorough")})
        _leave_out(config, items, _repeated_values(config, items))
        _leave_out(config, items, _parameter_sets_of_other_ranks(config, items))
    if WORLD.size == 1:
        _mix(items)
        return
    # What starts programs of its own, and what doesn't communicate, would only be done again by each rank.
    done_by_one = ON_ONE_RANK if whole else ON_ONE_RANK - {"one_rank"}
    left_out = {item for item in items if any(map(item.get_closest_marker, done_by_one))}
    left_out |= {item for item in items if whole and not _runs_here(config, item)}
    _leave_out(config, items, left_out)


class _FromAnotherFile(pytest.Dir):
    """A folder whose files are collected in their order, but from another one on in each process of `-n auto`.

    Processes that collect the same file at the same time all rewrite its assertions, which takes most of a collection.
    Those that come later find the rewritten file.
    """

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        nodes = list(super().collect())
        worker = self.config.workerinput  # pyright: ignore[reportAttributeAccessIssue]
        first = int(worker["workerid"].removeprefix("gw")) * len(nodes) // worker["workercount"]
        return nodes[first:] + nodes[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    return _FromAnotherFile.from_parent(parent, path=path) if hasattr(parent.config, "workerinput") else None


def _mix(items: list[pytest.Item]) -> None:
    """Order files so that those that start programs, which wait much, run beside others, the longest from the beginning."""
    files = sorted({item.path for item in items})
    launches = Counter(item.path for item in items if item.get_closest_marker("launches"))
    starting = sorted(launches, key=lambda path: (-launches[path], path))
    others = [path for path in files if path not in starting]
    place = {path: k / len(others) for k, path in enumerate(others)}
    place |= {path: 0.7 * k / len(starting) for k, path in enumerate(starting)}
    items.sort(key=lambda item: (place[item.path], item.path))


def pytest_collection_finish() -> None:
    gc.freeze()  # some 100,000 objects of the tests to come, which each of the collector's passes would look through
    gc.set_threshold(10_000)  # a trace of one test makes thousands, and hypothesis is called at each pass
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect what a file's tests leave, and let the collector's passes leave out what is kept, such as compiled programs.

    These become a million objects, and the passes a seventh of all processor time.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@cache  # asked by each test, like `_is_in`
def _is_whole_suite(config: pytest.Config) -> bool:
    chosen = [Path(name.split("::")[0]).resolve() for name in config.args]
    return chosen == [config.rootpath / "tests"] and not config.getoption("thorough")


def _repeated_values(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the combinations of parameters whose values others have, too, and those beyond the number in `few`."""
    tests: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        each_value = "each_value" in marks or _is_in(config, item.path, EACH_VALUE) and "each_combination" not in marks
        if (each_value or "few" in marks) and hasattr(item, "callspec"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    return {item for sets in tests.values() for item in set(sets).difference(_representatives(sets))}


def _representatives(sets: list[pytest.Item]) -> list[pytest.Item]:
    """Return the fewest parameter sets that have all values of all parameters, or as many as `few` says."""
    few = sets[0].get_closest_marker("few")
    values = {item: _values(item) for item in sets}
    pairs = {item: {*combinations(sorted(values[item]), 2)} for item in sets}
    missing, paired, chosen = set().union(*values.values()), set(), list[pytest.Item]()
    if few:  # multiples of the golden ratio spread however many are taken
        sets = [sets[k] for k in sorted(range(len(sets)), key=lambda k: k * 0.6180339887498949 % 1)]
    while sets and (len(chosen) < few.args[0] if few else missing):
        # The first of those with the most values, and among these with the most pairs of values, that are new.
        best = max(sets, key=lambda item: (len(missing & values[item]), len(pairs[item] - paired)))
        missing -= values[best]
        paired |= pairs[best]
        chosen.append(best)
        sets = [item for item in sets if item is not best]
    return chosen


def _values(item: pytest.Item) -> frozenset[tuple]:
    """Return the values of a test's parameters; those that one `parametrize` gives together are one value."""
    single = dict(item.callspec.params)
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [re.split(r"\s*,\s*", name) if isinstance(name, str) else tuple(name) for name in names]
    together = [tuple((name, id(single.pop(name))) for name in group) for group in groups]
    return frozenset([*together, *(((name, id(value)),) for name, value in single.items())])


def _parameter_sets_of_other_ranks(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return what the whole suite runs elsewhere: several ranks take every fourth parameter set, and one rank the others.

    What runs on a number of ranks in addition has another fourth there. Of two sets, the first or the second runs on
    several ranks, depending on the test's name: of arrays and a kernel, for example, not always the arrays.
    """
    tests: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if ON_ONE_RANK.isdisjoint(mark.name for mark in item.iter_markers()):
            tests.setdefault((item.path, item.originalname), []).append(item)
    asking = {path: _tests_that_ask(path) for path in {path for path, _ in tests}} if WORLD.size == 1 else {}
    left_out = set()
    for (path, name), sets in tests.items():
        if len(sets) == 1 or not UNDIVIDED.isdisjoint(mark.name for mark in sets[0].iter_markers()):
            left_out |= set(sets) if WORLD.size == 1 and name not in asking[path] else set()
            continue
        first = 2 * (zlib.crc32(name.encode()) % 2)
        places = [k % 4 for k in range(len(sets))] if len(sets) > 2 else [first, 2 - first]
        left_out |= {item for place, item in zip(places, sets) if place not in _fourths(config, path)}
    return left_out


def _tests_that_ask(path: Path) -> set[str]:
    """Return the names of a file's tests that ask whether there is one rank."""
    functions = path.read_text().split("\ndef ")[1:]
    return {function.partition("(")[0] for function in functions if re.search(r"\b(?:size|SIZE) == 1\b", function)}


def _fourths(config: pytest.Config, path: Path) -> tuple[int, ...]:
    """Return the places in each four parameter sets of those that the whole suite runs on this number of ranks."""
    if WORLD.size == _several(config, path):
        return (0,)
    return (1, 2, 3) if WORLD.size == 1 else (2,)


@cache
def _is_in(config: pytest.Config, path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(config.rootpath / "tests" / place) for place in places)


def _several(config: pytest.Config, path: Path) -> int:
    """Return the number of ranks on which the whole suite runs a file, beside one."""
    return 2 if _is_in(config, path, ON_TWO) else 3


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import files of which nothing is chosen on this number of ranks; all of them take seconds on each rank."""
    if collection_path.suffix != ".py" or WORLD.size == 1 or not _is_whole_suite(config):
        return None
    text = collection_path.read_text()
    if OF_ONE_RANK.search(text):
        return True
    asked_for = rf"\balso_on\([^)]*\b{WORLD.size}\b|\bmin_size={WORLD.size}\b"
    if WORLD.size == _several(config, collection_path) or re.search(asked_for, text):
        return None
    return None if _is_in(config, collection_path, ALSO_ON.get(WORLD.size, ())) else True


def _runs_here(config: pytest.Config, item: pytest.Item) -> bool:
    """Return whether the whole suite runs a test on this number of ranks, which isn't one."""
    also, other = ([n for mark in item.iter_markers(name) for n in mark.args] for name in ("also_on", "not_on"))
    several = max([_several(config, item.path), *(mark.kwargs.get("min_size", 0) for mark in item.iter_markers("mpi"))])
    if WORLD.size in other:
        return False
    return WORLD.size in (several, *also) or _is_in(config, item.path, ALSO_ON.get(WORLD.size, ()))


@pytest.fixture(autouse=True)
def optimization(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile kernels with LLVM's optimizations, or without."""
    if _is_whole_suite(request.config) and not _is_in(request.config, request.path, OPTIMIZED):
        monkeypatch.setattr(kernel_cache, "optimization_level", 0)


@pytest.fixture(autouse=True)
def no_programs_of_other_tests() -> None:
    """Compile in each test what it compiles, and warn again; functions that are alike have their programs in common."""
    forget_programs("function")


@pytest.fixture(autouse=True)
def entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call with ``rng=None`` draw other numbers, but the same ones in each run, so that a failure recurs."""
    monkeypatch.setattr(random_keys, "entropy", count(2**64).__next__)


@pytest.fixture(autouse=True)
def switched_off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn off MPIAD_TIMEOUT and MPIAD_DEBUG in tests that are marked `unguarded`, and in the programs that they start."""
    before = present()
    if not before.watches or request.node.get_closest_marker("unguarded") is None:
        yield
        return
    for name in ("MPIAD_TIMEOUT", "MPIAD_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    # A rank that comes late would take a message with a header for one without, or wait for the header.
    WORLD.Barrier()
    switch.restore(Settings())
    WORLD.Barrier()
    yield
    WORLD.Barrier()
    switch.apply(before)
    WORLD.Barrier()


@pytest.fixture
def rank() -> int:
    """This rank in the world."""
    return WORLD.rank


@pytest.fixture
def size() -> int:
    """The number of ranks in the world."""
    return WORLD.size


class CountingComm:
    """A communicator that notes the names of the operations that are called."""

    def __init__(self, comm: MPI.Comm, calls: list[str]):
        self._comm, self._calls = comm, calls

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._comm, name)
        if not callable(attribute):
            return attribute

        def called(*args: object, **kwargs: object) -> object:
            self._calls.append(name)
            return attribute(*args, **kwargs)

        return called


@pytest.fixture
def operations() -> Callable[[Callable[[], object]], list[str]]:
    """`operations(fun)`: the names of the MPI operations that `fun()` calls on the default communicator, in order."""

    def called(fun: Callable[[], object]) -> list[str]:
        used, calls = channel(None, "test"), []
        bare = used.data, used.reverse
        used.data, used.reverse = (CountingComm(comm, calls) for comm in bare)
        try:
            fun()
        finally:
            used.data, used.reverse = bare
        return calls

    return called


@pytest.fixture
def rank_rng(request: pytest.FixtureRequest) -> Callable[[int], np.random.Generator]:
    """`rank_rng(r)`: rank r's generator in this test, so that each rank can make the inputs of all ranks."""
    seed = zlib.crc32(request.node.nodeid.encode())
    return lambda rank: np.random.default_rng([seed, rank])


@pytest.fixture
def rng(rank_rng: Callable[[int], np.random.Generator], rank: int) -> np.random.Generator:
    """This rank's generator in this test."""
    return rank_rng(rank)


@pytest.fixture(params=device_kinds.available(), ids=lambda kind: kind.name)
def devices(request: pytest.FixtureRequest) -> device_kinds.StandIn | device_kinds.Cupy:
    """A kind of device arrays: `put(values)`, `look(x)`, `kind`, `start_counting()`, `copies()`."""
    return request.param


@pytest.fixture
def rank_counts(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Numbers of ranks on which an example must have the same answer: one, and three, or with `--thorough` two and four."""
    return (1, 2, 4) if request.config.getoption("thorough") else (1, 3)


@pytest.fixture
def mpirun(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., CompletedProcess]:
    """`mpirun(n, program, *args, timeout=40, env=None, cwd=None)`: run a program on n ranks of its own.

    `program` is a path (from the repository's root), or the text of a program (a string with a line break).
    The result has returncode, stdout and stderr. A program that takes longer is killed and fails the test
    with what it printed and the stacks of all ranks. `env` changes the environment; None removes a variable.
    """

    def start(
        n: int,
        program: str | os.PathLike,
        *args: object,
        timeout: float = 40,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike | None = None,
    ) -> CompletedProcess:
        if isinstance(program, str) and "\n" in program:
            path = tmp_path / f"program_{len(list(tmp_path.glob('program_*')))}.py"
            path.write_text(program)
        else:
            path = request.config.rootpath / program
        command = [str(path), *map(str, args)]
        job = launch.run_captured(n, command, limit=timeout, env=env, mpiexec=True, cwd=cwd)
        if job.reports:
            pytest.fail(f"{job.reports}\n-- stdout --\n{job.stdout}\n-- stderr --\n{job.stderr}")
        return CompletedProcess(command, job.returncode, job.stdout, job.stderr)

    return start


@pytest.fixture
def ft_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpirun: Callable[..., CompletedProcess]
) -> Callable[..., CompletedProcess]:
    """`mpirun` with Open MPI, under a launcher that lets a job outlive its ranks; see `fault_tolerant.with_ulfm`."""
    launcher = tmp_path / "mpiexec-with-ft"
    launcher.write_text(f'#!/bin/sh\nexec "{launch.find_mpiexec()}" --with-ft ulfm "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("MPIEXEC", str(launcher))
    return mpirun
