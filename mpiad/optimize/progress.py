"""What is shown of a solve under way: a line for each iterate, and how far it is to the user's limit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpiad.optimize.history import Row
from mpiad.progress_line import ProgressLine

__all__ = ["Progress"]


class Progress:
    """The progress of one solve.

    Parameters
    ----------
    options : dict or None
        The solve's, of which the root's count. A limit of the iterations, or else of the evaluations, says how long it
        takes at most; SciPy's own limits are so high that they say nothing.
    """

    def __init__(self, options: dict[str, Any] | None):
        self._options = options
        self._line: ProgressLine | None = None
        self._by_evaluations = False

    def show(self, row: Row) -> None:
        """Show an iterate."""
        if self._line is None:
            self._line = self._begin(row)
        done, other = row.iteration, f"{row.evaluations} evaluations"
        if self._by_evaluations:
            done, other = row.evaluations, f"iteration {row.iteration}"
        self._line.show(done, f"loss {row.loss:.6e}, |gradient| {row.gradient_norm:.2e}, {other}")

    def _begin(self, row: Row) -> ProgressLine:
        iterations, evaluations = self._limit("maxiter"), self._limit("maxfun") or self._limit("max_nfev")
        self._by_evaluations = iterations is None and evaluations is not None
        count = row.evaluations if self._by_evaluations else row.iteration
        unit = "evaluations" if self._by_evaluations else "iterations"
        # What was done before the first row, by an earlier run too, says nothing of the time from here.
        return ProgressLine(unit, evaluations if self._by_evaluations else iterations, done=count)

    def _limit(self, name: str) -> int | None:
        found = (self._options or {}).get(name)
        return int(found) if isinstance(found, (int, float, np.integer)) and found < math.inf else None

    def close(self) -> None:
        """End the line."""
        if self._line is not None:
            self._line.close()
