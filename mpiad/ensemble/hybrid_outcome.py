"""Completes outcomes of solves with events that act, by columns or by a kernel."""

from __future__ import annotations

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.run import FINAL, INITIAL
from mpiad.ensemble.settings import MOVING, Acting


def complete(outcome: Outcome, batch: Batch, acting: Acting, saveat: Array) -> None:
    """Add the jumps at the start to an outcome, and number events as the user gave them."""
    outcome.jumps = [*acting.started, *outcome.jumps]
    ended, still = acting.codes != MOVING, np.flatnonzero(batch.start == batch.end)
    outcome.codes[ended] = acting.codes[ended]
    table = outcome.event_table if outcome.crossings is None else outcome.crossings.T  # of which the event table is a part
    if table is not None:
        table[1] = np.array(acting.found)[table[1].astype(int)]
    steps, saved = outcome.save_step, outcome.saved
    if steps is not None:
        # A value saved at an event that acts belongs to the start of the next step; there may be none.
        steps[steps == outcome.naccept[:, None]] = FINAL
    if still.size and saved is not None:
        row, place = np.nonzero(np.broadcast_to(saveat, saved.shape[:2])[still] == batch.start[still, None])
        saved[still[row], place] = batch.u0.T[still[row]]
        if steps is not None:
            steps[still[row], place] = INITIAL
