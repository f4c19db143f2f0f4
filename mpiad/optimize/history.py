"""The history of a solve: one row per iterate, the starting point first."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from mpiad._typing import Array
from mpiad.progress import progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm


class Row(NamedTuple):
    """One iterate: its number, and its entries of `History`."""

    iteration: int
    loss: float
    gradient_norm: float
    step: float
    evaluations: int
    seconds: float


class History(NamedTuple):
    """The rows of a solve as arrays of length (iterations + 1), the starting point first.

    Attributes
    ----------
    loss : array
    gradient_norm : array
        Largest absolute entry of the gradient.
    step : array
        Euclidean length of each step, over all ranks; 0 at the starting point.
    evaluations : array of int
        Evaluations of the objective so far.
    seconds : array
        Time since the start of the solve, in seconds.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> result = mpiad.minimize(lambda x: mpiad.mpi_allreduce(np.sum((x - 1.0) ** 2)) / size, np.zeros(2))
    >>> print(result.history.loss.round(4), result.history.evaluations[0])
    [2.     0.1716 0.    ] 1
    """

    loss: np.ndarray
    gradient_norm: np.ndarray
    step: np.ndarray
    evaluations: np.ndarray
    seconds: np.ndarray

    def __repr__(self) -> str:
        ends = [f"{name} {row[0]:.3e} to {row[-1]:.3e}" for name, row in zip(self._fields[:2], self)]
        return f"<{len(self.loss)} points: {', '.join(ends)}, {self.evaluations[-1]} evaluations, {self.seconds[-1]:.3g} s>"


class Iterate(Protocol):
    """A point that a solve records."""

    @property
    def x(self) -> Array:
        """The variables, shape (n,)."""
        ...

    @property
    def value(self) -> float | None:
        """The objective; None until it is evaluated."""
        ...

    @property
    def norm(self) -> float:
        """The gradient's largest entry; NaN until it is evaluated."""
        ...


class Record:
    """The rows of a solve; the gradient's norm is added later if the callback comes before the gradient."""

    def __init__(self, progress: Progress | None) -> None:
        self.rows: list[Row] = []
        self._progress = progress
        self._start = time.perf_counter()
        self.last: Iterate | None = None  # the point of the last row

    @property
    def iterations(self) -> int:
        """Return the number of iterations."""
        return max(len(self.rows) - 1, 0)

    def add(self, point: Iterate, evaluations: int, step: float) -> Row:
        """Append a row for a point, and show it."""
        self._complete_last()
        loss = math.nan if point.value is None else float(point.value)
        row = Row(len(self.rows), loss, point.norm, step, evaluations, time.perf_counter() - self._start)
        self.rows.append(row)
        self.last = point
        if self._progress is not None:
            self._progress.show(row)
        return row

    def _complete_last(self) -> None:
        if self.last is not None and math.isnan(self.rows[-1].gradient_norm):
            self.rows[-1] = self.rows[-1]._replace(gradient_norm=self.last.norm)

    def table(self) -> np.ndarray:
        """Return the rows as an array for files, shape (rows, 6)."""
        self._complete_last()
        return np.array(self.rows, dtype=float).reshape(-1, len(Row._fields))

    def restore(self, table: np.ndarray, last: Iterate | None = None) -> None:
        """Restore the rows and the elapsed time of an earlier run, and the point of its last row."""
        self.rows = [Row(int(r[0]), r[1], r[2], r[3], int(r[4]), r[5]) for r in table.tolist()]
        self._start, self.last = time.perf_counter() - self.rows[-1].seconds, last

    def history(self) -> History:
        """Return the rows as arrays."""
        _, loss, norm, step, evaluations, seconds = self.table().T.copy()
        return History(loss, norm, step, evaluations.astype(int), seconds)


class Progress:
    """The root's progress bar: of iterations, or of evaluations if the user's options limit only these."""

    def __init__(self, options: dict[str, object] | None):
        self._options = options
        self._bar: tqdm | None = None

    def show(self, row: Row) -> None:
        """Update the bar for an iterate."""
        limit, count, unit, other = self._limit("maxiter"), row.iteration, "iterations", f"{row.evaluations} evaluations"
        max_evaluations = self._limit("maxfun") or self._limit("max_nfev")
        if limit is None and max_evaluations is not None:
            limit, count, unit, other = max_evaluations, row.evaluations, "evaluations", f"iteration {row.iteration}"
        # The estimate of the remaining time excludes the iterations of an earlier run.
        self._bar = bar = progress_bar(unit, limit, count) if self._bar is None else self._bar
        bar.set_postfix_str(f"loss {row.loss:.6e}, |gradient| {row.gradient_norm:.2e}, {other}", refresh=False)
        bar.update(count - bar.n)

    def _limit(self, name: str) -> int | None:
        found = (self._options or {}).get(name)
        return int(found) if isinstance(found, (int, float, np.integer)) and found < math.inf else None

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
