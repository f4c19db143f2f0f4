"""Sums of many arrays over the ranks in few messages: arrays are concatenated in buckets of one dtype and device.

The sums use a separate communicator, so they may start during a reverse pass, independently of its communication. On
different ranks arrays may be ready in different orders, but all ranks must start the sums in the same order: a sum starts
when all arrays of its bucket and of the previous buckets are ready. The sum of the last bucket can't overlap with
computation, so it is a blocking call, which takes less memory and time.
"""

from __future__ import annotations

import math
import zlib
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Function, Shape
from mpiad.transport import Channel, Spec
from mpiad.transport.core.collectives import Summation, start_allreduce, start_sum_in_place, sum_in_place
from mpiad.transport.core.tracing import opaque_step
from mpiad.transport.devices.device_arrays import ArrayModule

# Large enough to make latency negligible, and small enough for an early start of the first sum.
BUCKET_BYTES = 8 * 2**20
ENDED = "ended a gradient whose sums over the ranks were active."


class Bucket(NamedTuple):
    """Arrays in one message."""

    indices: list[int]  # indices of the arrays
    parts: list[tuple[slice, Shape | None]]  # the slice of each array in the message, and its shape, None for one axis


class Plan:
    """Arrays in buckets of at most `limit` bytes, the last first, as in reverse passes; `digest`: their checksum."""

    def __init__(self, specs: tuple[Spec, ...], limit: int):
        self.specs, self.limit = specs, limit
        self.host_specs = [spec._replace(arrays=None) for spec in specs]
        open_buckets: dict[tuple[np.dtype, ArrayModule | None], list[int]] = {}
        filled: dict[tuple[np.dtype, ArrayModule | None], int] = {}
        groups: list[list[int]] = []
        for index, spec in reversed(list(enumerate(specs))):
            length = math.prod(spec.shape) * spec.dtype.itemsize
            kind = spec.dtype, spec.arrays
            if kind not in open_buckets or filled[kind] + length > limit:
                open_buckets[kind], filled[kind] = [], 0
                groups.append(open_buckets[kind])
            open_buckets[kind].append(index)
            filled[kind] += length
        self.buckets: list[Bucket] = []
        for indices in [group[::-1] for group in groups]:
            stops = np.cumsum([0] + [math.prod(specs[index].shape) for index in indices]).tolist()
            shapes = [None if len(specs[index].shape) == 1 else specs[index].shape for index in indices]
            self.buckets.append(Bucket(indices, [(slice(a, b), shape) for a, b, shape in zip(stops, stops[1:], shapes)]))
        # All ranks must get the same digest, so it contains no device numbers, and isn't computed by Python's `hash`. It is
        # below 2¹⁸, so that sums of its squares over 10⁵ ranks, which `totals` compares, are exact in doubles.
        descriptions = [(spec.shape, spec.dtype.str, spec.arrays is not None) for spec in specs]
        self.digest = zlib.crc32(repr((descriptions, limit)).encode()) % 2**18
        self.bucket_of = {index: k for k, bucket in enumerate(self.buckets) for index in bucket.indices}


plan_of = lru_cache(256)(Plan)
"""Plans of arrays with equal specs and limits are made once."""


class Sums:
    """Sums over the ranks of arrays as they become ready; an exception inside the context makes the channel unusable."""

    def __init__(self, channel: Channel, plan: Plan):
        self._channel, self._plan = channel, plan
        self._arrays: list[Array] = [None] * len(plan.specs)
        self._missing = [len(bucket.indices) for bucket in plan.buckets]
        self._messages: list[Summation | Array] = []  # active or complete sums
        self._begun = False

    def begin(self) -> bool:
        """Return whether there are several buckets; if so, any rank may start a sum after this call."""
        self._begun = len(self._plan.buckets) > 1
        return self._begun

    def add(self, index: int, array: Array) -> None:
        """Add one array, and start the sums of the next buckets whose arrays are all ready; `wait` starts the last sum."""
        self._arrays[index] = array
        self._missing[self._plan.bucket_of[index]] -= 1
        while len(self._messages) < len(self._missing) - 1 and not self._missing[len(self._messages)]:
            self._begun = True
            self._sum_next(_start)

    def add_all(self, arrays: list[Array]) -> None:
        """Add all arrays, whose sums `wait` computes."""
        self._arrays = list(arrays)

    def _sum_next(self, step: Function) -> None:
        """Sum the arrays of the next bucket by `_start` or `_reduce`."""
        indices = self._plan.buckets[len(self._messages)].indices
        arrays = [self._arrays[k] for k in indices]
        for k in indices:
            self._arrays[k] = None  # frees the array
        self._messages += opaque_step(step, self._channel, arrays, specs=())

    def wait(self, divisor: float = 1) -> list[Array]:
        """Return the sums, divided by a number, after all arrays have been added."""
        while len(self._messages) < len(self._missing):
            self._sum_next(_reduce)
        *sums, _ = opaque_step(_finish, self._plan, self._messages, divisor, specs=self._plan.host_specs)
        self._begun = False
        return sums

    def __enter__(self) -> Sums:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After `begin` another rank may have started a sum, even if this rank hasn't.
        if kind is not None and self._begun:
            self._channel.mark(f"{kind.__name__} {ENDED}")


# The steps of sums, also in compiled programs. Sums use the channel's separate communicator; the channel completes their
# requests when it ends.


def are_active(channel: Channel) -> bool:
    """Return whether an exception has ended a compiled gradient after this rank has started sums."""
    started = channel.started.values()
    return any(kind == "reduction" and type(array) is np.ndarray for kind, _, array in started)


def _start(channel: Channel, arrays: list[Array]) -> tuple[Summation | Array]:
    """Concatenate arrays in new memory, and start their sum."""
    message = np.concatenate(arrays, axis=None)
    # Device arrays can't be summed in place.
    start = start_sum_in_place if type(message) is np.ndarray else start_allreduce
    return (start(channel, message, channel.separate()),)


def _reduce(channel: Channel, arrays: list[Array]) -> tuple[Summation | Array]:
    """Concatenate arrays in new memory, and sum them."""
    message = np.concatenate(arrays, axis=None)
    if type(message) is not np.ndarray:
        return (start_allreduce(channel, message, channel.separate()).finish(),)
    sum_in_place(channel.separate(), message)
    return (message,)


def _finish(plan: Plan, messages: list[Summation | Array], divisor: float) -> tuple[Array, ...]:
    """Complete the sums and return the arrays, followed by None."""
    out: list[Array] = [None] * len(plan.specs)
    for bucket, message in zip(plan.buckets, messages):
        if isinstance(message, Summation):
            message = message.finish()  # on the host the message itself, on a device a new array
        if divisor != 1:
            message /= int(divisor)
        for k, (part, shape) in zip(bucket.indices, bucket.parts):
            out[k] = message[part] if shape is None else message[part].reshape(shape)[()]
    return *out, None
