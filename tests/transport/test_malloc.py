"""What a process asks of its memory at import: read from the system's own list of its mappings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import launch
import pytest
from machine_load import slowdown

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="mappings are read from /proc"),
    pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="glibc's thresholds"),
]

# Prints whether the heap is marked for huge pages and how many bytes of it, whether an array of 8 MB lies in the heap, and
# one of 48 MB after the heap's extension is used up, how much memory the import took beside numpy's and mpi4py's, and what
# the report says.
PROGRAM = r"""
import json, re, numpy, autograd.numpy, scipy, mpi4py.MPI
resident = lambda: int(re.search(r"VmRSS:\s+(\d+)", open("/proc/self/status").read())[1]) >> 10
before = resident()
import mpiad
from mpiad.transport.resources import huge_pages
taken = resident() - before
arrays = [numpy.empty(length) for length in (1_000_000, *[500_000] * 75, 6_000_000)]
heaps = []
for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
    first, last = (int(number, 16) for number in part.split(" ")[0].split("-"))
    if "[heap]" in part:
        heaps.append((first, last, " hg" in part.split("VmFlags:")[1]))
inside = [any(first <= x.ctypes.data < last for first, last, _ in heaps) for x in (arrays[0], arrays[-1])]
print(json.dumps([sum(last - first for first, last, marked in heaps if marked), inside, taken, huge_pages()]))
"""


def found(tmp_path, **variables):
    clean = dict.fromkeys(("GLIBC_TUNABLES", "MPIAD_MALLOPT", "MPIAD_HUGE_PAGES", "MALLOC_TRIM_THRESHOLD_"))
    environment = launch.launch_environment(1, tmp_path, {**clean, **variables})
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100 * slowdown()
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


# Where the system gives no huge pages on request, none are asked for.
ASKED = SWITCH.exists() and "[madvise]" in SWITCH.read_text()


@pytest.mark.few(2)
@pytest.mark.parametrize("variables, raised, asked", [
    ({}, True, True),
    pytest.param({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, True, True, marks=pytest.mark.thorough),
    ({"MPIAD_HUGE_PAGES": "0"}, True, False),
    ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=4:glibc.malloc.hugetlb=0"}, True, False),
    ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False, False),
    pytest.param({"MALLOC_TRIM_THRESHOLD_": "131072"}, False, False, marks=pytest.mark.thorough),
    ({"MPIAD_MALLOPT": "0"}, False, False),
], ids=str)  # fmt: skip
def test_thresholds_and_huge_pages(variables, raised, asked, tmp_path):
    marked, inside, taken, report = found(tmp_path, **variables)
    assert inside == [raised, False]  # arrays of more than 32 MiB are mapped in any case
    assert (marked > 200 << 20) == (asked and ASKED)
    assert ("for the heap" in report) == (asked and ASKED) or "[always]" in SWITCH.read_text()
    assert taken < 60, f"the import took {taken} MiB"
