"""The parameters of an ensemble as rows of numbers, in the order in which a program numbers them.

There are three kinds of leaves: those that differ between trajectories; those shared by all; and those that can't be
differentiated (an integer, a boolean, a string, a function), also shared by all. The last are part of the program: f may
count and branch on them, and another value gives another program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Shape
from mpiad.compiling.arguments import argument, is_complex, parts, row_parts
from mpiad.ensemble.batch import Parameters
from mpiad.pytrees import is_variable
from mpiad.transport.device_arrays import is_device_array


class PackedLeaf(NamedTuple):
    """One leaf from which a program takes parameters."""

    place: int  # of the leaf
    shape: Shape  # of one trajectory's leaf
    varies: bool  # whether it differs between trajectories
    first: int  # the number of its first scalar among the parameters; the others follow in C order
    complex: bool = False  # whether its numbers are complex: each is two scalars then, its real and its imaginary part

    @property
    def scalars(self) -> range:
        """The numbers of its scalars."""
        return range(self.first, self.first + math.prod(self.shape) * (2 if self.complex else 1))


class ParameterPacking(NamedTuple):
    """The numbering of the scalars of a program's parameters."""

    parts: tuple[PackedLeaf, ...]  # in the order of their leaves, and so of their scalars

    @property
    def size(self) -> int:
        """The number of scalars."""
        return self.parts[-1].scalars.stop if self.parts else 0

    @property
    def varying(self) -> tuple[int, ...]:
        """The numbers of the scalars that differ between trajectories."""
        return tuple(j for part in self.parts if part.varies for j in part.scalars)

    @property
    def shared(self) -> tuple[int, ...]:
        """The numbers of the scalars that are the same for all."""
        return tuple(j for part in self.parts if not part.varies for j in part.scalars)

    def split(self, leaves: list[Any], count: int, dtype: DTypeLike) -> tuple[Array, Array]:
        """Return the parameters of `count` trajectories in a real dtype, shapes (len(varying), count) and (len(shared),).

        `leaves` are as `Parameters` holds them: the last axis of one that varies counts trajectories.
        """
        own = [row_parts(np.reshape(leaves[p.place], (-1, count))) for p in self.parts if p.varies and len(p.scalars)]
        common = [parts(np.ravel(leaves[p.place])) for p in self.parts if not p.varies]
        return _together(own or [np.empty((0, count))], dtype), _together(common or [np.empty(0)], dtype)

    def numbers(self, leaves: list[Any], count: int, dtype: DTypeLike) -> dict[int, Any]:
        """Return the scalars of `count` trajectories by their numbers, as programs take them, on the leaves' device."""
        if not any(map(is_device_array, leaves)):
            varying, shared = self.split(leaves, count, dtype)
            return dict(zip(self.varying, varying)) | dict(zip(self.shared, shared))
        rows: dict[int, Any] = {}
        for part in self.parts:
            leaf = np.reshape(leaves[part.place], (-1, count) if part.varies else (-1,))
            found = [leaf[j] for j in range(leaf.shape[0])]
            if part.complex:
                found = [half for number in found for half in (number.real, number.imag)]
            rows |= dict(zip(part.scalars, found))
        return rows

    def joined(self, varying: Sequence[Array] | Array, shared: Sequence[Array] | Array, count: int) -> dict[int, Array]:
        """Return arrays in the shapes of leaves, by their places, from rows in the order of `split`, of `count` numbers."""
        # Parts are in the order of their scalars, so each takes the next rows.
        rows = {True: iter(varying), False: iter(shared)}
        made = {}
        for part in self.parts:
            taken = np.stack([next(rows[part.varies]) for _ in part.scalars]) if part.scalars else np.empty(0)
            taken = taken[::2] + 1j * taken[1::2] if part.complex else taken
            shape = (*part.shape, count) if part.varies else part.shape
            made[part.place] = np.reshape(taken, shape)
        return made


def _together(arrays: list[Array], dtype: DTypeLike) -> Array:
    # A single array isn't copied: the batch owns it.
    return argument(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), dtype)


def packing_of(p: Parameters) -> ParameterPacking:
    """Return the numbering of the scalars of an ensemble's parameters."""
    found: list[PackedLeaf] = []
    first = 0
    for place, (leaf, varies) in enumerate(zip(p.leaves, p.varies)):
        if varies or is_variable(leaf):
            shape = np.shape(leaf)[:-1] if varies else np.shape(leaf)
            found.append(PackedLeaf(place, shape, varies, first, is_complex(leaf)))
            first = found[-1].scalars.stop
    return ParameterPacking(tuple(found))


def names_of(packing: ParameterPacking) -> tuple[str, ...]:
    """Return the names of a program's parameters: p0, p1, … per trajectory, and s0, s1, … shared by all."""
    named = {j: f"{kind}{i}" for kind in "ps" for i, j in enumerate(packing.varying if kind == "p" else packing.shared)}
    return tuple(named[j] for j in range(packing.size))
