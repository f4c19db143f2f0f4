"""What is compiled of a batch, and remembered: a training loop solves the same f again and again.

What was traced, compared with f and tried out needn't be so again, where f and the conditions read the same as then (see
`function_fingerprint`) and are given states and parameters of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad.compiling.function_fingerprint import Fingerprint, fingerprint_of
from mpiad.compiling.program import Program
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.layout import layout_of
from mpiad.ensemble.events import Event

__all__ = ["Plan", "remembered"]

# So that constants that change from solve to solve don't fill the memory.
_MOST_PLANS = 64
_plans: dict[Fingerprint, Plan] = {}


class Plan(NamedTuple):
    """What f, and the conditions of events, compute.

    Parameters
    ----------
    program : Program
    conditions : tuple of Program
    """

    program: Program
    conditions: tuple[Program, ...]


def remembered(
    make: Callable[[], Plan | None], batch: Batch, events: Sequence[Event], traced: bool, must: bool
) -> Plan | None:
    """Return the plan of a batch as it was made before for one like it, or else what `make` returns.

    Parameters
    ----------
    make : callable
        Returns the plan, None where the batch isn't compiled.
    batch : Batch
        Of plain arrays on the host.
    events : sequence of Event
    traced, must : bool
        Whether f will be differentiated, and whether the batch must be compiled.
    """
    parts = {part.place: part for part in layout_of(batch.p).parts}
    forms: list[Any] = [parts.get(place, leaf) for place, leaf in enumerate(batch.p.leaves)]
    conditions = [event.written for event in events]
    kinds = (batch.shape, np.dtype(batch.u0.dtype).str, traced, must)
    key = fingerprint_of(batch.f, conditions, batch.p.build(forms), kinds)
    if key is not None and key in _plans:
        return _plans[key]
    plan = make()
    if plan is not None and key is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.pop(next(iter(_plans)))
        _plans[key] = plan
    return plan
