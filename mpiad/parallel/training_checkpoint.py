"""Checkpoints of a training: one file with the state that all ranks share and each rank's own state."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm, Rank, Tree
from mpiad.checkpoint_files import read, remedy, write
from mpiad.parallel.parameters import matching_leaves, same_form
from mpiad.primitives.checks import root_of
from mpiad.pytrees import flatten, leaf_on_device
from mpiad.transport import channel
from mpiad.transport.core.agreement import raising_together
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of

_KIND = "training"
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


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
        on devices), numbers, strings, None and `numpy.random.Generator` in dicts, lists and tuples. The root's state is
        written, without pickling.
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
            file, described = _file(path, call), _described(tree, "tree", arrays)
        rank_own = _described(own, f"own/{used.rank}", own_arrays), own_arrays
    every = used.data.gather(rank_own, root)
    with raising_together(used, Exception):
        if used.rank == root:
            for _, state in every:
                arrays.update(state)
            description = {"kind": _KIND, "ranks": used.size, "tree": described, "own": [state for state, _ in every]}
            try:
                write(file, description, arrays.items())
            except OSError as found:
                text = f"{call}: {path!s} can't be written ({found.strerror}); an older file is unchanged."
                raise OSError(found.errno, f"{text} {remedy(found, file)}") from found


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
                found = _read(file, used.size) if file.exists() else None
            except (ValueError, OSError) as error:
                raise ValueError(f"{call}: {error}") from error
    found = used.data.bcast(found, root)
    if found is None:
        return None
    description, arrays = found
    own = description["own"]
    namespace = arrays_of(leaf_on_device(like))
    with raising_together(used):
        try:
            rank_own = _rebuilt(own[used.rank], arrays, namespace) if len(own) == used.size else None
            restored = TrainingCheckpoint(_rebuilt(description["tree"], arrays, namespace), rank_own)
            if like is not None:
                _require_like(restored, like)
            return restored
        except ValueError as error:
            raise ValueError(f"{call}: {path!s}: {error}") from error


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
        if isinstance(part, (dict, list, tuple)):
            entries = part.items() if isinstance(part, dict) else enumerate(part)
            parts += [(f"{name}[{key!r}]", inner) for key, inner in entries]
    raise mismatch


def _file(path: str | PathLike[str], call: str) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise TypeError(f"{call}: {error}.") from None


def _read(path: Path, size: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    description, arrays = read(path)
    if description.get("kind") != _KIND:
        raise ValueError(f"{path} isn't a training checkpoint.")
    if description["ranks"] != size and any(part != ["plain", None] for part in description["own"]):
        raise ValueError(
            f"{path} holds states (own) of {description['ranks']} rank(s), but this communicator has {size}. Start the "
            "same number of ranks, or save without own."
        )
    return description, arrays


def _described(value: Tree, path: str, arrays: dict[str, np.ndarray]) -> list[Any]:
    """Return the description of a pytree, and add its arrays to `arrays`; raise a TypeError for unsupported objects."""
    if value is None or isinstance(value, (bool, str)):  # bool before its base class int
        return ["plain", value]
    namespace = arrays_of(value)
    # Arrays of objects aren't supported, since they would need pickle.
    if namespace is not None or (isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject):
        while path in arrays:  # different leaves may have the same path, for example those of the keys 1 and "1"
            path += "'"
        arrays[path] = np.asarray(value) if namespace is None else namespace.to_host(value)
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return [kind if namespace is None else "device array", path]
    if isinstance(value, (int, float)):
        return ["plain", value]  # JSON represents integers of any size and all floats exactly
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    # Subclasses (Counter, NamedTuple) aren't supported, since their objects would lose the type.
    if type(value) is dict:
        parts = [[_described(key, path, arrays), _described(part, f"{path}/{key}", arrays)] for key, part in value.items()]
        return ["dict", parts]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [type(value).__name__, [_described(part, f"{path}/{k}", arrays) for k, part in enumerate(value)]]
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in _GENERATORS:
        return ["generator", _described(value.bit_generator.state, path, arrays)]
    raise TypeError(
        f"parallel.save_checkpoint: {path} is {type(value).__name__} {value!r:.60}, but a checkpoint may only hold arrays, "
        "numbers, strings, None, NumPy's generators, and dicts, lists and tuples of them. Save the parts of the object."
    )


def _rebuilt(description: list[Any], arrays: dict[str, np.ndarray], namespace: ArrayModule | None = None) -> Tree:
    """Return the pytree of a description; raise a ValueError for a device array if no `namespace` is given."""
    kind, rest = description[0], description[1:]
    if kind == "plain":
        return rest[0]
    if kind in ("array", "number"):
        return arrays[rest[0]] if kind == "array" else arrays[rest[0]][()]
    if kind == "device array":
        if namespace is None:
            raise ValueError(
                f"{rest[0]} was saved from a device. Pass like=, a pytree with an array on the device to which it should "
                "be copied, such as the initial parameters of the training."
            )
        return namespace.to_device(arrays[rest[0]])
    if kind == "complex":
        return complex(*rest)
    if kind == "dict":
        return {_rebuilt(key, arrays, namespace): _rebuilt(part, arrays, namespace) for key, part in rest[0]}
    if kind in ("list", "tuple"):
        parts = [_rebuilt(part, arrays, namespace) for part in rest[0]]
        return parts if kind == "list" else tuple(parts)
    state: dict[str, Any] = _rebuilt(rest[0], arrays)
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)
