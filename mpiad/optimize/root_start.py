"""The root's point at the start of a solve, and its placeholders on the other ranks, whose x0 must be equal to it."""

from __future__ import annotations

import hashlib
import math
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from mpiad._typing import Array, Rank, Tree
from mpiad.device import to_device
from mpiad.errors import ReplicationError
from mpiad.optimize.packing import RemoteArray, as_variables
from mpiad.pytrees import fetched, flatten, leaf_on_device, map_leaves, named_leaves
from mpiad.transport import Channel
from mpiad.transport.core.agreement import agreed, raising_together
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.replication import Difference, compare, listed
from mpiad.transport.devices.device_arrays import arrays_of

# All ranks raise if the x0 of a rank differs from the root's. Otherwise the root's x0 would silently replace an x0 that
# holds a rank's own variables, such as a block of a distributed grid.

Leaves = list[tuple[str, Any]]

_KIND_NAMES = dict(zip("biufcUS", ("a boolean", "an integer", "an integer", "a real", "a complex", "a text", "a bytes")))
_ADVICE = (
    "If each rank has its own variables, such as a block of a Domain, call domain.minimize(fun, x0), or minimize with "
    "method='L-BFGS-sharded'. If all ranks share them, pass x0 on the root only, or broadcast the root's (mpi_bcast)."
)


def shared_start(used: Channel, root: Rank, start: Tree, x0: Tree, args: tuple, call: str) -> Tree:
    """Return the root's `start` on all ranks (placeholders for device arrays); raise if any x0 differs; collective."""
    if used.size == 1:
        return start
    is_root = used.rank == root
    template = None
    if is_root:
        leaves, build = flatten(start)
        # Device arrays are represented by placeholders on the other ranks.
        for k, on_host in enumerate(fetched(leaves)):
            if arrays_of(leaves[k]) is not None:
                leaves[k] = RemoteArray(on_host.shape, on_host.dtype, _fingerprint(on_host))
        template = build(leaves)
    template = used.data.bcast(template, root)
    if any(type(leaf) is RemoteArray for leaf in flatten(template)[0]):
        with raising_together(used, ImportError):
            if not is_root:
                # The placeholders get this rank's device: that of its arguments, or the current device.
                xp = arrays_of(leaf_on_device([x0, args])) or arrays_of(to_device(np.zeros(0)))
                template = map_leaves(
                    lambda leaf: replace(leaf, arrays=xp) if type(leaf) is RemoteArray else leaf, template
                )
    with suppress(TypeError):  # an x0 that can't be converted differs from the root's
        x0 = as_variables(x0)
    own = None if x0 is None else named_leaves(x0, "x0")
    _require_root_values(used, root, own, named_leaves(template, "x0"), call)
    return start if is_root else template


def _fingerprint(array: np.ndarray) -> bytes:
    """Return a hash of an array's values that doesn't depend on the precision, signs of zeros, or bits of NaNs."""
    values = np.array(array, complex if array.dtype.kind == "c" else float)
    parts = values.reshape(-1).view(float)
    parts += 0.0  # converts -0.0 to 0.0
    parts[np.isnan(parts)] = np.nan
    return hashlib.blake2b(parts.data, digest_size=16).digest()


def _require_root_values(used: Channel, root: Rank, own: Leaves | None, root_leaves: Leaves, call: str) -> None:
    """Raise on all ranks if a leaf of any rank's `own` x0 isn't == the root's; all NaNs are equal; collective."""
    found = None if own is None or used.rank == root else _difference(own, root_leaves, root)
    if not on_any_rank(used.data, found is not None):
        return
    every: list[Difference | None] = used.data.allgather(found)
    differences = {rank: difference for rank, difference in enumerate(every) if difference is not None}
    ranks, first = list(differences), next(iter(differences.values()))
    text = f"{call}: x0 must be the same as on the root, rank {root}, but rank(s) {ranks} of {used.size} have another x0. "
    text += f"{_ADVICE}{listed(differences)}"
    raise agreed(used, ReplicationError(text, ranks, first.path, first.index, first.absolute, first.relative))


def _difference(own: Leaves, root_leaves: Leaves, root: Rank) -> Difference | None:
    try:
        for (path, _), (other, _) in zip_longest(own, root_leaves, fillvalue=("nothing more", None)):
            if path != other:
                return _structural_difference(path, f"it holds {path}, but rank {root}'s holds {other} at this position")
        ours, theirs = (fetched([leaf for _, leaf in leaves]) for leaves in (own, root_leaves))
        found = (_leaf_difference(path, a, b, root) for (path, _), a, b in zip(own, ours, theirs))
        return next(filter(None, found), None)
    except Exception as error:  # noqa: BLE001 - user code may run here, and the other ranks mustn't wait
        reason = f"{type(error).__name__}: {error}"
        return _structural_difference(own[0][0], f"it can't be compared with rank {root}'s: {reason}")


def _leaf_difference(path: str, own: Array, theirs: Array, root: Rank) -> Difference | None:
    own_kind, root_kind = _description(own), _description(theirs)
    if own_kind != root_kind:
        return _structural_difference(path, f"{path} is {own_kind}, but rank {root}'s is {root_kind}")
    if isinstance(theirs, RemoteArray):
        if _fingerprint(own) == theirs.fingerprint:
            return None
        text = f"{path}, {own_kind}, has different values than rank {root}'s, which is on a device"
        return _structural_difference(path, text)
    a, b = np.asarray(own), np.asarray(theirs)
    if a.dtype.kind not in _KIND_NAMES:
        return None  # for other objects only the types are compared
    equal = (a == b) | (a != a) & (b != b)  # NaNs are equal
    if np.all(equal):
        return None
    common_dtype = np.result_type(a, b)
    # `compare` compares bits, so equal values with different bits, such as 0.0 and -0.0, are replaced.
    return compare(path, own_kind, a.astype(common_dtype), np.where(equal, a, b).astype(common_dtype), root, 0)


def _description(leaf: Array) -> str:
    shape, dtype = (leaf.shape, leaf.dtype) if isinstance(leaf, RemoteArray) else (np.shape(leaf), np.asarray(leaf).dtype)
    kind = _KIND_NAMES.get(dtype.kind)
    if kind is None:
        return type(leaf).__name__
    return f"{kind} {f'array of shape {shape}' if shape else 'value'}"


def _structural_difference(path: str, text: str) -> Difference:
    return Difference(path, (), math.nan, math.nan, text)
