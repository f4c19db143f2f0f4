"""The progress of long calls: how far, how long, how long still."""

from __future__ import annotations

import io
import sys

import pytest

from mpiad import progress_line
from mpiad.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("per_row, expected", [(2.0, [0, 1, 2, 3, 4]), (0.4, [0, 3, 4]), (0.01, [0, 4])])
def test_plain_lines_come_once_a_second(clock: list[float], per_row: float, expected: list[int]) -> None:
    stream = io.StringIO()
    shown = ProgressLine("steps", stream=stream)
    for k in range(5):
        shown.show(k, f"loss {k}")
        clock[0] += per_row
    shown.close()
    shown.close()
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [f"{k} steps" for k in expected]
    assert [line.split(": ")[1] for line in lines] == [f"loss {k}" for k in expected]


def test_a_limit_says_how_long_the_rest_takes(clock: list[float]) -> None:
    stream = io.StringIO()
    shown = ProgressLine("epochs", 40, done=30, stream=stream)
    for more in (0, 1, 1, 7, 1):
        shown.advance(more)
        clock[0] += 50.0
    # 30 were done before: at 32, two have taken 100 seconds, and eight are left.
    assert stream.getvalue().splitlines() == [
        "30 of 40 epochs, 0:00:00",
        "31 of 40 epochs, 0:00:50, 0:07:30 left",
        "32 of 40 epochs, 0:01:40, 0:06:40 left",
        "39 of 40 epochs, 0:02:30, 0:00:17 left",
        "40 of 40 epochs, 0:03:20",
    ]


def test_a_terminal_gets_the_bar_of_tqdm() -> None:
    stream = Terminal()
    shown = ProgressLine("epochs", 40, done=30, stream=stream)
    shown.show(33, "loss 2")
    shown.close()
    text = stream.getvalue()
    assert "33/40" in text and "loss 2" in text and text.count("\n") == 1 and text.endswith("\n")


def test_a_terminal_without_tqdm_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    stream = Terminal()
    ProgressLine("epochs", 40, stream=stream).show(3)
    assert stream.getvalue().startswith("3 of 40 epochs, 0:00:00")
