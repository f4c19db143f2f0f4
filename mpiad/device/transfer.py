"""The GPU of a rank, and copies of arrays from the host to a device and back."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval

from mpiad._typing import Array, Function, Tree
from mpiad.pytrees import map_leaves
from mpiad.transport import world
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import ArrayModule, Spec, arrays_of, discover, is_device_array

_selected: list[int] = []
"""The index of the GPU that `select` selected last."""


def select(ids: Sequence[int] | int | None = None) -> int:
    """Make one of the node's GPUs the current device of this rank.

    Call this function once, before the first array is copied to a device.

    Parameters
    ----------
    ids : int or sequence of int, optional
        The index of this rank's GPU, or a sequence of indices. The GPUs of a sequence are assigned to the ranks of this
        node in rank order, cyclically if there are fewer GPUs than ranks. The default is all GPUs that are visible to CUDA.

    Returns
    -------
    int
        CUDA's index of the selected GPU among the GPUs that are visible to this process.

    Raises
    ------
    ImportError
        If CuPy can't be loaded.
    RuntimeError
        If no GPU is visible to CUDA.
    ValueError
        If `ids` is empty, or contains values that aren't indices of visible GPUs.

    Ranks
    -----
    Each rank calls it independently. If this is the program's first call of the library, all ranks call it.
    """
    cupy = _import_cupy("select")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"select: no GPU is visible to this process ({error}).") from error
    if count == 0:
        raise RuntimeError(
            "select: no GPU is visible to this process. Check CUDA_VISIBLE_DEVICES, or request a GPU from the scheduler."
        )
    local = world.local_rank()
    chosen = list(range(count) if ids is None else ids if isinstance(ids, Sequence) else [ids])
    if not chosen or any(isinstance(number, bool) or not isinstance(number, int) for number in chosen):
        raise ValueError(f"select: ids must be indices of GPUs, such as [0, 1], but got {ids!r}.")
    missing = [number for number in chosen if not 0 <= number < count]
    if missing:
        raise ValueError(
            f"select: ids={ids!r} names GPU {missing[0]}, but this process (local rank {local}) sees {count}: 0 to "
            f"{count - 1}. CUDA_VISIBLE_DEVICES renumbers the GPUs from 0."
        )
    number = chosen[local % len(chosen)]
    cupy.cuda.Device(number).use()
    discover()  # registers the arrays of CuPy with autograd
    _selected[:] = [number]
    return number


def own_device() -> int:
    """Return the index of this rank's GPU; call `select` if no GPU is selected yet."""
    return _selected[0] if _selected else select()


def _import_cupy(call: str) -> ModuleType:
    try:
        return import_module("cupy")
    except ImportError as error:
        raise ImportError(
            f"{call}: CuPy can't be loaded ({error}). Install it for the driver's CUDA version: pip install 'mpiad[gpu]' "
            "for CUDA 12, 'mpiad[gpu13]' for CUDA 13."
        ) from error


class Constants:
    """Constant host arrays, such as indices and weights, with one cached copy per device."""

    def __init__(self, *arrays: np.ndarray):
        self._arrays = arrays
        self._copies: dict[ArrayModule, tuple[Array, ...]] = {}

    def __reduce__(self) -> tuple:
        # The copies aren't pickled, since another process may not have the same devices.
        return Constants, self._arrays

    def like(self, x: Array) -> tuple[Array, ...]:
        """Return copies on the device of x, or the host arrays if x is on the host; x may be traced."""
        return self.on(arrays_of(getval(x)))

    def on(self, namespace: ArrayModule | None) -> tuple[Array, ...]:
        """Return copies on the device of an array module, or the host arrays for None."""
        if namespace is None:
            return self._arrays
        if namespace not in self._copies:
            self._copies[namespace] = tuple(namespace.to_device(np.ascontiguousarray(array)) for array in self._arrays)
        return self._copies[namespace]


def to_device(x: Tree, device: int | None = None, *, like: Array = None) -> Tree:
    """Copy arrays to a device.

    Parameters
    ----------
    x : array, number or pytree of them
        Host arrays, which may be traced. Arrays already on a device, strings and None are returned unchanged.
    device : int, optional
        The index of the GPU. The default is the current GPU (see `select`).
    like : device array, optional
        A device array; the result has the same type and is on the same device.

    Returns
    -------
    device array or pytree of them
        Arrays of the same dtypes, in the same structure; numbers become arrays of shape ().

    Raises
    ------
    ImportError
        If CuPy can't be loaded; the message names the package to install.
    TypeError
        If an array has a dtype that devices don't support.

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    The cotangent is copied to the host; `to_host` is the transpose.
    """
    arrays = arrays_of(getval(like)) if like is not None else None

    def move(leaf: Array) -> Array:
        plain = getval(leaf)
        if plain is None or isinstance(plain, str) or arrays_of(plain) is not None:
            return leaf
        if tracing.recorder is not None and tracing.recorder.is_abstract:
            return tracing.recorder.constant_on_device(plain)  # type: ignore[attr-defined] abstract traces have it
        nonlocal arrays
        if arrays is None:
            # CuPy is imported only if it is needed, since the user's device arrays may come from another library.
            cupy = _import_cupy("to_device")
            from mpiad.transport.devices.cupy_arrays import on_device

            arrays = on_device(cupy.cuda.runtime.getDevice() if device is None else device)
        return array_to_device(leaf, arrays)

    return map_leaves(move, x)


def to_host(x: Tree) -> Tree:
    """Copy arrays to the host.

    Parameters
    ----------
    x : device array or pytree of them
        The arrays may be traced; arrays already on the host are returned unchanged.

    Returns
    -------
    array or pytree of them
        NumPy arrays of the same dtypes, in the same structure; NumPy scalars for arrays of shape ().

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    The cotangent is copied to the device of `x`; `to_device` is the transpose.

    Examples
    --------
    >>> print(mpiad.device.to_host({"x": np.ones(2), "name": "already here"}))
    {'x': array([1., 1.]), 'name': 'already here'}
    """
    return map_leaves(lambda leaf: leaf if arrays_of(getval(leaf)) is None else array_to_host(leaf), x)


@primitive
def array_to_device(x: Array, arrays: ArrayModule) -> Array:
    """Copy one array or number to the device of an array module."""
    host = np.asarray(x)
    if host.dtype.kind not in "biufc" or host.dtype.char in "gG":
        raise TypeError(
            f"to_device: x must hold booleans, integers, or real or complex numbers of up to double precision, but got "
            f"{type(x).__name__} of dtype {host.dtype}."
        )
    # A number isn't copied: it is an argument of the kernel that fills the array.
    return arrays.to_device(host) if host.ndim else arrays.full((), host[()], host.dtype)


@primitive
def array_to_host(x: Array) -> Array:
    """Copy one device array to the host; an array of shape () becomes a NumPy scalar."""
    arrays = arrays_of(x)
    return x if arrays is None else arrays.to_host(x)[()]


def beside(values: Sequence[Array], specs: Sequence[Spec]) -> list[Array]:
    """Return values, which may be traced, with copies on the host of those whose spec is that of a number on the host."""
    pairs = zip(values, specs)
    return [
        array_to_host(x) if spec.arrays is None and is_device_array(getval(x)) and x.shape == spec.shape else x
        for x, spec in pairs
    ]


def _to_host_vjp(ans: Array, x: Array) -> Function:
    arrays = arrays_of(getval(x))
    if arrays is None:
        return lambda g: g
    return lambda g: g if arrays_of(getval(g)) is not None else array_to_device(g, arrays)


# The copy to the host and the copy to the device are transposes of each other.
defvjp(array_to_device, lambda ans, x, arrays: lambda g: g if arrays_of(getval(g)) is None else array_to_host(g))
defvjp(array_to_host, _to_host_vjp)
defjvp(array_to_device, lambda g, ans, x, arrays: array_to_device(g, arrays))
defjvp(array_to_host, lambda g, ans, x: array_to_host(g))
