"""Freed pages stay with the process, unless the user has decided otherwise."""

import sys

import pytest

pytestmark = [pytest.mark.launches, pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")]

PROGRAM = """
import resource
import numpy as np
import mpiad

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""
PAGES = 20 * 8_000_000 // 4096


@pytest.mark.parametrize("variable", ["MPIAD_MALLOPT", "MALLOC_TRIM_THRESHOLD_"])
def test_pages_are_kept_or_given_back(mpirun, variable):
    ours = mpirun(1, PROGRAM, env={"MPIAD_MALLOPT": None, "MALLOC_TRIM_THRESHOLD_": None})
    value = {"MPIAD_MALLOPT": "0", "MALLOC_TRIM_THRESHOLD_": "131072"}[variable]
    users = mpirun(1, PROGRAM, env={variable: value, "MALLOC_MMAP_THRESHOLD_": "131072"})
    assert int(ours.stdout) < PAGES // 20
    # Huge pages, where the system has them, make one fault of 512.
    assert int(users.stdout) > 10 * max(int(ours.stdout), 1)
