"""Whether a traced program computes what the function does.

A trace sees a function with symbols. One that looks at the kinds of its arguments, or keeps something from call to call,
may do something else with numbers; that is found here before anybody takes the one for the other.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array

__all__ = ["first_difference"]

# Of the largest term that may have been cancelled, in units of rounding.
_ROUNDINGS = 1e4


def first_difference(found: Array, expected: Array, given: Array) -> tuple[int, ...] | None:
    """Return where a program's values differ from a function's by more than rounding, None where they don't.

    Parameters
    ----------
    found, expected : array
        The values of both.
    given : array
        What they were computed from, in the precision of the computation.
    """
    if found.tobytes() == expected.tobytes():
        return None  # nearly always, and each call comes here
    largest = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (found, expected, given))
    allowed = _ROUNDINGS * float(np.finfo(given.dtype).eps) * (1.0 + largest)
    close = np.isclose(found, expected, rtol=0, atol=allowed, equal_nan=True)
    return None if close.all() else tuple(int(i) for i in np.argwhere(~close)[0])
