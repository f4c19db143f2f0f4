"""Detect copies of the root's variables that a program uses as blocks of a grid.

A solve whose variables are on the root passes copies of the variables to every rank. If a variable has the shape of a
block, every rank gets the same block, and the objective is computed for a grid of equal blocks. Therefore the solve
registers these copies, and operations of a domain raise an error if their argument is such a copy or a view of one. An
array that is computed from the variables may be intended as a block, so it only causes a warning, and only if a variable
has the shape of a block.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, LocalArray, Rank, Scalar, Shape
from mpiad.pytrees import flatten
from mpiad.transport.core.tracing import restoring_state, tracing

_log = logging.getLogger("mpiad")
_ADVICE = (
    "call domain.minimize(fun, x0), or minimize with method='L-BFGS-sharded', for which each rank has its own variables"
)


@dataclass(slots=True)
class RootCopies:
    """The copies of a solve whose variables are on the root."""

    arrays: tuple[Array, ...] = ()  # those that the solve has passed to the current function
    warned: bool = False


def with_registered_copies(fun: Function) -> Function:
    """Return `fun` with a check: while `fun` runs, domains don't accept the arrays of its first argument as blocks."""
    solve = RootCopies()

    def run(x: Array, *args: object) -> Scalar:
        # In nested solves, the variables of all solves are registered.
        outer = tracing.root_copies
        solve.arrays = (*(outer.arrays if outer else ()), *map(getval, flatten(x)[0]))
        with restoring_state():
            tracing.root_copies = solve
            try:
                return fun(x, *args)
            finally:
                tracing.root_copies, solve.arrays = outer, ()

    return run


def require_own_block(u: LocalArray, shape: Shape, ranks: int, rank: Rank, call: str) -> None:
    """Raise a ValueError if u is a registered variable; warn, on rank 0, if it may be computed from one."""
    solve = tracing.root_copies
    # Several ranks may each have a domain of one rank, with equal fields.
    if solve is None or ranks == 1:
        return
    block = getval(u)
    if not _ends_in(block, shape):
        return
    plain = [x for x in solve.arrays if isinstance(x, np.ndarray)] if isinstance(block, np.ndarray) else []
    # A view of a whole variable in another shape, or of one of its fields, counts as a copy; a slice may be a valid block.
    views = [x for x in plain if np.may_share_memory(block, x) and (block.size == x.size or _ends_in(x, shape))]
    if views or any(block is x for x in solve.arrays):
        raise ValueError(
            f"{call}: expected a block of this rank, but got a variable that the root of the solve holds, and of which all "
            f"ranks have the same copy. Instead {_ADVICE}. If all blocks should be equal, pass a copy, 1.0 * x."
        )
    # Only traced arrays are known to depend on the variables.
    if isbox(u) and rank == 0 and not solve.warned and any(_ends_in(array, shape) for array in solve.arrays):
        solve.warned = True
        _log.warning(
            f"{call}: the block was computed from variables that the root of the solve holds, and of which all ranks have "
            f"the same copies. One of them has the shape of a block, {shape}. If each rank should have its own variables, "
            f"the result is wrong: {_ADVICE}."
        )


def _ends_in(array: Array, shape: Shape) -> bool:
    return np.shape(array)[-len(shape) :] == shape
