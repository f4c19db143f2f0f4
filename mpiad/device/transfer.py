"""Arrays from the host to a device and back: the only explicit transfers of a program's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval

from mpiad._typing import Array, Tree
from mpiad.device.selection import imported_cupy
from mpiad.pytrees import map_leaves
from mpiad.transport.device_arrays import ArrayModule, arrays_of
from mpiad.transport.tracing import tracing

# Arrays of the host that don't change, as indices and weights, and their copies on devices.


class Constants:
    """Arrays that are copied to a device when they are first used there, once.

    `*arrays`: on the host; nobody writes to them.
    """

    def __init__(self, *arrays: np.ndarray):
        self._arrays = arrays
        self._copies: dict[ArrayModule, tuple[Array, ...]] = {}

    def __reduce__(self) -> Any:
        # Without the copies, which other processes may have no device for.
        return Constants, self._arrays

    def like(self, x: Array) -> tuple[Array, ...]:
        """Return the arrays on the device of another one, which may be traced."""
        return self.on(arrays_of(getval(x)))

    def on(self, namespace: ArrayModule | None) -> tuple[Array, ...]:
        """Return the arrays on a device; unchanged if it is None."""
        if namespace is None:
            return self._arrays
        if namespace not in self._copies:
            # Once for each device: a gradient takes the same indices in every step.
            self._copies[namespace] = tuple(namespace.to_device(np.ascontiguousarray(array)) for array in self._arrays)
        return self._copies[namespace]


def to_device(x: Tree, device: int | None = None, *, like: Array = None) -> Tree:
    """Copy arrays to a device.

    Parameters
    ----------
    x : array, number or pytree of them
        On the host, traced or not; arrays already on a device are passed through. Strings and None stay as they are.
    device : int, optional
        Number of the GPU; by default the current one, which `select` chooses.
    like : device array, optional
        An array whose kind and device are used instead.

    Returns
    -------
    device array or pytree of them
        With the same dtypes and structure; numbers become arrays without axes.

    Raises
    ------
    ImportError
        If CuPy can't be loaded; the message says what to install.
    TypeError
        If an array has a dtype that devices don't support.

    Ranks
    -----
    Each rank for itself; nothing is communicated.

    Adjoint
    -------
    The cotangent is copied to the host; `to_host` is the transpose.
    """
    arrays = arrays_of(getval(like)) if like is not None else None
    found: list[ArrayModule] = [] if arrays is None else [arrays]

    def move(leaf: Array) -> Any:
        plain = getval(leaf)
        if tracing.recorder is not None:
            tracing.recorder.refuse("it copies arrays to a device, and only NumPy's are compiled yet")
        if plain is None or isinstance(plain, str) or arrays_of(plain) is not None:
            return leaf
        if not found:
            # Only at this point: a pytree that is already on a device needs no CuPy.
            cupy = imported_cupy("to_device")
            from mpiad.transport.cupy_arrays import on_device

            found.append(on_device(cupy.cuda.runtime.getDevice() if device is None else device))
        return array_to_device(leaf, found[0])

    return map_leaves(move, x)


def to_host(x: Tree) -> Tree:
    """Copy arrays to the host.

    Parameters
    ----------
    x : device array or pytree of them
        Traced or not; arrays already on the host are passed through.

    Returns
    -------
    array or pytree of them
        NumPy arrays of the same dtypes and structure; NumPy scalars for arrays without axes.

    Ranks
    -----
    Each rank for itself; nothing is communicated.

    Adjoint
    -------
    The cotangent is copied to the device that the array came from; `to_device` is the transpose.

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
    # A number travels with the call that makes an array of it.
    return arrays.to_device(host) if host.ndim else arrays.full((), host[()], host.dtype)


@primitive
def array_to_host(x: Array) -> Array:
    """Copy one device array to the host; one without axes becomes a NumPy scalar."""
    arrays = arrays_of(x)
    return x if arrays is None else arrays.to_host(x)[()]


def _to_device_vjp(ans: Array, x: Array, arrays: ArrayModule) -> Any:
    return lambda g: g if arrays_of(getval(g)) is None else array_to_host(g)


def _to_host_vjp(ans: Array, x: Array) -> Any:
    arrays = arrays_of(getval(x))
    if arrays is None:
        return lambda g: g  # already on the host, such as a cotangent of zeros
    return lambda g: g if arrays_of(getval(g)) is not None else array_to_device(g, arrays)


# The two are each other's transposes: the same linear map, the identity, between two memories.
defvjp(array_to_device, _to_device_vjp)
defvjp(array_to_host, _to_host_vjp)
defjvp(array_to_device, lambda g, ans, x, arrays: array_to_device(g, arrays))
defjvp(array_to_host, lambda g, ans, x: array_to_host(g))
