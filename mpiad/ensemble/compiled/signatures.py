"""The types of the kernels' arguments, as numba writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array

__all__ = ["FORWARD", "REVERSE", "argument"]

_ROW, _TABLE, _CUBE, _CUBES = "float64[::1]", "float64[:, ::1]", "float64[:, :, ::1]", "float64[:, :, :, ::1]"
_NUMBERS, _NUMBER = "int64[::1]", "int64"

FORWARD = "void({})".format(", ".join([
    _ROW, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBER,  # b, ids, place, state, stop
    _TABLE, _TABLE, _ROW, _ROW, _ROW, _TABLE,  # u0, p, s, start, end, times
    "float64", _ROW, "float64", "float64", "float64",  # rtol, atol, dt, dtmax, max_steps
    _TABLE, _ROW, "int8[::1]", _NUMBERS, _NUMBERS,  # u_end, t_reached, codes, naccept, nreject
    _CUBE, "int32[:, ::1]", _CUBE, _CUBES,  # saved, save_step, du_end, dsaved
    _NUMBERS, _TABLE, _NUMBERS,  # last, rows, before_rows
]))  # fmt: skip

REVERSE = "void({})".format(", ".join([
    _ROW, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS,  # b, ids, row, step, place
    _NUMBER, _NUMBER, _TABLE, _ROW, _TABLE,  # first, stop, p, s, times
    _TABLE, _NUMBERS, _NUMBERS, _NUMBERS, _ROW,  # rows, before_rows, last, naccept, t_reached
    "boolean[::1]", _TABLE, _CUBE, "int32[:, ::1]",  # alive, end_bar, saved_bar, save_step
    _TABLE, _TABLE, _ROW, _ROW, _ROW,  # u0_bar, p_bar, s_bar, start_bar, stop_bar
]))  # fmt: skip


def argument(x: Any) -> Array:
    """Return an array of doubles as kernels take it: itself, where it is contiguous and may be written."""
    return np.require(x, float, ["C_CONTIGUOUS", "WRITEABLE"])
