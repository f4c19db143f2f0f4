"""SIGTERM and SIGINT of one rank: the job ends with a sentence, and the user's own handlers win."""

import os
import re
import signal
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from machine_load import takes_at_most

from mpiad.transport.core import calls
from mpiad.transport.exits import signals

launches = pytest.mark.launches

START = """
import os, signal, subprocess, sys, threading, time, warnings
import mpiad
from mpi4py import MPI

warnings.filterwarnings("ignore", message=".*use of fork")  # since Python 3.12, in a process with threads
rank = mpiad.mpi_rank()
mpiad.mpi_barrier()

def tell_soon(number):  # from another process, while this one waits
    print("told", time.time() + 0.3, flush=True)
    return subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -{int(number)} {os.getpid()}"])
"""

WAITS = {
    "in the library": ("mpiad.mpi_recv(0.0, 0)  # here", ", in mpi_recv"),
    "in bare MPI": ("MPI.COMM_WORLD.recv(source=0)  # here", ""),
    "in Python": ("while True: time.sleep(0.01)  # here", ""),
}


def line_of(program, mark="# here"):
    return 1 + program[: program.index(mark)].count("\n")


@launches
@pytest.mark.parametrize("waits", ["in the library", "in bare MPI", pytest.param("in Python", marks=pytest.mark.thorough)])
def test_sigterm_of_one_rank_ends_the_job(waits, mpirun, tmp_path):
    program = START + f"if rank == 1:\n    tell_soon(15)\n    {WAITS[waits][0]}\nmpiad.mpi_recv(0.0, 1)"
    path, place = tmp_path / "program_0.py", f"program_0.py:{line_of(program)}{WAITS[waits][1]}"
    path.write_text(program)

    def seconds():
        done = mpirun(2, path)
        ended = time.time()
        assert done.returncode == 143
        assert done.stderr.count(f"mpiad: rank 1 received SIGTERM at {place}. The job ends.") == 1
        return ended - float(re.search(r"told ([\d.]+)", done.stdout)[1])

    assert takes_at_most(2, seconds)


@pytest.mark.thorough
@launches
@pytest.mark.parametrize("first", ["MainThread", "mpiad-signals"])
def test_the_place_whichever_thread_is_first(first, mpirun):
    one_first = f"""
from mpiad.transport.exits import signals
end = signals._end
def last(*args):
    if threading.current_thread().name != {first!r}:
        time.sleep(0.5)
    end(*args)
signals._end = last
def work():
    tell_soon(15)
    while True: time.sleep(0.01)  # here
if rank == 1:
    work()
mpiad.mpi_recv(0.0, 1)
"""
    program = START + one_first
    done = mpirun(2, program)
    assert done.returncode == 143
    assert done.stderr.count(f"mpiad: rank 1 received SIGTERM at program_0.py:{line_of(program)} in work.") == 1


IN_THE_COMPILER = """
import sys, threading, autograd.numpy as np
main = threading.main_thread().ident
def end_in(name):
    while name not in sys._current_frames()[main].f_code.co_filename:
        time.sleep(0.001)
    os.kill(os.getpid(), 15)
if rank == 1:
    threading.Thread(target=end_in, args=("llvmlite",), daemon=True).start()
def work(x):
    for k in range(150):
        x = np.sin(x) * x + np.roll(x, k) / (1 + x**2)
    return x
mpiad.jit(work)(np.ones(500))  # here
mpiad.mpi_recv(0.0, 1)
"""


@launches
def test_sigterm_during_compilation_names_the_line_of_the_user(mpirun, tmp_path):
    program = START + IN_THE_COMPILER
    done = mpirun(2, program, env={"MPIAD_CACHE": str(tmp_path)})
    place = f"program_0.py:{line_of(program)}, in the compilation of a kernel"
    assert (done.returncode, done.stderr.count(f"mpiad: rank 1 received SIGTERM at {place}. The job ends.")) == (143, 1)


@pytest.mark.one_rank
def test_named_tuples_and_dataclasses_are_not_lines_of_the_user():
    """Python generates their code, which has no file: an interrupt in the compiler often comes there."""

    class Frame(NamedTuple):
        x: object

    found = sys._getframe()
    generated = SimpleNamespace(f_code=Frame.__new__.__code__, f_globals=Frame.__new__.__globals__, f_back=found)
    assert calls.site_of(generated).text.startswith("test_signals.py")


@pytest.mark.thorough
@launches
def test_sigterm_of_all_ranks(mpirun):
    done = mpirun(2, START + "tell_soon(15)\nMPI.COMM_WORLD.recv(source=1 - rank)")
    assert done.returncode == 143
    assert "rank 0 received SIGTERM" in done.stderr and "rank 1 received SIGTERM" in done.stderr


@launches
def test_sigterm_at_exit(mpirun):
    done = mpirun(2, START + "if rank == 1:\n    tell_soon(15)\nelse:\n    time.sleep(20)")
    assert done.returncode == 143 and "rank 1 received SIGTERM. The job" in done.stderr


@pytest.mark.thorough
@launches
@pytest.mark.unguarded
def test_sigint_in_a_wait_ends_the_job(mpirun):
    program = START + "if rank == 1:\n    tell_soon(2)\n    mpiad.mpi_recv(0.0, 0)  # here\nmpiad.mpi_recv(0.0, 1)"
    done = mpirun(2, program)
    assert done.returncode == 130
    place = f"program_0.py:{line_of(program)}, in mpi_recv"
    assert f"mpiad: rank 1 was interrupted by SIGINT while it waited inside MPI at {place}. The job" in done.stderr


@launches
def test_sigint_is_a_keyboard_interrupt_where_it_can_be(mpirun):
    caught = """
if rank == 1:
    tell_soon(2)
    try:
        time.sleep(20)
    except KeyboardInterrupt:
        print("caught", flush=True)
time.sleep(1.5)
mpiad.mpi_barrier()
"""
    done = mpirun(2, START + caught)
    assert done.returncode == 0 and "caught" in done.stdout and done.stderr == ""
    done = mpirun(2, START + "if rank == 1:\n    tell_soon(2)\n    time.sleep(20)\nmpiad.mpi_recv(0.0, 1)")
    assert done.returncode == 130
    assert "rank 1 ended the job by an exception" in done.stderr and "KeyboardInterrupt" in done.stderr


OWN = {
    "before": ("signal.signal(15, lambda *_: print('mine', flush=True))\n", ""),
    "after": ("", "signal.signal(15, lambda *_: print('mine', flush=True))\n"),
    "ignored": ("signal.signal(15, signal.SIG_IGN); print('mine', flush=True)\n", ""),
}


@pytest.mark.few(1)
@launches
@pytest.mark.parametrize("when", OWN)
def test_the_user_s_handler_wins(when, mpirun):
    before, after = OWN[when]
    program = "import signal\n" + before + START + after + "tell_soon(15).wait()\ntime.sleep(0.3)\nmpiad.mpi_barrier()"
    done = mpirun(2, program)
    assert done.returncode == 0 and done.stdout.count("mine") == 2 and done.stderr == ""


@pytest.mark.thorough
@launches
def test_a_wakeup_file_of_somebody_else_stays(mpirun):
    theirs = """
import os, signal
ear, mouth = os.pipe()
os.set_blocking(mouth, False)
signal.set_wakeup_fd(mouth)
import mpiad
assert signal.set_wakeup_fd(-1) == mouth
if mpiad.mpi_rank() == 1:
    os.kill(os.getpid(), 15)  # here
mpiad.mpi_recv(0.0, 1 - mpiad.mpi_rank())
"""
    done = mpirun(2, theirs)
    assert done.returncode == 143
    assert f"rank 1 received SIGTERM at program_0.py:{line_of(theirs)}." in done.stderr


ASYNCIO = """
import asyncio, os, signal
async def serve():
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(heard.wait(), 20)
    print("heard", flush=True)
"""
IN_A_LOOP = {
    "before": ("loop = asyncio.new_event_loop()\nloop.run_until_complete(serve())\n", ""),
    "after": ("", "loop = asyncio.new_event_loop()\nloop.run_until_complete(serve())\n"),
    "removed": ("", "asyncio.run(serve())\n"),
    "before and after": ("loop = asyncio.new_event_loop()\nloop.run_until_complete(serve())\n", "asyncio.run(serve())\n"),
}


@pytest.mark.thorough
@launches
@pytest.mark.parametrize(
    "when",
    [pytest.param(when, marks=[] if when == "before and after" else [pytest.mark.thorough]) for when in IN_A_LOOP],
)
def test_sigterm_beside_handlers_of_asyncio(when, mpirun):
    """asyncio is told of its signals by the same file; it reads them only in its loop, which a wait in MPI holds up."""
    before, after = IN_A_LOOP[when]
    program = ASYNCIO + before + START + after + "if rank == 1:\n    tell_soon(15)\nmpiad.mpi_recv(0.0, 1 - rank)  # here"
    done = mpirun(2, program)
    assert done.returncode == 143
    assert done.stdout.count("heard") == 2 * (2 if "and" in when else 1)
    assert f"mpiad: rank 1 received SIGTERM at program_0.py:{line_of(program)}, in mpi_recv" in done.stderr


@pytest.mark.serial
def test_a_wakeup_file_that_cannot_be_used_is_refused(monkeypatch):
    before = signals._set_wakeup_fd(-1)
    monkeypatch.setattr(signals, "_write_end", before)
    ear, mouth = os.pipe()
    try:
        with pytest.raises(ValueError, match="must be in non-blocking mode"):
            signals._set_others(mouth)
        assert signals._set_others(-1) == -1
    finally:
        os.close(ear)
        os.close(mouth)
        signals._set_wakeup_fd(before)


@launches
def test_children_have_python_s_own_handlers(mpirun):
    children = """
child = subprocess.Popen(["sleep", "20"])
child.terminate()
assert child.wait() == -15
fork = os.fork()
if fork == 0:
    time.sleep(20)
os.kill(fork, 15)
assert os.waitstatus_to_exitcode(os.wait()[1]) == -15
time.sleep(0.3)
mpiad.mpi_print("right")
"""
    done = mpirun(2, START + children)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\nright\n", "")


@pytest.mark.thorough
@launches
def test_a_child_s_wakeup_file_is_its_own(mpirun):
    """Also if it calls the function that this process had: its signals must not be read here, nor end this job."""
    child = """
set_wakeup_fd = signal.set_wakeup_fd
fork = os.fork()
if fork == 0:
    signal.signal(15, lambda *_: None)
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    assert set_wakeup_fd(mouth) == -1
    os.kill(os.getpid(), 15)
    assert os.read(ear, 1) == bytes([15])
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
time.sleep(0.3)
mpiad.mpi_print("right")
"""
    done = mpirun(2, START + child)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\nright\n", "")


@launches
def test_can_be_switched_off(mpirun):
    program = "import mpiad, signal\nassert signal.getsignal(15) == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1"
    assert mpirun(2, program, env={"MPIAD_ABORT": "0"}).returncode == 0
    assert mpirun(1, program).returncode == 0


POSTPONED = """
from mpiad.transport.exits.signals import postponed, requested

assert requested() is None
with postponed(patience=PATIENCE):
    tell_soon(15)
    for step in range(40):
        time.sleep(0.05)  # here
        if mpiad.mpi_allreduce(float(requested() is not None)) == 2:
            print("checkpoint after step", step, flush=True)
            break
assert requested() == 15
time.sleep(1)
mpiad.mpi_print("saved")
"""


# The second thread reads the signal when `postponed` has ended.
LATE = """
from mpiad.transport.exits import signals

act = signals._end_or_request
def late(*args):
    time.sleep(0.5 * (threading.current_thread().name == "mpiad-signals"))
    act(*args)
signals._end_or_request = late
"""


@pytest.mark.thorough
@launches
@pytest.mark.parametrize("before", ["", LATE])
def test_the_end_can_be_postponed(before, mpirun):
    done = mpirun(2, START + before + POSTPONED.replace("PATIENCE", "30.0"))
    assert done.returncode == 0 and done.stdout.count("checkpoint") == 2 and "saved\nsaved\n" in done.stdout


@pytest.mark.thorough
@launches
def test_but_not_for_ever(mpirun):
    program = START + POSTPONED.replace("PATIENCE", "0.5").replace("== 2", "== 3")
    done = mpirun(2, program)
    assert done.returncode == 143 and "saved" not in done.stdout
    assert re.search(r"rank \d received SIGTERM 0.5 s ago, and has not ended since at pr", done.stderr)


@pytest.mark.serial
def test_the_request_is_kept_for_later_steps(monkeypatch):
    monkeypatch.setattr(signals, "_requested", None)
    monkeypatch.setattr(signals, "_twin", None)
    before = signal.signal(signal.SIGTERM, signals._on_sigterm)
    try:
        with signals.postponed(), signals.postponed():
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.requested() == signal.SIGTERM
        assert signals.requested() == signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
