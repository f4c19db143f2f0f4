"""Sums of many arrays over the ranks in few messages: arrays are concatenated in buckets of one dtype and device.

The sums use a separate communicator, so that they may start during a reverse pass, independently of its communication. All
ranks start them in the order of the buckets, since arrays may become ready in different orders: a sum starts when its
bucket and all before it are full. The last bucket can't overlap with computation, so it is summed by a blocking call, which
needs less memory and time.
"""

from __future__ import annotations

import math
import zlib
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.transport import Channel, Spec
from mpiad.transport.collectives import Summation, start_allreduce, start_sum_in_place, sum_in_place

# Large enough that latency is negligible, small enough that the first sum starts early.
BUCKET_BYTES = 8 * 2**20


class Bucket(NamedTuple):
    """Arrays in one message."""

    places: list[int]  # indices of the arrays
    parts: list[tuple[slice, Shape | None]]  # the slice of each array in the message, and its shape, None for one axis


class Plan:
    """The division of arrays into buckets; the last arrays come first, since the reverse pass computes them first.

    `limit`: bytes of a bucket; a longer array has its own bucket. `digest`: number below 2¹⁸, equal for plans of the same
    arrays. `several`: whether there is more than one bucket, so that the first can be sent early.
    """

    def __init__(self, specs: list[Spec], limit: int):
        self.specs, self.limit = specs, limit
        open_buckets: dict[Any, list[int]] = {}
        filled: dict[Any, int] = {}
        groups: list[list[int]] = []
        for place in reversed(range(len(specs))):
            spec = specs[place]
            length = math.prod(spec.shape) * spec.dtype.itemsize
            kind = spec.dtype, spec.arrays
            if kind not in open_buckets or filled[kind] + length > limit:
                open_buckets[kind], filled[kind] = [], 0
                groups.append(open_buckets[kind])
            open_buckets[kind].append(place)
            filled[kind] += length
        self.buckets: list[Bucket] = []
        for places in [group[::-1] for group in groups]:
            stops = np.cumsum([0] + [math.prod(specs[place].shape) for place in places]).tolist()
            shapes = [None if len(specs[place].shape) == 1 else specs[place].shape for place in places]
            self.buckets.append(Bucket(places, [(slice(a, b), shape) for a, b, shape in zip(stops, stops[1:], shapes)]))
        # The ranks compare this. Device numbers aren't included, since they differ between ranks. A CRC, because Python's
        # hash of strings differs between processes; below 2¹⁸, so that a sum of squares over 10⁵ ranks is exact.
        described = [(spec.shape, spec.dtype.str, spec.arrays is not None) for spec in specs]
        self.digest = zlib.crc32(repr((described, limit)).encode()) % 2**18
        self.several = len(self.buckets) > 1
        self.bucket_of = {place: k for k, bucket in enumerate(self.buckets) for place in bucket.places}


def plan_of(specs: list[Spec], limit: int, before: Plan | None) -> Plan:
    """Return a plan; the previous one if it is for the same arrays."""
    return before if before is not None and before.limit == limit and before.specs == specs else Plan(specs, limit)


class Sums:
    """Sums over the ranks of arrays that become ready one after another, or all at once.

    This is a context manager. An exception that leaves the context after any rank may have started a sum marks the channel,
    because ranks with different numbers of started sums would combine different arrays from then on.
    """

    def __init__(self, channel: Channel, plan: Plan):
        self._channel, self._sum_channel, self._plan = channel, cast(Channel, _SumChannel(channel)), plan
        self._arrays: list[Any] = [None] * len(plan.specs)
        self._missing = [len(bucket.places) for bucket in plan.buckets]
        self._messages: list[Any] = []
        self._started: list[Summation] = []
        self._begun = False

    def begin(self) -> None:
        """Record that sums may start, on any rank."""
        self._begun = self._plan.several

    def add(self, place: int, array: Array) -> None:
        """Add one array, and start the sums of full buckets."""
        self._arrays[place] = array
        self._missing[self._plan.bucket_of[place]] -= 1
        # In the order of the buckets, though a later one may be full first.
        while len(self._messages) < len(self._missing) - 1 and not self._missing[len(self._messages)]:
            message = self._packed()
            # Device arrays are summed in buffers of the transport, not in place.
            start = start_sum_in_place if type(message) is np.ndarray else start_allreduce
            self._started.append(start(self._sum_channel, message))

    def add_all(self, arrays: list[Array]) -> None:
        """Add all arrays, and complete the sums."""
        self._arrays = list(arrays)
        for _ in self._plan.buckets:
            self._reduce_next()

    def _packed(self) -> Array:
        """Return the arrays of the next bucket, concatenated in new memory."""
        places = self._plan.buckets[len(self._messages)].places
        self._messages.append(np.concatenate([self._arrays[k] for k in places], axis=None))
        for k in places:
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
            self._messages[k] = summation.finish()  # the message itself on the host, a new array on a device
        self._started, self._begun = [], False
        # Each array is a view of its bucket's sum.
        out = self._arrays
        for bucket, message in zip(self._plan.buckets, self._messages):
            if divisor != 1:
                message /= divisor
            for k, (part, shape) in zip(bucket.places, bucket.parts):
                out[k] = message[part] if shape is None else message[part].reshape(shape)
        return out

    def __enter__(self) -> Sums:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # After `begin` another rank may have started a sum, even if this one hasn't.
        if kind is not None and (self._started or self._begun):
            self._channel.mark(f"{kind.__name__} ended a gradient whose sums over the ranks were active.")


class _SumChannel:
    """The attributes of a channel that a sum needs, with a separate communicator."""

    def __init__(self, channel: Channel):
        # The channel itself keeps track of active requests, which it completes at its end.
        self.data, self.begin, self.release = channel.separate(), channel.begin, channel.release
