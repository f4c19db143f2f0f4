"""How an iteration for one trajectory ended: a fit, or the search for a steady state."""

from __future__ import annotations

import logging

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.outcome import NamedCode

_log = logging.getLogger("mpiad")


class ConvergenceCode(NamedCode):
    """How a fit or the search for a steady state ended; equal to its name as a string.

    Examples
    --------
    >>> from mpiad.ensemble import ConvergenceCode, EnsembleProblem, ODEProblem, steady_state
    >>> growth = ODEProblem(lambda u, p, t: [u[0] * (p[0] - u[0])], [0.5], (0.0, 1.0), [1.0])
    >>> found = steady_state(EnsembleProblem(growth, p=np.array([[1.0], [2.0]])))
    >>> print(found.retcode == ConvergenceCode.Success)
    [ True  True]
    """

    Success = "Success"
    """It converged."""
    MaxIters = "MaxIters"
    """It was still under way after the largest number of evaluations, or steps."""
    Singular = "Singular"
    """It ended where the data don't determine the variables; or at a steady state beside which there are others."""
    InitialFailure = "InitialFailure"
    """At the start the solve fails already, or residuals or f aren't finite."""
    ConvergenceFailure = "ConvergenceFailure"
    """Steps became too small, because longer ones led to where the solve fails, or f says nothing."""


_NAMES = np.array([code.value for code in ConvergenceCode])


def names_of(codes: Array) -> Array:
    """Return the names of the codes in an array of numbers."""
    return _NAMES[codes]


def report(call: str, what: str, retcode: Array) -> None:
    """Log how many ended without success, how, and which first.

    Parameters
    ----------
    call, what : str
        The public function, and what it looks for, as ``"fits"``.
    retcode : array of str, shape (N,)
    """
    failed = np.flatnonzero(retcode != "Success")
    if not len(failed):
        return
    counts = [f"{count} {code}" for code in _NAMES[1:] if (count := np.count_nonzero(retcode == code))]
    _log.warning(
        "%s: %d of %d %s ended without success (%s); the first is number %d.",
        call, len(failed), len(retcode), what, ", ".join(counts), failed[0] + 1,
    )  # fmt: skip
