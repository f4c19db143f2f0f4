"""Operations on the vectors of several systems, and checks that all are on the host, or all on one device.

*Rows* are arrays of shape (k, n), on the host or on a device, with one row per system. *Numbers*, one per row, are always
on the host; numbers that are computed on a device are copied once per reduction.
"""

from __future__ import annotations

import cmath
import math
import operator
from collections.abc import Callable

import numpy as np

from mpiad._typing import Array, LocalArray
from mpiad.transport.core.buffers import conversion
from mpiad.transport.devices.device_arrays import arrays_of, is_array, is_device_array, named
from mpiad.transport.resources import combination, vdot, vdots


def on_device_of(rows: LocalArray, numbers: np.ndarray) -> Array:
    """Return numbers as an array on the host or device of the rows, in the rows' dtype or a wider dtype."""
    xp = arrays_of(rows)
    return numbers if xp is None else xp.to_device(np.ascontiguousarray(numbers, np.result_type(numbers, rows.dtype)))


def column(rows: LocalArray, numbers: np.ndarray) -> Array:
    """Return numbers in a shape that broadcasts with the rows; a single number is not copied to the device."""
    if arrays_of(rows) is not None and len(numbers) == 1:
        return rows.dtype.type(numbers[0])
    return on_device_of(rows, numbers).reshape(-1, *[1] * (rows.ndim - 1))


def on_host(x: Array) -> np.ndarray:
    """Return an untraced array on the host; an array on a device is copied."""
    xp = arrays_of(x)
    return x if xp is None else xp.to_host(x)


def is_nearly_real(sums: np.ndarray) -> Array:
    """Return, for each column of sums, whether the imaginary parts are at most effects of rounding."""
    if sums.dtype.kind != "c":
        return True
    return (np.abs(np.imag(sums)) <= 1e-3 * np.abs(sums)).all(axis=0)


def inner(*pairs: tuple[LocalArray, LocalArray]) -> np.ndarray:
    """Return this rank's part of inner products x* y of pairs (x, y) of rows (k, n); shape (len(pairs), k)."""
    if all(type(x) is np.ndarray for x, _ in pairs):
        return np.array([[vdot(one, other) for one, other in zip(x, y)] for x, y in pairs])
    return on_host(np.stack([np.vdot(x[c], y[c]) for x, y in pairs for c in range(len(x))])).reshape(len(pairs), -1)


def products(basis: LocalArray, v: LocalArray) -> np.ndarray:
    """Return this rank's part of inner products x* v, for j vectors x per system (j, k, n) and v (k, n); shape (k, j)."""
    if type(basis) is np.ndarray:
        out = np.empty((len(v), len(basis)), basis.dtype)
        for c in range(len(v)):
            out[c] = vdots(basis[:, c], v[c])
        return out
    return on_host(products_there(basis, v))


def products_there(basis: LocalArray, v: LocalArray) -> Array:
    """Return `products` on the device of the vectors."""
    basis = basis.swapaxes(0, 1)
    return ((basis.conj() if basis.dtype.kind == "c" else basis) @ v[:, :, None])[:, :, 0]


def combined(basis: LocalArray, numbers: np.ndarray) -> LocalArray:
    """Return the linear combination of the vectors (j, k, n) of each system with coefficients (k, j); shape (k, n)."""
    numbers = numbers.astype(basis.dtype, copy=False)
    if type(basis) is np.ndarray:
        out = np.empty(basis.shape[1:], basis.dtype)
        for c in range(len(out)):
            combination(numbers[c], basis[:, c], out=out[c])
        return out
    return (on_device_of(basis, numbers)[:, None] @ basis.swapaxes(0, 1))[:, 0]


_SMALL = 1e-250  # sums of squares that are larger are hardly affected by underflow


def lengths(x: LocalArray) -> list[float]:
    """Return the norm of this rank's part of each row, even if squares overflow or underflow."""
    if not x.shape[1]:
        return [0.0] * len(x)
    if type(x) is np.ndarray:
        wide = x if x.dtype.char in "dD" else x.astype(np.result_type(x.dtype, float))
        squares = [float(vdot(row, row).real) for row in wide]
        # Squares of single-precision numbers neither overflow nor underflow in double precision.
        if x.dtype.char in "fF" or all(_SMALL < square < 1.0 / _SMALL for square in squares):
            return [math.sqrt(square) for square in squares]
    size = np.abs(x).astype(float)
    largest = np.max(size, axis=1)
    usable = (largest > 0.0) & np.isfinite(largest)
    scaled = size / np.where(usable, largest, 1.0)[:, None]
    return on_host(np.where(usable, largest, 1.0) * np.sqrt(np.sum(scaled * scaled, axis=1))).tolist()


# Loops over Python numbers: for the few numbers of an iteration, NumPy's reductions take several times as long.


def are_finite(numbers: np.ndarray) -> bool:
    """Return whether all of a few numbers on the host are finite."""
    return all(map(cmath.isfinite, numbers.ravel().tolist()))


def are_within(numbers: np.ndarray, bounds: np.ndarray) -> bool:
    """Return whether each of a few numbers on the host is at most its bound."""
    return all(map(operator.le, numbers.tolist(), bounds.tolist()))


# All arrays of a call must be on the host, or all on one device, since arguments are never copied implicitly. For SciPy's
# factorizations, `through_host` copies the arguments and results.


def require_block(call: str, name: str, x: Array) -> None:
    """Raise a TypeError unless an untraced argument is an array of single- or double-precision numbers."""
    if not is_array(x) or x.dtype.char not in "fdFD" or not x.dtype.isnative:
        kind = f"dtype {x.dtype}. {conversion(x.dtype, name) or 'Convert it.'}" if is_array(x) else f"{type(x).__name__}."
        allowed = "an array of dtype float32, float64, complex64 or complex128, this rank's block"
        raise TypeError(f"{call}: {name} must be {allowed}, but got {kind}")


def require_on_host(call: str, name: str, x: Array) -> None:
    """Raise a TypeError if an untraced argument is on a device."""
    if is_device_array(x):
        raise TypeError(f"{call} works on the host, but {name} is {named(x)}: copy it with mpiad.device.to_host.")


def require_together(call: str, **values: Array) -> None:
    """Raise a TypeError unless all untraced arrays are on the host, or all on one device; numbers are ignored."""
    arrays = [(name, value) for name, value in values.items() if is_device_array(value) or np.ndim(value)]
    for name, value in arrays:
        first, other = arrays[0]
        kinds = arrays_of(value), arrays_of(other)
        # A compiled program that is traced takes host arrays beside traced ones.
        if kinds[0] != kinds[1] and not any(kind is not None and kind.takes_host_arrays for kind in kinds):
            one, two = (named(x) if is_device_array(x) else f"{type(x).__name__} on the host" for x in (other, value))
            raise TypeError(
                f"{call}: {first} and {name} must be on one device, but {first} is {one} and {name} {two}. Copies are "
                "never implicit: see mpiad.device.to_device and to_host."
            )


def through_host(solve: Callable[[LocalArray], LocalArray], r: LocalArray) -> LocalArray:
    """Apply a function of host arrays to an untraced array; return the result on the host or device of that array."""
    xp = arrays_of(r)
    return solve(r) if xp is None else xp.to_device(solve(xp.to_host(r)))
