"""`Snapshots`: the stored states of a loop, in memory or in a file, optionally compressed; checksums of states."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.compiling.cache import functions_of
from mpiad.device import to_host
from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.transport.devices.device_arrays import ArrayModule, arrays_of

# Fields in 16 bits per entry: values are rounded to multiples of a step, and differences of neighbors are stored.
#
# If the values themselves were rounded to 16 bits, finite differences of the field would magnify the rounding errors: for a
# wave with 25 cells per wavelength, the gradient would be accurate only to 1e-3. The differences of a smooth field are
# small, so 16 bits suffice for a smaller step. Integers are added and subtracted exactly, so for differences of any order
# the error is at most half a step. The order that allows the smallest step is chosen.
#
# Large fields are processed by compiled loops, with bitwise equal results.
#
# References
# ----------
# .. [1] L. Ibarria, P. Lindstrom, J. Rossignac and A. Szymczak, "Out-of-core compression and decompression of large
#    n-dimensional scalar fields", Comput. Graph. Forum 22 (2003): the Lorenzo predictor, here of any order.
# .. [2] S. Di and F. Cappello, "Fast error-bounded lossy HPC data compression with SZ", IPDPS 2016.
# .. [3] N. Kukreja et al., "Lossy checkpoint compression in full waveform inversion", Geosci. Model Dev. 15 (2022).

SMALLEST = 256  # smallest number of entries for which compression is worthwhile
# The largest difference that fits into 16 bits. If the largest difference of a field is below _FULL, the step is reduced.
_LARGEST, _FULL = 32767, 10000
_HIGHEST = 4  # highest order of differences
_RANGE = 2.0**24  # ratio of the largest entry to the smallest step, for the accuracy of single precision
_NEAR = 8  # the order is chosen from cells up to this distance from the largest entry


class Coded(NamedTuple):
    """An array coded in 16 bits per entry."""

    differences: np.ndarray  # int16; for a complex array, the last axis has real and imaginary parts
    # int32; the first entries along all axes, which have no differences of this order, and may need more than 16 bits
    corner: np.ndarray
    step: float
    # Order of the differences along the first axis. The first `order` layers, which have no such differences, are coded by
    # differences along the second axis; the first entries along both axes by differences along the third axis, and so on.
    order: int
    relative: bool  # whether the difference from the preceding leaf of the same state is coded

    def array(self, dtype: np.dtype, before: np.ndarray | None) -> np.ndarray:
        """Return the array, with an error of at most half a step per entry; `before` is the preceding leaf."""
        differences, kind = self.differences, np.finfo(dtype).dtype
        entries, axes = np.empty(differences.shape, kind), _axes(differences.ndim, dtype)
        if _pays_off(entries):
            head = differences[: max(self.order, 1)].astype(np.int32)
            self._add_up(head, axes)
            first_rows, ring, weights = head.astype(float).reshape(-1), np.zeros(_RING), _weights(self.order)
            rows = len(head), entries[0].size
            _functions()[1](differences.reshape(-1), self.step, weights, *rows, first_rows, ring, entries.reshape(-1))
        else:
            numbers = differences.astype(np.int32)
            self._add_up(numbers, axes)
            np.multiply(numbers, self.step, out=entries)
        if self.relative and before is not None:
            entries += _real(before)
        return entries.view(dtype)[..., 0] if dtype.kind == "c" else entries

    def _add_up(self, numbers: np.ndarray, axes: range) -> None:
        """Convert differences to multiples of the step."""
        numbers[_corner(self.order, axes)] = self.corner
        for axis in reversed(axes):
            part = np.moveaxis(numbers[_corner(self.order, range(axis))], axis, 0)
            for k in range(self.order, 0, -1):
                np.cumsum(part[k - 1 :], 0, out=part[k - 1 :])


def coded(array: np.ndarray, before: np.ndarray | None = None) -> Coded | None:
    """Return an array, or its difference from a similar array `before`, in 16 bits per entry; None if it isn't finite."""
    entries = field = _real(array)
    axes = _axes(entries.ndim, array.dtype)
    (index, largest), relative = _largest(entries), False
    if before is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            change = entries - _real(before)
        index_of_change, largest_change = _largest(change)
        if largest_change <= 0.5 * largest:
            field, index, largest, relative = change, index_of_change, largest_change, True
    if not np.isfinite(largest):
        return None
    if largest < np.finfo(float).tiny * _RANGE:
        return Coded(
            np.zeros(entries.shape, np.int16), np.zeros_like(entries[_corner(0, axes)], np.int32), 0.0, 0, relative
        )
    step, order = _best_order(field, index, largest / _RANGE)
    take = _by_compiled_passes if _pays_off(field) else _by_numpy
    while True:
        numbers, corner, largest_difference = take(field, step, order, axes)
        is_smallest = step <= largest / _RANGE
        if largest_difference <= _LARGEST and (largest_difference >= _FULL or is_smallest):
            return Coded(numbers.astype(np.int16, copy=False), corner, step, order, relative)
        # The factor 0.9 is a margin, since the rounding to integers may increase the differences.
        step = max(step * max(largest_difference, 1) / (0.9 * _LARGEST), largest / _RANGE)


def _by_compiled_passes(field: np.ndarray, step: float, order: int, axes: range) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the result of `_by_numpy`, computed by a compiled loop except for the first few rows."""
    numbers, rows = np.empty(field.shape, np.int16), max(order, 1)
    largest, ring, flat, width = np.zeros(1, np.int64), np.zeros(_RING), numbers.reshape(-1), field[0].size
    _functions()[0](field.reshape(-1), 1.0 / step, _weights(order), order, width, ring, flat, largest)
    numbers[:rows], corner, first_largest = _by_numpy(field[:rows], step, order, axes)
    return numbers, corner, max(int(largest[0]), first_largest)


def _by_numpy(field: np.ndarray, step: float, order: int, axes: range) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the differences, `Coded.corner`, and the largest difference, which may exceed 16 bits."""
    # The reciprocal of a small step may overflow in single precision.
    scaled = field * (np.float64(1.0 / step) if step < np.finfo(field.dtype).tiny else 1.0 / step)
    numbers = np.rint(scaled, out=scaled).astype(np.int32)
    for axis in axes:
        part = np.moveaxis(numbers[_corner(order, range(axis))], axis, 0)
        for k in range(1, order + 1):
            part[k:] -= part[k - 1 : -1]
    corner = numbers[_corner(order, axes)].copy()
    numbers[_corner(order, axes)] = 0
    return numbers, corner, int(max(numbers.max(), -numbers.min()))


def _largest(field: np.ndarray) -> tuple[np.intp, float]:
    """Return index, in the flat array, and size of the entry with the largest absolute value; NaN if any entry is NaN."""
    index = max(field.argmax(), field.argmin(), key=lambda k: abs(field.flat[k]))
    return index, float(abs(field.flat[index]))


def _best_order(field: np.ndarray, index: np.intp, min_step: float) -> tuple[float, int]:
    """Estimate, near the largest entry, the smallest step (at least `min_step`) and the order of differences for it."""
    sample = field[tuple(slice(max(k - _NEAR, 0), k + _NEAR) for k in np.unravel_index(index, field.shape))]
    steps = []
    for order in range(min(_HIGHEST + 1, len(sample))):
        sample = np.diff(sample, axis=0) if order else sample
        # The factor 1.5 is a margin, since differences may be larger elsewhere.
        steps.append((max(1.5 * float(np.abs(sample).max()) / (_LARGEST - 2**order), min_step), order))
    return min(steps)


def _real(array: np.ndarray) -> np.ndarray:
    """Return a real view of an array; for a complex array, the last axis has real and imaginary parts."""
    entries = np.require(array, None, ["C", "A", "W"])
    return entries[..., None].view(np.finfo(array.dtype).dtype) if array.dtype.kind == "c" else entries


def _corner(order: int, axes: range) -> tuple[slice, ...]:
    return (slice(max(order, 1)),) * len(axes)


def _axes(ndim: int, dtype: np.dtype) -> range:
    return range(ndim - (dtype.kind == "c"))


# Compiled loops that convert fields to 16 bits per entry and back.
#
# Each loop reads the field once. NumPy would read the field a dozen times, which takes as long as one or two time steps of
# a wave equation. The loops are written in the kernel language (see `mpiad.compiling.translation`), and compiled from the
# source code of this file. A field consists of rows of `width` entries. The loops process a field in blocks of
# columns: a ring buffer, which fits into the cache, contains the last eight rounded rows of a block, from which differences
# are computed.
#
# Integers are represented exactly, by doubles. Adding 1.5 * 2^52 = 6755399441055744 rounds a double to the nearest
# integer, with ties to even as in NumPy. The bits of the sum, minus 0x4338000000000000 (the bits of 1.5 * 2^52), are equal
# to this integer. The addition is used because few processors have vector instructions for the conversion.

# Minimum numbers of entries of a field and of a row. For smaller fields compilation (half a second) takes too long.
_MIN_ENTRIES, _MIN_WIDTH = 1 << 16, 32
_RING = 8 * 512  # entries of the ring buffer: eight rows of a block


def _pays_off(field: np.ndarray) -> bool:
    """Return whether the compiled loops are faster than NumPy for a field."""
    return field.dtype == np.float64 and field.size >= _MIN_ENTRIES and field[0].size >= _MIN_WIDTH


def _weights(order: int) -> np.ndarray:
    """Return the coefficients of the four preceding numbers in the backward difference of the given order."""
    return np.array([(-1.0) ** k * comb(order, k) for k in range(1, 5)])


@functools.cache
def _functions() -> tuple:
    vector, numbers = "float64[::1]", "int64[::1]"
    signatures = {
        "differences_of_rows": f"void({vector}, float64, {vector}, int64, int64, {vector}, int16[::1], {numbers})",
        "sums_of_rows": f"void(int16[::1], float64, {vector}, int64, int64, {vector}, {vector}, {vector})",
    }
    return tuple(functions_of(__name__, signatures))


def differences_of_rows(
    field: np.ndarray, inverse: float, weights: np.ndarray, order: int, width: int, ring: np.ndarray, out: np.ndarray,
    largest: np.ndarray,
) -> None:  # fmt: skip
    """Round rows to multiples of a step, and write their differences."""
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    maximum = 0
    for start in range(0, width, 512):
        n, row = min(512, width - start), 0
        for begin in range(start, field.size, width):
            k = 512 * (row & 7)
            rounded = ring[k : k + n]
            a = field[begin : begin + n]
            for i in range(n):
                rounded[i] = a[i] * inverse + 6755399441055744.0 - 6755399441055744.0
            if row >= order:
                i, j, k, m = 512 * ((row - 1) & 7), 512 * ((row - 2) & 7), 512 * ((row - 3) & 7), 512 * ((row - 4) & 7)
                c, d, e, f = ring[i : i + n], ring[j : j + n], ring[k : k + n], ring[m : m + n]
                target = out[begin : begin + n]
                for i in range(n):
                    difference = rounded[i] + u * c[i] + v * d[i] + w * e[i] + x * f[i]
                    bits = bits_of(difference + 6755399441055744.0)  # type: ignore  # noqa: F821
                    target[i] = bits
                    maximum = max(maximum, abs(bits - 0x4338000000000000))
            row += 1
    largest[0] = maximum


def sums_of_rows(
    differences: np.ndarray, step: float, weights: np.ndarray, order: int, width: int, head: np.ndarray, ring: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Write the field with given differences and first rows."""
    u, v, w, x = weights[0], weights[1], weights[2], weights[3]
    for start in range(0, width, 512):
        n, row = min(512, width - start), 0
        for begin in range(start, out.size, width):
            k = 512 * (row & 7)
            rounded = ring[k : k + n]
            if row < order:
                first_row = head[begin : begin + n]
                for i in range(n):
                    rounded[i] = first_row[i]
            else:
                i, j, k, m = 512 * ((row - 1) & 7), 512 * ((row - 2) & 7), 512 * ((row - 3) & 7), 512 * ((row - 4) & 7)
                c, d, e, f = ring[i : i + n], ring[j : j + n], ring[k : k + n], ring[m : m + n]
                coded = differences[begin : begin + n]
                for i in range(n):
                    rounded[i] = coded[i] - (u * c[i] + v * d[i] + w * e[i] + x * f[i])
            target = out[begin : begin + n]
            for i in range(n):
                target[i] = rounded[i] * step
            row += 1


_SINGLE = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}


def copy_of(leaf: Array) -> Array:
    """Return a copy of an array on the same device; numbers are returned unchanged."""
    arrays = arrays_of(leaf)
    if arrays is not None:
        return arrays.copy(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


# Checksums of states: a step that is repeated in the gradient must have the result of the forward run.
#
# A checksum contains sums of consecutive entries with weights of random signs. Unlike plain sums, these random projections
# have the size of the entries also if the entries cancel, and change if entries are permuted. They are compared up to the
# square root of the relative precision, since results of compiled and interpreted steps, of iterative solvers, and of steps
# from rounded states differ. Small leaves are copied instead, which is as fast. Of a large state a sixteenth of the sums is
# compared after a step, others after the next step: a step that isn't reproducible differs each time that it is repeated,
# and all sums would take 10% of the time of a gradient of compiled steps. Device arrays are summed and compared on the
# device.

_SHORTEST, _LONGEST = 32, 1024  # the number of entries in a sum
_FEWEST, _PARTS = 64, 16  # the number of sums, and of parts of a large leaf


def checksum(leaf: Array, step: int | None = None) -> Array:
    """Return the checksum of a leaf after a step, by default of all entries; for a small leaf it is a copy."""
    size = getattr(leaf, "size", 1)
    if size < _FEWEST * _SHORTEST:
        return copy_of(leaf)
    length = min(max(size // (_FEWEST * _PARTS), _SHORTEST), _LONGEST)
    entries, count, signs = leaf.reshape(-1), leaf.size // length, _signs(length, leaf.dtype, arrays_of(leaf))
    sums_of_part = count if step is None else max(-(-count // _PARTS), _FEWEST)
    first = (step or 0) * sums_of_part % count
    rows, rest = entries[: count * length].reshape(count, 1, length), entries[count * length :]
    with np.errstate(all="ignore"):
        # A batch of dot products: BLAS runs them in one thread, and so doesn't wait for the cores of other ranks.
        sums = (rows[first : first + sums_of_part] @ signs)[:, 0, 0]
        sums[:1] += rest @ signs[: rest.size]
    return sums


def checksums(entries: Array, first: int | None) -> Sequence[Array]:
    """Return the checksums of the entries, leaves after the steps first, ..., or whole ones; small ones are unchanged."""
    if entries.size < _FEWEST * _SHORTEST * len(entries):
        return entries
    return [checksum(leaf, None if first is None else first + k) for k, leaf in enumerate(entries)]


@functools.lru_cache(16)
def _signs(length: int, dtype: np.dtype, arrays: ArrayModule | None) -> Array:
    """Return weights between 0.5 and 1.5 with random signs, shape (length, 1)."""
    rng = np.random.default_rng(0)
    weights = (rng.uniform(0.5, 1.5, (length, 1)) * rng.choice([-1.0, 1.0], (length, 1))).astype(dtype)
    return weights if arrays is None else arrays.to_device(weights)


class Packed(NamedTuple):
    """A stored leaf of a state."""

    arrays: list[Array]  # the leaf, or `differences` and `corner` of its coded form
    dtype: Any = None  # the leaf's dtype, if the stored dtype is smaller
    code: tuple[float, int, bool] | None = None  # `step`, `order` and `relative` of its coded form
    device: ArrayModule | None = None  # the leaf's device, if it is stored on the host or in a file

    def leaf(self, before: Array | None) -> Array:
        """Return the leaf in its original dtype; `before` is the preceding leaf of the same state."""
        if self.code is not None:
            return Coded(self.arrays[0], self.arrays[1], *self.code).array(self.dtype, before)
        return self.arrays[0] if self.dtype is None else self.arrays[0].astype(self.dtype)


def _packed(leaf: Array, before: Array | None, schedule: CheckpointSchedule) -> Packed:
    """Return a leaf in its stored form: the leaf itself, or a smaller copy; only leaves on the host are compressed."""
    dtype = getattr(leaf, "dtype", None)
    if schedule.compress and isinstance(leaf, np.ndarray) and leaf.size >= SMALLEST:
        similar = isinstance(before, np.ndarray) and (before.shape, before.dtype) == (leaf.shape, leaf.dtype)
        code = coded(leaf, before if similar else None)
        if code is not None:
            return Packed([code.differences, code.corner], dtype, code[2:])
    if schedule.dtype is not None and dtype in _SINGLE:
        # Overflow is an error, since infinities would make the gradient NaN.
        with np.errstate(over="raise"):
            return Packed([leaf.astype(_SINGLE[dtype])], dtype)
    return Packed([leaf])


class Snapshots:
    """The stored states of one loop. A state is identified by the number of steps before it."""

    def __init__(self, schedule: CheckpointSchedule):
        self._schedule = schedule
        self._memory: dict[int, list[Packed]] = {}
        # States in the file: offset, and leaves without arrays. They form a stack, so a new state begins at `_end`.
        self._on_disk: dict[int, tuple[int, list[Packed]]] = {}
        self._file: Any = None
        self._end = 0

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def shared(self) -> Snapshots:
        """Return another object with the same states in memory; those on disk can't be shared."""
        other = Snapshots(self._schedule)
        other._memory = dict(self._memory)
        return other

    def keep(self, number: int, state: Sequence[Array], on_disk: bool, is_constant: bool) -> None:
        """Store a state, a copy unless it `is_constant`; raise an OSError, or a FloatingPointError for float32 overflow."""
        moved = self._schedule.host or self._schedule.compress or on_disk
        devices = [arrays_of(leaf) if moved else None for leaf in state]
        arrays = [leaf if device is None else to_host(leaf) for leaf, device in zip(state, devices)]
        try:
            # Each leaf may be coded relative to the preceding leaf: the two fields of a wave, for example, are similar.
            leaves = [_packed(leaf, before, self._schedule) for leaf, before in zip(arrays, [None, *arrays])]
        except FloatingPointError as error:
            raise FloatingPointError(
                f"timestepping.scan: the state before step {number} has entries beyond {np.finfo(np.float32).max:.2e}, "
                "which don't fit into CheckpointSchedule(dtype='float32'). Scale the state, or omit dtype."
            ) from error
        leaves = [item if device is None else item._replace(device=device) for item, device in zip(leaves, devices)]
        if on_disk:
            self._on_disk[number] = self._written(number, leaves)
        else:
            # Uncompressed leaves are copied, since a step may return the same buffer each time.
            self._memory[number] = [
                item._replace(arrays=[copy_of(leaf)]) if item.arrays[0] is leaf and not is_constant else item
                for item, leaf in zip(leaves, state)
            ]

    def state(self, number: int, last: bool) -> list[Array]:
        """Return a stored state; release it if `last`."""
        if number in self._memory:
            stored = self._memory.pop(number) if last else self._memory[number]
        else:
            offset, leaves = self._on_disk.pop(number) if last else self._on_disk[number]
            self._file.seek(offset)
            stored = [
                item._replace(arrays=[np.load(self._file, allow_pickle=False) for _ in item.arrays]) for item in leaves
            ]
            self._end = offset if last else self._end
        state: list[Array] = []
        before = None
        for packed in stored:
            # A leaf may be coded as the difference from the preceding leaf.
            before = packed.leaf(before)
            state.append(before if packed.device is None else packed.device.to_device(before))
        return state

    def _written(self, number: int, leaves: Sequence[Packed]) -> tuple[int, list[Packed]]:
        """Write the arrays of a state to the file; return their offset, and the leaves without their arrays."""
        try:
            if self._file is None:
                # The file has no name, so that nothing of it remains, even if the process is killed.
                self._file = tempfile.TemporaryFile(dir=self._schedule.directory, buffering=0)
            offset = self._file.seek(self._end)
            for array in (array for packed in leaves for array in packed.arrays):
                np.save(self._file, array, allow_pickle=False)
            self._end = self._file.tell()
        except OSError as error:
            folder = os.fspath(self._schedule.directory or tempfile.gettempdir())
            text = (
                f"timestepping.scan: the state before step {number} can't be written in {folder}: {error.strerror or error}"
            )
            raise OSError(error.errno, f"{text}. Choose another folder with CheckpointSchedule(directory=...).") from error
        return offset, [packed._replace(arrays=[None] * len(packed.arrays)) for packed in leaves]
