"""What each rank has made of its trajectories, a nest of anything, on all ranks; derivatives flow through its numbers."""

from __future__ import annotations

import pickle
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Shape, Tree
from mpiad.primitives import mpi_allgather
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Channel
from mpiad.transport.agreement import raise_first


def _skeletons(used: Channel, skeleton: Tree) -> list[Tree]:
    # Pickled before the message: a rank that can't must tell those that have nothing to pickle, and wait.
    try:
        mine, error = pickle.dumps(skeleton, pickle.HIGHEST_PROTOCOL), None
    except Exception as found:  # noqa: BLE001 raised on all ranks together
        mine, error = b"", TypeError(
            f"solve: what output_func or reduction return is sent to all ranks, but can't be pickled ({found}). Return "
            "numbers, arrays or texts of a solution, or say EnsembleMPI(gather=False)."
        )  # fmt: skip
    everything = used.data.allgather(mine)
    if not all(everything):
        raise_first(used, error)
    return [pickle.loads(text) for text in everything]


class _Place:
    """Stands for numbers that travel as part of one array."""

    def __init__(self, shape: Shape, dtype: np.dtype):
        self.shape, self.dtype = shape, dtype
        self.size = int(np.prod(shape))


def trees_of_all(used: Channel, comm: Comm, tree: Tree) -> list[Tree]:
    """Return the nests of all ranks; collective. A TypeError on all, where one has what can't be pickled."""
    leaves, build = flatten(tree)
    numbers = [leaf for leaf in leaves if is_variable(leaf)]
    places = [_place(leaf) if is_variable(leaf) else leaf for leaf in leaves]
    skeletons = _skeletons(used, build(places))
    flat = [flatten(skeleton) for skeleton in skeletons]
    dtypes = {place.dtype for parts, _ in flat for place in parts if isinstance(place, _Place)}
    dtype = np.result_type(*dtypes) if dtypes else np.dtype(float)
    mine = [_as(anp.ravel(number), dtype) for number in numbers]
    # The empty one stands for ranks without numbers, whose dtype must be that of the others.
    everything = mpi_allgather(anp.concatenate([np.empty(0, dtype), *mine]), axis=0, comm=comm)
    trees, at = [], 0
    for parts, make in flat:
        filled = []
        for part in parts:
            if isinstance(part, _Place):
                piece, at = everything[at : at + part.size], at + part.size
                part = _as(anp.reshape(piece, part.shape), part.dtype) if part.shape else _as(piece[0], part.dtype)
            filled.append(part)
        trees.append(make(filled))
    return trees


def _place(leaf: Array) -> _Place:
    value = np.asarray(getval(leaf))
    return _Place(value.shape, value.dtype)


def _as(x: Array, dtype: np.dtype) -> Any:
    if x.dtype == dtype:
        return x
    return anp.real(x) if x.dtype.kind == "c" and dtype.kind != "c" else x.astype(dtype)
