"""`CheckpointSchedule`: how many states a loop may keep, and where."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any, NamedTuple


class CheckpointSchedule(NamedTuple):
    """How many states are kept for the gradient of a loop, in memory and in files.

    Parameters
    ----------
    memory : int
        States kept in memory, the initial one counted.
    disk : int
        Further states kept in files: those that are written and read least often.
    directory : path, optional
        Where the files are written: a folder of its own is made in it for each loop on each rank, and removed with the
        gradient. By default the system's folder for temporary files, which may lie in memory itself.
    recorded : int
        Steps whose whole record, from one kept state on, may be held at once on the way back. With √n states and √n
        recorded steps each step is run twice only.
    dtype : str, optional
        ``"float32"``: states of double precision are kept in single precision, complex ones in complex64, in half the
        memory. On the way back the steps are run again from states of seven digits; the loop itself is run as ever.
    compress : bool
        Whether states are kept in 16 bits an entry, in a quarter of the memory of double precision: differences between
        neighbours, by which smooth fields keep five digits to seven, and rough ones four.
    host : bool
        Whether what is kept of arrays on devices is kept in the memory of the host; with `compress` it is.

    Examples
    --------
    A state kept every ten of 100 steps, and ten steps recorded at a time: each step is run twice.

    >>> mpiad.timestepping.CheckpointSchedule(memory=10, recorded=10)
    CheckpointSchedule(memory=10, disk=0, directory=None, recorded=10, dtype=None, compress=False, host=False)
    """

    memory: int = 0
    disk: int = 0
    directory: str | os.PathLike | None = None
    recorded: int = 1
    dtype: str | None = None
    compress: bool = False
    host: bool = False


def checkpoints_of(given: Any, call: str) -> CheckpointSchedule | None:
    """Return what a user gave as checkpoints, a number or `CheckpointSchedule`, in one form.

    A TypeError or ValueError where it is something else, or no state may be kept.
    """
    if given is None:
        return None
    kept = given if isinstance(given, CheckpointSchedule) else CheckpointSchedule(given)
    for name, number in (("memory", kept.memory), ("disk", kept.disk)):
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(
                f"{call}: checkpoints must be None, an integer or CheckpointSchedule(memory=..., disk=...), "
                f"but {name} is {type(number).__name__} {number!r:.60}."
            )
        if number < 0:
            raise ValueError(f"{call}: checkpoints must not be negative, but {name}={number}.")
    if not isinstance(kept.recorded, Integral) or kept.recorded < 1:
        raise ValueError(f"{call}: recorded must be an integer above zero, but got {kept.recorded!r}.")
    if kept.dtype not in (None, "float32"):
        raise ValueError(
            f"{call}: states are kept in their own precision (dtype=None) or in single precision (dtype='float32'), but "
            f"got dtype={kept.dtype!r:.40}."
        )
    for name, switch in (("compress", kept.compress), ("host", kept.host)):
        if not isinstance(switch, bool):
            raise TypeError(f"{call}: {name} must be True or False, but got {type(switch).__name__} {switch!r:.40}.")
    if kept.compress and kept.dtype is not None:
        raise ValueError(f"{call}: compress=True keeps 16 bits an entry, dtype={kept.dtype!r} 32: give one of them.")
    if kept.memory + kept.disk < 1:
        raise ValueError(f"{call}: checkpoints={given!r} keeps no state, but a gradient needs one at least: the first.")
    if kept.disk and kept.directory is not None and not os.path.isdir(kept.directory):
        raise ValueError(f"{call}: there is no folder {os.fspath(kept.directory)!r} for the checkpoints. Make it first.")
    return kept._replace(memory=int(kept.memory), disk=int(kept.disk), recorded=int(kept.recorded))
