"""Checkpoints of trainings: what all ranks hold, and what is each rank's own, in one file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, Rank, Tree
from mpiad.checkpoint_files import read, remedy, write
from mpiad.differentiation.trees import flatten
from mpiad.parallel.nests import described, rebuilt
from mpiad.parallel.parameters import matching, same_form
from mpiad.primitives.checks import root_of
from mpiad.transport import channel
from mpiad.transport.agreement import raising_together
from mpiad.transport.device_arrays import arrays_of

_KIND = "training"


class TrainingCheckpoint(NamedTuple):
    """What `load_checkpoint` returns."""

    tree: Tree  # what was saved of all ranks
    own: Tree  # what was saved of this rank; None where nothing was


def save_checkpoint(path: str | PathLike[str], tree: Tree, *, own: Tree = None, root: Rank = 0, comm: Comm = None) -> None:
    """Write the state of a training, whole or not at all: whoever is killed leaves the old file or the new one.

    Parameters
    ----------
    path : path
        Of one file, which the root writes.
    tree : pytree
        What is the same on all ranks: parameters, the optimizer's state, the epoch. Arrays (on devices too), numbers,
        strings, None and `numpy.random.Generator` in dicts, lists and tuples; the root's counts. It is written as data,
        never as a pickle.
    own : pytree, optional
        What differs between ranks: their generators, or with ``accumulate=k`` the optimizer's state between two updates.
    root : int
    comm : mpi4py intracommunicator, optional

    Raises
    ------
    TypeError
        On all ranks, where a nest of any rank holds something else.
    OSError
        On all ranks, where the file can't be written; an older one stays.

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
    of_mine: dict[str, np.ndarray] = {}
    # Before the gather, in which all would wait for a rank that has raised.
    with raising_together(used, Exception):
        if used.rank == root:
            file, said = _file(path, call), described(tree, "tree", arrays)
        mine = described(own, f"own/{used.rank}", of_mine), of_mine
    every = used.data.gather(mine, root)
    with raising_together(used, Exception):
        if used.rank == root:
            for _, theirs in every:
                arrays.update(theirs)
            description = {"kind": _KIND, "ranks": used.size, "tree": said, "own": [theirs for theirs, _ in every]}
            try:
                write(file, description, arrays.items())
            except OSError as found:
                text = f"{call}: {path!s} can't be written ({found.strerror}); an older file stays as it is."
                raise OSError(found.errno, f"{text} {remedy(found, file)}") from found


def load_checkpoint(
    path: str | PathLike[str], *, like: Tree = None, root: Rank = 0, comm: Comm = None
) -> TrainingCheckpoint | None:
    """Read what `save_checkpoint` wrote, to go on as if nothing had happened.

    Parameters
    ----------
    path : path
        Only the root reads.
    like : pytree, optional
        What the caller expects, as the parameters that the training would begin with: `tree` or `own`, or a part of one
        of them, must have its form, shapes and dtypes. Needed if arrays were saved from a device: they go to the device
        of its first array on one.
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    TrainingCheckpoint or None
        None on all ranks where there is no such file: the training begins.

    Raises
    ------
    ValueError
        On all ranks, where the file is damaged, isn't a training's, or holds parts of another number of ranks; where it
        holds nothing of the form, shapes and dtypes of `like`, or arrays of a device, and `like` none.

    Ranks
    -----
    All ranks of `comm` call it. A checkpoint without parts of the ranks' own serves any number of ranks.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state = mpiad.parallel.load_checkpoint(f"{folder}/training.npz")
    >>> print(state)  # there is none: the training begins
    None
    """
    used, call = channel(comm, "parallel.load_checkpoint"), "parallel.load_checkpoint"
    root = root_of(root, used, call)
    found: Any = None
    # Other ranks don't look for the file: on a node's own disk they might not find it.
    with raising_together(used):
        if used.rank == root:
            file = _file(path, call)
            try:
                found = _read(file, used.size) if file.exists() else None
            except (ValueError, OSError) as wrong:
                raise ValueError(f"{call}: {wrong}") from wrong
    found = used.data.bcast(found, root)
    if found is None:
        return None
    description, arrays = found
    own = description["own"]
    # Devices are this rank's own, and no file can say which; so one of the caller's arrays does.
    home = next(filter(None, map(arrays_of, flatten(like)[0])), None)
    with raising_together(used):
        try:
            mine = rebuilt(own[used.rank], arrays, home) if len(own) == used.size else None
            restored = TrainingCheckpoint(rebuilt(description["tree"], arrays, home), mine)
            if like is not None:
                _require_like(restored, like)
            return restored
        except ValueError as wrong:
            raise ValueError(f"{call}: {path!s}: {wrong}") from wrong


def _require_like(restored: TrainingCheckpoint, like: Tree) -> None:
    """Raise a ValueError if no part of a checkpoint has the form, shapes and dtypes of what the caller expects."""
    wrong, parts = ValueError("no part of it has the form (keys and lengths) of like."), list(restored._asdict().items())
    for name, part in parts:  # which grows
        if same_form(part, like):
            try:
                matching(part, like, flatten(like)[0], "another model's", name, "like")
            except ValueError as error:
                wrong = error
            else:
                return
        if isinstance(part, (dict, list, tuple)):
            entries = part.items() if isinstance(part, dict) else enumerate(part)
            parts += [(f"{name}[{key!r}]", inner) for key, inner in entries]
    raise wrong


def _file(path: str | PathLike[str], call: str) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise TypeError(f"{call}: {error}.") from None


def _read(path: Path, size: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    description, arrays = read(path)
    if description.get("kind") != _KIND:
        raise ValueError(f"{path} is no checkpoint of a training.")
    if description["ranks"] != size and any(part != ["plain", None] for part in description["own"]):
        raise ValueError(
            f"{path} holds parts of {description['ranks']} rank(s), but there are {size} now. Start as many, or save no "
            "parts of the ranks' own."
        )
    return description, arrays
