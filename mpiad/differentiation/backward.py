"""The reverse pass: the record from its end to its start, every communication on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpiad.differentiation.accumulate import accumulate
from mpiad.differentiation.tape import Recording, mark_unfinished
from mpiad.primitives.cotangents import conform

__all__ = ["run_backward"]

_ndarray = np.ndarray


def run_backward(recording: Recording, seeds: Iterable[tuple[int, Any]], variables: int, keep: bool = False) -> list:
    """Return the cotangents of the variables, which are the first nodes of the record.

    Parameters
    ----------
    recording : Recording
    seeds : iterable of (int, array)
        Places of the results and their cotangents.
    variables : int
        Number of variables.
    keep : bool
        Whether the record is used again; if not, its memory is returned on the way.

    Returns
    -------
    list
        One cotangent for each variable, None where nothing depends on it.
    """
    # Indexed by place: a list is cheaper than a dictionary of nodes, and needs no order to be found first.
    totals: list[Any] = [None] * len(recording.nodes)
    for place, g in seeds:
        totals[place] = g if totals[place] is None else totals[place] + g
    try:
        _sweep(recording.nodes, totals, variables, keep)
    except BaseException as error:
        mark_unfinished(recording.channels, f"{type(error).__name__} left a reverse pass with messages under way.")
        raise
    return totals[:variables]


def _sweep(nodes: list[Any], totals: list[Any], variables: int, keep: bool) -> None:
    owned = bytearray(len(nodes))
    for place in range(len(nodes) - 1, variables - 1, -1):
        node, g = nodes[place], totals[place]
        like = node.like
        if like is None:
            if g is None:  # nothing depends on it, and no other rank knows of it
                if not keep:
                    node.pull = None
                continue
        elif like.dtype is not None:
            # A communication is visited whether or not anything depends on its result here: its partners wait for it.
            g = like.zeros() if g is None else conform(g, *like)
        totals[place] = None
        for parent, part in zip(node.inputs, node.pull(g)):
            total = totals[parent]
            # The commonest case needs no call: the first cotangent, kept by reference.
            if total is None and type(part) is _ndarray:
                totals[parent] = part
            elif part is not None:
                totals[parent], owned[parent] = accumulate(total, owned[parent], part)
        if not keep:
            node.pull = None  # what it holds for its adjoint is free for the next one, also where the user keeps its value
            nodes[place] = None
