"""What is said of trajectories that failed: one line in the log, or an exception."""

from __future__ import annotations

import logging

import numpy as np
from autograd.tracer import getval

from mpiad.ensemble.device_solution import DeviceSolution
from mpiad.ensemble.facts import Facts
from mpiad.ensemble.retcodes import ReturnCode
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.errors import IntegrationError

__all__ = ["report"]

logger = logging.getLogger("mpiad")


def report(sol: EnsembleSolution | Facts, throw: bool, logs: bool = True) -> None:
    """Log how many trajectories failed, how, and which first; `logs` says whether this rank does.

    Raises
    ------
    IntegrationError
        With `throw`, where one failed.
    """
    if isinstance(sol, DeviceSolution) and sol.all_succeeded:
        return  # the codes stay where they are
    alive, codes = sol.survivors, sol.codes
    if alive.all():
        return
    failed = np.flatnonzero(~alive)
    counts = [f"{count} {code}" for code in ReturnCode if code.failed and (count := np.count_nonzero(codes == code.code))]
    first = int(failed[0])
    text = (
        f"solve: {len(failed)} of {len(codes)} trajectories failed ({', '.join(counts)}); the first is number "
        f"{first + 1}: "
        f"{sol.retcode[first]} at t = {getval(sol.t_reached[first]):.6g} after {sol.naccept[first]} steps."
    )
    if throw:
        raise IntegrationError(text)
    if logs:
        logger.warning("%s", text)
