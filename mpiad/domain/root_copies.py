"""Variables of which all ranks hold the root's copy, and which are therefore no blocks of a divided grid.

Shapes don't reveal this: a solve whose root holds the variables, started from ``np.zeros(domain.local_shape)``, passes the
root's block to every rank, and the ranks then compute the objective of a grid that consists of equal blocks. So the solve
registers the arrays that it passes, and the operations of a domain refuse them as blocks: the variables themselves in any
form, and fields that are cut out of them. An array computed from the variables may be intended as a block, so it gives
only a warning, and only if a variable has the block's shape.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, LocalArray, Rank, Shape
from mpiad.pytrees import flatten
from mpiad.transport.tracing import restoring_state, tracing

_log = logging.getLogger("mpiad")
_INSTEAD = (
    "call domain.minimize(fun, x0), or minimize with method='L-BFGS-sharded', for which each rank's block is a variable of "
    "its own"
)


class _Solve:
    """The arrays that a solve has passed to the current function, and whether a warning was given."""

    def __init__(self) -> None:
        self.arrays: tuple[Any, ...] = ()
        self.warned = False


def of_root_copies(fun: Function) -> Function:
    """Return a function during which domains refuse its first argument, a pytree of arrays, as blocks."""
    solve = _Solve()

    def run(x: Array, *args: Any) -> Any:
        # Solves nest: inside of two, copies of both are refused.
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
    """Raise a ValueError if a block is one of the root's variables; warn, on rank 0, if it may be computed from one.

    An array that isn't of shape (..., *shape) is no block. `ranks` is the number of ranks that divide the grid: if one rank
    has the whole grid, all may share it.
    """
    solve = tracing.root_copies
    if solve is None or ranks == 1:
        return
    block = getval(u)
    if not _ends_in(block, shape):
        return
    if any(_is_of(block, array, shape) for array in solve.arrays):
        raise ValueError(
            f"{call}: expected a block of this rank's own, but got the variable of a solve whose root holds the variables: "
            f"every rank has the root's. Instead {_INSTEAD}. If all blocks are meant to be equal, pass a copy, 1.0 * x."
        )
    # An untraced array doesn't depend on the variables, as far as is known.
    if isbox(u) and rank == 0 and not solve.warned and any(_ends_in(array, shape) for array in solve.arrays):
        solve.warned = True
        _log.warning(
            "%s: the block was computed from variables of which one has the shape of a block, %s, and every rank has the "
            "root's copy of them. If each rank was to have its own, the result is wrong: %s.", call, shape, _INSTEAD,
        )  # fmt: skip


def _is_of(block: Array, array: Array, shape: Shape) -> bool:
    if block is array:
        return True
    if not (isinstance(block, np.ndarray) and isinstance(array, np.ndarray) and np.may_share_memory(block, array)):
        return False
    # All of it in another form, or one of several fields; but a block that is cut out of a whole grid is one.
    return block.size == array.size or _ends_in(array, shape)


def _ends_in(array: Array, shape: Shape) -> bool:
    return np.shape(array)[-len(shape) :] == shape
