"""The types of the kernels' arguments, as `mpiad.compiling` reads them."""

from __future__ import annotations

from functools import cache

import numpy as np

__all__ = ["signature_of"]

# Of times, counts and sums; arrays of states have the states' precision.
_ROW, _TABLE = "float64[::1]", "float64[:, ::1]"
_NUMBERS = "int64[::1]"


@cache
def signature_of(name: str, dtype: np.dtype, events: bool = False) -> str:
    """Return the types of a kernel's arguments.

    Parameters
    ----------
    name : {"forward", "reverse"}
    dtype : dtype
        Of the states.
    events : bool
        Whether the kernel looks for events.
    """
    row, table, cube, cubes = (f"{dtype.name}[{':, ' * axes}::1]" for axes in range(4))
    kinds = (_forward if name == "forward" else _reverse)(row, table, cube, cubes)
    more = [_ROW, _TABLE] if events else []  # end_part, crossings
    return f"void({', '.join(kinds + more)})"


def _forward(row: str, table: str, cube: str, cubes: str) -> list[str]:
    return [
        row, _ROW, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS,  # b, exact, ids, place, state, taken
        table, table, row, _ROW, _ROW, _TABLE,  # u0, p, s, start, end, times
        "float64", row, "float64", "float64", "float64",  # rtol, atol, dt, dtmax, max_steps
        table, _ROW, "int8[::1]", _NUMBERS, _NUMBERS,  # u_end, t_reached, codes, naccept, nreject
        cube, "int32[:, ::1]", cube, cubes,  # saved, save_step, du_end, dsaved
        _NUMBERS, _TABLE, _NUMBERS,  # last, rows, before_rows
    ]  # fmt: skip


def _reverse(row: str, table: str, cube: str, cubes: str) -> list[str]:
    return [
        row, _ROW, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS,  # b, exact, ids, row, step, place
        _NUMBERS, table, row, _TABLE,  # state, p, s, times
        _TABLE, _NUMBERS, _NUMBERS, _NUMBERS, _ROW,  # rows, before_rows, last, naccept, t_reached
        "boolean[::1]", table, cube, "int32[:, ::1]",  # alive, end_bar, saved_bar, save_step
        table, _TABLE, _ROW, _ROW, _ROW,  # u0_bar, p_bar, s_bar, start_bar, stop_bar
    ]  # fmt: skip
