"""A point of a rank's piece, and what is known there of all ranks. Its gradient lies in the memory."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["Point"]


class Point:
    """Variables of the piece, shape (n,); the numbers are those of all ranks.

    Attributes
    ----------
    value : float
        The objective.
    norm : float
        Largest absolute entry of the (projected) gradient.
    slope : float
        Of the objective along the direction that led here; without the variables that a bound stopped.
    finite : bool
        Whether the value and all entries of the gradient are.
    clipped : bool
        Whether a bound stopped any variable on the way.
    step : float
        Along that direction.
    length : float
        Of the way from the point before, over all ranks.
    room : float
        From here to where the search that led here met no finite value; infinite where it met none.
    predicted, met : float
        Where a bound may have stopped variables: the step times the gradient before, and times the gradient here.
    settled : bool
        Whether the memory has moved here.
    aside : bool
        Whether the memory has put the gradient aside.
    """

    __slots__ = (
        "aside", "clipped", "finite", "length", "met", "norm", "predicted", "room", "settled", "slope", "step", "value",
        "x",
    )

    def __init__(self, x: np.ndarray):
        self.x = x
        self.value = self.norm = self.slope = math.nan
        self.predicted = self.met = self.step = math.nan
        self.finite = self.clipped = self.settled = self.aside = False
        self.length, self.room = 0.0, math.inf

    @property
    def gradient_norm(self) -> float:
        """Return `norm`, by the name that a record of iterates asks for."""
        return self.norm
