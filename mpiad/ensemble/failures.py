"""What is said of trajectories that failed: one line in the log, or an exception."""

from __future__ import annotations

import logging

import numpy as np

from mpiad.ensemble.retcodes import ReturnCode
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.errors import IntegrationError

__all__ = ["report"]

logger = logging.getLogger("mpiad")


def report(sol: EnsembleSolution, throw: bool) -> None:
    """Log how many trajectories failed, how, and which first.

    Raises
    ------
    IntegrationError
        With `throw`, where one failed.
    """
    failed = np.flatnonzero(~sol.survivors)
    if not failed.size:
        return
    counts = [
        f"{count} {code}" for code in ReturnCode if code.failed and (count := np.count_nonzero(sol.retcode == code.value))
    ]
    first = int(failed[0])
    text = (
        f"solve: {len(failed)} of {len(sol)} trajectories failed ({', '.join(counts)}); the first is number {first + 1}: "
        f"{sol.retcode[first]} at t = {sol.t_reached[first]:.6g} after {sol.naccept[first]} steps."
    )
    if throw:
        raise IntegrationError(text)
    logger.warning("%s", text)
