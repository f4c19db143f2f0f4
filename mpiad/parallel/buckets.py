"""Many arrays added up over the ranks in few messages: one behind the other, in buckets of one dtype.

The sums travel on a communicator of their own, so that they may start in the middle of a reverse pass whatever that
communicates itself. All ranks start them in the same order, that of the buckets, each as soon as it and all before it are
full: the order in which arrays become ready may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mpiad._typing import Array
from mpiad.transport import Channel, Spec
from mpiad.transport.collectives import Summation, start_allreduce
from mpiad.transport.collectives import finish_allreduce as finish

__all__ = ["BUCKET_BYTES", "Bucket", "Sums", "buckets_of"]

# Long enough that a message's latency doesn't count, short enough that the first starts early.
BUCKET_BYTES = 8 * 2**20


class Bucket(NamedTuple):
    """Arrays that travel together: their places, where each begins and ends, and how many numbers they are."""

    places: list[int]
    cuts: list[tuple[int, int]]
    size: int
    dtype: np.dtype


def buckets_of(specs: Sequence[Spec], limit: int) -> list[Bucket]:
    """Divide arrays among buckets of at most so many bytes, the last arrays first: their cotangents are ready first.

    Parameters
    ----------
    specs : sequence of Spec
    limit : int
        An array that is longer has a bucket of its own.
    """
    open_ones: dict[np.dtype, list[int]] = {}
    filled: dict[np.dtype, int] = {}
    groups: list[list[int]] = []
    for place in reversed(range(len(specs))):
        spec = specs[place]
        length = int(np.prod(spec.shape)) * spec.dtype.itemsize
        if spec.dtype not in open_ones or filled[spec.dtype] + length > limit:
            open_ones[spec.dtype], filled[spec.dtype] = [], 0
            groups.append(open_ones[spec.dtype])
        open_ones[spec.dtype].append(place)
        filled[spec.dtype] += length
    return [_bucket(places, specs) for places in groups]


def _bucket(places: list[int], specs: Sequence[Spec]) -> Bucket:
    stops = np.cumsum([0] + [int(np.prod(specs[place].shape)) for place in places]).tolist()
    return Bucket(places, list(zip(stops, stops[1:])), stops[-1], specs[places[0]].dtype)


class Sums:
    """Sums over the ranks of arrays that become ready one after another.

    Parameters
    ----------
    channel : Channel
        Prepared by `prepared`.
    specs : sequence of Spec
    limit : int
        Of a bucket's bytes.
    """

    def __init__(self, channel: Channel, specs: Sequence[Spec], limit: int):
        self._channel, self._specs = _apart(channel), specs
        self._buckets = buckets_of(specs, limit)
        self._of = {place: k for k, bucket in enumerate(self._buckets) for place in bucket.places}
        self._missing = [len(bucket.places) for bucket in self._buckets]
        self._arrays: list[Any] = [None] * len(specs)
        self._started: list[Summation] = []

    def add(self, place: int, array: Array) -> None:
        """Hand in one array, and start what is full."""
        self._arrays[place] = array
        self._missing[self._of[place]] -= 1
        while len(self._started) < len(self._buckets) and not self._missing[len(self._started)]:
            bucket = self._buckets[len(self._started)]
            flat = [np.ravel(self._arrays[k]) for k in bucket.places]
            whole = np.concatenate(flat) if len(flat) > 1 else np.array(flat[0])
            self._started.append(start_allreduce(self._channel, whole))
            for k in bucket.places:
                self._arrays[k] = None

    def wait(self) -> list[Array]:
        """Return the sums, once all arrays have been handed in."""
        out: list[Any] = [None] * len(self._specs)
        for bucket, summation in zip(self._buckets, self._started):
            whole = finish(summation)
            for k, (start, stop) in zip(bucket.places, bucket.cuts):
                out[k] = whole[start:stop].reshape(self._specs[k].shape)
        return out


class _Apart:
    """What `start_allreduce` needs of a channel, with a communicator of its own."""

    def __init__(self, channel: Channel):
        self.data = channel.derive()
        self.made_on = channel.data
        self.hold, self.release = channel.hold, channel.release


_known: WeakKeyDictionary[Channel, _Apart] = WeakKeyDictionary()


def _apart(channel: Channel) -> Any:
    """Return the communicator of the sums, made anew where the channel's duplicates were; collective at first."""
    found = _known.get(channel)
    if found is None or found.made_on is not channel.data:
        found = _known[channel] = _Apart(channel)
    return found
