"""Type aliases for the arguments of public functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

# NumPy arrays, autograd boxes and device arrays have no common static type.
Array: TypeAlias = Any
Scalar: TypeAlias = Any
Tree: TypeAlias = Any
"""A pytree: nested dicts, lists and tuples of arrays and scalars."""
Comm: TypeAlias = Any
"""An mpi4py intracommunicator; None for the library's duplicate of the world."""
Op: TypeAlias = Any
"""An mpi4py reduction operation, such as `MPI.SUM`."""
Request: TypeAlias = Any
"""A request of mpi4py, or a wrapper of it in `transport.watch`."""
Status: TypeAlias = Any
"""An mpi4py status object, in which the call writes its result, or None."""
Buffer: TypeAlias = Any
"""A buffer argument of mpi4py: an array, bytes, or a list of an array or bytes and counts."""
Index: TypeAlias = Any
"""An index of an array: an integer, a slice, None, Ellipsis, an array, or a tuple of these."""
Rank: TypeAlias = int
Shape: TypeAlias = tuple[int, ...]
Argnum: TypeAlias = int | tuple[int, ...]
"""The index of a differentiated argument, or a tuple of indices."""
Shared: TypeAlias = bool | tuple[bool, ...]
"""Whether the differentiated argument is one variable of all ranks; a tuple has a boolean for each index in `Argnum`."""
Axis: TypeAlias = int | tuple[int, ...] | None
Function: TypeAlias = Callable[..., Any]

Rng: TypeAlias = np.random.Generator | np.random.SeedSequence | int | None
"""The source of a call's random numbers; None for the entropy of the system, drawn on the root."""

LocalArray: TypeAlias = Array
"""An array that differs between ranks, for example a part of a distributed array."""
ReplicatedArray: TypeAlias = Array
"""An array that is the same on all ranks."""
RootArray: TypeAlias = Array
"""An array that is used on the root only."""
