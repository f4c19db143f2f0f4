"""Redistribution of the state of a sharded solve that was written by another number of ranks.

Each file contains the boxes (index ranges in the whole arrays) of its variables. A rank reads the files whose boxes
intersect its own boxes. Data that don't belong to variables are the same in all files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm
from mpiad.checkpoint_files import read, read_description, require_same_problem
from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.sharded.host_vectors import untiled
from mpiad.transport import Channel
from mpiad.transport.core.agreement import raising_together

Box = list[list[int]]
"""Start and stop along each axis of a whole array."""


class Layout(NamedTuple):
    """The box of each of this rank's variables in its whole array, in the order of the vector, and the arrays' shapes."""

    boxes: list[Box]
    shapes: list[list[int]]


class OldState(NamedTuple):
    """The files of one iteration, written by all ranks of an earlier job, and the boxes of each file."""

    iteration: int
    files: list[Path]
    boxes: list[list[Box]]

    def arrays(self, layout: Layout) -> dict[str, np.ndarray]:
        """Return this rank's arrays of the state; raise a ValueError if a file is damaged or from another iteration."""
        size = _length(layout.boxes)
        found: dict[str, np.ndarray] = {}
        nonempty = [part for part in zip(self.files, self.boxes) if _length(part[1])]
        # A rank without variables reads the data that all files contain from the first file.
        needed = [part for part in nonempty if any(map(_intersect, part[1], layout.boxes))] or nonempty[:1]
        for file, boxes in needed:
            description, arrays = read(file)
            if description["iteration"] != self.iteration:
                raise ValueError(f"minimize: another job writes the checkpoint {file}. Pass another file, or end that job.")
            parts = {"x": arrays.pop("x")[None]}
            if "rows" in arrays:
                parts["rows"] = untiled(arrays.pop("rows"), _length(boxes))
            found = found or {**arrays, **{name: np.zeros((len(part), size)) for name, part in parts.items()}}
            for name, part in parts.items():
                _copy(part, boxes, found[name], layout.boxes)
        found["x"] = found["x"][0]
        return found


def layout_of(specs: Sequence[tuple], checkpoint: CheckpointFile, comm: Comm) -> Layout | None:
    """Return the positions of this rank's variables, by the checkpoint's `blocks` or in the order of ranks, or None."""
    blocks = None if checkpoint.blocks is None else [[part.start, part.stop] for part in checkpoint.blocks]
    shapes = [tuple(shape) for shape, _ in specs]
    every = comm.allgather((shapes, blocks))
    before, boxes = every[: comm.rank], []
    for k, (shape, dtype) in enumerate(specs):
        if blocks is not None and list(shape[len(shape) - len(blocks) :]) == [stop - start for start, stop in blocks]:
            box = [*[[0, n] for n in shape[: len(shape) - len(blocks)]], *blocks]
        elif blocks is None and len(shape) == 1 and all(len(others) == len(shapes) for others, _ in every):
            start = sum(others[k][0] for others, _ in before if others[k])
            box = [[start, start + shape[0]]]
        else:
            box = []
        # A complex array has an additional last axis for real and imaginary parts.
        boxes.append([*box, *[[0, 2]] * (dtype.kind == "c")] if box else None)
    all_boxes = comm.allgather(boxes)
    if any(box is None for others in all_boxes for box in others) or len({len(others) for others in all_boxes}) > 1:
        return None
    ends = [[max(stops) for stops in zip(*[[stop for _, stop in box] for box in leaf])] for leaf in zip(*all_boxes)]
    return Layout(boxes, ends)


def global_checksum(vector: np.ndarray, layout: Layout, comm: Comm) -> str:
    """Return a checksum of a distributed vector that doesn't depend on the distribution; collective."""
    total, start = 0, 0
    for k, (box, shape) in enumerate(zip(layout.boxes, layout.shapes)):
        part = np.ascontiguousarray(vector[start : start + _length([box])], np.float64).view(np.uint64)
        axes = np.ix_(*[np.arange(*ends, dtype=np.uint64) for ends in box])
        indices = np.zeros(tuple(stop - first for first, stop in box), np.uint64)
        for axis_indices, n in zip(axes, shape):
            indices = indices * np.uint64(n) + axis_indices
        # Each number is hashed together with its position. The sum of the hashes doesn't depend on the order.
        total += int(np.sum(_hashed(part ^ _hashed(indices.ravel() + np.uint64(k << 56))), dtype=np.uint64))
        start += len(part)
    return f"{sum(comm.allgather(total)) % 2**64:016x}"


def _hashed(x: np.ndarray) -> np.ndarray:
    """Return the hashes of numbers by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def newest_state(files: list[Path], problem: dict[str, Any], used: Channel) -> OldState | None:
    """Return the newest state of which all `files` exist, or None; raise on all ranks if one is invalid; collective."""
    own = []
    with raising_together(used, (OSError, ValueError)):
        for file in files[used.rank :: used.size]:
            description = read_description(file)
            require_same_problem(file, description, problem, "minimize")
            own.append((file, description["iteration"], description.get("boxes")))
    by_ranks: dict[tuple[int, int], dict[int, tuple[Path, Any]]] = {}
    for file, iteration, boxes in [entry for entries in used.data.allgather(own) for entry in entries]:
        rank, size = map(int, re.findall(r"\.rank(\d+)of(\d+)\.", file.name)[-1])
        by_ranks.setdefault((iteration, size), {})[rank] = file, boxes
    common = [key for key, found in by_ranks.items() if len(found) == key[1] and all(boxes for _, boxes in found.values())]
    if not common:
        return None
    entries = [entry for _, entry in sorted(by_ranks[max(common)].items())]
    return OldState(max(common)[0], [file for file, _ in entries], [boxes for _, boxes in entries])


def _length(boxes: list[Box]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


def _intersect(old: Box, new: Box) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(old, new))


def _copy(source: np.ndarray, old: list[Box], target: np.ndarray, new: list[Box]) -> None:
    """Copy the intersections of corresponding boxes from one array of vectors to another."""
    start = target_start = 0
    for first, second in zip(old, new):
        parts = source[:, start : start + _length([first])], target[:, target_start : target_start + _length([second])]
        start, target_start = start + _length([first]), target_start + _length([second])
        if not _intersect(first, second):
            continue
        overlap = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second)]
        views = []
        for part, box in zip(parts, (first, second)):
            shaped = part.reshape(len(part), *[stop - start for start, stop in box])
            views.append(shaped[(slice(None), *[slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, box)])])
        views[1][...] = views[0]
