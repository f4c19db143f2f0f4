"""Solves of a batch by kernels on a device, with tangents if needed, and the reverse sweep.

A solve records no steps. For an adjoint, the forward kernel runs again for one share of the trajectories after the other,
and records the steps, whose number the first run has determined; then the reverse kernel processes this share. Both runs
of the forward kernel use the same machine code, so they take the same steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.backends import EnsembleGPU
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.compiled.cuda.cuda_events import ROWS
from mpiad.ensemble.compiled.cuda.gpu_inputs import inputs_of
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, kernel_spec_of
from mpiad.ensemble.compiled.kernel_texts import cuda_text
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.settings import Settings
from mpiad.transport.devices.device_arrays import ArrayModule, DeviceKernel, Launcher, launcher_of

_BLOCKS = 4096  # maximum number of blocks of trajectories whose step counts are copied to the host


class Share(NamedTuple):
    """The trajectories `first`, ..., `first + count - 1`, with up to `capacity` steps each."""

    first: int
    count: int
    capacity: int


def longest_of_blocks(arrays: ArrayModule, naccept: Array) -> tuple[int, Array]:
    """Return the number of trajectories per block, and the largest number of steps in each block, on the host."""
    n = len(naccept)
    size = -(-n // _BLOCKS)
    whole = n // size * size
    longest = [np.max(naccept[:whole].reshape(-1, size), axis=1)]
    if whole < n:
        longest.append(np.max(naccept[whole:]).reshape(1))
    return size, arrays.to_host(longest[0] if len(longest) == 1 else np.concatenate(longest))


def shares_within(size: int, longest: Array, count: int, bytes_per_step: int, budget: int) -> list[Share]:
    """Divide `count` trajectories into contiguous shares whose steps fit into a budget of bytes.

    `size`, `longest`: as returned by `longest_of_blocks`. Raises MemoryError if the steps of one trajectory don't fit.
    """
    needed = int(longest.max(initial=0)) * bytes_per_step
    if needed > budget:
        raise MemoryError(
            f"solve: the steps of one trajectory take {needed} bytes of device memory for its gradient, but the limit is "
            f"{budget}. Raise tape_bytes= of EnsembleGPU if more memory is free, or loosen rtol."
        )
    if needed * count <= budget:
        return [Share(0, count, int(longest.max(initial=0)))]
    shares: list[Share] = []
    for block, steps in enumerate(longest.tolist()):
        first, stop = block * size, min((block + 1) * size, count)
        if shares and (more := max(steps, shares[-1].capacity)) * (stop - shares[-1].first) * bytes_per_step <= budget:
            shares[-1] = Share(shares[-1].first, stop - shares[-1].first, more)
        else:
            most = min(stop - first, budget // max(1, steps * bytes_per_step))
            shares += [Share(a, min(most, stop - a), steps) for a in range(first, stop, most)]
    return shares


_ROWS = 1024  # initial capacity of the table of events, in addition to the expected number
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
    failed: Array  # shape (1,); number of failed trajectories
    rows: Any = None  # shape (6, event_capacity); the table of events, see `cuda_events`; None without events
    heads: Any = None  # shape (n,); per trajectory the column of its last event in the table, or -1
    found_events: int = 0  # the number of used columns of the table


class InputCotangents(NamedTuple):
    """Cotangents of u0, (d, n), of parameters per trajectory, (rows, n), and of shared parameters, (rows,)."""

    u0: Array
    p: Array
    s: Array


class Solver:
    """A batch of plain arrays, and its kernels, whose texts are stored in `compiler.kernels`."""

    def __init__(self, compiler: Compiler, arrays: ArrayModule, traced: TracedProblem, batch: Batch, settings: Settings):
        self._gpu: EnsembleGPU = compiler.backend
        self.arrays, self.settings, self._kernels = arrays, settings, compiler.kernels
        self.traced = traced._replace(numbers=())  # texts depend on the problem without its numbers
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
        # The first capacity per trajectory is one occurrence of each terminal event, and two of each nonterminal event.
        event_capacity = _ROWS + self.count * sum(1 if terminal else 2 for terminal, _ in self.spec.events)
        while True:
            results = self._empty(directions)
            saved, end = self.parts(results.vector)
            table, counter = self._table(event_capacity)
            self._forward(directions, Share(0, self.count, 0), (end, saved, *results[1:8]), (None, None), table)
            if not table:
                return results
            event_count = int(self.arrays.to_host(counter)[0])
            if event_count <= event_capacity:
                return results._replace(rows=table[0], heads=table[3], found_events=event_count)
            event_capacity = event_count  # the solve is repeated, with columns for all events

    def _table(self, event_capacity: int) -> tuple[tuple[Any, ...], Any]:
        """Return the forward kernel's arguments for events, and the counter of events, which is one of them."""
        if not self.spec.events:
            return (), None
        counter, heads = (self.arrays.full((n,), value, np.int64) for n, value in ((1, 0), (self.count, -1)))
        return (self.arrays.empty((ROWS, event_capacity), float), event_capacity, counter, heads), counter

    def parts(self, vector: Array) -> tuple[Array, Array]:
        """Return views of the saved states, (n_saved, d, n), and final states, (d, n), in a vector of results."""
        d, n, n_saved = self.d, self.count, self.inputs.n_saved
        cut = n_saved * d * n
        return vector[:cut].reshape(n_saved, d, n), vector[cut:].reshape(d, n)

    def _empty(self, directions: Directions) -> DeviceResults:
        empty, d, n, n_saved, m = self.arrays.empty, self.d, self.count, self.inputs.n_saved, len(directions)
        codes, naccept, nreject = [empty((n,), np.int32) for _ in range(3)]
        vector = empty(((n_saved + 1) * d * n,), self.real)
        tangents = empty((m, d, n), self.real), empty((m, n_saved, d, n), self.real)
        failed = self.arrays.full((1,), 0, np.int64)
        return DeviceResults(vector, empty((n,), float), codes, naccept, nreject, *tangents, failed)

    def _forward(
        self, directions: Directions, share: Share, results: Sequence[Any], steps: Sequence[Any], table: Sequence[Any]
    ) -> None:
        settings, rtol = self.settings, self.real.type(self.settings.rtol)
        scalars = (0.0 if settings.dt is None else float(settings.dt), float(settings.dtmax), int(settings.max_steps))
        # The second run, without arrays for results, saves no states.
        inputs = self.inputs if results[0] is not None else self.inputs._replace(n_saved=0)
        self._launch(self.kernel(directions), share, *inputs, rtol, *scalars, *results, *steps, share.capacity, *table)

    # ---- reverse

    def pulled(
        self, results: DeviceResults, vector_bar: Array, wanted: tuple[int, ...], times: Sequence[Array] = ()
    ) -> InputCotangents:
        """Return the cotangents of initial states and of the `wanted` parameters; `vector_bar`: that of `results.vector`.

        `times`: with events, the cotangents of end times, (n,), and of the times of all events.
        """
        empty = self.arrays.empty
        varying = [j for j in self.traced.packing.varying if j in wanted]
        shared = [j for j in self.traced.packing.shared if j in wanted]
        spec = self.spec._replace(wanted_varying=len(varying), wanted_shared=len(shared))
        u0_bar, p_bar = [empty((rows, self.count), self.real) for rows in (self.d, len(varying))]
        kernel, sums = self._loaded("reverse", spec, (*varying, *shared)), []
        shares: list[Share] = []
        if self.count:
            budget = self._gpu.tape_bytes or self._launcher.free_bytes() // 2
            # The state, and two doubles: time and step size.
            bytes_per_step = self.d * self.real.itemsize + 16
            size, longest = longest_of_blocks(self.arrays, results.naccept)
            shares = shares_within(size, longest, self.count, bytes_per_step, budget)
        most = max((share.count * share.capacity for share in shares), default=0)
        steps = empty((most * self.d,), self.real), empty((most * 2,), float)
        saved_bar, end_bar = self.parts(vector_bar)
        inputs = *self.inputs[:8], *steps, results.naccept, results.t_reached, results.codes, end_bar, saved_bar
        events = (results.rows, results.rows.shape[1], results.heads, *times) if self.spec.events else ()
        for share in shares:
            self._forward((), share, (None,) * 9, steps, (None, 0, None, None) if self.spec.events else ())
            s_bar = empty((len(shared), share.count), self.real)
            self._launch(kernel, share, *inputs, u0_bar, p_bar, s_bar, *events)
            sums += [np.sum(s_bar, axis=1)] if shared else []
        s_bar = sum(sums[1:], sums[0]) if sums else self.arrays.full((len(shared),), 0, self.real)
        return InputCotangents(u0_bar, p_bar, s_bar)

    # ---- kernels

    def _loaded(self, name: str, spec: KernelSpec, wanted: tuple[int, ...] = ()) -> DeviceKernel:
        self._kernels[name] = cuda_text(name, self.traced, spec, wanted)
        return loaded(self._launcher, self._kernels[name], name, self._gpu.options)

    def _launch(self, kernel: DeviceKernel, share: Share, *arguments: Any) -> None:
        if share.count:
            threads = self._gpu.block or threads_per_block(share.count, self._launcher.multiprocessors)
            blocks = -(-share.count // threads)
            numbers = (self.count, share.first, share.count)
            self._launcher.launch(kernel, blocks, threads, (*numbers, *arguments))


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
    """Return the number of threads in a block: 128, or fewer if there would be fewer than two blocks per multiprocessor.

    A block occupies its resources until its longest trajectory has ended, so larger blocks would be slower.
    """
    return next((threads for threads in (128, 64) if count >= 2 * threads * multiprocessors), 32)
