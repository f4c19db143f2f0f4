"""After some modules a second process compiles: memory doesn't grow, and nothing else changes, even if it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from machine_load import slowdown

import mpiad
from mpiad.compiling import cache, machine_code
from mpiad.compiling.cache import Source, kernel_of

pytestmark = pytest.mark.serial

SIGNATURE = "void(float64[::1], float64[::1])"
TEXT = """
def run(x, out):
    for k in range(x.shape[0]):
        out[k] = math.exp({constant} * x[k]) + k
"""
X = np.linspace(-1.0, 1.0, 9)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """Let the second process compile from the first module on; no module comes from the disk."""
    monkeypatch.setenv("MPIAD_CACHE", "0")
    for name, value in (("MOST_HERE", 0), ("_here", 0), ("_compiler", None), ("_can_start", True)):
        monkeypatch.setattr(machine_code, name, value)
    cache._loaded.clear()
    yield
    machine_code._end_compiler()
    cache._loaded.clear()


def check(constant):
    """Compile a kernel, compare it with NumPy, and return whether this process has compiled it."""
    out, before = np.zeros_like(X), machine_code._here
    kernel_of(TEXT.format(constant=constant), "run", SIGNATURE).function(X, out)
    np.testing.assert_allclose(out, np.exp(constant * X) + np.arange(9), rtol=1e-14)
    return machine_code._here > before


def the_process():
    assert machine_code._compiler is not None
    return machine_code._compiler


def number():
    return the_process().process.pid


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid):
    """Return whether a process ends soon."""
    limit = time.monotonic() + 10 * slowdown()
    while is_running(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    return not is_running(pid)


def test_the_first_modules_are_compiled_here(monkeypatch):
    monkeypatch.setattr(machine_code, "MOST_HERE", 2)
    assert [check(float(k)) for k in range(4)] == [True, True, False, False]


def test_the_machine_code_is_the_same():
    sources = [Source(TEXT.format(constant=c), "run", SIGNATURE) for c in (2.0, 3.0)]
    there = cache.code_of(sources)
    assert the_process().modules == 1
    machine_code._can_start = False
    assert cache.code_of(sources) == there and machine_code._here == 1


def test_a_program_is_one_module(monkeypatch):
    earlier = mpiad.jit(lambda x: mpiad.mpi_allreduce(2.0 * x))  # MPI's calls are in a module of their own
    earlier(X), earlier(X)
    counts = []
    original = cache.object_file
    monkeypatch.setattr(cache, "object_file", lambda texts, level: counts.append(len(texts)) or original(texts, level))

    def fun(x):
        for _ in range(3):
            x = mpiad.mpi_allreduce(anp.sin(x) * anp.sum(x)) / mpiad.mpi_size()
        return x

    def in_numpy(x):
        for _ in range(3):
            x = np.sin(x) * np.sum(x)
        return x

    compiled = mpiad.jit(fun, strict=True)
    compiled(X)
    np.testing.assert_allclose(compiled(X + 1.0), in_numpy(X + 1.0), rtol=1e-12)
    assert len(counts) == 1 and counts[0] > 1


def test_it_is_renewed(monkeypatch):
    monkeypatch.setattr(machine_code, "_MOST_THERE", 2)
    check(1.0)
    first = number()
    check(2.0)
    assert machine_code._compiler is None and not is_running(first)
    assert not check(3.0) and number() != first


def test_this_process_compiles_if_the_other_dies():
    check(1.0)
    first = number()
    os.kill(first, signal.SIGKILL)
    assert check(2.0)  # here, and the next one in a new process
    assert not check(3.0) and number() != first


def test_it_may_die_while_it_compiles():
    check(1.0)
    pid = number()
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    assert check(2.0)
    timer.join()


@pytest.mark.parametrize("name", ["/no/such/python", "/bin/false", "/bin/echo", ""])
def test_this_process_compiles_if_no_other_can_be_started(name, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", name)
    with caplog.at_level("INFO", "mpiad"):
        assert check(1.0) and check(2.0)
    assert len([line for line in caplog.messages if "compiled in this process" in line]) <= 1  # it isn't tried again


class Announced:
    """The output of the process, which tells when its first line is waited for."""

    def __init__(self, file):
        self._file, self.awaited = file, threading.Event()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def readline(self):
        self.awaited.set()
        return self._file.readline()


@pytest.fixture
def interruptible():
    """Let SIGINT raise, also in a job that a shell has started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_no_answer_behind():
    check(1.0)
    first, process = number(), the_process().process
    os.kill(first, signal.SIGSTOP)
    process.stdout = Announced(process.stdout)

    def interrupt(main, awaited):
        awaited.wait()  # an interrupt before the wait may be raised in a finalizer, and be lost
        time.sleep(0.2)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt, args=(threading.get_ident(), process.stdout.awaited))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        check(2.0)
    interrupter.join()
    assert not is_running(first)
    assert not check(3.0) and not check(2.0)


def test_what_cannot_be_compiled_is_an_error():
    check(1.0)
    with pytest.raises(NotImplementedError, match="undefined"):
        kernel_of("def run(x, out):\n    out[0] = undefined(x[0])", "run", SIGNATURE)
    assert not check(2.0)


PROGRAM = """
import os, sys, time
from mpiad.compiling import machine_code
from mpiad.compiling.cache import kernel_of
machine_code.MOST_HERE = 0
kernel_of({text!r}, "run", {signature!r})
print(machine_code._compiler.process.pid, flush=True)
child = os.fork() if "fork" in sys.argv else -1
if child == 0:
    assert machine_code._compiler is None
    kernel_of({text!r}.replace("exp", "sin"), "run", {signature!r})  # by a process of its own
    print(machine_code._compiler.process.pid, flush=True)
    machine_code._end_compiler()
    time.sleep(60)
if child > 0:
    print(child, flush=True)
if "wait" in sys.argv:
    time.sleep(60)
"""


def start(*arguments):
    text = PROGRAM.format(text=TEXT.format(constant=1.0), signature=SIGNATURE)
    env = os.environ | {"MPIAD_CACHE": "0"}
    return subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.few(2)
@pytest.mark.launches
@pytest.mark.parametrize("how", ["end", "SIGKILL", "SIGKILL with a fork"])
def test_it_ends_with_its_rank(how):
    rank: Any = start(*([] if how == "end" else ["wait"]), *(["fork"] if "fork" in how else []))
    pid = int(rank.stdout.readline())
    if "fork" in how:
        others = {int(rank.stdout.readline()) for _ in range(2)}
        assert pid not in others
    if how != "end":
        assert is_running(pid)
        rank.kill()
    assert rank.wait(30 * slowdown()) == (0 if how == "end" else -signal.SIGKILL)
    assert ends(pid)
    for other in others if "fork" in how else ():
        if is_running(other):
            os.kill(other, signal.SIGKILL)
    rank.stdout.close()


MEMORY = """
import json, sys
from mpiad.compiling import cache, machine_code
machine_code.MOST_HERE, cache._MAX_LOADED = int(sys.argv[1]), 8
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
def compile(numbers):
    for k in numbers:
        cache.kernel_of({text!r} % k, "run", {signature!r})
compile(range(16))
before = resident()
compile(range(16, 48))
print(json.dumps((resident() - before) / 32))
"""


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize("here", [8, pytest.param(1000, marks=pytest.mark.thorough)])
def test_memory_does_not_grow_with_each_module(here):
    program = MEMORY.format(text=TEXT.format(constant="%d"), signature=SIGNATURE)
    env = os.environ | {"MPIAD_CACHE": "0", "MPIAD_HUGE_PAGES": "0"}
    command = [sys.executable, "-c", program, str(here)]
    growth = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout)  # kB
    assert growth < 20.0 if here == 8 else growth > 40.0  # the second: this figure shows what LLVM loses
