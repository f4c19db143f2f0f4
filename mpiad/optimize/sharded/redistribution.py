"""Redistribution of the state of a sharded solve, from the files of one number of ranks to another number.

Each file contains the boxes (index ranges in the whole arrays) of its variables. A rank reads the files whose boxes
intersect its own boxes. Data other than variables are the same in all files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Comm
from mpiad.checkpoint_files import read, read_description, require_problem
from mpiad.optimize.checkpoint import CheckpointFile
from mpiad.optimize.sharded.host_vectors import untiled

Box = list[list[int]]
"""Start and stop along each axis of a whole array."""


class Layout(NamedTuple):
    """Positions of the variables of this rank's vector, as consecutive boxes of whole arrays."""

    boxes: list[Box]
    shapes: list[list[int]]


class OldState(NamedTuple):
    """An iteration of which all old ranks have files: the files, with their boxes."""

    iteration: int
    files: list[Path]
    boxes: list[list[Box]]

    def arrays(self, layout: Layout) -> dict[str, np.ndarray]:
        """Return this rank's arrays of the state; raise a ValueError if a file is damaged, or of another iteration."""
        size = _length(layout.boxes)
        found: dict[str, np.ndarray] = {}
        pieces = [piece for piece in zip(self.files, self.boxes) if _length(piece[1])]
        # A rank without variables reads the first file, for the data that all files have.
        needed = [piece for piece in pieces if any(map(_meet, piece[1], layout.boxes))] or pieces[:1]
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
    """Return the positions of this rank's variables, given their shapes and dtypes; None if unknown. Collective.

    They are given by the `blocks` of the checkpoint. By default arrays with one axis are assumed to be consecutive parts of
    whole arrays, in the order of ranks.
    """
    blocks = None if checkpoint.blocks is None else [[part.start, part.stop] for part in checkpoint.blocks]
    shapes = [tuple(shape) for shape, _ in specs]
    every = comm.allgather((shapes, blocks))
    before, boxes = every[: comm.rank], []
    for k, (shape, dtype) in enumerate(specs):
        if blocks is not None and list(shape[len(shape) - len(blocks) :]) == [stop - start for start, stop in blocks]:
            box = [*[[0, n] for n in shape[: len(shape) - len(blocks)]], *blocks]
        elif blocks is None and len(shape) == 1 and all(len(theirs) == len(shapes) for theirs, _ in every):
            start = sum(theirs[k][0] for theirs, _ in before if theirs[k])
            box = [[start, start + shape[0]]]
        else:
            box = []
        # A complex array has a last axis for both parts.
        boxes.append([*box, *[[0, 2]] * (dtype.kind == "c")] if box else None)
    known = comm.allgather(boxes)
    if any(box is None for theirs in known for box in theirs) or len({len(theirs) for theirs in known}) > 1:
        return None
    ends = [[max(stops) for stops in zip(*[[stop for _, stop in box] for box in leaf])] for leaf in zip(*known)]
    return Layout(boxes, ends)


def place_independent(vector: np.ndarray, layout: Layout, comm: Comm) -> str:
    """Return a checksum of a distributed vector that doesn't depend on the distribution; all ranks call it."""
    total, start = 0, 0
    for k, (box, shape) in enumerate(zip(layout.boxes, layout.shapes)):
        piece = np.ascontiguousarray(vector[start : start + _length([box])], np.float64).view(np.uint64)
        axes = np.ix_(*[np.arange(*ends, dtype=np.uint64) for ends in box])
        places = np.zeros(tuple(stop - first for first, stop in box), np.uint64)
        for places_along, n in zip(axes, shape):
            places = places * np.uint64(n) + places_along
        # Each number is hashed together with its position. The sum of the hashes doesn't depend on the order.
        total += int(np.sum(_mixed(piece ^ _mixed(places.ravel() + np.uint64(k << 56))), dtype=np.uint64))
        start += len(piece)
    return f"{sum(comm.allgather(total)) % 2**64:016x}"


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return the hashes of numbers by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def newest_state(files: list[Path], problem: dict[str, Any], comm: Comm) -> tuple[OldState | None, str | None]:
    """Return the newest iteration of which all ranks of an old job have files, and an error in a file; collective.

    `files` are all files of the old ranks; `problem` is the part of the problem's description that doesn't depend on the
    number of ranks.
    """
    mine, wrong = [], None
    for file in files[comm.rank :: comm.size]:
        try:
            description = read_description(file)
            require_problem(file, description, problem, "minimize")
            mine.append((file, description["iteration"], description.get("boxes")))
        except (OSError, ValueError) as error:
            wrong = str(error)
    every = comm.allgather((mine, wrong))
    wrong = next((text for _, text in every if text is not None), None)
    by_ranks: dict[tuple[int, int], dict[int, tuple[Path, Any]]] = {}
    for file, iteration, boxes in [entry for entries, _ in every for entry in entries]:
        rank, many = map(int, re.findall(r"\.rank(\d+)of(\d+)\.", file.name)[-1])
        by_ranks.setdefault((iteration, many), {})[rank] = file, boxes
    whole = [key for key, found in by_ranks.items() if len(found) == key[1] and all(boxes for _, boxes in found.values())]
    if wrong is not None or not whole:
        return None, wrong
    entries = [entry for _, entry in sorted(by_ranks[max(whole)].items())]
    return OldState(max(whole)[0], [file for file, _ in entries], [boxes for _, boxes in entries]), None


def _length(boxes: list[Box]) -> int:
    return sum(prod(stop - start for start, stop in box) for box in boxes)


def _meet(old: Box, new: Box) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(old, new))


def _copy(source: np.ndarray, old: list[Box], target: np.ndarray, new: list[Box]) -> None:
    """Copy the intersections of two lists of boxes, from one array of vectors to another."""
    begin, out = 0, 0
    for first, second in zip(old, new):
        parts = source[:, begin : begin + _length([first])], target[:, out : out + _length([second])]
        begin, out = begin + _length([first]), out + _length([second])
        if not _meet(first, second):
            continue
        common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second)]
        views = []
        for part, box in zip(parts, (first, second)):
            shaped = part.reshape(len(part), *[stop - start for start, stop in box])
            views.append(shaped[(slice(None), *[slice(a - start, b - start) for (a, b), (start, _) in zip(common, box)])])
        views[1][...] = views[0]
