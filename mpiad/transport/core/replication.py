"""Check that a replicated value is bitwise the same on all ranks.

The check is one reduction of a hash. If the hashes differ, the ranks exchange descriptions of all leaves and compare the
first leaves that differ. Bits are compared: ``-0.0`` differs from ``0.0``, and a NaN equals only a NaN with the same bits.
Copies that are only nearly equal would drift apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.errors import ReplicationError
from mpiad.transport.core.agreement import fingerprint
from mpiad.transport.core.channels import Channel
from mpiad.transport.devices.device_arrays import arrays_of

_SHOWN = 8
_HUGE = 2**1023  # integers from 2¹⁰²⁴ on can't be converted to floats
# A long double on x86 has 80 bits, in ten of its 16 bytes; the other bytes are arbitrary.
_USED_BYTES = 10 if np.finfo(np.longdouble).nmant == 63 else np.dtype(np.longdouble).itemsize


class Difference(NamedTuple):
    """The first leaf, at `path`, in which a rank's copy differs from the reference."""

    path: str
    index: tuple[int, ...]  # of the first different entry
    # The largest differences of the leaf's entries; NaN if undefined (for NaN, strings or different shapes).
    absolute: float
    relative: float
    text: str


def compare(path: str, kind: str, mine: Array, theirs: Array, reference: int, others: int) -> Difference:
    """Return how `mine` differs from `theirs` of rank `reference`; `kind`: shape and dtype; `others`: more such leaves."""
    more = f"; {others} more differ" if others else ""
    if not isinstance(mine, np.ndarray):
        text = f"{path} is {mine!r:.60} instead of rank {reference}'s {theirs!r:.60}{more}"
        absolute = relative = float("nan")
        if isinstance(mine, int) and isinstance(theirs, int):
            distance = abs(mine - theirs)
            absolute, relative = float(min(distance, _HUGE)), distance / max(abs(mine), abs(theirs))
        return Difference(path, (), absolute, relative, text)
    places = np.flatnonzero((bits_of(mine) != bits_of(theirs)).any(axis=1))
    first = tuple(int(i) for i in np.unravel_index(places[0], mine.shape))
    absolute, relative = _largest(mine.reshape(-1)[places], theirs.reshape(-1)[places])
    size = "in the sign of a zero or the bits of a NaN only" if absolute == 0 else f"by at most {absolute:.2g}"
    if absolute != absolute:
        size = "where just one of the two is NaN" if mine.dtype.kind in "fc" else "their dtype isn't numeric"
    elif absolute != 0:
        size += f" (relative {relative:.2g})"
    at, count = (f" first at {list(first)}", f"{len(places)} of {mine.size} entries differ, ") if first else ("", "")
    text = f"{path} ({kind}){at} is {mine[first]} instead of rank {reference}'s {theirs[first]}; {count}{size}{more}"
    return Difference(path, first, absolute, relative, text)


def bits_of(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array's entries without padding, shape (size, bytes per entry)."""
    if not array.size:
        return np.empty((0, 1), np.uint8)
    if array.dtype.names:  # there may be gaps between the fields
        return np.concatenate([bits_of(array[name]).reshape(array.size, -1) for name in array.dtype.names], axis=1)
    whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if array.dtype.char not in "gG":
        return whole.reshape(array.size, -1)
    return whole.reshape(array.size, -1, np.dtype(np.longdouble).itemsize)[:, :, :_USED_BYTES].reshape(array.size, -1)


def listed(differences: Mapping[int, Difference]) -> str:
    """Return a line for each rank's difference; if there are many, the first few and the number of the others."""
    lines = [f"\n  rank {rank}: {difference.text}" for rank, difference in differences.items()]
    return "".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def greatest(values: Sequence[float] | np.ndarray) -> float:
    """Return the largest number except NaN; NaN if there is none."""
    known = np.asarray(values)[~np.isnan(values)]
    return float(known.max()) if known.size else float("nan")


def _largest(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    if mine.dtype.kind not in "biufc":
        return float("nan"), float("nan")
    wide = np.clongdouble if mine.dtype.kind == "c" else np.longdouble
    a, b = mine.astype(wide), theirs.astype(wide)
    with np.errstate(all="ignore"):
        absolute = np.abs(a - b)
        relative = absolute / np.maximum(np.abs(a), np.abs(b))
    absolute[np.isnan(a) & np.isnan(b)] = 0
    relative[absolute == 0] = 0
    return greatest(absolute), greatest(relative)


class _Leaf(NamedTuple):
    path: str
    kind: str
    digest: int

    def __str__(self) -> str:
        return f"{self.path} ({self.kind})"


def require_replicated(
    channel: Channel, leaves: Sequence[tuple[str, object]], prefix: str, advice: str = "", reference: int | None = None
) -> None:
    """Raise a ReplicationError on all ranks if the copies of a value, with `leaves` by path, differ; collective."""
    # Leaves are arrays, numbers, strings or None, else a TypeError is raised. `advice` comes before the differences, which
    # are those from rank `reference`, by default from the most common copy.
    values, wrong = [], ""
    described = []
    try:
        for path, value in leaves:
            values.append(_plain(path, value))
            described.append(_Leaf(path, *_described(values[-1])))
    except TypeError as error:
        wrong = str(error)
    digest = fingerprint(described)
    # The minimum of the complements is the complement of the maximum, so one reduction computes both.
    mine, least = np.array([digest, ~digest, not wrong]), np.empty(3, int)
    channel.data.Allreduce(mine, least, MPI.MIN)
    if not least[2] or least[0] != ~least[1]:
        _explain(channel, values, described, wrong, f"{prefix}, but ", f" {advice}" if advice else "", reference)


def _plain(path: str, value: object) -> Array:
    if value is None or isinstance(value, (str, bytes, int)):  # a Python integer of any size
        return value
    arrays = arrays_of(value)
    if arrays is not None:
        return arrays.to_host(value)
    array = np.asarray(value) if isinstance(value, (float, complex, np.generic, np.ndarray)) else None
    if array is None or array.dtype.hasobject:
        raise TypeError(
            f"{path} is {type(value).__name__} {value!r:.60}. The ranks can compare numbers, strings and arrays of them."
        )
    return array


def _described(value: object) -> tuple[str, int]:
    if not isinstance(value, np.ndarray):
        return type(value).__name__, fingerprint(repr(value))
    return f"shape {value.shape}, dtype {value.dtype}", fingerprint(bits_of(value))


def _explain(
    channel: Channel,
    values: list[Array],
    described: list[_Leaf],
    wrong: str,
    prefix: str,
    advice: str,
    reference: int | None,
) -> None:
    every: list[tuple[list[_Leaf], str]] = channel.data.allgather((described, wrong))
    for rank, (_, text) in enumerate(every):
        if text:
            raise TypeError(f"{prefix}{text} This happened on rank {rank}.")
    copies = [tuple(found) for found, _ in every]
    if reference is None:  # so that a single rank that differs is reported
        reference = copies.index(Counter(copies).most_common(1)[0][0])
    ranks = [rank for rank, copy in enumerate(copies) if copy != copies[reference]]
    shared, places = copies[reference], dict[int, int]()
    for rank in ranks:
        shorter = min(len(copies[rank]), len(shared))
        places[rank] = next((k for k in range(shorter) if copies[rank][k] != shared[k]), shorter)
    found = channel.data.allgather(_compared(channel, values, copies, reference, places))
    differences = {rank: found[rank] for rank in ranks}
    first, who = differences[ranks[0]], f"rank(s) {ranks} of {channel.size} differ from rank {reference}"
    sizes = [greatest(values) for values in zip(*[(one.absolute, one.relative) for one in differences.values()])]
    raise ReplicationError(f"{prefix}{who}.{advice}{listed(differences)}", ranks, first.path, first.index, *sizes)


def _compared(
    channel: Channel, values: list[Array], copies: list[tuple[_Leaf, ...]], reference: int, places: dict[int, int]
) -> Difference | None:
    """Return this rank's difference, None if there is none; `places`: by rank, the index of its first different leaf."""
    shared = copies[reference]
    sent = {k: values[k] for k in set(places.values()) if k < len(values)} if channel.rank == reference else None
    theirs = channel.data.bcast(sent, reference)
    if channel.rank not in places:
        return None
    k, mine = places[channel.rank], copies[channel.rank]
    if k >= min(len(mine), len(shared)) or mine[k][:2] != shared[k][:2]:
        here, there = (str(copy[k]) if k < len(copy) else f"nothing after {k} leaves" for copy in (mine, shared))
        text = f"{here} instead of rank {reference}'s {there}"
        return Difference((mine if k < len(mine) else shared)[k].path, (), float("nan"), float("nan"), text)
    others = sum(one != other for one, other in zip(mine, shared)) - 1
    return compare(shared[k].path, shared[k].kind, values[k], theirs[k], reference, others)
