"""Run programs one after the other in one job: `mpiexec -n 2 python run_in_turn.py a.py "b.py --size 3"`.

Each runs in its own folder, as the main program, with the environment that the job began with. What its ranks print goes
to `a.py.stdout` and `a.py.stderr` beside it: all of them append to the two, so that lines are there in the order in which
they were written. The first program that raises ends the job; with `--raising` before their names each raises on all ranks,
and what it leaves is cleared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import shlex
import sys
import traceback
from pathlib import Path

from mpi4py import MPI

import mpiad
from mpiad.compiling import cache


def run(program: Path, raising: bool) -> None:
    environment = dict(os.environ)
    os.chdir(program.parent)
    with contextlib.ExitStack() as stack:
        for redirect, kind in ((contextlib.redirect_stdout, "stdout"), (contextlib.redirect_stderr, "stderr")):
            stack.enter_context(redirect(stack.enter_context(open(f"{program}.{kind}", "a", buffering=1))))
        try:
            runpy.run_path(str(program), run_name="__main__")
        except BaseException:
            sys.stderr.write(traceback.format_exc())  # at once, so that two ranks' lines don't mix
            if not raising:
                raise
    if raising:
        mpiad.reset()
    os.environ.clear()
    os.environ.update(environment)
    logging.root.handlers.clear()  # `basicConfig` does nothing if there are some
    logging.getLogger("mpiad").setLevel(logging.NOTSET)
    MPI.COMM_WORLD.Barrier()


cache.optimization_level = 0
raising = "--raising" in sys.argv
for command in sys.argv[1 + raising :]:
    sys.argv = shlex.split(command)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    run(Path(sys.argv[0]), raising)
