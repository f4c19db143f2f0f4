"""Which objective fits a program: how its results lie on the ranks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, Function, Rank
from mpiad.primitives.checks import root_of
from mpiad.transport import channel

__all__ = ["ObjectiveReport", "describe_objective"]


class ObjectiveReport(NamedTuple):
    """How a program's results lie on the ranks, and which objective fits.

    Attributes
    ----------
    kind : {"same", "root", "share"}
        The same on all ranks; on the root only; a share on each.
    objective : str
        The objective that fits.
    values : list
        What each rank returned.
    factors : dict
        By what each objective would multiply the gradient that fits; NaN where it isn't a factor.
    text : str
        The same in words.
    """

    kind: str
    objective: str
    values: list
    factors: dict
    text: str

    def __str__(self) -> str:
        return self.text


def describe_objective(fun: Function, *args: Any, root: Rank = 0, comm: Comm = None) -> ObjectiveReport:
    """Run a function and say which objective fits what its ranks return.

    Parameters
    ----------
    fun : callable
        As for `value_and_grad`.
    *args : object
        This rank's arguments.
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    ObjectiveReport
        Equal on all ranks. It goes by values: shares that happen to be equal look like copies.

    Raises
    ------
    TypeError
        On all ranks, where one returns anything but a real number or None.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    Not differentiable.
    """
    used = channel(comm, "describe_objective")
    root = root_of(root, used, "describe_objective")
    found = fun(*args)
    scalar = found is None or (np.ndim(found) == 0 and np.isrealobj(found) and not isinstance(found, str))
    values = used.data.allgather(None if found is None else float(found) if scalar else repr(found)[:60])
    wrong = [f"rank {rank}: {value}" for rank, value in enumerate(values) if isinstance(value, str)]
    if wrong:
        raise TypeError(f"describe_objective: every rank must return one real number or None, but got {'; '.join(wrong)}.")
    return _report(values, root)


def _report(values: list, root: int) -> ObjectiveReport:
    size = len(values)
    others = [value for rank, value in enumerate(values) if rank != root]
    if all(value is None or value == 0.0 for value in others) and others:  # one rank alone holds what all hold
        factors = {"root": 1.0, "sum": 1.0, "mean": 1.0 / size}
        said = f"only the root (rank {root}) holds the result. objective='root' fits; 'mean' would divide by {size}"
        return ObjectiveReport("root", "root", values, factors, f"{said} the gradient.")
    if all(value == values[root] for value in others):
        factors = {"root": 1.0, "sum": float(size), "mean": 1.0}
        said = f"all ranks return the same value. objective='root' fits; 'sum' would multiply the gradient by {size}."
        return ObjectiveReport("same", "root", values, factors, said)
    factors = {"root": math.nan, "sum": 1.0, "mean": 1.0 / size}
    said = (
        "each rank returns a share of its own. objective='sum' fits (or 'mean' for the mean of losses, "
        f"1/{size} of that gradient); 'root' would leave out all shares but that of rank {root}."
    )
    return ObjectiveReport("share", "sum", values, factors, said)
