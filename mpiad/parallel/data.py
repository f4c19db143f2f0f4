"""`DistributedDataContainer`: samples divided among the ranks, so that each sample is used once per epoch; their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import SupportsInt

import numpy as np

from mpiad._typing import Array, Comm, Function, Rank, Rng, Tree
from mpiad.device.transfer import Constants
from mpiad.parallel.parameters import refuse_traced
from mpiad.primitives import mpi_local_rank, mpi_rank, mpi_size
from mpiad.primitives.checks import positive_count
from mpiad.pytrees import flatten, is_variable, named_leaves
from mpiad.transport import Channel, channel
from mpiad.transport.core.buffers import even_range
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.random_keys import generator_of, random_key, shared_key
from mpiad.transport.core.replication import require_replicated
from mpiad.transport.devices.device_arrays import is_array
from mpiad.transport.watch import watch_settings


class Items(list):
    """A batch in the form of a list of objects, one per sample."""


class _LastContainer(threading.local):
    size = 0
    order: Tree = None
    item = epoch = -1
    first: object = object()  # no batch begins with it


last_container = _LastContainer()
"""The last data container that this thread used: its number of ranks, the values that determine its order, the index and
the epoch of its last item, and the item's first leaf."""


def local_rank() -> Rank:
    """Return this rank's index among the ranks of its node, without communication; see `mpiad.mpi_local_rank`.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> print(0 <= mpiad.parallel.local_rank() <= rank)
    True
    """
    return mpi_local_rank()


def total_workers(comm: Comm = None) -> int:
    """Return the number of ranks, the result of `mpiad.mpi_size`.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> print(mpiad.parallel.total_workers() == size)
    True
    """
    return mpi_size(comm)


class DistributedDataContainer:
    """Divide a data set among the ranks; each rank has access to the whole data set.

    Without `batch_size` an item is one sample, and the numbers of items of two ranks may differ by one. A loop that
    communicates for each item would then hang. With `batch_size` an item is this rank's part of a batch of all ranks, all
    ranks have the same number of items, and a batch has the same samples for any number of ranks.

    Parameters
    ----------
    data : array, possibly nested tuple or dict of arrays, or a sequence
        Samples are indexed by the first axes of the arrays, which have equal lengths; arrays may be on devices. Any other
        object with `len` and indexing, for example a list, is a sequence of samples, and a batch is a list of samples.
    batch_size : int, optional
        Total size of a batch on all ranks. The last batch of an epoch may be smaller, and a rank's part of it may be empty.
    shuffle : bool
        Whether each epoch has a different random order, the same on all ranks.
    rng : Generator, SeedSequence or int, optional
        The source of a key for the orders, the same on all ranks; None: other orders in each container.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    epoch : int
        The last argument of `set_epoch`, 0 initially.

    Raises
    ------
    TypeError, ValueError
        If `data` is none of the above, the arrays have different lengths, there is no sample, or `batch_size` isn't a
        positive integer.

    Ranks
    -----
    Each rank creates a container with the same data, `batch_size`, `shuffle` and `rng`, without
    communication unless `shuffle` is True and `rng` is None. Each sample
    is used exactly once per epoch, on one of the ranks.

    Examples
    --------
    >>> data = mpiad.parallel.DistributedDataContainer((np.arange(24.0),), batch_size=12)
    >>> print(mpiad.mpi_allreduce(sum(np.sum(batch[0]) for batch in data)) == np.sum(np.arange(24)))
    True
    """

    def __init__(
        self, data: Tree, batch_size: int | None = None, shuffle: bool = False, rng: Rng = None, comm: Comm = None
    ):
        if batch_size is not None:
            positive_count(batch_size, "DistributedDataContainer: batch_size")
        self.data, self.batch_size, self.shuffle = data, batch_size, bool(shuffle)
        self._count, self._arrays, self._build = _parts(data)
        if self._count < 1:
            kind = type(data).__name__
            raise ValueError(f"DistributedDataContainer: there is no sample in the data, {kind} {data!r:.60}.")
        self._rank, self._size = mpi_rank(comm), mpi_size(comm)
        call = "DistributedDataContainer"
        self._key = 0
        if self.shuffle:
            self._key = shared_key(None, channel(comm, call), call) if rng is None else random_key(rng, call)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Select the order of another epoch, an integer from 0; all ranks call this with the same epoch."""
        self.epoch = epoch = positive_count(epoch, "DistributedDataContainer.set_epoch: epoch", 0)
        self._order = np.arange(self._count)
        self._order_parameters = {"samples": self._count, "batch_size": self.batch_size}
        if self.shuffle:
            self._order_parameters |= {"key of rng": f"{self._key:#x}", "epoch": epoch}
            # Each epoch has a generator, so a resumed training doesn't need to generate the orders of earlier epochs.
            self._order = generator_of(self._key, epoch).permutation(self._count)

    def __len__(self) -> int:
        """Return the number of items: this rank's samples, or batches, whose number is the same on all ranks."""
        if self.batch_size is None:
            return len(self._local_indices(0, self._count))
        return -(-self._count // self.batch_size)

    def __getitem__(self, k: int) -> Tree:
        """Return this rank's sample k, or its part of batch k."""
        count = len(self)
        if not -count <= k < count:
            raise IndexError(f"DistributedDataContainer: there is no item {k} of {count} on rank {self._rank}.")
        k %= count
        last_container.size, last_container.order = self._size, self._order_parameters
        last_container.item, last_container.epoch = k, self.epoch
        # Indices are Python integers, since a user's data set may not support NumPy's.
        if self.batch_size is None:
            index = int(self._local_indices(0, self._count)[k])
            found = self.data[index] if self._arrays is None else self._build([leaf[index] for leaf in self._arrays])
        else:
            indices = self._local_indices(k * self.batch_size, min((k + 1) * self.batch_size, self._count))
            if self._arrays is None:
                found = Items(self.data[index] for index in indices.tolist())
            else:
                copies = Constants(indices)
                # `take` is twice as fast as indexing.
                found = self._build([leaf.take(*copies.like(leaf), axis=0) for leaf in self._arrays])
        last_container.first = _first_leaf(found)
        return found

    def __iter__(self) -> Iterator[Tree]:
        return (self[k] for k in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"DistributedDataContainer({self._count} samples, batch_size={self.batch_size}, shuffle={self.shuffle}, "
            f"epoch={self.epoch}, rank {self._rank} of {self._size})"
        )

    def _local_indices(self, start: int, stop: int) -> np.ndarray:
        """Return this rank's sample indices, from places start to stop of the order; the first ranks may have one more."""
        first, end = even_range(stop - start, self._size, self._rank)
        return self._order[start + first : start + end]


def _parts(data: Tree) -> tuple[int, Sequence[Array] | None, Function]:
    """Return the number of samples, and the arrays of a pytree, None for a sequence, with the function that rebuilds it."""
    leaves, build = flatten([] if isinstance(data, list) else data)
    arrays = [is_array(leaf) and leaf.ndim > 0 for leaf in leaves]
    if leaves and all(arrays):
        lengths = [len(leaf) for leaf in leaves]
        if len(set(lengths)) > 1:
            raise ValueError(f"DistributedDataContainer: the arrays must have equal lengths, but have {lengths}.")
        return lengths[0], leaves, build
    if isinstance(data, dict) or (isinstance(data, tuple) and any(map(is_array, data))):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf, allowed in zip(leaves, arrays) if not allowed}))
        raise TypeError(
            f"DistributedDataContainer: a tuple or dict must hold arrays with an entry for each sample, but holds "
            f"{kinds or 'nothing'}. Convert them to arrays, or pass a list with one item for each sample."
        )
    try:
        return len(data), None, build
    except TypeError:
        raise TypeError(
            "DistributedDataContainer: the data must be arrays, a pytree of arrays, or have len and indexing, but got "
            f"{type(data).__name__} {data!r:.60}."
        ) from None


def count_samples(samples: Callable[..., int] | None, params: Tree, batch: Sequence[Tree], call: str) -> int:
    """Return the number of this rank's samples; raise a TypeError if they are traced, a ValueError if it is invalid."""
    leaves = flatten([part for part in batch if not isinstance(part, Items)])[0]
    refuse_traced(leaves, call)
    if samples is not None:
        return valid_count(samples(params, *batch), call)
    lengths = [len(part) for part in batch if isinstance(part, Items)]
    return [*lengths, *(np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)), 1][0]


def valid_count(number: SupportsInt, call: str) -> int:
    """Return a number of samples as an integer; raise a ValueError if it is negative or has a fraction."""
    count = int(number)
    if count < 0 or count != number:
        raise ValueError(f"{call}: the number of samples must be an integer from 0, but got {number!r:.60}.")
    return count


def described_batch(batch: Sequence[Tree], count: int) -> str:
    """Return a description of this rank's part of a batch: its index in the last container, or the number of samples."""
    known = last_container.first is _first_leaf(batch)
    return f"batch {last_container.item} of epoch {last_container.epoch}" if known else f"a batch of {count} sample(s)"


def _first_leaf(batch: Tree) -> object:
    while isinstance(batch, (dict, list, tuple)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


def require_equal_replicas(
    channel: Channel, call: str, compared: dict[str, Tree], is_own: Callable[[str], bool] | None = None
) -> None:
    """Raise on all ranks if `compared` differs between ranks, except in leaves that are untrained or `is_own`."""
    # In debug mode orders of samples are also compared, if the last container of every rank has as many ranks as `channel`.
    if watch_settings.debug() and not on_any_rank(channel.data, last_container.size != channel.size):
        compared = {**compared, "data": last_container.order}
    leaves = [
        (path, leaf)
        for name, part in compared.items()
        for path, leaf in named_leaves(part, name)
        if (is_variable(leaf) or name not in ("params", "state"))
        and not (is_own is not None and name == "params" and is_own(path))
    ]
    advice = "Call parallel.synchronize before the first step, and use the same rng, rate and epoch on all ranks."
    require_replicated(channel, leaves, f"{call}: all ranks must train the same parameters in the same way", advice)
