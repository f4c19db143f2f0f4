"""Learning rates: a number, or a function of the number of updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

__all__ = ["checked_rate", "rate_at"]


def checked_rate(rate: float | Callable[[int], float], name: str) -> None:
    """Raise a ValueError where a learning rate isn't a positive number or a function."""
    if not callable(rate) and not (isinstance(rate, Real) and 0 < rate < math.inf):
        allowed = "above zero, or a function of the number of updates"
        raise ValueError(f"{name}: learning_rate must be {allowed}, but got {rate!r}.")


def rate_at(rate: float | Callable[[int], float], updates: int) -> float:
    """Return the rate after some updates."""
    return float(rate(updates) if callable(rate) else rate)
