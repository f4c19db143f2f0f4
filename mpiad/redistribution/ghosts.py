"""`GhostExchange`: entries that other ranks own, fetched by their global numbers.

The constructor finds the pattern of messages once. Each rank is the directory of an equal share of the numbers: it learns
from the owners who owns which of them, and answers the ranks that need them. So no rank stores anything about all numbers.
Owned numbers are registered as runs: consecutive numbers at consecutive positions, of which a range is one.

A rank requests each number once, also if it needs it several times. In a message, numbers are in increasing order. Entries
are gathered into one array before they are sent, whose slices are the messages, and they are received into slices of
another one. The transpose adds the ghosts of each number first, on the rank that needs it, and then, on the owner, the sums
of the ranks in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, LocalArray, Rank
from mpiad.differentiation.concatenation import concatenate
from mpiad.differentiation.segment_sum import Segments, take_segments
from mpiad.extend import custom_operator, defadjoint
from mpiad.primitives import mpi_allreduce, mpi_alltoall, mpi_irecv, mpi_isend
from mpiad.primitives.checks import point_to_point
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import suspended
from mpiad.primitives.request import CombinedRequest
from mpiad.transport import MAX, Channel, Spec, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.agreement import raise_together, raising_together
from mpiad.transport.core.buffers import require_sendable
from mpiad.transport.core.channels import is_watched
from mpiad.transport.core.messages import exchange
from mpiad.transport.core.tracing import checked_on_replay, once, restoring_state
from mpiad.transport.devices.device_arrays import arrays_of, empty_like

_TAG = 32741  # below 32767, the largest tag that every MPI supports
_CALL = "GhostExchange"
_LARGEST = 2**62  # so that sums of numbers and shares don't overflow


class _Parts(NamedTuple):
    """The slices of an array, one after the other, that belong to this rank and to other ranks."""

    length: int
    local: slice
    others: dict[Rank, slice]  # those that aren't empty


class GhostExchange:
    """The exchange of entries by their global numbers: each rank fetches those that it needs from the ranks that own them.

    Parameters
    ----------
    needed : array of integers, shape (n_needed,)
        The numbers of the entries that this rank reads, in any order. They may be repeated, and may be this rank's own.
    owned : tuple (start, stop), or array of integers of shape (n_owned,)
        The numbers of this rank's entries: a half-open range, or the number of each entry. Each needed number must be owned
        by one rank, and no number by two; numbers that nobody needs needn't exist.
    comm : mpi4py intracommunicator, optional

    Attributes
    ----------
    n_needed, n_owned : int
    sources : list of (rank, slice)
        The ranks whose entries this rank needs, possibly including this rank, and their entries in the order of ranks and
        numbers.
    destinations : list of (rank, array)
        The ranks that need this rank's entries, and the indices of these entries.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if `needed` or `owned` isn't valid, if a needed number has no owner, or if two ranks own a number.

    Ranks
    -----
    All ranks of `comm` create it, and all call its methods in the same order. A rank may own and need nothing. A rank sends
    messages only to ranks that need its entries.

    Notes
    -----
    Owners are found through a distributed directory: no rank stores more than its share of the numbers.

    References
    ----------
    A. Pinar and B. Hendrickson, "Communication support for adaptive computation", Proc. 10th SIAM Conference on Parallel
    Processing for Scientific Computing (2001).

    Examples
    --------
    Each rank owns two entries of a vector, and reads the first one of the next rank:

    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> next_one = 2 * (rank + 1) % (2 * size)
    >>> ghosts = mpiad.GhostExchange([next_one], (2 * rank, 2 * rank + 2))
    >>> print(ghosts.fetch(np.array([2.0 * rank, 2.0 * rank + 1])) == next_one)
    [ True]
    """

    def __init__(self, needed: Sequence[int] | Array, owned: tuple[int, int] | Array, comm: Comm = None):
        used = channel(comm, _CALL)
        self.comm, self._agreed = comm, False
        with restoring_state(), suspended():
            with raising_together(used):
                numbers = _numbers(needed, "needed")
                runs, self.n_owned = _runs(owned)
            self.n_needed = len(numbers)
            unique, places = np.unique(numbers, return_inverse=True)
            owners, positions = _owners(unique, runs, used.rank, used.size, comm)
            order = np.argsort(owners, kind="stable")
            counts = np.bincount(owners, minlength=used.size)
            sent_counts = mpi_alltoall(counts, comm=comm)
            sent = mpi_alltoall(positions[order], counts, comm=comm, received=sent_counts)
        incoming, outgoing = _slices(counts), _slices(sent_counts)
        self.sources: list[tuple[Rank, slice]] = list(incoming.items())
        self.destinations = [(rank, sent[part]) for rank, part in outgoing.items()]
        self._rank, none = used.rank, slice(0, 0)
        self._incoming = _Parts(len(unique), incoming.pop(used.rank, none), incoming)
        self._outgoing = _Parts(len(sent), outgoing.pop(used.rank, none), outgoing)
        # The sent entries among the owned ones, and the needed entries among the received ones; None if they are equal.
        self._sent = Segments(sent, self.n_owned)
        places = np.argsort(order)[places]
        in_order = len(places) == len(unique) and bool((places == np.arange(len(places))).all())
        self._places = None if in_order else Segments(places, len(unique))

    def fetch(self, x: LocalArray) -> LocalArray:
        """Return the needed entries.

        Parameters
        ----------
        x : array of shape (n_owned, ...)
            This rank's entries; dtype and further axes are the same on all ranks.

        Returns
        -------
        array of shape (n_needed, ...)
            The entries in the order of `needed`.

        Raises
        ------
        TypeError, ValueError
            If `x` isn't an array or has another length; in the exchange's first call, and in debug mode, on all ranks, also
            if dtypes or further axes differ between ranks. Later calls don't compare them.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        `accumulate`.
        """
        self._check(x, self.n_owned, "fetch", "owned")
        return _fetch(x, self)

    def accumulate(self, ghosts: LocalArray) -> LocalArray:
        """Add ghosts to the entries that they are copies of: the transpose of `fetch`.

        Parameters
        ----------
        ghosts : array of shape (n_needed, ...)
            Contributions to the needed entries; dtype and further axes are the same on all ranks.

        Returns
        -------
        array of shape (n_owned, ...)
            The sum of all ranks' contributions to each of this rank's entries, zero for an entry that no rank needs. They
            are added in a fixed order: on each rank in the order of `needed`, then in the order of ranks.

        Raises
        ------
        TypeError, ValueError
            As in `fetch`.

        Ranks
        -----
        All ranks call it.

        Adjoint
        -------
        `fetch`.
        """
        self._check(ghosts, self.n_needed, "accumulate", "needed")
        return _accumulate(ghosts, self)

    def begin_fetch(self, x: LocalArray) -> CombinedRequest:
        """Start a fetch that `mpi_wait` completes; computations between the two calls overlap with the messages.

        Parameters
        ----------
        x : array of shape (n_owned, ...)
            As in `fetch`. It may be overwritten after this call.

        Returns
        -------
        request
            ``mpi_wait(request)`` returns the array of `fetch`.

        Raises
        ------
        TypeError, ValueError
            As in `fetch`.

        Ranks
        -----
        All ranks begin their fetches in the same order, and may wait for them in different orders.

        Adjoint
        -------
        The adjoint of `mpi_wait` starts to send the cotangents of ghosts to the owners; that of this call adds them.
        """
        self._check(x, self.n_owned, "begin_fetch", "owned")
        packed, plain = take_segments(x, self._sent), getval(x)
        requests = [
            mpi_irecv(empty_like(plain, (part.stop - part.start, *plain.shape[1:])), rank, tag=_TAG, comm=self.comm)
            for rank, part in self._incoming.others.items()
        ]
        received = len(requests)
        requests += [
            mpi_isend(packed[part], rank, tag=_TAG, comm=self.comm) for rank, part in self._outgoing.others.items()
        ]
        before = sum(rank < self._rank for rank, _ in self.sources)

        def finish(values: list[LocalArray]) -> LocalArray:
            # The entries of this rank are between those of the lower and the higher ranks.
            parts = [*values[:before], packed[self._outgoing.local], *values[before:received]]
            found = concatenate(parts) if len(parts) > 1 else parts[0]
            return found if self._places is None else take_segments(found, self._places)

        return CombinedRequest(requests, finish)

    def _check(self, x: LocalArray, length: int, method: str, argument: str) -> None:
        """Raise an error if `x` can't be exchanged."""
        call, plain = f"{_CALL}.{method}", getval(x)

        def check() -> None:
            require_sendable(plain, call)
            shape = getattr(plain, "shape", ())
            if shape[:1] != (length,):
                text = f"the first axis must have one entry for each of the {length} {argument} numbers of this rank"
                raise ValueError(f"{call}: {text}, but got shape {shape}.")

        self.agree(plain, 0, call, check)

    def agree(self, x: LocalArray, axis: int, call: str, check: Callable[[], object]) -> None:
        """Raise the error of `check`; in the first call and in debug mode on all ranks, which compare other axes, too."""
        error = None
        try:
            check()
        except (TypeError, ValueError) as found:
            error = found
        if not self._agreed or error is not None or is_watched():
            spec = Spec((0,), np.dtype(float)) if error else spec_like(x)._replace(arrays=None)
            # Compiled programs compare in each call, as other ranks do, which may be interpreted, or not at all.
            run = checked_on_replay if error is None and is_watched() else once
            run(self._agree, channel(self.comm, call, collective=False), spec, axis % len(spec.shape), call, error)

    def _agree(self, channel: Channel, spec: Spec, axis: int, call: str, error: Exception | None) -> None:
        if not self._agreed or getattr(channel.data, "agreement", None) is not None:
            collectives.lengths_of_all(channel, spec, axis, call, error)
            self._agreed = True
        elif error is not None:
            raise error

    def __repr__(self) -> str:
        partners = len({*self._incoming.others, *self._outgoing.others})
        return f"GhostExchange({self.n_needed} needed, {self.n_owned} owned, {partners} other ranks)"


def fetch_ghosts(x: LocalArray, ghosts: GhostExchange) -> LocalArray:
    """Return the needed entries (n_needed, ...) of x (n_owned, ...); collective."""
    received = _swap(ghosts._sent.taken(x), ghosts._outgoing, ghosts._incoming, ghosts.comm)
    return received if ghosts._places is None else ghosts._places.taken(received)


def accumulate_ghosts(x: LocalArray, ghosts: GhostExchange) -> LocalArray:
    """Return for each owned entry the sum (n_owned, ...) of its ghosts in x (n_needed, ...); collective."""
    packed = x if ghosts._places is None else ghosts._places(x)
    return ghosts._sent(_swap(packed, ghosts._incoming, ghosts._outgoing, ghosts.comm))


_fetch = custom_operator(fetch_ghosts)
# Fetching copies the owner's entry to each place that needs it, so its transpose adds the cotangents of all copies.
_accumulate = defadjoint(_fetch, accumulate_ghosts)
_fetch.spec_of = lambda x, ghosts: Spec((ghosts.n_needed, *x.shape[1:]), x.dtype)
_accumulate.spec_of = lambda x, ghosts: Spec((ghosts.n_owned, *x.shape[1:]), x.dtype)


def _swap(x: LocalArray, sent: _Parts, received: _Parts, comm: Comm) -> LocalArray:
    """Send the parts of an array to their ranks, and return the array of the received parts."""
    spec = Spec((received.length, *x.shape[1:]), x.dtype, arrays_of(x))
    if sent.others or received.others:
        out = exchange(point_to_point(comm, _CALL), _TAG, x, sent.others, spec, received.others, _CALL)
    else:
        out = spec.empty()
    if sent.local.stop:
        out[received.local] = x[sent.local]
    return out


def _numbers(values: Sequence[int] | Array, argument: str) -> np.ndarray:
    """Return global numbers as an array of dtype int64; raise if they are invalid."""
    numbers = np.asarray(values, None if np.size(values) else np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(
            f"{_CALL}: {argument} must be an array of integers with one dimension, but got shape {numbers.shape} and dtype "
            f"{numbers.dtype}."
        )
    if numbers.size and numbers.min() < 0:
        raise ValueError(f"{_CALL}: {argument} must not be negative, but got number {numbers.min()}.")
    if numbers.size and numbers.max() > _LARGEST:
        raise ValueError(f"{_CALL}: {argument} must be at most {_LARGEST}, but got number {numbers.max()}.")
    return numbers.astype(np.int64)


def _runs(owned: tuple[int, int] | Array) -> tuple[np.ndarray, int]:
    """Return runs of consecutive numbers as rows (start, stop, position), and the number of owned entries."""
    if isinstance(owned, tuple):
        if len(owned) != 2 or not all(isinstance(end, (int, np.integer)) for end in owned) or not 0 <= owned[0] <= owned[1]:
            raise ValueError(
                f"{_CALL}: owned as a tuple must be a range (start, stop) with 0 <= start <= stop, but got {owned}."
            )
        start, stop = owned
        return np.array([[start, stop, 0]] if start < stop else np.zeros((0, 3)), np.int64), int(stop - start)
    numbers = _numbers(owned, "owned")
    starts = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(numbers))
    return np.stack([numbers[starts], numbers[starts] + lengths, starts], axis=1), len(numbers)


def _owners(unique: np.ndarray, runs: np.ndarray, rank: Rank, size: int, comm: Comm) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of each of the sorted numbers, and its position there; collective."""
    largest = max(runs[:, 1].max(initial=0), unique.max(initial=-1) + 1)
    share = max(-(-int(mpi_allreduce(largest, MAX, comm=comm)) // size), 1)  # the directory of number n is rank n // share
    # Runs are divided among the directories.
    first, last = runs[:, 0] // share, (runs[:, 1] - 1) // share
    repeats = last - first + 1
    start, stop, position = np.repeat(runs, repeats, axis=0).T
    directory = np.repeat(first - np.cumsum(repeats) + repeats, repeats) + np.arange(repeats.sum())
    begin, end = np.maximum(start, directory * share), np.minimum(stop, (directory + 1) * share)
    rows = np.stack([begin, end, position + begin - start, np.full(len(begin), rank)], axis=1)
    by_directory = np.argsort(directory, kind="stable")
    entries = mpi_alltoall(rows[by_directory], np.bincount(directory, minlength=size), comm=comm)
    entries = entries[np.argsort(entries[:, 0], kind="stable")]
    # A last entry for numbers below all others.
    begin, end, position, owner = np.concatenate([entries, [[0, 0, 0, -1]]]).T
    asked_counts = np.bincount(unique // share, minlength=size)
    counts = mpi_alltoall(asked_counts, comm=comm)
    asked = mpi_alltoall(unique, asked_counts, comm=comm, received=counts)
    at = np.searchsorted(entries[:, 0], asked, side="right") - 1
    found = np.stack([np.where(asked < end[at], owner[at], -1), position[at] + asked - begin[at]], axis=1)
    owners, positions = mpi_alltoall(found, counts, comm=comm, received=asked_counts).T
    error, twice = None, np.flatnonzero(entries[1:, 0] < entries[:-1, 1])
    if len(twice):
        (*_, one), (number, *_, other) = entries[twice[0]], entries[twice[0] + 1]
        text = f"{_CALL}: a number must be owned once, but number {number} is owned by rank {one} and by rank {other}."
        error = ValueError(text)
    elif (owners < 0).any():
        error = ValueError(f"{_CALL}: rank {rank} needs number {unique[owners < 0][0]}, which no rank owns.")
    raise_together(channel(comm, _CALL), error)
    return owners, positions


def _slices(counts: np.ndarray) -> dict[Rank, slice]:
    """Return the slice of each rank with a nonzero count."""
    stops = np.cumsum(counts).tolist()
    return {rank: slice(stop - count, stop) for rank, (stop, count) in enumerate(zip(stops, counts.tolist())) if count}
