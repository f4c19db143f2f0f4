"""`Snapshots`: the stored states of a loop, in memory or in files, optionally compressed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.device import to_host
from mpiad.timestepping import compiled_coding
from mpiad.timestepping.checkpoints import CheckpointSchedule
from mpiad.transport.devices.device_arrays import arrays_of

# Fields in 16 bits per entry: values are rounded to multiples of a step, and differences of neighbors are stored.
#
# If the values themselves were rounded to 16 bits, finite differences of the field would magnify the rounding errors: for a
# wave with 25 cells per wavelength, the gradient would be accurate only to 1e-3. The differences of a smooth field are
# small, so 16 bits suffice for a smaller step. Integers are added and subtracted exactly, so for differences of any order
# the error is at most half a step. The order that allows the smallest step is chosen.
#
# Large fields are processed by compiled loops, with bitwise equal results: see `compiled_coding`.
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
_WIDE = 2000  # smallest number of entries per layer for which layers are added one by one
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
        before = _real(before) if self.relative and before is not None else None
        if compiled_coding.pays_off(kind, differences.size, differences.size // len(differences)):
            head = differences[: max(self.order, 1)].astype(np.int32)
            self._add_up(head, axes)
            weights = compiled_coding.weights(self.order)
            compiled_coding.write_sums(differences, before, self.step, weights, head.astype(float), entries)
        else:
            numbers = differences.astype(np.int32)
            self._add_up(numbers, axes)
            np.multiply(numbers, self.step, out=entries)
            if before is not None:
                entries += before
        return entries.view(dtype)[..., 0] if dtype.kind == "c" else entries

    def _add_up(self, numbers: np.ndarray, axes: range) -> None:
        """Convert differences to multiples of the step."""
        numbers[_corner(self.order, axes)] = self.corner
        for axis in reversed(axes):
            part = np.moveaxis(numbers[_corner(self.order, range(axis))], axis, 0)
            for k in range(self.order, 0, -1):
                _accumulate(part[k - 1 :])


def coded(array: np.ndarray, before: np.ndarray | None = None) -> Coded | None:
    """Return an array, or its difference from a similar array `before`, in 16 bits per entry; None if it isn't finite."""
    entries = _real(array)
    axes = _axes(entries.ndim, array.dtype)
    before = None if before is None else _real(before)
    compiled = compiled_coding.pays_off(entries.dtype, entries.size, entries.size // len(entries))
    with np.errstate(over="ignore", invalid="ignore"):
        row_maxima, changes = (compiled_coding.row_maxima if compiled else _row_maxima)(
            entries, entries if before is None else before
        )
    relative = before is not None and float(changes.max()) <= 0.5 * float(row_maxima.max())
    if not relative:
        before = None
    largest = float((changes if relative else row_maxima).max())
    if not np.isfinite(largest):
        return None
    if largest < np.finfo(float).tiny * _RANGE:
        return Coded(
            np.zeros(entries.shape, np.int16), np.zeros_like(entries[_corner(0, axes)], np.int32), 0.0, 0, relative
        )
    step, order = _best_order(entries, before, int(np.argmax(changes if relative else row_maxima)), largest / _RANGE)
    take = _by_compiled_passes if compiled else _by_numpy
    while True:
        numbers, corner, largest_difference = take(entries, before, step, order, axes)
        is_smallest = step <= largest / _RANGE
        if largest_difference <= _LARGEST and (largest_difference >= _FULL or is_smallest):
            return Coded(numbers.astype(np.int16, copy=False), corner, step, order, relative)
        # The factor 0.9 is a margin, since the rounding to integers may increase the differences.
        step = max(step * max(largest_difference, 1) / (0.9 * _LARGEST), largest / _RANGE)


def _by_compiled_passes(
    entries: np.ndarray, before: np.ndarray | None, step: float, order: int, axes: range
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the result of `_by_numpy`, computed by compiled loops except for the first few rows."""
    numbers, rows = np.empty(entries.shape, np.int16), max(order, 1)
    largest = compiled_coding.write_differences(entries, before, step, compiled_coding.weights(order), numbers)
    first, corner, first_largest = _by_numpy(entries[:rows], None if before is None else before[:rows], step, order, axes)
    numbers[:rows] = first
    return numbers, corner, max(largest, first_largest)


def _by_numpy(
    entries: np.ndarray, before: np.ndarray | None, step: float, order: int, axes: range
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the differences, `Coded.corner`, and the largest difference, which may exceed 16 bits."""
    scaled = (entries if before is None else entries - before) * (1.0 / step)
    numbers = np.rint(scaled, out=scaled).astype(np.int32)
    for axis in axes:
        part = np.moveaxis(numbers[_corner(order, range(axis))], axis, 0)
        for k in range(1, order + 1):
            part[k:] -= part[k - 1 : -1]
    corner = numbers[_corner(order, axes)].copy()
    numbers[_corner(order, axes)] = 0
    return numbers, corner, int(max(numbers.max(), -numbers.min()))


def _row_maxima(field: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return each row's maximum absolute value, and its maximum change from `before`; NaN if the row contains NaN."""
    sizes = np.abs(field), np.abs(field - before)
    return tuple(size.reshape(len(field), -1).max(1) if field.ndim > 1 else size for size in sizes)


def _best_order(entries: np.ndarray, before: np.ndarray | None, row: int, min_step: float) -> tuple[float, int]:
    """Estimate, near the largest entry, the smallest step (at least `min_step`) and the order of differences for it."""
    largest_row = np.abs(entries[row] if before is None else entries[row] - before[row])
    index = row, *np.unravel_index(np.argmax(largest_row), largest_row.shape)
    nearby = tuple(slice(max(k - _NEAR, 0), k + _NEAR) for k in index)
    sample = entries[nearby] if before is None else entries[nearby] - before[nearby]
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


def _accumulate(layers: np.ndarray) -> None:
    if layers.size < _WIDE * len(layers):
        np.cumsum(layers, 0, out=layers)
    else:  # adding layer by layer is faster than NumPy's sums across rows
        for k in range(1, len(layers)):
            layers[k] += layers[k - 1]


def _corner(order: int, axes: range) -> tuple[slice, ...]:
    return (slice(max(order, 1)),) * len(axes)


def _axes(ndim: int, dtype: np.dtype) -> range:
    return range(ndim - (dtype.kind == "c"))


_SINGLE = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}


def own(leaf: Array) -> Any:
    """Return a copy of an array on the same device; numbers are returned unchanged."""
    arrays = arrays_of(leaf)
    if arrays is not None:
        return arrays.copy(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


class Packed(NamedTuple):
    """A stored leaf of a state."""

    arrays: list[Any]  # the leaf, or `differences` and `corner` of its coded form
    dtype: Any = None  # the leaf's dtype, if the stored dtype is smaller
    code: tuple[float, int, bool] | None = None  # `step`, `order` and `relative` of its coded form
    device: Any = None  # the leaf's device, if it is stored on the host or in a file

    def leaf(self, before: Any) -> Any:
        """Return the leaf in its original dtype; `before` is the preceding leaf of the same state."""
        if self.code is not None:
            return Coded(self.arrays[0], self.arrays[1], *self.code).array(self.dtype, before)
        return self.arrays[0] if self.dtype is None else self.arrays[0].astype(self.dtype)


def _packed(leaf: Array, before: Any, schedule: CheckpointSchedule) -> Packed:
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
        self._files: dict[int, tuple[str, list[Packed]]] = {}  # file name, and leaves without arrays
        self._folder: tempfile.TemporaryDirectory | None = None

    def shared(self) -> Snapshots:
        """Return another object with the same states in memory; states in files can't be shared."""
        other = Snapshots(self._schedule)
        other._memory = dict(self._memory)
        return other

    def keep(self, number: int, state: Sequence[Array], on_disk: bool) -> None:
        """Store a copy of a state; raise an OSError, or a FloatingPointError for an overflow in single precision."""
        moved = self._schedule.host or self._schedule.compress
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
        leaves = [item._replace(device=device) for item, device in zip(leaves, devices)]
        if on_disk:
            self._files[number] = self._written(number, leaves)
        else:
            # Uncompressed leaves are copied, since a step may return the same buffer each time.
            self._memory[number] = [
                item._replace(arrays=[own(leaf)]) if item.arrays[0] is leaf else item for item, leaf in zip(leaves, state)
            ]

    def state(self, number: int, last: bool) -> list[Array]:
        """Return a stored state; release it if `last`."""
        if number in self._memory:
            stored = self._memory.pop(number) if last else self._memory[number]
        else:
            stored = self._read(*(self._files.pop(number) if last else self._files[number]), last)
        leaves: list[Any] = []
        before = None
        for packed in stored:
            # A leaf may be coded as the difference from the preceding leaf.
            before = packed.leaf(before)
            leaves.append(before if packed.device is None else packed.device.to_device(before))
        return leaves

    def _read(self, name: str, leaves: Sequence[Packed], last: bool) -> list[Packed]:
        with open(name, "rb") as file:
            read = [packed._replace(arrays=[np.load(file, allow_pickle=False) for _ in packed.arrays]) for packed in leaves]
        if last:
            os.remove(name)
        return read

    def _written(self, number: int, leaves: Sequence[Packed]) -> tuple[str, list[Packed]]:
        """Write the arrays of a state to a file; return the file's name, and the leaves without their arrays."""
        try:
            if self._folder is None:
                # The folder is removed with this object, even if no gradient is computed.
                self._folder = tempfile.TemporaryDirectory(prefix="mpiad-steps-", dir=self._schedule.directory)
            name = os.path.join(self._folder.name, f"{number}.npy")
            with open(name, "wb") as file:
                for array in (array for packed in leaves for array in packed.arrays):
                    np.save(file, to_host(array), allow_pickle=False)
        except OSError as error:
            folder = self._folder.name if self._folder is not None else self._schedule.directory
            text = f"timestepping.scan: the state before step {number} can't be written in {folder}: {error.strerror}. "
            raise OSError(error.errno, f"{text}Choose another folder with CheckpointSchedule(directory=...).") from error
        devices = [packed.device or arrays_of(packed.arrays[0]) for packed in leaves]
        empty = [packed._replace(arrays=[None] * len(packed.arrays)) for packed in leaves]
        return name, [packed._replace(device=device) for packed, device in zip(empty, devices)]
