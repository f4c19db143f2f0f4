"""Keep the ranks of a test run in step, and let rank 0 speak for all.

A test that fails on one rank leaves the others in a communication that never ends, or, worse, lets them
meet it in its next test. So after each phase of each test the ranks compare outcomes, on a communicator of
their own and without blocking: a phase that failed anywhere failed everywhere, and rank 0's report shows
the tracebacks of all ranks. Where the others don't come to the comparison, the rank that failed reports and
the job ends. A rank that passed waits as long as its test may take. Skips, and the tests collected, must be
the same on all ranks.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TextIO

import numpy as np
import pytest
from machine_load import slowdown
from mpi4py import MPI

PATIENCE = float(os.environ.get("MPIAD_TEST_PATIENCE", "10"))
PASSED, SKIPPED, FAILED = range(3)
PLACE = re.compile(r"^\S+:\d+: ", re.MULTILINE)  # "tests/test_x.py:12: AssertionError"
OF_THE_ERROR = re.compile(r"E  |\S+:\d+: ")
CODES = {"passed": PASSED, "skipped": SKIPPED, "failed": FAILED}


def poll(request: MPI.Request, patience: float | None) -> bool:
    """Wait for a request without holding the core; return False where it takes longer than `patience`."""
    start, wait = time.monotonic(), 0
    while not request.Test():
        wait += 1
        time.sleep(0 if wait < 50 else min(5e-3, 1e-5 * wait))
        waited = time.monotonic() - start
        if patience is not None and waited > patience and waited > patience * slowdown():
            return False
    return True


def full_text(report: pytest.TestReport) -> str:
    """Return a report's traceback and what the test printed."""
    printed = [f"-- {name} --\n{content}" for name, content in report.sections]
    return "\n".join([report.longreprtext, *printed])


def what_differs(text: str) -> str:
    """Return a report without the source lines: errors, places, and what the test printed."""
    traceback, mark, printed = text.partition("\n-- ")
    return "\n".join(line for line in traceback.split("\n") if OF_THE_ERROR.match(line)) + mark + printed


def merged_text(texts: list[str | None]) -> str:
    """Return the ranks' reports: equal ones once, and the source lines once for each place of failure."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    blocks, places = [], set()
    for text, ranks in ranks_of.items():
        place = tuple(PLACE.findall(text))
        shown = what_differs(text) if place and place in places else text
        places.add(place)
        blocks.append(f"---- rank {', '.join(map(str, ranks))} ----\n{shown}")
    return "\n".join(blocks)


def clear_messages(report: pytest.TestReport) -> None:
    """Renew the library's communicators: a test that fails may leave messages, which the next test would take."""
    reset = getattr(sys.modules.get("mpiad"), "reset", None)
    if reset is not None and report.when == "call":
        try:
            reset()
        except Exception as error:
            report.sections.append(("mpiad.reset after the failure", repr(error)))


class Agreement:
    """The plugin; `report` is where a rank writes that it waits in vain."""

    def __init__(self, report: TextIO, launched: bool) -> None:
        self.report, self.launched = report, launched
        self.comm = MPI.COMM_WORLD.Dup()
        self.collect_errors: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Stop on all ranks where one cannot collect its tests or collects others."""
        errors = self.comm.allgather("\n".join(self.collect_errors) or None)
        lists = self.comm.allgather([item.nodeid for item in session.items])
        if any(errors):
            pytest.exit(f"tests cannot be collected:\n{merged_text(errors)}", returncode=2)
        if any(names != lists[0] for names in lists):
            numbers = [len(names) for names in lists]
            differ = sorted(set().union(*lists) - set(lists[0]).intersection(*lists))
            pytest.exit(f"the ranks collected different tests ({numbers}): {differ[:5]}", returncode=2)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        code = CODES[report.outcome]
        sent, extremes = np.array([code, -code]), np.empty(2, dtype=int)
        request = self.comm.Iallreduce(sent, extremes, op=MPI.MAX)
        if not poll(request, PATIENCE if code == FAILED else None):
            self.give_up(report)
        if extremes[0] == FAILED or extremes[0] != -extremes[1]:
            self.fail_everywhere(report)
            clear_messages(report)
        return report

    def fail_everywhere(self, report: pytest.TestReport) -> None:
        """Make one failed report of all ranks' reports."""
        outcomes = self.comm.allgather(report.outcome)
        texts = self.comm.allgather(None if report.passed else full_text(report))
        by_rank = ", ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))
        if report.failed and outcomes.count("passed") == len(outcomes) - 1:
            report.sections.append(("ranks", by_rank))
            return
        report.outcome = "failed"
        report.longrepr = f"{by_rank}\n{merged_text(texts)}"
        report.sections.clear()

    def give_up(self, report: pytest.TestReport) -> None:
        """Report this rank's failure, and end the job."""
        print(
            f"{report.nodeid} failed here; the other ranks did not finish it within {PATIENCE:g} s\n{full_text(report)}",
            file=self.report,
            flush=True,
        )
        if self.launched:  # the launcher collects the other ranks' stacks before it ends the job
            time.sleep(10)
        self.comm.Abort(1)

    def pytest_unconfigure(self) -> None:
        """Wait for rank 0's summary: mpiexec ends the job when the first rank leaves with an error."""
        poll(self.comm.Ibarrier(), PATIENCE)
