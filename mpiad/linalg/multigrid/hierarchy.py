"""The V-cycle over all levels, from the finest to the coarsest.

The steps on each level are smoothing, restriction of the residual, correction by the coarser level, and smoothing. The
smoother is a Gauss-Seidel sweep over groups of colors. The second sweep, in the reverse order, is the transpose of the
first, so the cycle is a symmetric operator. After the first sweep, the equations of the last group are satisfied, so its
residuals are zero. The second sweep begins with this group, and computes its values from the other groups, so the
correction isn't interpolated to this group. On the finest level, which has two groups, this halves the work.

A V-cycle visits each level once. If the coefficient jumps, the errors of all levels add up, and the number of iterations
grows with the size of the grid. This is avoided by visiting the two levels below the finest level twice.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import splu

from mpiad._typing import Array, Comm, LocalArray, Rank, Shape
from mpiad.linalg.multigrid.color_layout import Box, Color, Distribution, layout_of
from mpiad.linalg.multigrid.stencil import (
    LevelHalo,
    Stencil,
    coarse_operator,
    corners,
    find_interpolation,
    offsets,
    stencil_of,
)
from mpiad.linalg.multigrid.weighted_sums import CompiledSums, Step, Sums, Term, WeightedSum
from mpiad.linalg.vectors import through_host
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.operation import suspended
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import ArrayModule, copied, empty_like

# Message tags, below MPI's guaranteed limit of 32767.
_TAG_GATHER, _TAG_SCATTER = 32754, 32755


class Agglomeration:
    """The transfer of points from a `Distribution` to another `Distribution`, which has blocks on a subset of its ranks."""

    def __init__(self, before: Distribution, after: Distribution, rank: Rank, comm: Comm):
        self._rank, self._comm, self._same = rank, comm, before == after
        position: Any = before.position(rank)
        self._own_box = before.box(position)
        new_position = after.position(rank)
        self.box: Box | None = None if new_position is None else after.box(new_position)
        self._leader = _leader(before, after, position)
        self._members = [
            (before.owner(other), before.box(other))
            for other in before.positions()
            if self.box is not None and _leader(before, after, other) == rank
        ]

    def gather(self, block: LocalArray) -> LocalArray:
        """Return this rank's new block (None if it owns none) from the old blocks; all owners of old blocks call it."""
        if self._same:
            return block
        with restoring_state(), suspended():
            # Empty blocks aren't sent. Sends come first, since they don't block.
            if self._leader != self._rank and block.size:
                mpi_send(copied(block), self._leader, tag=_TAG_GATHER, comm=self._comm)
            if self.box is None:
                return None
            lead = block.shape[: block.ndim - len(self.box.low)]
            whole, pending = empty_like(block, lead + self.box.shape), []
            for member, box in self._members:
                target = (..., *box.within(self.box))
                if member == self._rank:
                    whole[target] = block
                elif whole[target].size:
                    pending.append((target, mpi_irecv(whole[target], member, tag=_TAG_GATHER, comm=self._comm)))
            for target, request in pending:
                whole[target] = mpi_wait(request)
            return whole

    def scatter(self, merged: Array, block: LocalArray) -> LocalArray:
        """Return this rank's old block, shaped like `block` plus a layer, from the new blocks; all owners call it."""
        if self._same:
            return merged
        # The layer is included, so that interpolation needs no exchange of halos.
        own_box = self._own_box.grown(1)
        with restoring_state(), suspended():
            if self.box is None:
                buffer = empty_like(block, block.shape[: block.ndim - len(own_box.low)] + own_box.shape)
                return mpi_wait(mpi_irecv(buffer, self._leader, tag=_TAG_SCATTER, comm=self._comm))
            for member, box in self._members:
                if member != self._rank:
                    part = merged[(..., *box.grown(1).within(self.box.grown(1)))]
                    mpi_send(copied(part), member, tag=_TAG_SCATTER, comm=self._comm)
            return merged[(..., *own_box.within(self.box.grown(1)))]


def _leader(before: Distribution, after: Distribution, position: tuple[int, ...]) -> Rank:
    """Return the new owner of a block: along each dimension, the last new owner at or before the old owner."""
    owners = [starts[k] for starts, k in zip(before.ranks, position)]
    return sum(max(start for start in starts if start <= owner) for starts, owner in zip(after.ranks, owners))


# The coarsest level, on one rank: a sparse factorization by SciPy, on the host. For arrays on a device, a small level
# is solved by a product with its inverse, which is copied to the device once; for a larger level, each solve copies the
# right-hand side to the host and the solution back.

_DENSE = 512  # largest number of points for which the inverse (2 MiB) is used


class Coarsest:
    """Factors of an operator with given couplings; if `singular`, the value at the last point is zero."""

    def __init__(self, stack: np.ndarray, periodic: tuple[bool, ...], singular: bool):
        self._shape, self._periodic = stack.shape[1:], periodic
        # If the kernel contains only constants, the operator without one row and one column is nonsingular.
        self._size = stack[0].size - singular
        self._factors = splu(_matrix(stack, periodic)[: self._size, : self._size]) if self._size else None
        self._inverse: Any = None

    def on(self, xp: ArrayModule) -> Coarsest:
        """Return the same operator on a device."""
        other, count = copy.copy(self), math.prod(self._shape)
        if count <= _DENSE:
            other._inverse = xp.to_device(self._solved(np.eye(count)))
        return other

    def solve(self, f: LocalArray) -> LocalArray:
        """Return the solutions, with one layer around each, for right-hand sides of shape (systems, *shape)."""
        if self._inverse is not None:
            return self._with_layer(f.reshape(len(f), -1) @ self._inverse.T)
        return through_host(lambda f: self._with_layer(self._solved(f.reshape(len(f), -1).T).T), f)

    def _solved(self, f: np.ndarray) -> np.ndarray:
        # If the operator is singular, `Multigrid` subtracts the mean of the solution.
        u = np.zeros(f.shape)
        if self._factors is not None:
            u[: self._size] = self._factors.solve(f[: self._size])
        return u

    def _with_layer(self, u: LocalArray) -> LocalArray:
        out = empty_like(u, (u.size // math.prod(self._shape), *[n + 2 for n in self._shape]))
        out[:] = 0.0
        out[(slice(None), *[slice(1, -1)] * len(self._shape))] = u.reshape(-1, *self._shape)
        for axis, periodic in enumerate(self._periodic, 1):
            if periodic:
                lines = out.swapaxes(0, axis)
                lines[0], lines[-1] = lines[-2], lines[1]
        return out


def _matrix(stack: np.ndarray, periodic: tuple[bool, ...]) -> Any:
    shape: Shape = stack.shape[1:]
    points = np.indices(shape)
    numbers = np.arange(stack[0].size)
    rows, columns, values = [], [], []
    for offset, coupling in zip(offsets(len(shape)), stack):
        target, inside = [axis_points + step for axis_points, step in zip(points, offset)], coupling != 0
        for axis_points, n, wraps in zip(target, shape, periodic):
            inside &= wraps | ((axis_points >= 0) & (axis_points < n))
        # Along a periodic dimension of one or two points, several offsets refer to the same point: their entries are added.
        rows.append(numbers.reshape(shape)[inside])
        columns.append(np.ravel_multi_index([axis_points[inside] for axis_points in target], shape, mode="wrap"))
        values.append(-coupling[inside])
    triplets = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
    return sp.coo_array(triplets, (numbers.size, numbers.size)).tocsc()


# Largest number of points, by number of dimensions, for which a factorization is cheaper than further levels.
_FACTORIZED = {1: 4096, 2: 400, 3: 216}
# Smallest length of a block, by number of dimensions; for shorter blocks, messages would dominate the run time.
_SHORTEST = {1: 4096, 2: 64, 3: 16}


class Plan(NamedTuple):
    """Data for constructing a level and all coarser levels."""

    rank: Rank
    comm: Comm
    singular: bool  # whether constants are in the operator's kernel
    doubled: int  # number of levels below the current level that are visited twice
    compiled: bool  # whether cycles on the host are compiled
    twice: bool = False  # whether the current level is visited twice


class Coarser:
    """The next coarser problem: a level on the same or fewer ranks, or the factorized operator on one rank."""

    def __init__(self, stack: np.ndarray, distribution: Distribution, plan: Plan):
        # Colors require an even number of points along periodic dimensions.
        odd = any(wraps and n % 2 for wraps, n in zip(distribution.periodic, distribution.shape))
        last = odd or math.prod(distribution.shape) <= _FACTORIZED[len(distribution.cuts)]
        # No block with neighbors is as long as the longest dimension, so the last level is on one rank.
        after = distribution.merged(max(distribution.shape) if last else _SHORTEST[len(distribution.cuts)])
        self._gathering = Agglomeration(distribution, after, plan.rank, plan.comm)
        whole = self._gathering.gather(stack)
        self._solver: Level | Coarsest | None = None
        if whole is not None and last:
            self._solver = Coarsest(whole, distribution.periodic, plan.singular)
        elif whole is not None:
            layout = layout_of(self._gathering.box)  # type: ignore[arg-type]
            # A coarse operator couples diagonal neighbors, even if the finest operator doesn't.
            stencil = stencil_of(layout, dict(zip(offsets(len(distribution.cuts)), whole)))
            plan = plan._replace(doubled=max(0, plan.doubled - 1), twice=plan.doubled > 0)
            self._solver = hierarchy(stencil, after, plan)

    def on(self, xp: ArrayModule) -> Coarser:
        """Return a copy of this problem on a device."""
        other = copy.copy(self)
        other._solver = None if self._solver is None else self._solver.on(xp)
        return other

    def correct(self, residual: LocalArray) -> LocalArray:
        """Return the correction on this rank's coarse points and a layer around them, from the residual at these points."""
        f = self._gathering.gather(residual)
        return self._gathering.scatter(None if self._solver is None else self._solver.solve(f), residual)


def hierarchy(stencil: Stencil, distribution: Distribution, plan: Plan) -> Level:
    """Return a level with all coarser levels; all ranks that own a block call it."""
    halo = LevelHalo(stencil.layout, distribution, plan.rank, plan.comm)
    find_interpolation(stencil, halo)
    stack = coarse_operator(stencil, halo)
    return Level(stencil, halo, Coarser(stack, distribution.coarse(), plan), plan.compiled, plan.twice)


class Level:
    """A level of the V-cycle, on a rank that owns a block of the level."""

    def __init__(self, stencil: Stencil, halo: LevelHalo, below: Coarser, compiled: bool = False, twice: bool = False):
        self.layout, self._stencil, self._halo, self._below, self._twice = stencil.layout, stencil, halo, below, twice
        self._count = count = len(self.layout.colors)
        # Rows of the state, for all colors: u, then the residual, then the product with u; and one row for restriction.
        self._coarse = 3 * count
        self.sums = (CompiledSums if compiled else Sums)(self.layout, stencil.memory, 3 * count + 1)
        step, updated = self.sums.step, list[Color]()
        self._before: list[tuple[Step, list[Color]]] = []
        for group in stencil.sweep:
            # In the first sweep, which starts from zero, only colors that have been updated contribute.
            self._before.append((step([self._relaxed(color, updated) for color in group]), group))
            updated = updated + group
        # The colors whose equations aren't satisfied after the first sweep.
        self._unfinished = unfinished = [color for color in self.layout.colors if color not in stencil.sweep[-1]]
        later = _later(stencil.sweep)
        self._residuals = step([self._residual(color, later.get(color)) for color in unfinished])
        self._restriction = step([self._restricted(unfinished)])
        self._interpolation = step([self._interpolated(color) for color in unfinished])
        # In the second sweep, in reverse order, all neighbors contribute.
        self._after = [
            (step([self._relaxed(c, self.layout.colors) for c in group]), group) for group in reversed(stencil.sweep)
        ]
        self._product = step([self._multiplied(color) for color in self.layout.colors])

    def on(self, xp: ArrayModule) -> Level:
        """Return a copy of this level and all coarser levels on a device."""
        return Level(self._stencil.on(xp), self._halo, self._below.on(xp), twice=self._twice)

    def solve(self, f: LocalArray) -> LocalArray:
        """Return the result of one or two cycles, with one layer of the halo, for blocks f; collective."""
        f = self.layout.split(f)
        u = self.cycle(f)
        if self._twice:
            # If B is the operator of a cycle, two cycles are the operator 2 B - B A B, which is symmetric, too.
            first = u.copy()
            f -= self.product_after(f)
            u = first + self.cycle(f)
        return self.layout.join(u, rim=1)

    def cycle(self, f: LocalArray) -> LocalArray:
        """Return the result of one V-cycle for f, starting from zero; the next call overwrites it. Collective."""
        # f must be contiguous, and zero outside of the block; the result has a filled halo.
        if len(f) != len(self.sums.state):
            self.sums.allocate(len(f))
        for relax, group in self._before:
            relax(f)
            self._fill(group)
        coarse = self.layout.shaped(self.sums.state[:, self._coarse])
        self._residuals(f)
        # Restriction reads residuals of neighboring points, which have other colors than coarse points (0, ...).
        self._fill([color for color in self._unfinished if any(color)], self._count)
        self._restriction(f)
        coarse[(..., *self.layout.coarse(rim=1))] = self._below.correct(coarse[(..., *self.layout.coarse())])
        self._interpolation(f)
        self._fill(self._unfinished)
        for relax, group in self._after:
            relax(f)
            self._fill(group)
        return self.sums.state[:, : self._count]

    def product_after(self, f: LocalArray) -> LocalArray:
        """Return the operator's product with the last result of ``cycle(f)``; the next product overwrites it."""
        self._product(f)
        return self.sums.state[:, 2 * self._count : self._coarse]

    def _fill(self, colors: list[Color], first: int = 0) -> None:
        self._halo.fill(self.sums.state, {color: first + self.layout.row[color] for color in colors})

    # ---- the sums

    def _relaxed(self, color: Color, among: list[Color]) -> WeightedSum:
        """Return the sum that solves a color's equations for the values of this color."""
        row, others = self.layout.row[color], [other for other in among if other != color]
        # Until the halo is filled, its values are zero, since the inverse diagonal is zero at points of other ranks.
        return WeightedSum(row, self._stencil.terms(color, others), base=row, scale=row)

    def _residual(self, color: Color, later: list[Color] | None) -> WeightedSum:
        # The equations are satisfied after the color's update, so the residual is due to later updates of other colors.
        row = self.layout.row[color]
        return WeightedSum(self._count + row, self._stencil.terms(color, later), base=row if later is None else None)

    def _multiplied(self, color: Color) -> WeightedSum:
        row = self.layout.row[color]
        if color in self._stencil.sweep[0]:
            # A cycle updates this group last, so its equations are satisfied: the product is f.
            return WeightedSum(2 * self._count + row, base=row)
        return WeightedSum(2 * self._count + row, self._stencil.terms(color), negative=True)

    def _restricted(self, colors: list[Color]) -> WeightedSum:
        terms, has_coarse = [], self.layout.colors[0] in colors
        for color in colors:
            for weights, shift in self._corners(color) if any(color) else ():
                terms.append(Term(weights, self._count + self.layout.row[color], -shift, -shift))
        return WeightedSum(self._coarse, terms, base=self._count if has_coarse else None, of_right=False)

    def _interpolated(self, color: Color) -> WeightedSum:
        """Return the interpolation to a color, the transpose of restriction: a sum of neighboring coarse values."""
        row = self.layout.row[color]
        pairs = self._corners(color) if any(color) else [(None, 0)]
        return WeightedSum(row, [Term(weights, self._coarse, shift) for weights, shift in pairs], base=row, of_right=False)

    def _corners(self, color: Color) -> list[tuple[int, int]]:
        """Return the row of each of a color's weights, and the offset of its coarse point."""
        start, first = self.layout.inner.start, self._stencil.weights[color]
        return [(first + k, self.layout.shifted(corner).start - start) for k, corner in enumerate(corners(color))]


def _later(sweep: list[list[Color]]) -> dict[Color, list[Color]]:
    """Return, for each color, the colors after it in a sweep; an empty dict if the sweep visits a color twice."""
    order = [color for group in sweep for color in group]
    if len(set(order)) < len(order):
        return {}
    return {
        color: [other for after in sweep[number + 1 :] for other in after]
        for number, group in enumerate(sweep)
        for color in group
    }
