"""Hosts that are apart, as network namespaces of this machine (`tests/hosts.py`), which run `host_programs.py`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hosts
import pytest
from machine_load import slowdown

PROGRAM = Path(__file__).with_name("host_programs.py")
pytestmark = [
    pytest.mark.serial,
    pytest.mark.launches,
    pytest.mark.thorough,
    pytest.mark.limit(240),
]


@pytest.fixture(scope="module", autouse=True)
def possible():
    if reason := hosts.missing():
        pytest.skip(reason)


def ended(process, seconds=100.0):
    """The exit status of a job and what it prints; all of its processes are gone."""
    try:
        out, err = process.communicate(timeout=seconds * slowdown())
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"the job didn't end in {seconds} s:\n{out}{err}")
    return process.returncode, out, err


def run(found, per_host, name, **env):
    return ended(found.start(per_host, sys.executable, PROGRAM, name, env=env))


@pytest.mark.parametrize("count, delay, loss", [(2, 0.0, 0.0), (4, 2e-4, 0.0), (2, 1e-3, 0.0), (3, 1e-3, 0.02)])
def test_local_ranks_and_a_gradient(tmp_path, count, delay, loss):
    with hosts.hosts(count, tmp_path, delay, loss) as found:
        code, out, err = run(found, 2, "places")
        assert code == 0, out + err
        assert eval(out) == [(name, k) for name in found.names for k in range(2)]


def test_the_delay_is_hidden_behind_computation(tmp_path):
    """A message takes 10 ms, and the computation of a step 30 ms."""
    with hosts.hosts(2, tmp_path, 1e-2) as found:
        code, out, err = run(found, 1, "overlap")
    assert code == 0, out + err
    apart, at_once = map(float, out.split())
    print(f"a step takes {apart * 1e3:.1f} ms with the exchange before the computation, {at_once * 1e3:.1f} ms at once")
    assert apart > 0.038 and at_once < 0.85 * apart


def test_kernels_in_a_folder_that_hosts_share(tmp_path):
    """Four hosts compile the same at once; then nothing is compiled any more, and no part of a file is left."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    counts = []
    for _ in range(2):
        with hosts.hosts(4, tmp_path) as found:
            code, out, err = run(found, 1, "kernels", MPIAD_CACHE=str(cache))
        assert code == 0, out + err
        counts.append(tuple(map(int, out.split())))
    assert counts[0] == counts[1] and counts[0][0] > 0 and counts[0][1] == 0


def test_an_exception_on_another_host_ends_the_job(tmp_path):
    with hosts.hosts(2, tmp_path, 1e-3) as found:
        code, out, err = run(found, 1, "exception")
    assert code != 0 and "ArithmeticError: on the last host" in err


def test_a_deadlock_between_hosts_has_a_table(tmp_path):
    with hosts.hosts(2, tmp_path, 1e-3) as found:
        code, out, err = run(found, 1, "deadlock", MPIAD_TIMEOUT="4")
    assert code != 0 and "DeadlockError" in err and "mpi_allreduce" in err and "mpi_recv" in err, err


@pytest.mark.parametrize("how", ["cut off", "dead"])
def test_a_host_that_is_lost_ends_the_job(tmp_path, how):
    """Its packets are lost from now on, or its processes are killed."""
    with hosts.hosts(3, tmp_path, 2e-4) as found:
        process = found.start(1, sys.executable, PROGRAM, "endless", env={"MPIAD_TIMEOUT": "5"})
        assert process.stdout.readline().strip() == "going on"
        if how == "cut off":
            found.relay.cut.add(2)
        else:
            pids = subprocess.run(["ip", "netns", "pids", found.names[2]], capture_output=True, text=True).stdout.split()
            for pid in map(int, pids):
                os.kill(pid, signal.SIGKILL)
        code, out, err = ended(process)
        assert code != 0


def test_nothing_is_left_behind(tmp_path):
    with hosts.hosts(2, tmp_path) as found:
        names = found.names
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(name in left for name in names) and not any((Path("/etc/netns") / name).exists() for name in names)
