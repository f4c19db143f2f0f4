"""Whether a value of which every rank holds a copy is the same on all of them, bit for bit.

Equal copies cost one reduction of a hash, whatever their size. Only where the hashes differ do the ranks tell each other
what they hold, leaf by leaf, and look for the first entry that differs.

Equality is that of bits: ``-0.0`` isn't ``0.0`` (they divide differently), and a NaN equals a NaN of the same bits and no
other. Copies that were broadcast, and updated alike, are equal in this sense; those that are only nearly equal drift apart.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.errors import ReplicationError
from mpiad.transport.channels import Channel
from mpiad.transport.copy_differences import Difference, bits_of, compare, greatest, listed
from mpiad.transport.device_arrays import arrays_of


class _Held(NamedTuple):
    """What the ranks tell each other of a leaf: where it is, what kind of value, and a hash of its bits."""

    path: str
    kind: str
    digest: bytes

    def __str__(self) -> str:
        return f"{self.path} ({self.kind})"


def require_replicated(channel: Channel, leaves: Sequence[tuple[str, Any]], said: str, advice: str = "") -> None:
    """Raise on all ranks where the copies of a value differ; all ranks of the channel call it.

    `leaves` are the arrays, numbers, strings and Nones that this rank's copy is made of, each with its path. The message
    begins with what the user `said`, and ends with the `advice`. A ReplicationError says which ranks differ, where first,
    and by how much; a TypeError that one holds an object whose bits can't be compared.
    """
    values, wrong = [], ""
    held = []
    try:
        for path, value in leaves:
            values.append(_plain(path, value))
            held.append(_Held(path, *_described(values[-1])))
    except TypeError as error:
        wrong = str(error)
    # Of paths and kinds too: the same bits under other names are another value.
    mine = hashlib.blake2b(repr(held).encode(), digest_size=16).digest()
    if not _all_equal(channel, mine, bool(wrong)):
        _explain(channel, values, held, wrong, f"{said}, but ", f" {advice}" if advice else "")


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


def _described(value: object) -> tuple[str, bytes]:
    if not isinstance(value, np.ndarray):
        return type(value).__name__, hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    digest = hashlib.blake2b(np.ascontiguousarray(bits_of(value)).data, digest_size=16).digest()
    return f"shape {value.shape}, dtype {value.dtype}", digest


def _all_equal(channel: Channel, digest: bytes, wrong: bool) -> bool:
    """Tell whether the least and the greatest hash are the same one, and no rank has a mistake to tell."""
    words = np.frombuffer(digest, dtype=np.uint64)
    # The least of the complements is the complement of the greatest: one reduction finds both.
    sent = np.concatenate([words, ~words, np.array([not wrong], dtype=np.uint64)])
    least = np.empty_like(sent)
    channel.data.Allreduce(sent, least, MPI.MIN)
    return bool(least[4]) and bool((least[:2] == ~least[2:4]).all())


def _explain(channel: Channel, values: list[Any], held: list[_Held], wrong: str, said: str, advice: str) -> None:
    # Only here, where something differs, do the ranks tell each other more than a hash.
    every: list[tuple[list[_Held], str]] = channel.data.allgather((held, wrong))
    for rank, (_, text) in enumerate(every):
        if text:
            raise TypeError(f"{said}{text} This happened on rank {rank}.")
    copies = [tuple(found) for found, _ in every]
    # Where one rank of many has drifted away, it is that rank that differs, whichever it is.
    reference = copies.index(Counter(copies).most_common(1)[0][0])
    ranks = [rank for rank, copy in enumerate(copies) if copy != copies[reference]]
    places = {rank: _first_difference(copies[rank], copies[reference]) for rank in ranks}
    found = channel.data.allgather(_compared(channel, values, copies, reference, places))
    differences: list[Difference] = [found[rank] for rank in ranks]
    raise ReplicationError(
        f"{said}rank(s) {ranks} of {channel.size} differ from rank {reference}.{advice}"
        f"{listed(dict(zip(ranks, differences)))}",
        ranks, differences[0].path, differences[0].index,
        greatest([difference.absolute for difference in differences]),
        greatest([difference.relative for difference in differences]),
    )  # fmt: skip


def _first_difference(copy: tuple[_Held, ...], other: tuple[_Held, ...]) -> int:
    for k, (mine, theirs) in enumerate(zip(copy, other)):
        if mine != theirs:
            return k
    return min(len(copy), len(other))


def _compared(
    channel: Channel, values: list[Any], copies: list[tuple[_Held, ...]], reference: int, places: dict[int, int]
) -> Difference | None:
    """Compare this rank's copy with the reference's, which tells all what it holds where another's first difference is."""
    shared = copies[reference]
    held = {k: values[k] for k in set(places.values()) if k < len(values)} if channel.rank == reference else None
    theirs = channel.data.bcast(held, reference)
    if channel.rank not in places:
        return None
    k, mine = places[channel.rank], copies[channel.rank]
    if k >= min(len(mine), len(shared)) or mine[k][:2] != shared[k][:2]:
        return _of_structure(mine, shared, k, reference)
    others = sum(one != other for one, other in zip(mine, shared)) - 1
    return compare(shared[k].path, shared[k].kind, values[k], theirs[k], reference, others)


def _of_structure(copy: tuple[_Held, ...], other: tuple[_Held, ...], k: int, reference: int) -> Difference:
    here, there = (str(held[k]) if k < len(held) else f"nothing after {k} leaves" for held in (copy, other))
    path = (copy if k < len(copy) else other)[k].path
    return Difference(path, (), float("nan"), float("nan"), f"{here} instead of rank {reference}'s {there}")
