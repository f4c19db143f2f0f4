"""Selection of the GPU of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from mpiad.transport import world
from mpiad.transport.device_arrays import discover

_chosen: list[int] = []
"""The GPU that `select` chose last."""


def select(ids: Sequence[int] | int | None = None) -> int:
    """Make one of the node's GPUs the current one of this rank.

    Call it once, before the first array is put on a device.

    Parameters
    ----------
    ids : int or sequence of int, optional
        GPUs for this node's ranks: the rank with local number r gets the r-th, and if there are fewer than ranks, they
        are assigned cyclically. An int is the GPU of this rank. By default all GPUs that CUDA shows.

    Returns
    -------
    int
        Number of the GPU, as CUDA counts those that this process sees.

    Raises
    ------
    ImportError
        If CuPy can't be loaded.
    RuntimeError
        If CUDA shows no GPU.
    ValueError
        If there is no GPU of the requested number.

    Ranks
    -----
    Each rank for itself; nothing is communicated, except at the library's first use, which is collective.
    """
    cupy = imported_cupy("select")
    count = _visible(cupy)
    local = world.local_rank()
    if ids is None:
        chosen = list(range(count))
    else:
        chosen = list(ids) if isinstance(ids, Sequence) else [ids]
    _check(chosen, ids, count, local)
    number = chosen[local % len(chosen)]
    # Current for this thread from here on: cupy.asarray and kernels of the user's go there too.
    cupy.cuda.Device(number).use()
    discover()  # CuPy is loaded, and its arrays must be registered with autograd
    _chosen[:] = [number]
    return number


def own_device() -> int:
    """Return this rank's GPU: the one that was selected, or else one chosen as by `select`."""
    return _chosen[0] if _chosen else select()


def imported_cupy(call: str) -> Any:
    """Return CuPy; raise an ImportError that names the packages to install."""
    try:
        return import_module("cupy")
    except ImportError as error:
        raise ImportError(
            f"{call}: CuPy can't be loaded ({error}). Install the version for the driver: pip install 'mpiad[gpu]' for "
            "CUDA 12, 'mpiad[gpu13]' for CUDA 13."
        ) from error


def _visible(cupy: ModuleType) -> int:
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"select: CUDA shows this process no GPU ({error}).") from error
    if count == 0:
        raise RuntimeError("select: CUDA shows this process no GPU. Look at CUDA_VISIBLE_DEVICES, or ask for one.")
    return count


def _check(chosen: list[Any], ids: object, count: int, local: int) -> None:
    wrong = [number for number in chosen if isinstance(number, bool) or not isinstance(number, int)]
    if wrong or not chosen:
        raise ValueError(f"select: ids must be numbers of GPUs, as [0, 1], but got {ids!r}.")
    missing = [number for number in chosen if not 0 <= number < count]
    if missing:
        raise ValueError(
            f"select: ids={ids!r} names GPU {missing[0]}, but this process (local rank {local}) sees {count}: 0 to "
            f"{count - 1}. CUDA_VISIBLE_DEVICES renumbers them from 0."
        )
