"""A batch on a device, and the runs of its kernels: solves, tangents, and the reverse sweep over the steps.

The forward kernel keeps no record for the reverse sweep. For an adjoint, it runs once more, share by share, and records the
steps in memory whose size the first run has determined; the reverse kernel follows. So device memory is used for the steps
of one share, and only during a backward pass. Both runs use the same machine code, so they take the same steps.
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
from mpiad.transport.device_arrays import ArrayModule
from mpiad.transport.device_kernels import DeviceKernel, Launcher, launcher_of

# The trajectories that go back over their steps together: as many as device memory allows.


# Number of values that are copied to the host, for ensembles of all sizes.
_BLOCKS = 4096


class Share(NamedTuple):
    """Trajectories first, ..., first + count - 1, none of which took more than `capacity` steps."""

    first: int
    count: int
    capacity: int


def longest_of_blocks(arrays: ArrayModule, naccept: Array) -> tuple[int, Array]:
    """Return the number of trajectories in a block, and on the host the largest number of steps of each block."""
    n = len(naccept)
    size = -(-n // _BLOCKS)
    whole = n // size * size
    longest = [np.max(naccept[:whole].reshape(-1, size), axis=1)]
    if whole < n:
        longest.append(np.max(naccept[whole:]).reshape(1))
    return size, arrays.to_host(longest[0] if len(longest) == 1 else np.concatenate(longest))


def shares_within(size: int, longest: Array, count: int, bytes_per_step: int, budget: int) -> list[Share]:
    """Divide `count` trajectories, in order, into shares whose steps fit into a budget.

    Blocks have `size` trajectories, and `longest` holds the largest number of steps per block. Raises MemoryError if the
    steps of one trajectory alone don't fit.
    """
    needed = int(longest.max(initial=0)) * bytes_per_step
    if needed > budget:
        raise MemoryError(
            f"solve: the steps of one trajectory take {needed} bytes of device memory for its gradient, but there are "
            f"{budget}. Raise tape_bytes= of EnsembleGPU where more is free, or loosen rtol."
        )
    if needed * count <= budget:
        return [Share(0, count, int(longest.max(initial=0)))]
    made: list[Share] = []
    for block, steps in enumerate(longest.tolist()):
        first, stop = block * size, min((block + 1) * size, count)
        if made and (more := max(steps, made[-1].capacity)) * (stop - made[-1].first) * bytes_per_step <= budget:
            made[-1] = Share(made[-1].first, stop - made[-1].first, more)
        else:
            most = min(stop - first, budget // max(1, steps * bytes_per_step))
            made += [Share(a, min(most, stop - a), steps) for a in range(first, stop, most)]
    return made


# Initial number of rows of events, in addition to the expected ones.
_ROWS = 1024
Directions = tuple[tuple[str, int], ...]
_log = logging.getLogger("mpiad")

_lock = threading.RLock()
_known: dict[tuple[Any, ...], DeviceKernel] = {}


class DeviceResults(NamedTuple):
    """The results of a solve on the device."""

    vector: Array  # shape ((n_saved + 1) * d * n,); saved states, of shape (n_saved, d, n), and last ones, (d, n)
    # `t_reached`, `codes`, `naccept`, `nreject`: shape (n,).
    t_reached: Array
    codes: Array
    naccept: Array
    nreject: Array
    # `du_end`, `dsaved`: shapes (m, d, n), (m, n_saved, d, n); tangents in the m directions that were propagated.
    du_end: Array
    dsaved: Array
    failed: Array  # shape (1,); number of failed trajectories
    rows: Any = None  # shape (6, room); the table of events: see `cuda_events`; None without events
    heads: Any = None  # shape (n,); per trajectory the row of its last event, -1 without one
    found_events: int = 0  # number of rows


class InputCotangents(NamedTuple):
    """Cotangents, row by row: u0 (d, n), parameters per trajectory (rows, n), shared parameters (rows,)."""

    u0: Array
    p: Array
    s: Array


class Solver:
    """A batch on a device, and the kernels for it.

    - `arrays`: of the device.
    - `batch`: of plain arrays, on the host or on the device.
    - `compiler`: its `kernels`, the texts of the kernels that this solve has used, are filled in here.
    """

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
        # Two events of each kind per trajectory at first.
        room = _ROWS + self.count * sum(1 if terminal else 2 for terminal, _ in self.spec.events)
        while True:
            results = self._empty(directions)
            saved, end = self.parts(results.vector)
            table, counter = self._table(room)
            self._forward(directions, Share(0, self.count, 0), (end, saved, *results[1:8]), (None, None), table)
            if not table:
                return results
            happened = int(self.arrays.to_host(counter)[0])
            if happened <= room:
                return results._replace(rows=table[0], heads=table[3], found_events=happened)
            room = happened  # repeated, with rows for all events

    def _table(self, room: int) -> tuple[tuple[Any, ...], Any]:
        """Return the forward kernel's arguments for events, and among them the counter."""
        if not self.spec.events:
            return (), None
        counter, heads = (self.arrays.full((n,), value, np.int64) for n, value in ((1, 0), (self.count, -1)))
        return (self.arrays.empty((ROWS, room), float), room, counter, heads), counter

    def parts(self, vector: Array) -> tuple[Array, Array]:
        """Return saved states, of shape (n_saved, d, n), and last ones, of shape (d, n), of such a vector."""
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
        # Without arrays for results saved times aren't looked up.
        given = self.inputs if results[0] is not None else self.inputs._replace(n_saved=0)
        self._launch(self.kernel(directions), share, *given, rtol, *scalars, *results, *steps, share.capacity, *table)

    # ---- reverse

    def pulled(
        self, results: DeviceResults, vector_bar: Array, wanted: tuple[int, ...], times: Sequence[Array] = ()
    ) -> InputCotangents:
        """Return the cotangents of initial states and of the parameters `wanted`, from that of the results' vector.

        With events `times` are the cotangents of the times at which trajectories ended, (n,), and of all events'.
        """
        empty = self.arrays.empty
        wanted_own = [j for j in self.traced.packing.varying if j in wanted]
        wanted_common = [j for j in self.traced.packing.shared if j in wanted]
        own, common = len(wanted_own), len(wanted_common)
        spec = self.spec._replace(wanted_varying=own, wanted_shared=common)
        u0_bar, p_bar = [empty((rows, self.count), self.real) for rows in (self.d, own)]
        kernel, sums = self._loaded("reverse", spec, (*wanted_own, *wanted_common)), []
        shares: list[Share] = []
        if self.count:
            budget = self._gpu.tape_bytes or self._launcher.free_bytes() // 2
            # Per step the state, and two doubles for its time and size.
            bytes_per_step = self.d * self.real.itemsize + 16
            size, longest = longest_of_blocks(self.arrays, results.naccept)
            shares = shares_within(size, longest, self.count, bytes_per_step, budget)
        most = max((share.count * share.capacity for share in shares), default=0)
        steps = empty((most * self.d,), self.real), empty((most * 2,), float)
        saved_bar, end_bar = self.parts(vector_bar)
        given = *self.inputs[:8], *steps, results.naccept, results.t_reached, results.codes, end_bar, saved_bar
        events = (results.rows, results.rows.shape[1], results.heads, *times) if self.spec.events else ()
        for share in shares:
            self._forward((), share, (None,) * 9, steps, (None, 0, None, None) if self.spec.events else ())
            s_bar = empty((common, share.count), self.real)
            self._launch(kernel, share, *given, u0_bar, p_bar, s_bar, *events)
            sums += [np.sum(s_bar, axis=1)] if common else []
        s_bar = sum(sums[1:], sums[0]) if sums else self.arrays.full((common,), 0, self.real)
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
    """Return the kernel "forward" or "reverse" of a text of CUDA C, compiled if this device doesn't have it yet."""
    key = launcher, name, options, text
    # Within the lock: a second thread waits for the first one's kernel instead of compiling it, too.
    with _lock:
        if key not in _known:
            started = time.perf_counter()
            kernel = launcher.compiled(text, name, options)
            seconds = time.perf_counter() - started
            _log.info(
                "solve: the %s kernel was compiled for the GPU in %.2f s; each thread takes %d registers and %d bytes of "
                "local memory.",
                *(name, seconds, kernel.registers, kernel.local_bytes),
            )
            _known[key] = kernel
        return _known[key]


def threads_per_block(count: int, multiprocessors: int) -> int:
    """Return the number of threads in a block: 128, fewer if there would be fewer than two blocks per multiprocessor.

    A block occupies its resources until its longest trajectory has ended, so it is only large enough to hide latency.
    Registers never limit it: 256 threads may have the maximum of 255 registers each.
    """
    return next((threads for threads in (128, 64) if count >= 2 * threads * multiprocessors), 32)
