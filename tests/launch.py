"""Start a Python program on some ranks, under a limit that shows where each rank was.

    python tests/launch.py --ranks 1 2 3 4 --limit 300 -- -m pytest --with-mpi

What follows `--` are the arguments of this interpreter. One rank is started without mpiexec.

Design. A job gets a private folder, in which each of its processes opens one report file at start-up (see
`startup/sitecustomize.py`). A process that finds itself stuck writes there; so does one that gets SIGUSR1.
The launcher ends a job when its limit has passed or when a report has been written: it asks the processes
that have not reported for their stacks, kills all of them, and prints what each one wrote under its rank.
Nothing here depends on which MPI it is: launch flags are given as environment variables, each of which only
one MPI reads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine_load import slowdown

STARTUP = Path(__file__).parent / "startup"
CURRENT_TEST = "current-test"  # in a job's folder while pytest runs, and what has failed by then
FAILURES = "failures"  # of several processes, each with its name behind it
KERNELS = "LAUNCH_KERNELS"  # a folder that all jobs of one launch have in common
# A rank that waits inside MPI polls, and takes as much of a core as one that computes. With these it sleeps for some 50 us
# between polls, which delays each message by as much.
SLEEPING_WAITS = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # MPICH 4 and later
    "OMPI_MCA_mpi_yield_when_idle": "1",  # Open MPI 5 and later
    "OMPI_MCA_threads_pthreads_yield_strategy": "nanosleep",
    "OMPI_MCA_threads_pthreads_nanosleep_time": "1",  # in ns; Linux adds 50 us
}
EXPIRED = 124  # as coreutils' timeout returns
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
RUNNER_FRAME = re.compile(r'^  File ".*/site-packages/(_pytest|pytest|pluggy)/|^  File "<frozen runpy>"')
OF_THE_LAUNCHER = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "MPI_LOCAL", "OMPI_", "OPAL_", "PRTE_")


@dataclass
class Outcome:
    """How a job ended. `reports` says where its ranks were when it did not end by itself; usually empty."""

    returncode: int
    reports: str
    seconds: float
    stdout: str = ""
    stderr: str = ""


def find_mpiexec() -> str:
    """Return $MPIEXEC, else the mpiexec beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = os.environ.get("MPIEXEC") or (str(beside) if beside.exists() else shutil.which("mpiexec"))
    if not found:
        raise SystemExit(f"no mpiexec: MPIEXEC is not set, {beside} does not exist, and PATH has none")
    return found


def launch_environment(ranks: int, folder: Path, changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment of a job: this one, less what makes it a rank of another job.

    It doesn't ask for unbuffered output, in which `print` writes a line and its end apart: two ranks' lines mix. And it
    lets Python keep what it has compiled.
    """
    inside_a_job = any(name in os.environ for name in RANK_VARIABLES)
    keep = {k: v for k, v in os.environ.items() if not (inside_a_job and k.startswith(OF_THE_LAUNCHER))}
    keep.pop("PYTHONUNBUFFERED", None)
    # Without it each of some thousand processes would compile the library anew, which is half of its start.
    keep.pop("PYTHONDONTWRITEBYTECODE", None)
    defaults = {
        "OMP_NUM_THREADS": "1",  # one BLAS thread pool for each rank on shared cores is far slower
        # UCX, which MPICH contains, replaces functions of the C library to watch memory that networks use. That takes
        # 40 ms of each start, and these jobs use no network.
        "UCX_MEM_MMAP_HOOK_MODE": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
        "OMPI_MCA_hwloc_base_binding_policy": "none",
    }
    if ranks > (os.cpu_count() or 1):
        defaults |= SLEEPING_WAITS  # ranks that wait leave the cores to the others
    if not sys.stdout.isatty():  # Open MPI gives its ranks a terminal in any case
        defaults["NO_COLOR"] = "1"
    if os.getuid() == 0:
        defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    chosen = {k: v for k, v in {**defaults, **keep, **changes}.items() if v is not None}
    path = [str(STARTUP), *chosen.get("PYTHONPATH", "").split(os.pathsep)]
    return chosen | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, path))),
        "MPIAD_LAUNCH_FOLDER": str(folder),
        "MPIAD_LAUNCH_RANKS": str(ranks),
    }


def report_files(folder: Path) -> list[Path]:
    """Return the report files, which are named `rank.pid`, by rank."""
    files = [f for f in folder.iterdir() if f.suffix[1:].isdigit()]
    return sorted(files, key=lambda f: tuple(map(int, f.name.split("."))))


def send_signal(file: Path, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(file.suffix[1:]), number)


def collect_reports(folder: Path) -> None:
    """Ask each process that has not reported for its stacks, and give it the time to write them."""
    silent = [f for f in report_files(folder) if not f.stat().st_size]
    for file in silent:
        send_signal(file, signal.SIGUSR1)
    patience = time.monotonic() + 2
    while time.monotonic() < patience and not all(f.stat().st_size for f in silent):
        time.sleep(0.05)
    time.sleep(0.2)  # a report is written line by line


def end(job: subprocess.Popen, folder: Path) -> None:
    """End mpiexec and, in case it leaves some behind, its ranks."""
    job.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout=3)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    for file in report_files(folder):
        send_signal(file, signal.SIGKILL)
    job.wait()


def without_the_runner(text: str) -> str:
    """Return stacks without pytest's own thirty frames."""
    return "\n".join(line for line in text.strip().split("\n") if not RUNNER_FRAME.search(line))


def reports_text(folder: Path, reason: str) -> str:
    """Return what the processes reported, each under its rank, and where a run of pytest broke off."""
    lines = [file.read_text() for file in sorted(folder.glob(f"{FAILURES}*"))]
    if reason:
        lines.append(reason)
    lines += [f"the run broke off in {file.read_text()}" for file in sorted(folder.glob(f"{CURRENT_TEST}*"))]
    for file in report_files(folder):
        text = without_the_runner(file.read_text(errors="replace"))
        if text:
            lines.append(f"---- rank {file.stem} (process {file.suffix[1:]}) ----\n{text}\n")
    return "\n".join([*lines, ""]) if lines else ""


def watch(job: subprocess.Popen, folder: Path, limit: float) -> str:
    """Wait for the job's end and return "", or the reason to end it before; time on a busy machine counts less."""
    last, spent = time.monotonic(), 0.0
    while spent < limit:
        now = time.monotonic()
        last, spent = now, spent + (now - last) / slowdown()
        try:
            job.wait(timeout=0.25)
            return ""
        except subprocess.TimeoutExpired:
            if any(f.stat().st_size for f in report_files(folder)):
                return "a rank is stuck: where each one is"
    return f"no end after {limit:g} s of a quiet machine: where each rank is"


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that a launcher that is ended ends its job."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    ranks: int,
    arguments: Sequence[str],
    *,
    limit: float,
    env: Mapping[str, str | None] | None = None,
    mpiexec: bool | None = None,
    **popen: object,
) -> Outcome:
    """Run this interpreter with these arguments on some ranks, for at most `limit` seconds.

    `env` changes the environment (None removes a variable); `mpiexec` is by default not used for one rank.
    Further keywords go to `subprocess.Popen`.
    """
    use_mpiexec = ranks > 1 if mpiexec is None else mpiexec
    command = [*([find_mpiexec(), "-n", str(ranks)] if use_mpiexec else []), sys.executable, *arguments]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpiad-launch-") as name, sigterm_as_exit():
        folder = Path(name)
        environment = launch_environment(ranks, folder, env or {})
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **popen)
        try:
            reason = watch(job, folder, limit)
            if reason:
                collect_reports(folder)
        finally:
            if job.poll() is None:
                end(job, folder)
        returncode = EXPIRED if reason else job.returncode
        reports = reports_text(folder, reason) if returncode else ""
        return Outcome(returncode, reports, time.monotonic() - start)


def run_captured(ranks: int, arguments: Sequence[str], **options: object) -> Outcome:
    """Do the same as `run`, and keep what the job prints."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        outcome = run(ranks, arguments, stdout=out, stderr=err, **options)
        for file in (out, err):
            file.seek(0)
        outcome.stdout, outcome.stderr = out.read(), err.read()
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="numbers of ranks, one job each")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each job")
    parser.add_argument("arguments", nargs="+", help="arguments of the interpreter, after --")
    options = parser.parse_args()
    ends = []
    with tempfile.TemporaryDirectory(prefix="mpiad-kernels-") as kernels:
        for ranks in options.ranks:
            if len(options.ranks) > 1:
                print(f"\n==== {ranks} rank{'s' * (ranks > 1)} ====", flush=True)
            outcome = run(ranks, options.arguments, limit=options.limit, env={KERNELS: kernels})
            print(outcome.reports, end="", file=sys.stderr, flush=True)
            ends.append((ranks, outcome))
    if len(ends) > 1:
        print("\n==== all ====")
        for ranks, outcome in ends:
            verdict = f"FAILED (exit {outcome.returncode})" if outcome.returncode else "passed"
            print(f"{ranks} rank{'s' * (ranks > 1)}: {verdict} in {outcome.seconds:.1f} s")
    return next((abs(outcome.returncode) for _, outcome in ends if outcome.returncode), 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
