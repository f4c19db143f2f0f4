"""A limit for each test, after which every rank shows where it is.

One timer is always running, from the start of pytest to its end: a hang while collecting or in a teardown is
a hang too. On a busy machine the limit is longer (`machine_load`). The timer is a thread in C, so it fires while
Python waits inside MPI. Under `launch.py` it writes this rank's stacks to the report file, and the launcher then
collects the other ranks' and ends the job; without it, it writes to stderr and ends this process.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from launch import CURRENT_TEST, FAILURES
from machine_load import slowdown

DEFAULT = float(os.environ.get("MPIAD_TEST_TIMEOUT", "60"))


def open_report(config: pytest.Config) -> tuple[TextIO, bool]:
    """Return the file to report to when stuck, and whether a launcher reads it."""
    prepared = sys.modules.get("sitecustomize")
    file = getattr(prepared, "report_file", None)
    if file is not None:
        return file, True
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        return os.fdopen(os.dup(2), "w"), False


class TimeLimit:
    """The plugin that restarts the timer before each test, with the seconds of its `limit` mark.

    It also notes the test that runs and what has failed, for the launcher to show where the run breaks off.
    """

    def __init__(self, report: TextIO, launched: bool, worker: str = "") -> None:
        self.report, self.launched = report, launched
        folder = Path(report.name).parent if launched and Path(report.name).stem == "0" else None
        self.notes = {name: folder / (name + worker) for name in (CURRENT_TEST, FAILURES)} if folder else {}
        self.started, self.seconds = -math.inf, 0.0

    def restart(self, seconds: float = DEFAULT) -> None:
        # A restart ends a thread and starts another, a millisecond, twice for each of some thousand short tests.
        if seconds == self.seconds and time.monotonic() < self.started + 1:
            return
        self.started, self.seconds = time.monotonic(), seconds
        faulthandler.dump_traceback_later(seconds * slowdown(), exit=not self.launched, file=self.report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.notes:
            self.notes[CURRENT_TEST].write_text(item.nodeid)
        mark = item.get_closest_marker("limit")
        self.restart(float(mark.args[0]) if mark else DEFAULT)
        try:
            return (yield)
        finally:
            self.restart()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.notes:
            with open(self.notes[FAILURES], "a") as notes:
                notes.write(f"\n____ {report.nodeid} ({report.when}) ____\n{report.longreprtext}\n")

    def pytest_sessionfinish(self) -> None:
        for note in self.notes.values():
            note.unlink(missing_ok=True)

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()
