"""Calls that the root drives: it runs a program, and all ranks execute the evaluations that the program requests.

An *instruction* is the call of a method of a function's evaluation, such as ``gradient(x)``, on all ranks:

1. The root broadcasts its header: the method, the function's index, and the lengths of two vectors: the points, one after
   the other, and a second one, for example a direction; -1 without a vector. The other ranks wait for it in `_serve`.
2. The root broadcasts the vectors. If they are short, the header contains them, and there is no second message.
3. All ranks call the method. It runs the user's functions, communicates, and returns the result on the root. If it
   raises on any rank, all ranks raise (`StageFailures`), and this is the last instruction.

"start" sends the structure of a function's first point, from which all ranks make its evaluation. "finish" is followed by
the pickled outcome: the program's result, if all ranks get it, or its exception.

With rank groups, every group executes each instruction, apart from the points of "values", which the groups divide. The
ranks of a group agree on failures first, then all ranks do.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from mpiad._typing import Array, Buffer, Function, Rank, Tree
from mpiad.device import to_device
from mpiad.differentiation.advice import explain
from mpiad.domain.root_copies import with_registered_copies
from mpiad.errors import DeadlockError, ReplicationError, WorkerError
from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.history import Progress
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.packing import Packing, RemoteArray, as_variables
from mpiad.pytrees import fetched, flatten, leaf_on_device, map_leaves, named_leaves
from mpiad.transport import Channel, channel, renew
from mpiad.transport.core.agreement import FAILURES, Failure, agreed, raising_together
from mpiad.transport.core.calls import Site
from mpiad.transport.core.channels import is_fork
from mpiad.transport.core.fault_tolerance import is_interruption
from mpiad.transport.core.polling import wait_gently
from mpiad.transport.core.rank_groups import RankGroups
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.exits.signals import postponed, requested
from mpiad.transport.exits.user_failures import StageFailures

METHODS: Sequence[
    str
] = """finish start value plain values gradient both product not_finite jvp vjp residuals factor tangent
    cotangent""".split()
_log = logging.getLogger("mpiad")
_HEADER, _SHORT = 4, 28  # lengths: of the header, and at most of the vectors that are sent with it


class Solve:
    """The base class of all solves; `channel`: the user's; `agreement` raises an exception of one rank on all."""

    def __init__(self, user_channel: Channel, call: str):
        # A duplicate of the communicator, because the user's function may communicate while instructions are pending, and
        # later calls mustn't receive messages of an interrupted solve.
        self.channel, self._comm, self._call = user_channel, user_channel.derive(), call
        self.agreement = StageFailures(self._comm, call, "mpiad.optimize", explain)

    @contextmanager
    def ending(
        self, checkpoint: CheckpointFile | None, progress: Progress | None, on_signal: str = "return"
    ) -> Iterator[None]:
        """Postpone SIGTERM if checkpoints are written; at the end free resources; after a failure renew the channel.

        If a rank has received a signal, all ranks raise SystemExit at the end, unless `on_signal` is "return" on any rank.
        """
        try:
            with nullcontext() if checkpoint is None else postponed(checkpoint.patience, tuple(checkpoint.signals)):
                yield
        except Exception as error:
            if isinstance(error, DeadlockError):
                self.agreement.close()  # this isn't collective
            # If ranks no longer communicate, the communicator can't be freed, and may be needed to interrupt waiting ranks.
            elif not self.agreement.broken and not is_interruption(error):
                self._close()
            if self.agreement.error is not None:
                renew(self.channel.user, self._call)  # otherwise later calls could receive pending messages
            raise
        finally:
            if progress is not None:
                progress.close()
        self._close()
        if checkpoint is not None:
            numbers, choices = zip(*self.channel.data.allgather((requested() or 0, on_signal)))
            if max(numbers) and "return" not in choices:
                if self.channel.rank == 0:
                    _log.warning("%s: ended by signal %d; the same program continues.", self._call, max(numbers))
                raise SystemExit(128 + max(numbers))

    def _close(self) -> None:
        self.agreement.close()
        self.channel.drop(self._comm)


_OUTSIDE = "a driven function is evaluated by groups of ranks, and communicates on its argument comm"
ELSEWHERE = (
    "a driven function can't be called in another process, such as those of a pool, from which the other ranks can't be "
    "reached. Don't use a pool; f.map(points) evaluates many points on all ranks."
)


class RootDriven(Solve):
    """A call that `root` drives; ``factory(program, packing, agreement, channel, comm)`` makes evaluations; collective."""

    def __init__(
        self, user_channel: Channel, root: Rank, programs: list[Program], factory: Function, call: str,
        division: RankGroups | None = None, progress: Progress | None = None,
    ):  # fmt: skip
        super().__init__(user_channel, call)
        self.root, self.progress = root, progress
        self._programs, self._factory, self._is_root = programs, factory, user_channel.rank == root
        self.evaluations: list[Any] = [None] * len(programs)
        self.evaluation: Any = None  # of the function that was defined last
        self._message: Buffer = np.zeros(_HEADER + _SHORT)
        self._header = memoryview(self._message)[:_HEADER]  # takes half as long to read or write as an array
        self._lock = threading.RLock()
        self._by_main = threading.current_thread() is threading.main_thread()
        self._thread: int | None = None  # the thread that executes an instruction
        # Raised by further requests: the failure of an instruction, after which the other ranks wait for none, or the end.
        self._failure: BaseException | None = None
        self.site: Site | None = None  # the line at which instructions are reported, if the user's code makes requests
        self._division = division
        self._group: Solve = self if division is None else Solve(channel(division.comm, call), call)

    def define(self, function: int, start: Tree, name: str = "x0") -> None:
        """Make a function's evaluation, for variables like those that all ranks have; on all ranks."""
        program, group = self._programs[function], self._group
        if group._comm.size > 1:
            program = program._replace(fun=with_registered_copies(program.fun))
        self.packing = Packing(start, self._call, name)
        self.evaluation = self._factory(program, self.packing, group.agreement, group.channel, group._comm)
        self.evaluations[function] = self.evaluation

    def request(self, method: str, *vectors: np.ndarray, function: int = 0, start: Tree = None) -> Any:
        """Execute an instruction on all ranks, and return its result; the root calls this, in any thread."""
        thread = threading.get_ident()
        if is_fork():  # the lock may be held forever
            raise RuntimeError(f"{self._call}: {ELSEWHERE}")
        with self._lock:
            if self._thread == thread:
                raise RuntimeError(
                    f"{self._call}: a driven function was called inside an evaluation. Call the plain function."
                )
            if self._failure is not None:
                raise self._failure
            self._thread = thread
            refusal, self.channel.fault = self.channel.fault, None  # `program` alone may not communicate
            around, tracing.site = tracing.site, self.site or tracing.site
            # `program` may use other threads than the one that called `drive`, and evaluations may contain further solves.
            for_main, tracing.for_main = tracing.for_main, tracing.for_main or self._by_main
            try:
                for solve in (self, self._group):
                    solve.agreement.watch(thread)
                self._send(method, function, vectors)
                return self._execute(method, function, vectors, start)
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._thread, self.channel.fault, tracing.site, tracing.for_main = None, refusal, around, for_main

    def _send(self, method: str, function: int = 0, vectors: Sequence[np.ndarray] = ()) -> None:
        if self._comm.size == 1:
            return
        flat = [np.ascontiguousarray(vector, dtype=float).reshape(-1) for vector in vectors]
        vector = flat[0] if len(flat) == 1 else np.concatenate([*flat, []])
        sizes, header = [*map(len, flat), -1, -1], self._header
        header[0], header[1], header[2], header[3] = METHODS.index(method), function, sizes[0], sizes[1]
        if len(vector) <= _SHORT:
            self._message[_HEADER : _HEADER + len(vector)] = vector
        self._comm.Ibcast(self._message, self.root).Wait()  # nonblocking, to match the call in `_serve`
        if len(vector) > _SHORT:
            self._comm.Bcast(vector, self.root)

    def _serve(self) -> Any:
        """Execute the root's instructions until the end; return the outcome."""
        while True:
            wait_gently(self._comm.Ibcast(self._message, self.root))
            number, function, first, second = map(int, self._header)
            method = METHODS[number]
            if method == "finish":
                return self._share_outcome()
            length = first + max(second, 0)
            vector = self._message[_HEADER : _HEADER + length]
            if length > _SHORT:
                vector = np.empty(length)
                self._comm.Bcast(vector, self.root)  # sent immediately after the header, so the call may block
            self._execute(method, function, (vector,) if second < 0 else (vector[:first], vector[first:]))

    def _execute(self, method: str, function: int, vectors: Sequence[np.ndarray], start: Tree = None) -> Any:
        if method == "start":
            start = shared_start(self.channel, self.root, start, None, self._programs[function].args, self._call)
            return self.define(function, start, "the first point")
        call, group, division = getattr(self.evaluations[function], method), self._group, self._division
        if division is None:
            return call(*vectors)

        def stage() -> Any:
            try:
                with self.channel.refusing(_OUTSIDE):
                    return call(*vectors)
            except FAILURES as error:
                if error is not group.agreement.error:
                    raise
                if error.__cause__ is not None:  # on the rank that failed
                    raise error.__cause__ from None

        if method != "values":
            return self.agreement.run(stage)
        points, count = vectors[0].reshape(-1, self.evaluations[function].packing.size), division.count
        vectors = (points[division.index :: count],)
        parts = self._comm.gather(self.agreement.run(stage), self.root)
        if parts is None:
            return None
        parts = parts[self.root % group._comm.size :: group._comm.size]  # of the rank in each group that has the values
        return np.array([parts[k % count][k // count] for k in range(len(points))])

    def run(self, program: Callable[[RootDriven], Any], everywhere: bool = True) -> Any:
        """Run the program on the root and execute its instructions; return its result, on all ranks or on the root."""
        if not self._is_root:
            return self._serve()
        cause: BaseException | None = None
        outcome = result = None
        try:
            result = program(self)
        except (*FAILURES, KeyboardInterrupt) as error:  # the other ranks mustn't wait
            # After a timeout or an interruption the other ranks raise without a message from the root.
            if self._failure is None and (is_interruption(error) or isinstance(error, DeadlockError)):
                raise
            # Exceptions that can be pickled.
            kind = next((kind for kind in (TypeError, ValueError) if isinstance(error, kind)), None)
            cause, found, text = error, Failure.of(error), f"{self._call}: the root, rank {self.root}, raised "
            outcome = WorkerError(text + found.summary, self.root, found.trace, exit_code=found.exit_code)
            outcome = outcome if kind is None else kind(f"{error} (raised on the root, rank {self.root})")
        with self._lock:  # another thread may wait for its evaluation
            if self._failure is not None:  # even if the program has caught it
                raise self._failure
            self._failure = RuntimeError(f"{self._call}: a driven function was called after the end of `{self._call}`.")
            # The other ranks wait for this even if the root has failed; they then raise the root's exception, too.
            self._send("finish")
        shared = self._share_outcome(result if everywhere and cause is None else outcome, cause)
        return shared if everywhere else result

    def _share_outcome(self, outcome: object = None, cause: BaseException | None = None) -> Any:
        """Return the root's outcome on all ranks; raise it if it is an exception, on the root from `cause`."""
        outcome = self._comm.bcast(outcome, self.root)
        if isinstance(outcome, Exception):
            raise outcome from cause
        return outcome

    def _close(self) -> None:
        if self._group is not self:
            self._group._close()
            if self.agreement.error is not None:
                renew(self._group.channel.user, self._call)
        super()._close()


# The root's point at the start of a solve, and its placeholders on the other ranks, whose x0 must be equal to it.
#
# All ranks raise if the x0 of a rank differs from the root's. Otherwise the root's x0 would silently replace an x0 that
# holds a rank's own variables, such as a block of a distributed grid.

_KINDS = {"f": "real", "c": "complex"}
_ADVICE = (
    "If each rank has its own variables, such as a block of a Domain, call domain.minimize(fun, x0), or minimize with "
    "method='L-BFGS-sharded'. If all ranks share them, pass x0 on the root only, or broadcast the root's (mpi_bcast)."
)


def shared_start(channel: Channel, root: Rank, start: Tree, x0: Tree, args: tuple, call: str) -> Tree:
    """Return the root's `start` on all ranks (placeholders for device arrays); raise if any x0 differs; collective."""
    if channel.size == 1:
        return start
    is_root = channel.rank == root
    template = None
    if is_root:
        leaves, build = flatten(start)
        # Device arrays are represented by placeholders on the other ranks.
        for k, on_host in enumerate(fetched(leaves)):
            if arrays_of(leaves[k]) is not None:
                leaves[k] = RemoteArray(on_host.shape, on_host.dtype, _fingerprint(on_host))
        template = build(leaves)
    template = channel.data.bcast(template, root)
    if any(type(leaf) is RemoteArray for leaf in flatten(template)[0]):
        with raising_together(channel, ImportError):
            if not is_root:
                # The placeholders get this rank's device: that of its arguments, or the current device.
                xp = arrays_of(leaf_on_device([x0, args])) or arrays_of(to_device(np.zeros(0)))
                template = map_leaves(
                    lambda leaf: replace(leaf, arrays=xp) if type(leaf) is RemoteArray else leaf, template
                )
    with suppress(*FAILURES):  # an x0 that can't be converted differs from the root's
        x0 = as_variables(x0)
    theirs = named_leaves(template, "x0")
    own = theirs if is_root or x0 is None else named_leaves(x0, "x0")
    remote = [type(leaf) is RemoteArray for _, leaf in theirs] + [False] * len(own)
    leaves = zip(own, fetched([leaf for _, leaf in own]), remote)
    compared = [(path, _comparable(leaf, is_remote)) for (path, _), leaf, is_remote in leaves]
    try:
        require_replicated(channel, compared, f"{call}: x0 must be the same as on the root, rank {root}", _ADVICE, root)
    except ReplicationError as error:
        raise agreed(channel, error) from None
    return start if is_root else template


def _fingerprint(array: np.ndarray) -> str:
    """Return shape, kind and a checksum of the `_comparable` values."""
    checksum = hashlib.blake2b(np.ascontiguousarray(_comparable(array, False)).data, digest_size=8).hexdigest()
    return f"{_KINDS.get(array.dtype.kind, 'other')} array {array.shape}, checksum {checksum}"


def _comparable(leaf: Array, is_remote: bool) -> Array:
    """Return a value with the same bits for equal numbers of all precisions and all NaNs; only the type of an object."""
    if isinstance(leaf, RemoteArray):
        return leaf.fingerprint
    if leaf is None or isinstance(leaf, (str, bytes)):
        return leaf
    try:
        array = np.asarray(leaf)
    except FAILURES:  # user code may run here, and the other ranks mustn't wait
        return type(leaf).__name__
    if is_remote:
        return _fingerprint(array)
    if array.dtype.kind not in "fc":
        plain = array.astype(np.int64) if array.dtype.kind in "iu" else array
        return plain if array.dtype.kind in "biuUS" else type(leaf).__name__
    values = np.array(array, complex if array.dtype.kind == "c" else float) + 0.0  # converts -0.0 to 0.0
    return np.where(np.isnan(values), np.nan, values)
