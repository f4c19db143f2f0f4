"""The root's point at the start of a solve, and its placeholders on the other ranks, whose x0 must be equal to it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace

import numpy as np

from mpiad._typing import Array, Rank, Tree
from mpiad.device import to_device
from mpiad.errors import ReplicationError
from mpiad.optimize.packing import RemoteArray, as_variables
from mpiad.pytrees import fetched, flatten, leaf_on_device, map_leaves, named_leaves
from mpiad.transport import Channel
from mpiad.transport.core.agreement import FAILURES, agreed, raising_together
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.devices.device_arrays import arrays_of

# All ranks raise if the x0 of a rank differs from the root's. Otherwise the root's x0 would silently replace an x0 that
# holds a rank's own variables, such as a block of a distributed grid.

_KINDS = {"f": "real", "c": "complex"}
_ADVICE = (
    "If each rank has its own variables, such as a block of a Domain, call domain.minimize(fun, x0), or minimize with "
    "method='L-BFGS-sharded'. If all ranks share them, pass x0 on the root only, or broadcast the root's (mpi_bcast)."
)


def shared_start(channel: Channel, root: Rank, start: Tree, x0: Tree, args: tuple, call: str) -> Tree:
    """Return the root's `start` on all ranks (placeholders for device arrays); raise if any x0 differs; collective."""
    if channel.size == 1:
        return start
    is_root = channel.rank == root
    template = None
    if is_root:
        leaves, build = flatten(start)
        # Device arrays are represented by placeholders on the other ranks.
        for k, on_host in enumerate(fetched(leaves)):
            if arrays_of(leaves[k]) is not None:
                leaves[k] = RemoteArray(on_host.shape, on_host.dtype, _fingerprint(on_host))
        template = build(leaves)
    template = channel.data.bcast(template, root)
    if any(type(leaf) is RemoteArray for leaf in flatten(template)[0]):
        with raising_together(channel, ImportError):
            if not is_root:
                # The placeholders get this rank's device: that of its arguments, or the current device.
                xp = arrays_of(leaf_on_device([x0, args])) or arrays_of(to_device(np.zeros(0)))
                template = map_leaves(
                    lambda leaf: replace(leaf, arrays=xp) if type(leaf) is RemoteArray else leaf, template
                )
    with suppress(*FAILURES):  # an x0 that can't be converted differs from the root's
        x0 = as_variables(x0)
    theirs = named_leaves(template, "x0")
    own = theirs if is_root or x0 is None else named_leaves(x0, "x0")
    remote = [type(leaf) is RemoteArray for _, leaf in theirs] + [False] * len(own)
    leaves = zip(own, fetched([leaf for _, leaf in own]), remote)
    compared = [(path, _comparable(leaf, is_remote)) for (path, _), leaf, is_remote in leaves]
    try:
        require_replicated(channel, compared, f"{call}: x0 must be the same as on the root, rank {root}", _ADVICE, root)
    except ReplicationError as error:
        raise agreed(channel, error) from None
    return start if is_root else template


def _fingerprint(array: np.ndarray) -> str:
    """Return shape, kind and a checksum of the `_comparable` values."""
    checksum = hashlib.blake2b(np.ascontiguousarray(_comparable(array, False)).data, digest_size=8).hexdigest()
    return f"{_KINDS.get(array.dtype.kind, 'other')} array {array.shape}, checksum {checksum}"


def _comparable(leaf: Array, is_remote: bool) -> Array:
    """Return a value with the same bits for equal numbers of all precisions and all NaNs; only the type of an object."""
    if isinstance(leaf, RemoteArray):
        return leaf.fingerprint
    if leaf is None or isinstance(leaf, (str, bytes)):
        return leaf
    try:
        array = np.asarray(leaf)
    except FAILURES:  # user code may run here, and the other ranks mustn't wait
        return type(leaf).__name__
    if is_remote:
        return _fingerprint(array)
    if array.dtype.kind not in "fc":
        plain = array.astype(np.int64) if array.dtype.kind in "iu" else array
        return plain if array.dtype.kind in "biuUS" else type(leaf).__name__
    values = np.array(array, complex if array.dtype.kind == "c" else float) + 0.0  # converts -0.0 to 0.0
    return np.where(np.isnan(values), np.nan, values)
