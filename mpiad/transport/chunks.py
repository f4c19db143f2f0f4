"""Where large arrays are cut, so that one piece can be copied from or to a device while another one travels.

Pieces are lists of ranges of the flat array. Of an array that all ranks have whole, a piece is one range. Of an array
that has a block for each rank, a piece is a range of every block: each call then keeps all ranks busy, as the whole would.
All follows from what the ranks know of each other, so they cut alike wherever their arrays lie.
"""

from __future__ import annotations

from itertools import accumulate

from mpiad.transport import device_settings

__all__ = ["Ranges", "bounds", "of_block", "of_blocks", "of_whole"]

Ranges = list[tuple[int, int]]

_LARGEST_ENTRY = 16  # bytes, of a complex128
# Each block's part of a piece is copied by itself, so among many ranks it mustn't become too short for that.
_MOST_PARTS = 16


def bounds(size: int, itemsize: int, chunk: int | None = None) -> Ranges:
    """Return where the pieces of an array of so many entries begin and end; `chunk` is the most bytes of one."""
    chunk = device_settings.present().chunk if chunk is None else chunk
    step = (chunk - chunk % _LARGEST_ENTRY) // itemsize  # whole entries of any dtype
    return [(start, min(start + step, size)) for start in range(0, size, step)]


def of_whole(size: int, itemsize: int, chunk: int | None = None) -> list[Ranges]:
    """Return the pieces of an array that is cut from its front to its end."""
    return [[part] for part in bounds(size, itemsize, chunk)]


def of_blocks(counts: list[int], itemsize: int) -> list[Ranges]:
    """Return the pieces of an array made of one block of so many entries for each rank."""
    starts = [0, *accumulate(counts)]
    return [
        [(begin + start, begin + end) for begin, (start, end) in zip(starts, parts)] for parts in _parts(counts, itemsize)
    ]


def of_block(counts: list[int], rank: int, itemsize: int) -> list[Ranges]:
    """Return the pieces of one rank's block, as an array of its own; the last ones may be empty."""
    return [[parts[rank]] for parts in _parts(counts, itemsize)]


def _parts(counts: list[int], itemsize: int) -> list[Ranges]:
    """Return the pieces, each as what it takes of every block, counted from the block's begin."""
    chunk = device_settings.present().chunk
    step = max(chunk // min(len(counts), _MOST_PARTS) // itemsize, 1)
    return [[(min(start, count), min(start + step, count)) for count in counts] for start in range(0, max(counts), step)]
