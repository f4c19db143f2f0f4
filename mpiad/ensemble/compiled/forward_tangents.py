"""Tangents that a forward kernel has carried, as gradients and forward mode take them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.complex_parts import from_parts
from mpiad.ensemble.compiled.kernel_solver import Solver
from mpiad.ensemble.run import INITIAL, NOWHERE, Run

__all__ = ["carried_tangents"]


def carried_tangents(
    solver: Solver, run: Run, by_u0: bool, places: Sequence[int], saving: bool
) -> tuple[Array, Array | None] | None:
    """Return the tangents of final and saved states along the numbers that a run is differentiated by.

    Parameters
    ----------
    by_u0 : bool
        Whether by the initial states, whose numbers come first.
    places : sequence of int
        Of the leaves of the parameters.
    saving : bool
        Whether those of the saved states are wanted.

    Returns
    -------
    array, shape (m, d, N)
    array, shape (m, N, n_saved, d), or None
        None instead of both, where others were carried.
    """
    if run.outcome.carried is None:
        return None
    known = list(solver.directions)
    wanted = [("u", c) for c in range(solver.form.d)] if by_u0 else []
    wanted += [direction for place in places for direction in solver.directions_of(place)]
    if not set(wanted) <= set(known):
        return None
    end, saved = run.outcome.carried
    if wanted != known:
        chosen = [known.index(direction) for direction in wanted]
        end, saved = end[chosen], saved[chosen] if len(saved) else saved
    if not saving:
        return end, None
    return end, saved if solver.form.inside else _at_ends(solver, run, wanted, end)


def _at_ends(solver: Solver, run: Run, directions: list[tuple[str, int]], end: Array) -> Array:
    """Return the tangents of states that were all saved at the start or at the end."""
    final = np.transpose(end, (0, 2, 1))[:, :, None]
    unit = np.array([[float(kind == "u" and place == c) for c in range(solver.form.d)] for kind, place in directions])
    unit = from_parts(unit, run.batch.u0.dtype)
    where = run.save_step[None, :, :, None]
    return np.where(where == NOWHERE, 0.0, np.where(where == INITIAL, unit[:, None, None], final))
