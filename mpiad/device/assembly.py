"""`concatenate`, `stack` and `array` for host and device arrays.

The functions of autograd.numpy with these names fail for device arrays, since they convert their arguments to NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.builtins import SequenceBox
from autograd.extend import defjvp_argnums, defvjp_argnum, primitive
from autograd.tracer import getval

from mpiad._typing import Array, Function, Tree
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of


@primitive
def joined(axis: int, *arrays: Array) -> Array:
    """Join device arrays along an axis."""
    return np.concatenate(arrays, axis)


def _joined_vjp(argnum: int, ans: Array, args: tuple, kwargs: dict) -> Function:
    axis, arrays = args[0], args[1:]
    start = sum(x.shape[axis] for x in arrays[: argnum - 1])
    lead = (slice(None),) * (axis % len(ans.shape))
    cut = (*lead, slice(start, start + arrays[argnum - 1].shape[axis]))
    real = ans.dtype.kind == "c" and arrays[argnum - 1].dtype.kind != "c"  # a real array among complex arrays
    return lambda g: anp.real(g[cut]) if real else g[cut]


def _joined_jvp(argnums: tuple, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    tangents = dict(zip(argnums, gs))
    return joined(args[0], *[tangents[k] if k in tangents else anp.zeros_like(args[k]) for k in range(1, len(args))])


defvjp_argnum(joined, _joined_vjp)
defjvp_argnums(joined, _joined_jvp)


def concatenate(arrays: Sequence[Array], axis: int | None = 0) -> Array:
    """Join arrays along an axis.

    Parameters
    ----------
    arrays : sequence of array
        Host arrays, or arrays on one device; they may be traced.
    axis : int or None
        Axis along which the arrays are joined; for None, the arrays are flattened first.

    Raises
    ------
    TypeError
        If some arrays are on the host and others on a device.

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    The cotangent is split into one part per array.
    """
    arrays = [anp.ravel(x) for x in arrays] if axis is None else list(arrays)
    axis = axis or 0
    if not _on_device(arrays, "concatenate"):
        return anp.concatenate(arrays, axis)
    # As in NumPy, the result is a new array even if only one array is given.
    return joined(axis, *arrays)


def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Join arrays of one shape along a new axis; see `concatenate`.

    Parameters
    ----------
    arrays : sequence of array
        Arrays of one shape, all on the host or on one device; they may be traced.
    axis : int
        Position of the new axis in the result.

    Raises
    ------
    TypeError
        If some arrays are on the host and others on a device.
    ValueError
        If the shapes differ.
    """
    arrays = list(arrays)
    if all(type(x) is np.ndarray for x in arrays):  # autograd's function takes several times as long
        return np.stack(arrays, axis)
    if not _on_device(arrays, "stack"):
        return anp.stack(arrays, axis)
    shapes = {x.shape for x in arrays}
    if len(shapes) > 1:
        raise ValueError(f"stack: all arrays must have the same shape, but got {sorted(shapes)}.")
    # The index None inserts the new axis: all array libraries and autograd's derivatives support this index.
    lead = (slice(None),) * (axis % (len(arrays[0].shape) + 1))
    return joined(len(lead), *[x[(*lead, None)] for x in arrays])


def array(values: Tree, *args: Any, **kwargs: Any) -> Array:
    """Make an array from nested lists, on the device if any element is a device array.

    Parameters
    ----------
    values : array, number, or nested lists and tuples of them
        All arrays are on the host, or all are on one device.
    *args, **kwargs
        Passed to `numpy.array` if all values are on the host; on a device only the dtype is used.

    Raises
    ------
    TypeError
        If host arrays and device arrays are mixed.

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    The cotangent of an element is the corresponding entry of the result's cotangent.
    """
    device = _device_in(values)
    if device is None:
        return anp.array(values, *args, **kwargs)
    dtype = args[0] if args else kwargs.get("dtype")
    # A copy, as in NumPy.
    result = _from_nested(values, device) if arrays_of(values) is None else device.copy(values)
    return result if dtype is None else result.astype(np.dtype(dtype))


def _from_nested(values: Tree, device: ArrayModule) -> Array:
    if isinstance(values, (list, tuple, SequenceBox)):
        return stack([_from_nested(values[i], device) for i in range(len(values))])
    if arrays_of(getval(values)) is None and np.ndim(getval(values)) == 0:
        # The product with a traced number is also traced.
        return values * device.full((), 1, np.result_type(getval(values)))
    return values[...]


def _device_in(values: Tree) -> ArrayModule | None:
    if not isinstance(values, (list, tuple, SequenceBox)):
        return arrays_of(getval(values))
    found = (_device_in(values[i]) for i in range(len(values)))
    return next((device for device in found if device is not None), None)


def _on_device(arrays: Sequence[Array], call: str) -> bool:
    """Return whether arrays are on a device; raise a TypeError if only some of them are."""
    device = _device_in(arrays)
    for k, x in enumerate(arrays):
        if device is not None and not device.takes_host_arrays and arrays_of(getval(x)) is None:
            raise TypeError(
                f"{call}: array {k} is a {type(getval(x)).__name__} on the host, but other arrays are on a device. "
                "Copies to a device are never implicit: pass mpiad.device.to_device(x)."
            )
    return device is not None
