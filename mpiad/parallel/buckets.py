"""Sums of many arrays over the ranks in few messages: arrays are concatenated in buckets of one dtype and device.

The sums use a separate communicator, so they may start during a reverse pass, independently of its communication. On
different ranks arrays may be ready in different orders, but all ranks must start the sums in the same order: a sum starts
when all arrays of its bucket and of the previous buckets are ready. The sum of the last bucket can't overlap with
computation, so it is a blocking call, which takes less memory and time.
"""

from __future__ import annotations

import math
import zlib
from types import SimpleNamespace, TracebackType
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.transport import Channel, Spec
from mpiad.transport.core.collectives import Summation, start_allreduce, start_sum_in_place, sum_in_place

# Large enough to make latency negligible, and small enough for an early start of the first sum.
BUCKET_BYTES = 8 * 2**20


class Bucket(NamedTuple):
    """Arrays in one message."""

    indices: list[int]  # indices of the arrays
    parts: list[tuple[slice, Shape | None]]  # the slice of each array in the message, and its shape, None for one axis


class Plan:
    """Arrays in buckets of at most `limit` bytes, the last first, as in reverse passes; `digest`: their checksum."""

    def __init__(self, specs: list[Spec], limit: int):
        self.specs, self.limit = specs, limit
        open_buckets: dict[Any, list[int]] = {}
        filled: dict[Any, int] = {}
        groups: list[list[int]] = []
        for index in reversed(range(len(specs))):
            spec = specs[index]
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


def plan_of(specs: list[Spec], limit: int, previous: Plan | None) -> Plan:
    """Return a plan for arrays: the previous plan if limit and specs are the same."""
    return previous if previous is not None and previous.limit == limit and previous.specs == specs else Plan(specs, limit)


class Sums:
    """Sums over the ranks of arrays as they become ready; an exception inside the context makes the channel unusable."""

    def __init__(self, channel: Channel, plan: Plan):
        self._channel, self._plan = channel, plan
        # Sums use the separate communicator, but their requests are registered with `channel`, which completes them when it
        # ends.
        separate: Any = SimpleNamespace(data=channel.separate(), begin=channel.begin, release=channel.release)
        self._sum_channel: Channel = separate
        self._arrays: list[Any] = [None] * len(plan.specs)
        self._missing = [len(bucket.indices) for bucket in plan.buckets]
        self._messages: list[Any] = []
        self._started: list[Summation] = []
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
            message = self._packed()
            # Device arrays can't be summed in place.
            start = start_sum_in_place if type(message) is np.ndarray else start_allreduce
            self._started.append(start(self._sum_channel, message))

    def add_all(self, arrays: list[Array]) -> None:
        """Add all arrays, and complete the sums."""
        self._arrays = list(arrays)
        for _ in self._plan.buckets:
            self._reduce_next()

    def _packed(self) -> Array:
        """Return the arrays of the next bucket, concatenated in new memory."""
        indices = self._plan.buckets[len(self._messages)].indices
        self._messages.append(np.concatenate([self._arrays[k] for k in indices], axis=None))
        for k in indices:
            self._arrays[k] = None  # frees the array
        return self._messages[-1]

    def _reduce_next(self) -> None:
        message = self._packed()
        if type(message) is np.ndarray:
            sum_in_place(self._sum_channel, message)
        else:
            self._messages[-1] = start_allreduce(self._sum_channel, message).finish()

    def wait(self, divisor: int = 1) -> list[Array]:
        """Return the sums, divided by a number, after all arrays have been added."""
        if len(self._messages) < len(self._missing):
            self._reduce_next()
        for k, summation in enumerate(self._started):
            self._messages[k] = summation.finish()  # on the host the message itself, on a device a new array
        self._started, self._begun = [], False
        out = self._arrays
        for bucket, message in zip(self._plan.buckets, self._messages):
            if divisor != 1:
                message /= divisor
            for k, (part, shape) in zip(bucket.indices, bucket.parts):
                out[k] = message[part] if shape is None else message[part].reshape(shape)
        return out

    def __enter__(self) -> Sums:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After `begin` another rank may have started a sum, even if this rank hasn't.
        if kind is not None and (self._started or self._begun):
            self._channel.mark(f"{kind.__name__} ended a gradient whose sums over the ranks were active.")
