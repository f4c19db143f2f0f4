"""Solves of a batch by kernels on a device, with tangents if needed, and the reverse sweep.

A solve records no steps. For an adjoint, the forward kernel runs again for one share of the trajectories after the other,
and records the steps, whose number the first run has determined; then the reverse kernel processes this share. Both runs
of the forward kernel use the same machine code, so they take the same steps.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Shape
from mpiad.ensemble.backends import EnsembleGPU
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.cuda.cuda_kernels import ROWS
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, kernel_spec_of
from mpiad.ensemble.compiled.kernel_texts import cuda_text
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.settings import Settings
from mpiad.transport.devices.device_arrays import (
    ArrayModule,
    DeviceKernel,
    Launcher,
    arrays_of,
    is_device_array,
    launcher_of,
)

# Size in bytes up to which the steps of a gradient are stored without asking for the free memory.
_MOST_UNASKED = 1 << 28
# The number of transfers from the host whose copies are used again, and the largest number of bytes of one of them.
_MOST_COPIES, _MOST_COPIED = 64, 4096


_ROWS = 1024  # number of columns of the first table of events, in addition to the expected number of events
Directions = tuple[tuple[str, int], ...]
_log = logging.getLogger("mpiad")

_lock = threading.RLock()
_loaded_kernels: dict[tuple[Any, ...], DeviceKernel] = {}


class DeviceResults(NamedTuple):
    """The results of a solve on the device."""

    vector: Array  # shape ((n_saved + 1) * d * n,); saved states, of shape (n_saved, d, n), and final ones, (d, n)
    t_reached: Array  # shape (n,), like the next three
    codes: Array
    naccept: Array
    nreject: Array
    du_end: Array  # shape (m, d, n); tangents in m directions
    dsaved: Array  # shape (m, n_saved, d, n)
    summary: Array  # shape (2,); the number of failed trajectories, and the largest number of steps
    rows: Any = None  # shape (6, event_capacity); the table of events, see `cuda_kernels`; None without events
    heads: Any = None  # shape (n,); per trajectory the column of its last event in the table, or -1
    event_count: int = 0  # the number of used columns of the table


class Solver:
    """A batch of plain arrays, and its kernels, whose texts are stored in `compiler.kernels`."""

    def __init__(self, compiler: Compiler, arrays: ArrayModule, traced: TracedProblem, batch: Batch, settings: Settings):
        self._gpu: EnsembleGPU = compiler.backend  # type: ignore[assignment]
        self.arrays, self.settings, self._kernels = arrays, settings, compiler.kernels
        self.traced = traced.origin or traced  # texts depend on the problem without its numbers
        self._launcher = launcher_of(arrays)
        self.spec = kernel_spec_of(traced, batch, settings)._replace(record=True, tolerances=True)
        self.d, self.real = self.spec.d, batch.u0.dtype
        self.inputs = inputs_of(arrays, batch, settings, traced)
        self.count = batch.size

    # ---- forward

    def kernel(self, directions: Directions = ()) -> DeviceKernel:
        """Return the forward kernel with tangents in these directions."""
        return self._loaded("forward", self.spec._replace(directions=directions))

    def solved(self, directions: Directions = ()) -> DeviceResults:
        """Solve all trajectories."""
        # The first capacity per trajectory is one occurrence of each event that stops a step, and two of each other event.
        event_capacity = _ROWS + self.count * sum(1 if stops else 2 for stops, _ in self.spec.events)
        empty, d, n, n_saved, m = self.arrays.empty, self.d, self.count, self.inputs.n_saved, len(directions)
        while True:
            codes, naccept, nreject = [empty((n,), np.int32) for _ in range(3)]
            vector = empty(((n_saved + 1) * d * n,), self.real)
            du_end, dsaved = (empty((m, *shape), self.real) if m else None for shape in ((d, n), (n_saved, d, n)))
            summary = self.arrays.full((2,), 0, np.int64)
            results = DeviceResults(vector, empty((n,), float), codes, naccept, nreject, du_end, dsaved, summary)
            saved, end = self.parts(results.vector)
            table, counter = self._table(event_capacity)
            self._forward(directions, 0, self.count, (end, saved, *results[1:8]), (None, None, 0), table)
            if not table:
                return results
            event_count = int(self.arrays.to_host(counter)[0])
            if event_count <= event_capacity:
                return results._replace(rows=table[0], heads=table[3], event_count=event_count)
            event_capacity = event_count  # the solve is repeated, with columns for all events

    def _table(self, event_capacity: int) -> tuple[tuple[Any, ...], Any]:
        """Return the forward kernel's arguments for events, and the counter of events, which is one of them."""
        if not self.spec.events:
            return (), None
        counter, heads = (self.arrays.full((n,), value, np.int64) for n, value in ((1, 0), (self.count, -1)))
        return (self.arrays.empty((ROWS, event_capacity), float), event_capacity, counter, heads), counter

    def parts(self, vector: Array) -> tuple[Array | None, Array]:
        """Return views of any saved states, (n_saved, d, n), and final states, (d, n), in a vector, traced or not."""
        shape, n_saved = (self.d, self.count), self.inputs.n_saved
        if self.settings.ends:
            return None, vector.reshape(shape)
        cut = n_saved * self.d * self.count
        return vector[:cut].reshape((n_saved, *shape)), vector[cut:].reshape(shape)

    def _forward(self, directions: Directions, first: int, count: int, results: tuple, steps: tuple, table: tuple) -> None:
        settings, rtol = self.settings, self.real.type(np.max(self.settings.rtol))
        scalars = (0.0 if settings.dt is None else float(settings.dt), float(settings.dtmax), int(settings.max_steps))
        # The second run, without arrays for results, saves no states.
        inputs = self.inputs if results[0] is not None else self.inputs._replace(n_saved=0)
        self._launch(self.kernel(directions), first, count, *inputs, rtol, *scalars, *results, *steps, *table)

    # ---- reverse

    def pulled(
        self, results: DeviceResults, longest: int, vector_bar: Array, wanted: tuple[int, ...], times: Sequence[Array] = ()
    ) -> tuple[Array, Array, Array | None]:
        """Return the cotangents of u0, (d, n), of parameters per trajectory, (rows, n), and of shared ones, (rows,)."""
        # `longest`: the largest number of steps of a trajectory. `times`: the cotangents of end times, (n,), and of the
        # times of all events. If the steps exceed the memory, they are recorded for some trajectories at a time.
        empty = self.arrays.empty
        varying = [j for j in self.traced.packing.varying if j in wanted]
        shared = [j for j in self.traced.packing.shared if j in wanted]
        spec = self.spec._replace(wanted_varying=len(varying), wanted_shared=len(shared))
        u0_bar, p_bar = [empty((rows, self.count), self.real) for rows in (self.d, len(varying))]
        kernel, sums = self._loaded("reverse", spec, (*varying, *shared)), []
        size = min(self.count, self._most_recorded(longest))
        steps = empty((size * longest * self.d,), self.real), empty((size * longest * 2,), float)
        saved_bar, end_bar = self.parts(vector_bar)
        inputs = *self.inputs[:8], *steps, results.naccept, results.t_reached, results.codes, end_bar, saved_bar
        events = (results.rows, results.rows.shape[1], results.heads, *times) if self.spec.events else ()
        for first in range(0, self.count, size or 1):
            count, table = min(size, self.count - first), (None, 0, None, None) if self.spec.events else ()
            self._forward((), first, count, (None,) * 9, (*steps, longest), table)
            s_bar = empty((len(shared), count), self.real)
            self._launch(kernel, first, count, *inputs, u0_bar, p_bar, s_bar, *events)
            sums += [np.sum(s_bar, axis=1)] if shared else []
        s_bar = sum(sums[1:], sums[0]) if sums else self.arrays.full((len(shared),), 0, self.real)
        return u0_bar, p_bar, s_bar

    def _most_recorded(self, longest: int) -> int:
        """Return the number of trajectories whose steps fit into the memory for them."""
        needed = max(1, longest) * (self.d * self.real.itemsize + 16)  # the state, and two doubles: time and step size
        budget = self._gpu.tape_bytes
        if budget is None:
            # The driver takes a while to find the free memory.
            budget = _MOST_UNASKED if needed * self.count <= _MOST_UNASKED else self._launcher.free_bytes() // 2
        if needed > budget:
            raise MemoryError(
                f"solve: the steps of one trajectory take {needed} bytes of device memory for its gradient, but the limit "
                f"is {budget}. Raise tape_bytes= of EnsembleGPU if more memory is free, or loosen rtol."
            )
        return budget // needed

    # ---- kernels

    def _loaded(self, name: str, spec: KernelSpec, wanted: tuple[int, ...] = ()) -> DeviceKernel:
        self._kernels[name] = cuda_text(name, self.traced, spec, wanted)
        return loaded(self._launcher, self._kernels[name], name, self._gpu.options)

    def _launch(self, kernel: DeviceKernel, first: int, count: int, *arguments: Any) -> None:
        """Run a kernel for the trajectories `first`, ..., `first + count - 1`."""
        if count:
            threads = self._gpu.block or threads_per_block(count, self._launcher.multiprocessors)
            self._launcher.launch(kernel, -(-count // threads), threads, (self.count, first, count, *arguments))


def loaded(launcher: Launcher, text: str, name: str, options: tuple[str, ...]) -> DeviceKernel:
    """Return the kernel "forward" or "reverse" of a CUDA source, compiled once per device."""
    key = launcher, name, options, text
    # The lock prevents two threads from compiling the same kernel.
    with _lock:
        if key not in _loaded_kernels:
            started = time.perf_counter()
            kernel = launcher.compiled(text, name, options)
            seconds = time.perf_counter() - started
            _log.info(
                "solve: the %s kernel was compiled for the GPU in %.2f s; each thread takes %d registers and %d bytes of "
                "local memory.",
                *(name, seconds, kernel.registers, kernel.local_bytes),
            )
            _loaded_kernels[key] = kernel
        return _loaded_kernels[key]


def threads_per_block(count: int, multiprocessors: int) -> int:
    """Return the number of threads in a block: 128, or fewer if there would be fewer than two blocks per multiprocessor."""
    # A block occupies its resources until its longest trajectory has ended, so larger blocks would be slower.
    return next((threads for threads in (128, 64) if count >= 2 * threads * multiprocessors), 32)


# The arguments of GPU kernels for a batch, as arrays on the device, and a small sample of the batch on the host.

_COLUMNS = 5  # number of trajectories in a sample


class Inputs(NamedTuple):
    """The arguments of kernels, in order; the reverse kernel takes only the arguments before `u0`."""

    # Parameters per trajectory, shape (varying, n), and shared parameters, shape (shared,).
    p: Array
    s: Array
    # Start and end of tspan: shape (n,), or (1,) if `by_span` is zero.
    start: Array
    stop: Array
    by_span: int  # stride of `start` and `stop`: 1, or 0 if all trajectories share one tspan
    times: Array  # shape (n_saved,) or (n, n_saved)
    n_saved: int
    by_row: int  # whether `times` has one row per trajectory: 1 or 0
    u0: Array  # shape (d, n) or (d, 1)
    # Strides of `u0` along components and along trajectories.
    u0_row: int
    u0_column: int
    atol: Array  # shape (d,), or with a relative tolerance per component (2 d,): absolute and relative ones


def inputs_of(arrays: ArrayModule, batch: Batch, settings: Settings, traced: TracedProblem) -> Inputs:
    """Return the arguments on a device; small host arrays are copied in one transfer, once for several solves."""
    count, real, d, leaves = batch.size, batch.u0.dtype, len(batch.u0), batch.p.leaves
    parts, one_span = traced.packing.parts, batch.one_span
    one_start = not is_device_array(batch.u0) and batch.u0.size > 0 and batch.u0.strides[-1] == 0
    varying = [
        device_rows(arrays, leaves[part.place], real).reshape(len(part.scalars), count) for part in parts if part.varies
    ]
    shared = [leaves[part.place] for part in parts if not part.varies]
    shared += [np.array(traced.numbers)] if traced.numbers else []
    # Doubles come first, so that all numbers are aligned.
    on_host = {"times": np.asarray(settings.saveat, float)}
    if one_span:
        on_host |= {"start": batch.start[:1], "stop": batch.end[:1]}
    on_host["atol"] = np.full(d, np.ravel(settings.atol), real)
    if np.ndim(settings.rtol):
        on_host["atol"] = np.append(on_host["atol"], np.ravel(settings.rtol).astype(real))
    if not any(map(is_device_array, shared)):
        on_host["s"] = np.concatenate([np.ravel(leaf) for leaf in shared] or [np.empty(0)]).astype(real)
    if one_start:
        on_host["u0"] = batch.u0[:, :1]
    content, times = b"".join(x.tobytes() for x in on_host.values()), on_host["times"]
    copied = _copied_together if len(content) <= _MOST_COPIED else _copied_together.__wrapped__
    on_device = dict(zip(on_host, copied(arrays, content, tuple((x.dtype, x.shape) for x in on_host.values()))))
    if "s" not in on_host:
        on_device["s"] = _concatenated(arrays, [device_rows(arrays, leaf, real).reshape(-1) for leaf in shared], (0,), real)
    if not one_span:
        on_device |= {name: device_rows(arrays, x, float) for name, x in (("start", batch.start), ("stop", batch.end))}
    if not one_start:
        on_device["u0"] = device_rows(arrays, batch.u0, real)
    return Inputs(
        p=_concatenated(arrays, varying, (0, count), real), by_span=int(not one_span), n_saved=times.shape[-1],
        by_row=int(times.ndim > 1), u0_row=1 if one_start else count, u0_column=int(not one_start), **on_device,
    )  # fmt: skip


@lru_cache(_MOST_COPIES)
def _copied_together(
    arrays: ArrayModule, content: bytes, kinds: tuple[tuple[np.dtype, tuple[int, ...]], ...]
) -> list[Array]:
    """Return device arrays of these dtypes and shapes; kernels don't write to them."""
    copy, stop, parts = arrays.to_device(np.ndarray(len(content), np.uint8, content)), 0, []
    for dtype, shape in kinds:
        start, stop = stop, stop + dtype.itemsize * math.prod(shape)
        parts.append(copy[start:stop].view(dtype).reshape(shape))
    return parts


def device_rows(arrays: ArrayModule, x: Array, dtype: DTypeLike) -> Array:
    """Return a contiguous array of a dtype on the device, without a copy if possible."""
    if not is_device_array(x):
        return arrays.to_device(np.ascontiguousarray(x, dtype))
    return arrays.contiguous(x if x.dtype == dtype else x.astype(dtype))


def _concatenated(arrays: ArrayModule, parts: list[Array], empty: tuple[int, ...], dtype: DTypeLike) -> Array:
    parts = [part for part in parts if part.size]
    if not parts:
        return arrays.empty(empty, dtype)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sample_batch(batch: Batch) -> Batch:
    """Return a small batch on the host; states, and floats that vary or are on a device, are replaced by other numbers."""
    leaves = [_leaf(leaf, varies) for leaf, varies in zip(batch.p.leaves, batch.p.varies)]
    times = [np.full(_COLUMNS, x[0] if len(x) else value) for x, value in ((batch.start, 0.0), (batch.end, 1.0))]
    u0 = _arbitrary((len(batch.u0), _COLUMNS), batch.u0.dtype)
    return Batch(batch.f, batch.shape, u0, batch.p._replace(leaves=leaves), *times)


def _leaf(leaf: Array, varies: bool) -> Array:
    arrays = arrays_of(leaf)
    if not varies and arrays is None:
        return leaf
    shape = (*leaf.shape[:-1], _COLUMNS) if varies else leaf.shape
    if leaf.dtype.kind in "fc":
        return _arbitrary(shape, leaf.dtype)
    # f may branch on integers, so those of the first trajectories are used.
    return np.resize((leaf if arrays is None else arrays.to_host(leaf)).T, shape[::-1]).T


def _arbitrary(shape: Shape, dtype: DTypeLike) -> Array:
    """Return distinct numbers between 0.5 and 1.5."""
    return (1 + 0.5 * np.sin(1 + 2.3 * np.arange(math.prod(shape)))).reshape(shape).astype(dtype)
