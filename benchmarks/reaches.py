"""What a benchmark tells `run.py` of its figures, which ends with a table of them."""

from __future__ import annotations

import json
import os

FILE = "BENCH_FIGURES"  # the variable that names the file; nothing is written where a benchmark is run by itself


def report(line: str, figure: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
    """Add a line of the table, on one rank.

    Parameters
    ----------
    line : str
        What was measured.
    figure : float
    at_most, at_least : float, optional
        What is aimed at, one of the two; none where a figure is shown for what it is.
    """
    _write({"line": line, "figure": float(figure), "at_most": at_most, "at_least": at_least})


def report_missing(line: str, why: str) -> None:
    """Add a line that couldn't be measured here."""
    _write({"line": line, "why": why})


def _write(row: dict) -> None:
    if FILE in os.environ:
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(row) + "\n")
