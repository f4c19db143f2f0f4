"""What a solve's progress line says."""

from __future__ import annotations

from mpiad.optimize.history import Row

__all__ = ["line_of"]


def line_of(row: Row) -> str:
    """Return an iteration in words."""
    return (
        f"iteration {row.iteration:4d}  loss {row.loss:.6e}  |gradient| {row.gradient_norm:.2e}  "
        f"evaluations {row.evaluations:4d}  {row.seconds:6.1f} s"
    )
