"""Run some programs on all ranks, one after the other, up to the first that fails: a job of `fuzz.py`.

    python tests/programs/batch.py --limit 30 [--diagnose] PROGRAMS [BEFORE]

`PROGRAMS` has one on each line; the number of the one that runs stands in `PROGRAMS.at`, for the driver to read when
the job has ended in whatever way. `BEFORE` is run first on every rank: it may break the library on purpose.
"""

import argparse
import faulthandler
import importlib
import runpy
import sys

from mpi4py import MPI
from programs import arithmetic
from programs.comparison import differences
from programs.diagnosed import alarms
from programs.steps import read

WORLD = MPI.COMM_WORLD


def run(programs, limit=30.0, note=lambda place: None, check=differences):
    """Run the programs; exit with what differs, by ranks, at the first where something does.

    Returns the number of those that the reference can't decide.
    """
    beside, undecided = WORLD.Dup(), 0  # the comparison must not depend on what the program has left on the library's
    stuck = getattr(sys.modules.get("sitecustomize"), "report_file", sys.stderr)
    for place, program in enumerate(programs):
        if program.size != WORLD.size:
            raise SystemExit(f"a program of {program.size} ranks was started on {WORLD.size}")
        faulthandler.dump_traceback_later(limit, exit=stuck is sys.stderr, file=stuck)
        if WORLD.rank == 0:
            note(place)
        found = check(program)
        undecided += found is None
        everyones = beside.allgather(found or [])
        if any(everyones):
            if WORLD.rank == 0:
                print(*(f"rank {rank}: {line}" for rank, lines in enumerate(everyones) for line in lines), sep="\n")
                sys.stdout.flush()
            beside.Barrier()  # mpiexec may end the job with the first rank that leaves
            raise SystemExit(1)
    faulthandler.cancel_dump_traceback_later()
    return undecided


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one program")
    parser.add_argument("--diagnose", action="store_true", help="whether `diagnose` has no false alarm, and nothing else")
    parser.add_argument("programs")
    parser.add_argument("before", nargs="?")
    parser.add_argument("--devices", action="store_true", help="whether the arrays are on the stand-in for a device")
    options = parser.parse_args()
    if options.devices:
        from device_on_cpu import double  # noqa: F401 it compiles kernels

        arithmetic.ON_DEVICES.append(importlib.import_module("device_double"))
    if options.before:
        runpy.run_path(options.before)
    with open(options.programs) as file:
        programs = [read(line) for line in file]

    def note(place):
        with open(f"{options.programs}.at", "w") as file:
            file.write(str(place))

    undecided = run(programs, options.limit, note, alarms if options.diagnose else differences)
    if undecided and WORLD.rank == 0:
        print(f"{undecided} undecided")


if __name__ == "__main__":
    main()
