"""The progress line."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

from mpiad import progress_line
from mpiad.optimize.history import Row
from mpiad.optimize.minimize import minimize
from mpiad.optimize.progress import line_of
from mpiad.progress_line import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(count: int) -> list[Row]:
    return [Row(k, 1.0 / (k + 1), 0.1, 0.2, k + 1, 0.5 * k) for k in range(count)]


def test_terminal_line_is_written_over() -> None:
    stream = Terminal()
    shown = ProgressLine(stream)
    for row in rows(3):
        shown.show(line_of(row))
    shown.close()
    text = stream.getvalue()
    assert text.count("\r") == 3 and text.count("\n") == 1 and text.endswith("\n")
    assert "iteration    2  loss 3.333333e-01  |gradient| 1.00e-01  evaluations    3     1.0 s" in text


@pytest.mark.parametrize("per_row, expected", [(2.0, [0, 1, 2, 3, 4]), (0.4, [0, 3, 4]), (0.01, [0, 4])])
def test_plain_lines_come_once_a_second(monkeypatch: pytest.MonkeyPatch, per_row: float, expected: list[int]) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    shown = ProgressLine(stream)
    for row in rows(5):
        shown.show(line_of(row))
        clock[0] += per_row
    shown.close()
    lines = stream.getvalue().splitlines()
    assert [int(re.match(r"iteration +(\d+)  loss", line).group(1)) for line in lines] == expected


def test_only_the_root_writes(capsys: pytest.CaptureFixture, rank: int, size: int) -> None:
    root = size - 1
    result = minimize(lambda x: (x - 2.0) ** 4, 0.0, root=root, objective="mean", progress=True)
    lines = capsys.readouterr().err.splitlines()
    if rank != root:
        assert not lines
        return
    assert lines[0].startswith("iteration    0  loss 1.600000e+01  |gradient| 3.20e+01  evaluations    1")
    assert lines[-1].startswith(f"iteration {result.nit:4d}  loss {result.fun:.6e}")
    assert np.isfinite(result.history.seconds).all()
