"""Arithmetic on all leaves of several nests in few passes.

Small leaves are laid behind one another, since each call of NumPy's costs as much as some thousand numbers; what is long
is taken piece by piece, so that what a formula needs in between stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.trees import is_variable
from mpiad.primitives.cotangents import spec_like

_LONG = 1 << 13  # numbers; laying shorter arrays behind one another costs less than a formula's calls for each
_PIECE = 1 << 14  # with what a formula holds in between this fills a second-level cache
_ndarray = np.ndarray

Formula = Callable[..., None]


def in_blocks(formula: Formula, columns: Sequence[Sequence[Any]], results: Sequence[int]) -> list[list[Any]]:
    """Return new leaves, a list for each result, computed from those at the same places.

    ``formula(*inputs, *outputs)``, on flat arrays of equal length, writes the outputs entry by entry; small arrays lie
    beside others in memory. Leaves of the first column that aren't floats or arrays of floats are left out: results have
    what the columns have there. `results` says for each result which column's leaves it resembles in shape and dtype.
    """
    out = [list(columns[k]) for k in results]
    together: dict[Any, list[int]] = {}
    for place, leaf in enumerate(columns[0]):
        plain = type(leaf) is _ndarray and leaf.dtype.kind in "fc"
        if plain and leaf.size >= _LONG:
            inputs = [np.ravel(column[place]) for column in columns]
            for new, flat in zip(out, _applied(formula, inputs, results)):
                new[place] = flat.reshape(leaf.shape)
        elif plain or is_variable(leaf):
            # By dtype and place: laid together, float32 would become float64, and arrays of two devices can't be.
            together.setdefault(leaf.dtype if plain else _kind(leaf), []).append(place)
    for places in together.values():
        inputs = [np.concatenate([column[k] for k in places], axis=None) for column in columns]
        shapes = [np.shape(columns[0][k]) for k in places]
        for new, flat in zip(out, _applied(formula, inputs, results)):
            _take_apart(flat, places, shapes, new)
    return out


def _kind(leaf: Array) -> Any:
    """Return the dtype of a number, and of an array on a device also where that is."""
    _, dtype, arrays = spec_like(leaf)
    return dtype if arrays is None else (dtype, arrays)


def _applied(formula: Formula, inputs: list[np.ndarray], results: Sequence[int]) -> list[np.ndarray]:
    # All of the whole length, so that pieces are written where they stay: only a formula's own values are short.
    outputs = [np.empty_like(inputs[k]) for k in results]
    every = inputs + outputs
    if len(inputs[0]) <= _PIECE or type(inputs[0]) is not _ndarray:  # a device has its own ways
        formula(*every)
        return outputs
    for start in range(0, len(inputs[0]), _PIECE):
        piece = slice(start, start + _PIECE)
        formula(*[array[piece] for array in every])
    return outputs


def _take_apart(flat: np.ndarray, places: list[int], shapes: list[tuple[int, ...]], out: list[Any]) -> None:
    start = 0
    for place, shape in zip(places, shapes):
        if not shape:
            # Numbers stay numbers; a slice would make of each an array of one entry.
            out[place] = flat[start]
            start += 1
            continue
        stop = start + (shape[0] if len(shape) == 1 else math.prod(shape))
        out[place] = flat[start:stop] if len(shape) == 1 else flat[start:stop].reshape(shape)
        start = stop
