"""Halo exchange, which copies the cells around a block from the ranks that own them, and its transpose.

Filling a halo copies cells from other blocks and, beyond physical sides, applies the boundary conditions. The result is
the same as if one dimension were filled after another, as by `numpy.pad`, except that the scheme `FACES_ONLY` sets corners
to zero. The transpose of filling, folding, adds every halo cell to the cell that it copies, on the rank that owns it.
Each of the two operations is one node on the tape, and the adjoint of the other operation. `field_exchange` divides both
operations into halves, between which the program can compute. A *padded* array includes the halo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm, LocalArray, Rank
from mpiad.compiling.strided_updates import StridedUpdate
from mpiad.domain.boundary import ZERO, Side, Sides, homogeneous
from mpiad.domain.partition import Partition
from mpiad.domain.routes import BY_AXIS, Geometry, Index, Route, Stage, plan
from mpiad.extend import InPlace, custom_operator, defjvp, defvjp
from mpiad.primitives import mpi_irecv, mpi_send, mpi_wait
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.request import Request
from mpiad.pytrees import split
from mpiad.transport import channel
from mpiad.transport.core.linked_calls import LinkedRun, LinkedStep
from mpiad.transport.core.messages import PreparedMessages
from mpiad.transport.devices.device_arrays import copied, empty_like

# MPI guarantees tags up to 32767.
TAG = 32750


# The messages of a stage, one to each neighbor; all messages start before the first is completed.


class PendingReceive(NamedTuple):
    """A message that this rank is receiving."""

    parts: tuple[Index, ...]  # indices of the message's parts in the array
    request: Request


def post(values: LocalArray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm) -> list[PendingReceive]:
    """Start the messages of a stage for an array (..., *padded), from blocks to halos, or if `backwards` vice versa."""
    cells = [(r.peer, r.owned, r.ghosts) if backwards else (r.peer, r.ghosts, r.owned) for r in routes]
    # Receives are posted before the sends, so that MPI needn't buffer the messages.
    incoming = [
        PendingReceive(parts, mpi_irecv(_buffer_for(values, parts), peer, tag=tag, comm=comm))
        for peer, parts, _ in cells
        if parts
    ]
    for peer, _, parts in cells:
        if parts:
            mpi_send(np.concatenate([values[index].reshape(-1) for index in parts]), peer, tag=tag, comm=comm)
    return incoming


def complete(values: LocalArray, incoming: list[PendingReceive], backwards: bool) -> None:
    """Wait for the messages of a stage, and write the received values to the cells; if `backwards`, add the values."""
    for parts, request in incoming:
        # Messages are completed in a fixed order, so that contributions to one cell are added in a fixed order.
        for index, part in zip(parts, split(mpi_wait(request), [values[index].shape for index in parts])):
            if backwards:
                values[index] += part
            else:
                values[index] = part


def _buffer_for(values: LocalArray, parts: tuple[Index, ...]) -> LocalArray:
    return empty_like(values, (sum(values[index].size for index in parts),))


class _Copy(NamedTuple):
    """Cells that get the values of other cells, or to which the values are added."""

    out: np.ndarray
    cells: np.ndarray | None  # None if `out` is set to a value
    side: Side
    adds: bool = False
    axis: int = 0  # dimension of the side, from the last one

    def run(self) -> None:
        if self.adds:
            np.add(self.out, self.side.folded(self.cells, self.out, self.axis), out=self.out)
        else:
            self.out[...] = self.side.filled(self.cells)

    def linked(self) -> StridedUpdate | None:
        """Return the same as a kernel, if there is one."""
        if self.cells is None:
            return StridedUpdate.of(self.out, self.side.value, 1, 0, False)
        if self.adds and self.cells.shape != self.out.shape:  # several layers are added first
            return None
        return StridedUpdate.of(self.out, self.cells, self.side.factor, self.side.value, self.adds)


class PreparedFill(LinkedRun):
    """The filling or folding of one array at a fixed address that is exchanged repeatedly: copies and messages in order."""

    def __init__(self, parts: Sequence[_Copy | PreparedMessages]):
        self._parts = parts
        self.linked, self.begun = _linked(parts)

    def __call__(self) -> Iterator[None]:
        """Fill or fold the array; the iterator yields while messages are in flight."""
        for part in self._parts:
            if isinstance(part, _Copy):
                part.run()
                continue
            try:
                part.start()
                yield
                part.finish("exchange")
            except BaseException as error:
                part.abandon(error)
                raise


def _linked(parts: Sequence[_Copy | PreparedMessages]) -> tuple[list[LinkedStep] | None, int]:
    """Return `LinkedRun.linked` and `LinkedRun.begun`."""
    steps, begun = list[LinkedStep | None](), 0
    for part in parts:
        if isinstance(part, _Copy):
            steps += [part.linked()] if part.out.size else []
            continue
        started, ended = part.linked("exchange") or ([None], [])
        begun = begun or len(steps) + len(started)
        steps += [*started, *ended]
    linked = [step for step in steps if step is not None and step.kernel is not None]
    return (linked if len(linked) == len(steps) else None), begun


def _messages(
    values: np.ndarray, routes: tuple[Route, ...], backwards: bool, tag: int, comm: Comm
) -> list[_Copy | PreparedMessages]:
    """Return the messages of a stage, with copies into and from their memory; arguments as for `post`."""
    outgoing = [_Packing(values, route.ghosts if backwards else route.owned) for route in routes]
    # With `backwards`, received values are added to the cells, so they need a buffer.
    incoming = [_Packing(values, route.owned if backwards else route.ghosts, buffered=backwards) for route in routes]
    sent, received = ({r.peer: m.message for r, m in zip(routes, memory)} for memory in (outgoing, incoming))
    messages = PreparedMessages(channel(comm, "exchange", collective=False), tag, sent, received)
    packed = [_Copy(part, cells, ZERO) for memory in outgoing for cells, part in memory.copies]
    unpacked = [_Copy(cells, part, ZERO, backwards) for memory in incoming for cells, part in memory.copies]
    return [*packed, messages, *unpacked]


class _Packing:
    """The memory of a message: a view of the array if the message is one contiguous part, else a buffer."""

    def __init__(self, values: np.ndarray, parts: tuple[Index, ...], buffered: bool = False):
        cells = [values[index] for index in parts]
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []  # parts of the array, with views of the buffer
        if len(cells) == 1 and cells[0].flags.c_contiguous and not buffered:
            self.message = cells[0]
        else:
            self.message = _buffer_for(values, parts)
            self.copies = list(zip(cells, split(self.message, [part.shape for part in cells])))


class LocalFill(NamedTuple):
    """Cells of the halo (ghost cells) that no message fills."""

    ghost: Index
    copied: Index | None  # cells of this rank that the ghost cells copy; None if the ghost cells are set to a value
    axis: int = 0  # dimension of the physical side beyond which the ghost cells lie
    end: int | None = None  # 0 or 1 for the low or high side; None if no physical side is involved

    def side(self, sides: Sides) -> Side:
        """Return the boundary of these cells; without a physical side `ZERO`, which adds zero to the copied cells."""
        return ZERO if self.end is None else sides[self.axis][self.end]


class Halo:
    """The messages and local copies that fill a block's halo; `interior` is the block's index in a padded array."""

    def __init__(self, partition: Partition, rank: Rank, widths: tuple[int, ...], comm: Comm):
        self.geometry, self.comm = Geometry(partition, rank, widths), comm
        self.widths, self.shape, self.padded = widths, self.geometry.shape, self.geometry.padded
        self.interior = (..., *self.geometry.block)
        self._plans: dict[str, tuple[Stage, ...]] = {}
        self._local: dict[tuple, list[list[LocalFill]]] = {}

    def stages(self, scheme: str) -> tuple[Stage, ...]:
        """Return the stages of a scheme of `routes`."""
        if scheme not in self._plans:
            self._plans[scheme] = plan(self.geometry, scheme)
        return self._plans[scheme]

    def local(self, sides: Sides, scheme: str) -> list[list[LocalFill]]:
        """Return, for each stage, the cells of the halo that no message fills, in the order in which they are filled."""
        # The key doesn't contain boundary values, since a program may use another value in each step.
        key = (scheme, *[side.layers for pair in sides for side in pair])
        if key not in self._local:
            by_stage = []
            for stage in self.stages(scheme):
                # The order is reversed, so that folding, which traverses the list backwards, adds the copies in order.
                fills = [LocalFill(ghost, owned) for owned, ghost in reversed(stage.own_copies)]
                for axis, end, extents in stage.sides:
                    before, after, layers = (..., *extents[:axis]), extents[axis + 1 :], sides[axis][end].layers
                    copied = layers and (*before, layers(self.shape[axis], self.widths[axis], end), *after)
                    fills.append(LocalFill((*before, self.geometry.layers(axis, 2 * end - 1), *after), copied, axis, end))
                by_stage.append([*fills, *[LocalFill(ghost, None) for ghost in stage.empty]])
            self._local[key] = by_stage
        return self._local[key]


@custom_operator
def fill_halo(u: LocalArray, halo: Halo, sides: Sides, scheme: str = BY_AXIS) -> LocalArray:
    """Return the block u (..., *halo.shape) with its halo: (..., *halo.padded). Collective; adjoint: `fold_halo`."""
    out = empty_like(u, u.shape[: u.ndim - len(halo.shape)] + halo.padded)
    out[halo.interior] = u
    fill_in_place(out, halo, sides, scheme)
    return out


def fill_in_place(out: LocalArray, halo: Halo, sides: Sides, scheme: str = BY_AXIS) -> None:
    """Fill the halo of an array of shape (..., *padded), whose interior contains the block."""
    for stage, local in zip(halo.stages(scheme), halo.local(sides, scheme)):
        complete(out, post(out, stage.routes, False, TAG, halo.comm), False)
        fill_local(out, local, sides)


def fill_local(out: LocalArray, local: list[LocalFill], sides: Sides) -> None:
    """Fill the cells that no message fills; called after all messages of the stage."""
    for cells in local:
        out[cells.ghost] = cells.side(sides).filled(None if cells.copied is None else out[cells.copied])


@custom_operator
def fold_halo(g: LocalArray, halo: Halo, sides: Sides, scheme: str = BY_AXIS) -> LocalArray:
    """Add the halo cells of g (..., *halo.padded) to the cells that they copy; return the block. Adjoint: `fill_halo`."""
    total = copied(g)
    fold_in_place(total, halo, sides, scheme)
    # The result is a view, which saves a copy, but keeps the memory of the halo allocated.
    return total[halo.interior]


def fold_in_place(total: LocalArray, halo: Halo, sides: Sides, scheme: str = BY_AXIS) -> None:
    """Fold the halo of an array of shape (..., *padded) into its interior; the halo is not cleared."""
    for stage, local in zip(reversed(halo.stages(scheme)), reversed(halo.local(sides, scheme))):
        # The order of filling is reversed, since its local copies may read cells that its messages have filled.
        fold_local(total, local, sides, len(halo.shape))
        complete(total, post(total, stage.routes, True, TAG, halo.comm), True)


def fold_local(total: LocalArray, local: list[LocalFill], sides: Sides, ndim: int) -> None:
    """Add the halo cells that no message fills to the cells that they copy."""
    # The order of filling is reversed, since a side that is filled later may copy halo cells of an earlier side.
    for cells in reversed(local):
        if cells.copied is not None:
            side, layers = cells.side(sides), total[cells.copied]
            total[cells.copied] += side.folded(total[cells.ghost], layers, cells.axis - ndim)


# Filling is affine. Each row of its matrix has at most one nonzero entry, in the column of the copied cell. Folding
# multiplies by the transpose of this matrix.
defvjp(fill_halo, lambda ans, u, halo, sides, scheme=BY_AXIS: lambda g: fold_halo(g, halo, sides, scheme))
defjvp(fill_halo, lambda du, ans, u, halo, sides, scheme=BY_AXIS: fill_halo(du, halo, homogeneous(sides), scheme))
defvjp(fold_halo, lambda ans, g, halo, sides, scheme=BY_AXIS: lambda v: fill_halo(v, halo, homogeneous(sides), scheme))
defjvp(fold_halo, lambda dg, ans, g, halo, sides, scheme=BY_AXIS: fold_halo(dg, halo, sides, scheme))
fill_halo.batched_adjoint = fold_halo.batched_adjoint = True


def _prepared(values: LocalArray, halo: Halo, sides: Sides, scheme: str = BY_AXIS, backwards: bool = False) -> PreparedFill:
    """Return a function that fills one array in place, or folds it; see `InPlace.prepared`."""
    stages, local, ndim = halo.stages(scheme), halo.local(sides, scheme), len(halo.shape)
    parts: list[_Copy | PreparedMessages] = []
    if not backwards:
        constants = [x for cells in local for x in cells if x.copied is None]
        parts += [_Copy(values[x.ghost], None, x.side(sides)) for x in constants]
    for stage, cells in list(zip(stages, local))[:: -1 if backwards else 1]:
        messages = _messages(values, stage.routes, backwards, TAG, halo.comm) if stage.routes else []
        # Folding reverses the order of filling, as in `fold_in_place`.
        pairs = [(values[x.ghost], values[x.copied], x.side(sides), x.axis - ndim) for x in cells if x.copied]
        if backwards:
            parts += [*[_Copy(owned, ghost, side, True, axis) for ghost, owned, side, axis in pairs[::-1]], *messages]
        else:
            parts += [*messages, *[_Copy(ghost, owned, side) for ghost, owned, side, _ in pairs]]
    return PreparedFill(parts)


def _is_constant(halo: Halo, sides: Sides, scheme: str = BY_AXIS) -> bool:
    """Return whether no entry of the halo depends on a block."""
    copies = any(cells.copied is not None for local in halo.local(sides, scheme) for cells in local)
    return not copies and not any(stage.routes for stage in halo.stages(scheme))


def _in_place(run: Callable[..., None], folds: bool) -> InPlace:
    """Return the variant of filling or folding in a buffer of the shape with the halo."""

    def still(halo: Halo, sides: Sides, scheme: str = BY_AXIS) -> list[tuple[int, int]] | None:
        if not any(stage.routes for stage in halo.stages(scheme)):
            return None
        fills = [cells for local in halo.local(sides, scheme) for cells in local]
        constant = {(cells.axis, cells.end) for cells in fills if cells.copied is None}
        # The transpose of a reflection changes the h layers next to the outermost layer of the block. Together with the
        # outermost layer and the h layers of the halo, these are 2 h + 1 layers. Sides set to a constant don't change.
        layers = [2 * width + 1 if folds else width for width in halo.widths]
        return [
            (h * ((axis, 0) not in constant), n - h * ((axis, 1) not in constant))
            for axis, (n, h) in enumerate(zip(halo.padded, layers))
        ]

    def reads(halo: Halo, *_: object) -> list[int]:
        # A reflection reads one layer more than there are in the halo.
        return [n if folds else h and h + 1 for h, n in zip(halo.widths, halo.padded)]

    block, padded = (lambda halo, *_: halo.widths), (lambda halo, *_: (0,) * len(halo.shape))  # their begins in the buffer
    given, result = (padded, block) if folds else (block, padded)
    prepared = functools.partial(_prepared, backwards=folds)
    return InPlace(lambda halo, *_: halo.padded, given, result, run, prepared, still, reads, _is_constant, folds, folds)


fill_halo.spec_of = lambda u, halo, *_: spec_like(u)._replace(shape=u.shape[: u.ndim - len(halo.shape)] + halo.padded)
fold_halo.spec_of = lambda g, halo, *_: spec_like(g)._replace(shape=g.shape[: g.ndim - len(halo.shape)] + halo.shape)
fill_halo.in_place, fold_halo.in_place = _in_place(fill_in_place, False), _in_place(fold_in_place, True)
