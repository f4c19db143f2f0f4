"""The root's starting point on all ranks; if a rank gave another one, all raise.

Otherwise a starting point for each rank's own variables, such as a block of a distributed grid, would silently be replaced
by the root's, and the result would be wrong whenever the shapes agree.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from mpiad._typing import Array, Rank, Tree
from mpiad.device import to_device
from mpiad.errors import ReplicationError
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.packing import Elsewhere, as_variables
from mpiad.pytrees import fetched, flatten, leaf_on_device, map_leaves, named_leaves
from mpiad.transport import Channel
from mpiad.transport.agreement import agreed, raising_together
from mpiad.transport.channels import on_any_rank
from mpiad.transport.device_arrays import ArrayModule, arrays_of
from mpiad.transport.replication import Difference, compare, listed

Leaves = list[tuple[str, Any]]

_KINDS = {
    "b": "a boolean", "i": "an integer", "u": "an integer", "f": "a real", "c": "a complex", "U": "a text", "S": "a bytes",
}  # fmt: skip
_ADVICE = (
    "Where each rank has variables of its own, as a block of a Domain, call domain.minimize(fun, x0), or minimize with "
    "method='L-BFGS-sharded'. Where all ranks share them, give x0 on the root only, or on all ranks the root's (mpi_bcast)."
)


def shared_start(used: Channel, program: Program, start: Tree, x0: Tree, call: str = "minimize") -> Tree:
    """Return the root's `start`, with placeholders for device arrays on other ranks; all ranks call it with their x0.

    A ReplicationError on all ranks if the x0 of one differs from the root's.
    """
    if used.size == 1:
        return start
    leads = used.rank == program.root
    template = used.data.bcast(_without_devices(start) if leads else None, program.root)
    if any(type(leaf) is Elsewhere for leaf in flatten(template)[0]):
        with raising_together(used, ImportError):
            if not leads:
                home = _own_device(x0, program.args)
                template = map_leaves(
                    lambda leaf: replace(leaf, arrays=home) if type(leaf) is Elsewhere else leaf, template
                )
    mine = None if x0 is None else named_leaves(_as_given(x0), "x0")
    _require_roots(used, program.root, mine, named_leaves(template, "x0"), call)
    return start if leads else template


def _without_devices(start: Tree) -> Tree:
    """Return the root's variables as sent to other ranks: with placeholders for device arrays."""
    leaves, build = flatten(start)
    return build([
        leaf if arrays_of(leaf) is None else Elsewhere(leaf.shape, leaf.dtype, _fingerprint(on_host))
        for leaf, on_host in zip(leaves, fetched(leaves))
    ])  # fmt: skip


def _fingerprint(array: np.ndarray) -> bytes:
    """Return a hash of an array's values, the same for equal values of two precisions, both zeros, and all NaNs."""
    values = np.array(array, complex if array.dtype.kind == "c" else float)
    parts = values.reshape(-1).view(float)
    parts += 0.0  # makes -0.0 a 0.0
    parts[np.isnan(parts)] = np.nan
    return hashlib.blake2b(parts.data, digest_size=16).digest()


def _own_device(*given: object) -> ArrayModule | None:
    """Return this rank's device: that of its arguments, else the current one; an ImportError without CuPy."""
    # The root's device number is meaningless on another node; this rank's own arrays determine the device.
    return arrays_of(leaf_on_device(list(given))) or arrays_of(to_device(np.zeros(0)))


def _as_given(x0: Tree) -> Tree:
    """Return x0 as `as_variables` converts the root's; unchanged if it can't be varied."""
    try:
        return as_variables(x0)
    except TypeError:
        return x0


def _require_roots(used: Channel, root: Rank, mine: Leaves | None, roots: Leaves, call: str) -> None:
    """Raise a ReplicationError on all ranks if an argument of one differs from the root's, in form or in a value.

    Values are compared as by ``==``, but a NaN is equal to a NaN; reals of single and of double precision may be equal.
    `mine`, `roots` : leaves of the arguments of this rank (None for no argument) and the root, each with its path. All
    ranks call it.
    """
    found = None if mine is None or used.rank == root else _difference(mine, roots, root)
    if not on_any_rank(used.data, found is not None):
        return
    # Only if one differs do the ranks exchange the differences, so that all raise the same error.
    every: list[Difference | None] = used.data.allgather(found)
    differences = {rank: difference for rank, difference in enumerate(every) if difference is not None}
    ranks, first = list(differences), next(iter(differences.values()))
    raise agreed(used, ReplicationError(
        f"{call}: x0 counts on the root only, rank {root}, but what rank(s) {ranks} of {used.size} gave differs from it. "
        f"{_ADVICE}{listed(differences)}",
        ranks, first.path, first.index, first.absolute, first.relative,
    ))  # fmt: skip


def _difference(mine: Leaves, roots: Leaves, root: Rank) -> Difference | None:
    try:
        for (path, _), (other, _) in zip_longest(mine, roots, fillvalue=("nothing more", None)):
            if path != other:
                return _told(path, f"it holds {path} where rank {root}'s holds {other}")
        # Device arrays in one copy.
        own, theirs = (fetched([leaf for _, leaf in leaves]) for leaves in (mine, roots))
        found = (_of_leaf(path, here, there, root) for (path, _), here, there in zip(mine, own, theirs))
        return next(filter(None, found), None)
    except Exception as error:  # noqa: BLE001 - user code may run here, and the other ranks mustn't wait
        return _told(mine[0][0], f"it can't be compared with rank {root}'s: {type(error).__name__}: {error}")


def _of_leaf(path: str, mine: Array, theirs: Array, root: Rank) -> Difference | None:
    here, there = _described(mine), _described(theirs)
    if here != there:
        return _told(path, f"{path} is {here}, but rank {root}'s is {there}")
    if isinstance(theirs, Elsewhere):
        same = _fingerprint(mine) == theirs.fingerprint
        return None if same else _told(path, f"{path}, {here}, has other values than rank {root}'s, which is on a device")
    a, b = np.asarray(mine), np.asarray(theirs)
    if a.dtype.kind not in _KINDS:
        return None  # of other objects only the type is known
    equal = np.asarray(a == b)
    if not equal.all():
        equal |= (a != a) & (b != b)  # NaNs
    if equal.all():
        return None
    wide = np.result_type(a, b)
    # Equal values must not count as different in their bits: zeros of two signs, NaNs of several kinds.
    return compare(path, here, a.astype(wide), np.where(equal, a, b).astype(wide), root, 0)


def _described(leaf: Array) -> str:
    shape, dtype = (leaf.shape, leaf.dtype) if isinstance(leaf, Elsewhere) else (np.shape(leaf), np.asarray(leaf).dtype)
    kind = _KINDS.get(dtype.kind)
    if kind is None:
        return type(leaf).__name__
    return f"{kind} {f'array of shape {shape}' if shape else 'value'}"


def _told(path: str, text: str) -> Difference:
    return Difference(path, (), math.nan, math.nan, text)
