"""Checkpoints of a training: one file with the state that all ranks share and each rank's own state."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, Rank, Tree
from mpiad.checkpoint_files import read, remedy, write
from mpiad.parallel.parameters import matching_leaves
from mpiad.primitives.checks import root_of
from mpiad.pytrees import children, described, flatten, leaf_on_device, rebuilt, same_form
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.devices.device_arrays import arrays_of

_KIND = "training"


class TrainingCheckpoint(NamedTuple):
    """The result of `load_checkpoint`."""

    tree: Tree  # the state that was the same on all ranks
    own: Tree  # this rank's state, or None


def save_checkpoint(path: str | PathLike[str], tree: Tree, *, own: Tree = None, root: Rank = 0, comm: Comm = None) -> None:
    """Write the state of a training atomically: if a process is killed, the file is the old one or the new one.

    Parameters
    ----------
    path : path
        Name of the file, which the root writes.
    tree : pytree
        The state that is the same on all ranks: parameters, the optimizer's state, the epoch. It consists of arrays (also
        on devices), numbers, strings, None and `numpy.random.Generator` in dicts, lists, tuples and classes of
        `mpiad.pytrees.register`. The root's state is written, without pickling.
    own : pytree, optional
        State that differs between ranks: generators, or the state of a `DistributedOptimizer` with ``accumulate=k`` between
        two updates.
    root : int
    comm : mpi4py intracommunicator, optional

    Raises
    ------
    TypeError
        On all ranks, if a pytree of any rank holds an object of another type.
    OSError
        On all ranks, if the file can't be written; an older file is then unchanged.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mpiad.parallel.save_checkpoint(f"{folder}/training.npz", {"weights": np.ones(3), "epoch": 4})
    ...     print(mpiad.parallel.load_checkpoint(f"{folder}/training.npz").tree)
    {'weights': array([1., 1., 1.]), 'epoch': 4}
    """
    used, call = channel(comm, "parallel.save_checkpoint"), "parallel.save_checkpoint"
    root = root_of(root, used, call)
    arrays: dict[str, np.ndarray] = {}
    own_arrays: dict[str, np.ndarray] = {}
    with raising_together(used, Exception):
        if used.rank == root:
            file, described_tree = _file(path, call), described(tree, "tree", arrays, call)
        rank_own = described(own, f"own/{used.rank}", own_arrays, call), own_arrays
    every = used.data.gather(rank_own, root)
    with raising_together(used, Exception):
        if used.rank == root:
            for _, state in every:
                arrays.update(state)
            description = {"kind": _KIND, "ranks": used.size, "tree": described_tree, "own": [state for state, _ in every]}
            try:
                write(file, description, arrays.items())
            except OSError as found:
                text = f"{call}: {path!s} can't be written ({found.strerror or found}); an older file is unchanged."
                # Without a number, which would make it an error of a subclass on the root only.
                raise OSError(f"{text} {remedy(found, file)}") from found


def load_checkpoint(
    path: str | PathLike[str], *, like: Tree = None, root: Rank = 0, comm: Comm = None
) -> TrainingCheckpoint | None:
    """Read a file of `save_checkpoint`, to resume a training.

    Parameters
    ----------
    path : path
        Name of the file, which the root reads.
    like : pytree, optional
        The expected state, such as the initial parameters of the training: `tree` or `own`, or a part of one of them, must
        have its structure, shapes and dtypes. Needed if arrays were saved from a device: they are copied to the device of
        the first device array in `like`.
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    TrainingCheckpoint or None
        None on all ranks if the file doesn't exist.

    Raises
    ------
    ValueError
        On all ranks, if the file is damaged, isn't a training checkpoint, or holds states `own` of another number of ranks;
        if no part of the checkpoint matches `like`; or if it contains device arrays and `like` contains none.

    Ranks
    -----
    All ranks of `comm` call it. A checkpoint saved without `own` can be loaded on any number of ranks.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = mpiad.parallel.load_checkpoint(f"{folder}/training.npz")
    >>> print(state)  # the file doesn't exist
    None
    """
    used, call = channel(comm, "parallel.load_checkpoint"), "parallel.load_checkpoint"
    root = root_of(root, used, call)
    found: Any = None
    # Only the root reads the file, which may be on a local disk of its node.
    with raising_together(used):
        if used.rank == root:
            file = _file(path, call)
            try:
                found = read(file) if file.exists() else None
            except (ValueError, OSError) as error:
                raise ValueError(f"{call}: {error}") from error
    found = used.data.bcast(found, root)
    if found is None:
        return None
    description, arrays = found
    with raising_together(used):
        try:
            return _restored(description, arrays, used, like)
        except ValueError as error:
            raise ValueError(f"{call}: {path!s}: {error}") from error


def _restored(
    description: dict[str, Any], arrays: dict[str, np.ndarray], channel: Channel, like: Tree
) -> TrainingCheckpoint:
    """Return the states in a file; raise a ValueError if they don't belong to this number of ranks, or to `like`."""
    if description.get("kind") != _KIND:
        raise ValueError("it isn't a training checkpoint.")
    own, namespace = description["own"], arrays_of(leaf_on_device(like))
    if description["ranks"] != channel.size and any(part != ["plain", None] for part in own):
        raise ValueError(
            f"it holds states (own) of {description['ranks']} rank(s), but this communicator has {channel.size}. "
            "Start the same number of ranks, or save without own."
        )
    rank_own = rebuilt(own[channel.rank], arrays, namespace) if len(own) == channel.size else None
    restored = TrainingCheckpoint(rebuilt(description["tree"], arrays, namespace), rank_own)
    if like is not None:
        _require_like(restored, like)
    return restored


def _require_like(restored: TrainingCheckpoint, like: Tree) -> None:
    """Raise a ValueError if no part of a checkpoint has the structure, shapes and dtypes of `like`."""
    mismatch, parts = ValueError("no part of it has the structure of like."), list(restored._asdict().items())
    for name, part in parts:  # `parts` grows in this loop
        if same_form(part, like):
            try:
                matching_leaves(part, like, flatten(like)[0], "no match for like", name, "like")
            except ValueError as error:
                mismatch = error
            else:
                return
        parts += children(part, name) or []
    raise mismatch


def _file(path: str | PathLike[str], call: str) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise TypeError(f"{call}: {error}.") from None
