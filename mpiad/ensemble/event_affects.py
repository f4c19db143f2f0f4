"""Affects of events, called with columns: plain, and in functions that traces see."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Tree
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.derivative import locked
from mpiad.ensemble.event import Event
from mpiad.ensemble.linearization import Field


def affected(event: Event, batch: Batch, u: Array, p: Tree, t: Array) -> Array:
    """Return the states after an event, shape (d, n), n ≥ 2, at times t (n,); of `batch` only the shape of a state is used.

    A NotImplementedError where the affect uses a traced value from around it; a TypeError or ValueError where it writes
    into its arguments, or returns what can't be a state.
    """
    try:
        value: Any = event.affect(locked(u) if batch.shape else locked(u)[0], p, locked(t))  # type: ignore[misc]
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise TypeError(
            "Event: affect writes into its arguments, which are read-only. Return the state after the event: a list of its "
            "components, or a new array."
        ) from error
    parts = list(value) if isinstance(value, (list, tuple)) and batch.shape else [value]
    if any(map(isbox, parts)):
        raise NotImplementedError(
            "Event: affect uses a traced value from around it, through which no derivative can flow. Pass it as p."
        )
    whole = not isinstance(value, (list, tuple)) and bool(batch.shape)
    got = [np.shape(part) for part in parts]
    if got != [u.shape] if whole else (len(got) != len(u) or not set(got) <= {(), t.shape}):
        raise ValueError(
            f"Event: affect returned {f'shape {got[0]}' if len(got) == 1 else f'{len(got)} components of shapes {got}'}, "
            f"but the state after the event was expected, of shape {u.shape}: {len(u)} components, each a number or of "
            f"shape {t.shape}. It is called with columns as f is, u of shape (d, n)."
        )
    after = np.empty_like(u)
    for part in parts:
        if not np.can_cast(np.asarray(part).dtype, u.dtype, casting="same_kind"):
            raise TypeError(f"Event: affect returned {np.asarray(part).dtype} for u of {u.dtype}. Give u0 that dtype.")
    for i, part in enumerate(parts[0] if whole else parts):
        after[i] = part
    return after


def affect_field(event: Event, batch: Batch) -> Field:
    """Return the affect as a function of traced columns."""
    return Field(batch._replace(f=event.affect))  # type: ignore[arg-type]
