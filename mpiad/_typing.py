"""Names for the kinds of argument that public functions take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

# NumPy arrays, autograd boxes and device arrays are distinguished at run time; a type checker can't do so.
Array: TypeAlias = Any
Scalar: TypeAlias = Any
Tree: TypeAlias = Any
"""Any nest of dict, list and tuple whose leaves are arrays or scalars."""
Comm: TypeAlias = Any
"""An mpi4py intracommunicator; None means the library's own duplicate of the world."""
Op: TypeAlias = Any
"""An mpi4py reduction operation, as `MPI.SUM`."""
Request: TypeAlias = Any
"""What can be waited for: a request of mpi4py's, or one under watch."""
Status: TypeAlias = Any
"""An mpi4py status that is filled in, or None."""
Buffer: TypeAlias = Any
"""What mpi4py sends from or receives into: an array, bytes, or one of these with counts."""
Index: TypeAlias = Any
"""What stands between the brackets of an array: an integer, a slice, None, Ellipsis, an array, or a tuple of these."""
Rank: TypeAlias = int
Shape: TypeAlias = tuple[int, ...]
Argnum: TypeAlias = int | tuple[int, ...]
"""The position of the argument to differentiate with respect to, or several of them."""
Axis: TypeAlias = int | tuple[int, ...] | None
Function: TypeAlias = Callable[..., Any]

LocalArray: TypeAlias = Array
"""An array that differs from rank to rank: this rank's own piece."""
ReplicatedArray: TypeAlias = Array
"""An array of which every rank holds the same copy."""
RootArray: TypeAlias = Array
"""An array that counts on the root only."""
