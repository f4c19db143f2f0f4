"""With which code Python ends is known before its exit functions run, whoever raised SystemExit or looked at it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from machine_load import slowdown

from mpiad.transport.core.agreement import exit_code

# Programs, their lines that exit (None: none, or caught), and the codes that they end with.
ENDS = [
    ("sys.exit(3)", 1, 3),
    ("exit(4)", 1, 4),
    ("quit(5)", 1, 5),
    ("raise SystemExit(6)", 1, 6),
    ("raise SystemExit", 1, 0),
    ("sys.exit()", 1, 0),
    ("taken_by_name(7)", 1, 7),
    ("sys.exit('a message')", 1, 1),
    ("sys.exit(SystemExit(8))", 1, 8),
    ("class Exit(SystemExit):\n    pass\nraise Exit(9)", 3, 9),
    ("try:\n    sys.exit(10)\nfinally:\n    done = True", 2, 10),
    ("with open(os.devnull), np.errstate(all='raise'), contextlib.ExitStack():\n    sys.exit(11)", 2, 11),
    ("@contextlib.contextmanager\ndef managed():\n    yield\nwith managed():\n    sys.exit(12)", 5, 12),
    ("try:\n    sys.exit(13)\nexcept SystemExit as error:\n    kept.append(error)\n    raise", 2, 13),
    ("async def task():\n    sys.exit(14)\nasyncio.run(task())", 2, 14),
    ("ThreadPoolExecutor().submit(sys.exit, 15).result()", 1, 15),
    ("argparse.ArgumentParser().parse_args(['--unknown'])", 1, 2),
    ("try:\n    sys.exit(16)\nfinally:\n    sys.exit(17)", 4, 17),
    ("try:\n    sys.exit(3)\nexcept SystemExit as error:\n    kept.append(error.code)", None, 0),
    ("thread = threading.Thread(target=sys.exit, args=(3,))\nthread.start()\nthread.join()", None, 0),
    ("atexit.register(lambda: SystemExit(3).code)", None, 0),
    ("raise ArithmeticError", None, 1),
]

# Each end is that of a fork: only the interpreter's own shows what it asks for.
PROGRAM = """
import argparse, asyncio, atexit, contextlib, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from sys import exit as taken_by_name

import mpi4py
import numpy as np

mpi4py.rc.initialize = False
from mpiad.transport.core.calls import site_of_trace
from mpiad.transport.exits.abort import at
from mpiad.transport.exits.departure import detect_exit

kept = []
assert detect_exit(lambda code, trace: print(repr(code) + at(site_of_trace(trace)), end="", flush=True))
for end in ENDS:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        exec(compile(end, "end.py", "exec"))
        break
    print(" ->", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.serial
def test_every_end_by_an_exit_is_noted_with_its_code_and_its_line():
    program = PROGRAM.replace("ENDS", repr([end for end, *_ in ENDS]))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50 * slowdown(), check=True
    )
    noted = done.stdout.splitlines()
    assert len(noted) == len(ENDS)
    for (end, line, expected), told in zip(ENDS, noted):
        said, ended = told.split(" -> ")
        assert int(ended) == expected, (end, told)
        code, _, place = said.partition(" at ")
        if line is None:
            assert said == "", (end, told)
        else:
            assert exit_code(eval(code)) == expected and place.split(" in ")[0] == f"end.py:{line}", (end, told)


@pytest.mark.serial
@pytest.mark.parametrize(("code", "expected"), [(None, 0), (0, 0), (False, 0), (3, 3), (-1, 255), (256, 0), ("text", 1)])
def test_code_is_python_s(code, expected):
    assert exit_code(code) == expected
