"""The levels, from the finest to the coarsest.

A V-cycle visits each level once. If the coefficient jumps, the errors of all levels add up and the number of iterations
grows with the grid; visiting the two levels below the finest twice keeps it constant.

Interpolation follows the operator: across a jump of the coefficient it preserves the flux, not the slope. Between two
coarse points the value satisfies the equation there, with the couplings across the line between them lumped onto it; then
in the middle of four coarse points, in three dimensions with those across the plane lumped; last in the middle of eight
with the equation itself.

References
----------
J. E. Dendy, Black box multigrid, Journal of Computational Physics 48 (1982), section 2.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import splu

from mpiad._typing import Array, Comm, LocalArray, Rank, Shape
from mpiad.linalg.host_and_device import through_host
from mpiad.linalg.multigrid.colour_layout import Box, Colour, Spread, layout_of, reach
from mpiad.linalg.multigrid.level import Level, LevelHalo, Stencil, corners, offsets, stencil_of
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.operation import suspended
from mpiad.transport.buffers import copied, empty_beside
from mpiad.transport.device_arrays import ArrayModule
from mpiad.transport.tracing import restoring_state

# Coarse points are gathered on fewer ranks, and the correction is scattered: one message each way per rank.


# Unlikely to be used by users, and below the 32767 that MPI guarantees.
_TAG_GATHER, _TAG_SCATTER = 32754, 32755


class Agglomeration:
    """The blocks of one `Spread` as parts of those of another, whose owners own some of them already.

    `rank`: one that owns a block before. `box` (or None): the points that this rank owns afterwards.
    """

    def __init__(self, before: Spread, after: Spread, rank: Rank, comm: Comm):
        self._rank, self._comm, self._same = rank, comm, before == after
        position: Any = before.position(rank)
        self._mine = before.box(position)
        place = after.position(rank)
        self.box: Box | None = None if place is None else after.box(place)
        self._leader = _leader(before, after, position)
        self._members = [
            (before.owner(other), before.box(other))
            for other in before.positions()
            if self.box is not None and _leader(before, after, other) == rank
        ]

    def gather(self, block: LocalArray) -> LocalArray:
        """Return this rank's block afterwards, from a block of shape (..., *own points before); None if it has none.

        All ranks that own a block before call it.
        """
        if self._same:
            return block
        with restoring_state(), suspended():
            return self._gathered(block)

    def _gathered(self, block: LocalArray) -> LocalArray:
        # A block of the level above may own no coarse point at all.
        # Sends first: they don't wait, and a leader receives from its members in any order.
        if self._leader != self._rank and block.size:
            mpi_send(copied(block), self._leader, _TAG_GATHER, self._comm)
        if self.box is None:
            return None
        lead = block.shape[: block.ndim - len(self.box.low)]
        whole, coming = empty_beside(block, lead + self.box.shape), []
        for member, box in self._members:
            there = (..., *box.within(self.box))
            if member == self._rank:
                whole[there] = block
            elif whole[there].size:
                coming.append((there, mpi_irecv(whole[there], member, _TAG_GATHER, self._comm)))
        for there, request in coming:
            whole[there] = mpi_wait(request)
        return whole

    def scatter(self, whole: Array, beside: LocalArray) -> LocalArray:
        """Return this rank's points before, with one layer around them, of an array on those afterwards.

        `whole` has shape (..., *points), for the points that this rank owns afterwards with one layer around them, or is
        None; the result is on the device of `beside`, a block of this rank's points before. All ranks that own a block
        before call it.
        """
        if self._same:
            return whole
        with restoring_state(), suspended():
            return self._scattered(whole, beside)

    def _scattered(self, whole: Array, beside: LocalArray) -> LocalArray:
        # With the layer around it, which saves the exchange that interpolation would need.
        mine = self._mine.grown(1)
        if self.box is None:
            like = empty_beside(beside, beside.shape[: beside.ndim - len(mine.low)] + mine.shape)
            return mpi_wait(mpi_irecv(like, self._leader, _TAG_SCATTER, self._comm))
        for member, box in self._members:
            if member != self._rank:
                mpi_send(copied(whole[(..., *box.grown(1).within(self.box.grown(1)))]), member, _TAG_SCATTER, self._comm)
        return whole[(..., *mine.within(self.box.grown(1)))]


def _leader(before: Spread, after: Spread, position: tuple[int, ...]) -> Rank:
    """Return the owner of a block afterwards: the last of the new owners that isn't beyond it, along each dimension."""
    shares = [along[place] for along, place in zip(before.ranks, position)]
    return sum(max(kept for kept in along if kept <= share) for along, share in zip(after.ranks, shares))


# The coarsest level, on one rank: a sparse factorization by SciPy, and so on the host.
#
# On a device a small level is solved by a product with its inverse, which is copied there once. For larger ones each solve
# copies the right-hand side to the host and the solution back.


_DENSE = 512  # points: an inverse of 2 MiB, read in less time than a copy to the host and back takes


class Coarsest:
    """A factorized operator.

    `stack`, of shape (1 + offsets, *shape): its diagonal and its couplings. `singular`: whether constants are in its
    kernel; the last point's value is then fixed.
    """

    def __init__(self, stack: np.ndarray, periodic: tuple[bool, ...], singular: bool):
        self._shape, self._periodic = stack.shape[1:], periodic
        # A singular operator of this kind without one row and column isn't singular.
        self._kept = stack[0].size - singular
        self._factors = splu(_matrix(stack, periodic)[: self._kept, : self._kept]) if self._kept else None
        self._inverse: Any = None

    def on(self, home: ArrayModule) -> Coarsest:
        """Return the same operator on a device."""
        other, count = copy.copy(self), math.prod(self._shape)
        if count <= _DENSE:
            other._inverse = home.to_device(self._solved(np.eye(count)))
        return other

    def solve(self, f: LocalArray) -> LocalArray:
        """Return the solutions with one layer around them, for right-hand sides of shape (systems, *shape)."""
        if self._inverse is not None:
            return self._surrounded(f.reshape(len(f), -1) @ self._inverse.T)
        return through_host(lambda f: self._surrounded(self._solved(f.reshape(len(f), -1).T).T), f)

    def _solved(self, f: np.ndarray) -> np.ndarray:
        # The omitted point is zero: any constant may be added, and `Multigrid` subtracts the mean.
        u = np.zeros(f.shape)
        if self._factors is not None:
            u[: self._kept] = self._factors.solve(f[: self._kept])
        return u

    def _surrounded(self, u: LocalArray) -> LocalArray:
        out = u.reshape(-1, *self._shape)
        for axis, periodic in enumerate(self._periodic, 1):
            width = [(1, 1) if other == axis else (0, 0) for other in range(out.ndim)]
            out = np.pad(out, width, mode="wrap" if periodic else "constant")
        return out


def _matrix(stack: np.ndarray, periodic: tuple[bool, ...]) -> Any:
    shape: Shape = stack.shape[1:]
    points = np.indices(shape)
    here = np.arange(stack[0].size)
    rows, columns, values = [here], [here], [stack[0].ravel()]
    for offset, coupling in zip(offsets(len(shape)), stack[1:]):
        there = [along + step for along, step in zip(points, offset)]
        inside = np.ones(shape, bool)
        for axis, n in enumerate(shape):
            if periodic[axis]:
                there[axis] = there[axis] % n
            inside &= (there[axis] >= 0) & (there[axis] < n)
        # On a ring of one or two points an offset leads to the point itself, or two to the same: entries are added.
        inside &= coupling != 0
        rows.append(here.reshape(shape)[inside])
        columns.append(np.ravel_multi_index([along[inside] for along in there], shape))
        values.append(-coupling[inside])
    triplets = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return sp.coo_array(triplets, (here.size, here.size)).tocsc()


# A factorization of this many points costs less than the levels that it saves.
_FACTORISED = {1: 4096, 2: 400, 3: 216}
# Sending the sides of shorter blocks takes longer than computing several of them on one rank.
_SHORTEST = {1: 4096, 2: 64, 3: 16}


class Plan(NamedTuple):
    """Data shared by all levels."""

    rank: Rank
    comm: Comm
    singular: bool  # whether constants are in the operator's kernel
    doubled: int  # number of levels, below the current one, that are visited twice
    compiled: bool  # whether cycles on the host are compiled


class Coarser:
    """The next coarser problem: a level of the same ranks or of fewer, or the factorized operator on one."""

    def __init__(self, stack: np.ndarray, spread: Spread, plan: Plan):
        last = _is_last(spread)
        after = spread.alone() if last else spread.merged(_SHORTEST[len(spread.cuts)])
        self._gathering = Agglomeration(spread, after, plan.rank, plan.comm)
        whole = self._gathering.gather(stack)
        self._level: Level | None = None
        self._coarsest: Coarsest | None = None
        self._twice = plan.doubled > 0
        if whole is None:
            return
        if last:
            self._coarsest = Coarsest(whole, spread.periodic, plan.singular)
        else:
            layout = layout_of(self._gathering.box)  # type: ignore[arg-type]
            # With all neighbors: a coarse operator has couplings across corners, even if the finest one doesn't.
            stencil = stencil_of(layout, offsets(len(spread.cuts)), whole)
            self._level = hierarchy(stencil, after, plan._replace(doubled=max(0, plan.doubled - 1)))

    def on(self, home: ArrayModule) -> Coarser:
        """Return the same on a device, with copies."""
        other = copy.copy(self)
        other._level = None if self._level is None else self._level.on(home)
        other._coarsest = None if self._coarsest is None else self._coarsest.on(home)
        return other

    def correct(self, residual: LocalArray) -> LocalArray:
        """Return the correction on this rank's coarse points and the layer around them, for the residual on the points."""
        f = self._gathering.gather(residual)
        if self._level is not None:
            layout = self._level.layout
            return self._gathering.scatter(layout.join(self._visited(self._level, layout.split(f)), rim=1), residual)
        return self._gathering.scatter(None if self._coarsest is None else self._coarsest.solve(f), residual)

    def _visited(self, level: Level, f: LocalArray) -> LocalArray:
        u = level.cycle(f)
        if not self._twice:
            return u
        # With B for a cycle, 2 B - B A B: symmetric like B.
        first = u.copy()
        f -= level.product_after(f)
        return first + level.cycle(f)


def _is_last(spread: Spread) -> bool:
    # Colors need an even number of points around a ring.
    odd = any(wraps and n % 2 for wraps, n in zip(spread.periodic, spread.shape))
    return odd or math.prod(spread.shape) <= _FACTORISED[len(spread.cuts)]


def hierarchy(stencil: Stencil, spread: Spread, plan: Plan) -> Level:
    """Return a level with all coarser ones; all ranks that own a block call it."""
    halo = LevelHalo(stencil.layout, spread, plan.rank, plan.comm)
    find_interpolation(stencil, halo)
    stack = coarse_operator(stencil, halo)
    return Level(stencil, halo, Coarser(stack, spread.coarse(), plan), plan.compiled)


def find_interpolation(stencil: Stencil, halo: LevelHalo) -> None:
    """Compute the weights of a level's interpolation, also for its halo, and store them in the stencil. Collective."""
    colours = stencil.layout.colours
    # Points between two coarse points first: those in the middle of four or eight are interpolated from them.
    for odd in range(1, len(colours[0]) + 1):
        group = [colour for colour in colours if sum(colour) == odd]
        for colour in group:
            _find_weights(stencil, colour)
        halo.fill({colour: stencil.weights_of(colour) for colour in group})


def _find_weights(stencil: Stencil, colour: Colour) -> None:
    layout, at = stencil.layout, {corner: k for k, corner in enumerate(corners(colour))}
    inner, row = stencil.weights_of(colour)[:, layout.inner], layout.row[colour]
    centre = stencil.diagonal[row, layout.inner].copy()
    for along, coupling in _collapsed(stencil, colour).items():
        if not any(along):
            centre -= coupling
            continue
        neighbour, steps = reach(colour, along)
        there = layout.shifted(steps)
        for k, corner in enumerate(corners(neighbour)):
            target = at[tuple(s + t for s, t in zip(steps, corner))]
            inner[target] += coupling * stencil.weights_of(neighbour)[k, there] if any(neighbour) else coupling
    # Points without couplings (outside of the block) have no weights; a nonpositive center means the same.
    inner *= np.divide(1.0, centre, out=np.zeros_like(centre), where=centre > 0)


def _collapsed(stencil: Stencil, colour: Colour) -> dict[tuple[int, ...], np.ndarray]:
    """Return a color's couplings summed over the dimensions in which its points have coarse indices."""
    layout = stencil.layout
    out: dict[tuple[int, ...], np.ndarray] = {}
    for offset, coupling in stencil.couplings.items():
        along = tuple(o if odd else 0 for o, odd in zip(offset, colour))
        part = coupling[layout.row[colour], layout.inner]
        out[along] = out[along] + part if along in out else part
    return out


def coarse_operator(stencil: Stencil, halo: LevelHalo) -> np.ndarray:
    """Return the coarse operator PᵀAP on this rank's coarse points, shape (1 + offsets, *coarse points); collective.

    It is the diagonal, and the couplings in the order of `offsets`.
    """
    layout = stencil.layout
    products = {colour: _product(stencil, colour) for colour in layout.colours}
    # Restriction reads the rows of neighboring points, which other ranks may own.
    halo.fill({colour: rows for colour, (rows, _) in products.items()})
    ndim = len(layout.shape)
    out = np.zeros((3**ndim, layout.size))
    targets = [(0,) * ndim, *offsets(ndim)]
    for colour, (rows, at) in products.items():
        for k, corner in enumerate(corners(colour)):
            # Restriction is the transpose of interpolation, so its offsets have the opposite sign.
            there = layout.shifted(corner, -1)
            for number, target in enumerate(targets):
                # A row is relative to the coarse point at its own entry, a target to the one to which it is restricted.
                row = at.get(tuple(s + t for s, t in zip(target, corner)))
                if row is not None:
                    part = rows[row, there]
                    out[number, layout.inner] += part * stencil.weights_of(colour)[k, there] if any(colour) else part
    out[1:] *= -1
    return layout.whole(out)[(slice(None), *layout.coarse())].copy()


def _product(stencil: Stencil, colour: Colour) -> tuple[np.ndarray, dict[tuple[int, ...], int]]:
    """Return the rows of AP of a color, and the row of each coarse point, which is given in entries."""
    layout, number = stencil.layout, stencil.layout.row[colour]
    coarse = itertools.product(*[(0, 1) if odd else (-1, 0, 1) for odd in colour])
    at = {steps: k for k, steps in enumerate(coarse)}
    rows = np.zeros((len(at), layout.size))
    inner = rows[:, layout.inner]
    zero = (0,) * len(colour)
    # A row of A, with each neighbor's value replaced by its interpolation.
    terms = [(zero, stencil.diagonal, np.add), *[(o, n, np.subtract) for o, n in stencil.couplings.items()]]
    for offset, coefficient, gather in terms:
        neighbour, steps = reach(colour, offset)
        there, factor = layout.shifted(steps), coefficient[number, layout.inner]
        for k, corner in enumerate(corners(neighbour)):
            row = inner[at[tuple(s + t for s, t in zip(steps, corner))]]
            gather(row, factor * stencil.weights_of(neighbour)[k, there] if any(neighbour) else factor, out=row)
    return rows, at
