"""Calls of compiled functions with plain arguments, arrays and floats, which needn't be taken apart.

A small program takes a few µs, as long as what surrounds it. So a function is written for a signature: it compares the
arguments, looks whether the program is still that of the function, and runs it. It returns `MISSED` where the call has to
go the general way: for other arguments, a changed closure, all replays in use, calls that are noted or watched.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpiad.programs.entry import Entry, count
from mpiad.transport import calls
from mpiad.transport.channels import communications, is_watched
from mpiad.transport.fault_tolerance import FAULT_TOLERANT

MISSED: Any = object()
_PLAIN = (np.ndarray, float, np.float64)


def short_call(entry: Entry, args: tuple, made: Any) -> Callable[[tuple], Any] | None:
    """Return the function from positional arguments like those of a call to a result like its; None where there is none."""
    if FAULT_TOLERANT or entry.may_change or not args or not all(type(x) in _PLAIN for x in args):
        return None
    names: dict[str, Any] = {
        "missed": MISSED, "count": count, "counted": communications, "same": entry.watch.is_the_same,
        "free": entry.replays.free[True], "is_noting": calls.is_noting, "is_watched": is_watched,
        "build": entry.build, "leaves": entry.leaves,
    }  # fmt: skip
    others = []
    for k, x in enumerate(args):
        names[f"t{k}"] = type(x)
        others.append(f"type(a{k}) is not t{k}")
        if type(x) is np.ndarray:
            names[f"d{k}"] = x.dtype
            others.append(f"a{k}.dtype is not d{k} or a{k}.shape != {x.shape}")
    for k, (channel, _) in enumerate(entry.channels):
        names[f"c{k}"] = channel
        others.append(f"c{k}.fault")
    given = ", ".join(f"a{k}" for k in range(len(args)))
    text = f"""
def call(args):
    if len(args) != {len(args)}:
        return missed
    {given}, = args
    if {" or ".join(others)} or is_noting() or is_watched() or not same():
        return missed
    try:
        replay = free.pop()
    except IndexError:
        return missed
    {"next(counted); " * entry.communications if entry.communications < 5 else f"count({entry.communications})"}
    made = replay.first({given})
    free.append(replay)
    return {_result(entry, made)}
"""
    exec(compile(text, str(Path(__file__).with_name("<call>")), "exec"), names)
    return names["call"]


def _result(entry: Entry, made: Any) -> str:
    """Return the text of what the function returns, made of the program's outputs."""
    if not all(entry.inside):
        return "build(leaves(made))"
    if isinstance(made, (np.ndarray, np.generic)):
        return "made[0]"
    is_flat = type(made) in (tuple, list) and all(isinstance(x, (np.ndarray, np.generic)) for x in made)
    return f"{type(made).__name__}(made)" if is_flat else "build(made)"
