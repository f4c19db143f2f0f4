"""How a trajectory can end."""

from __future__ import annotations

from enum import Enum

import numpy as np

from mpiad._typing import Array

__all__ = ["ReturnCode", "came_through", "codes_of", "names_of", "survived"]


class ReturnCode(str, Enum):
    """How a trajectory ended; equal to its name as a string."""

    Success = "Success"
    """The end of tspan was reached."""
    Terminated = "Terminated"
    """A terminal event came first."""
    MaxIters = "MaxIters"
    """max_steps steps were tried; raise max_steps, or the problem is stiff."""
    DtLessThanMin = "DtLessThanMin"
    """No step that time can resolve meets the tolerance: a singularity, a discontinuity, or a tolerance too tight."""
    Unstable = "Unstable"
    """f gave NaN or infinity however small the step."""

    def __str__(self) -> str:
        return self.value

    @property
    def code(self) -> int:
        """Its number in arrays."""
        return _ORDER.index(self)

    @property
    def failed(self) -> bool:
        """Whether neither the end of tspan nor a terminal event was reached."""
        return self not in (ReturnCode.Success, ReturnCode.Terminated)


_ORDER = list(ReturnCode)
_NAMES = np.array([code.value for code in ReturnCode])
# They begin with different letters, which are found faster than strings are compared.
_BY_LETTER = np.zeros(128, np.int8)
_BY_LETTER[[ord(code.value[0]) for code in ReturnCode]] = np.arange(len(_ORDER))
# Those that aren't failures come first.
_FIRST_FAILURE = [code.failed for code in ReturnCode].index(True)


def names_of(codes: Array) -> Array:
    """Return the names of the codes in an array of numbers."""
    return _NAMES[codes]


def codes_of(names: Array) -> Array:
    """Return the numbers of the names in an array, the inverse of `names_of`."""
    letters = np.ascontiguousarray(names, _NAMES.dtype).view(np.uint32)[:: _NAMES.itemsize // 4]
    return _BY_LETTER[letters]


def survived(names: Array) -> Array:
    """Tell which names of an array are of trajectories that didn't fail."""
    return came_through(codes_of(names))


def came_through(codes: Array) -> Array:
    """Tell which codes in an array of numbers are of trajectories that didn't fail."""
    return codes < _FIRST_FAILURE
