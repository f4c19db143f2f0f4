"""The reverse pass, which visits the nodes of a record, including all communications, from the last to the first.

The *total* of a node is the sum of its cotangents so far. The first cotangent is stored by reference, since it may be
shared with other nodes, or be a read-only view. The sum with the second cotangent is a new array, which is *owned*: later
cotangents are added in place. A cotangent with few nonzero elements (`Scatter`) is added without a dense array.

Several passes over one record can run at the same time; each is a *lane*. All lanes run the adjoint of a communication
before any lane continues. Therefore all ranks communicate in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from autograd.core import SparseObject, sparse_add, sparse_object_types
from autograd.extend import vspace
from autograd.tracer import Box

from mpiad._typing import Array
from mpiad.device.assembly import stack
from mpiad.differentiation.rules.scatter_add import Scatter, copy_of
from mpiad.differentiation.tape import OrderedNode, Recording
from mpiad.primitives.cotangents import conform, conformed
from mpiad.primitives.operation import BatchedVjp, StackedVjp, VectorizedVjp
from mpiad.transport import Spec
from mpiad.transport.core.agreement import mark_left
from mpiad.transport.core.tracing import restore_state, tracing
from mpiad.transport.devices.device_arrays import is_device_array

_ndarray, _boxes = np.ndarray, Box.types


def accumulate(total: Array, owned: bool, g: Array) -> tuple[Array, bool]:
    """Add a cotangent g to a node's total, in place if it is `owned`; return the total and whether it is owned."""
    # g is never overwritten, and may be None for zero; `total` is None before the first cotangent, and never sparse.
    if g is None:
        return total, owned
    kind = type(g)
    if total is None:
        if kind is Scatter:
            return g.dense(), True
        if kind in sparse_object_types:
            return sparse_add(vspace(g), None, g), True
        return g, False
    if kind is type(total) and (kind is _ndarray or is_device_array(g)):
        if owned and g.dtype == total.dtype and g.shape == total.shape and g.size > 1:
            total += g
            return total, True
        return total + g, True
    if kind is Scatter or kind in sparse_object_types:
        return _with_sparse(total, owned, g), True
    if kind in _boxes or type(total) in _boxes or isinstance(g, (tuple, list, dict)):
        space = vspace(g)
        # A program of a compiled function that records this call needs the total from before.
        return (space.mut_add(total, g) if owned and not is_device_array(total) else space.add(total, g)), True
    return total + g, True


def _with_sparse(total: Array, owned: bool, g: Array) -> Array:
    if type(g) is not Scatter:
        space = vspace(g)
        if is_device_array(total):
            return space.add(total, sparse_add(space, None, g))
        # A total that isn't owned may be shared, so it must be copied.
        return sparse_add(space, total if owned else copy_of(total), g)
    if type(total) in _boxes:
        if tracing.recorder is not None:  # programs contain arrays, but no functions that hold arrays
            return total + g.dense()
        space = vspace(total)
        return sparse_add(space, total if owned else copy_of(total), SparseObject(space, g.mut_add))
    # The sum is computed in place only if it has the dtype of the total.
    is_array = type(total) is _ndarray or is_device_array(total)
    if is_array and total.shape == g.shape and np.can_cast(g.dtype, total.dtype):
        return g.mut_add(total if owned else total.copy())
    return total + g.dense()


def run_backward(
    recording: Recording,
    seeds: Iterable[tuple[int, Array]],
    variables: int,
    keep: bool = False,
    ready: Callable[[int, Array], None] | None = None,
) -> list:
    """Return the cotangents of the variables, the first nodes (None: zero); free the record unless `keep` is set."""
    # `seeds`: pairs of a result's position, -1 for a constant, and its cotangent. ``ready(variable, cotangent)`` is called
    # as soon as the cotangent of a variable is complete.
    totals: list[Array] = [None] * len(recording.nodes)
    for position, g in seeds:
        if position >= 0:
            totals[position] = g if totals[position] is None else totals[position] + g
    saved = tracing.__dict__.copy()
    try:
        if keep and recording.reads is not None:
            recording.reads.require_unchanged()
        if ready is None:
            sweep(recording.nodes, totals, range(len(totals) - 1, variables - 1, -1), keep, bytearray(len(totals)))
        else:
            _sweep_with_callback(recording.nodes, totals, variables, keep, ready)
    except BaseException as error:
        restore_state(saved, error)
        mark_left(recording.channels, error, "a reverse pass")
        raise
    return totals[:variables]


def cotangents_of(recording: Recording, seeds: Iterable[tuple[int, Array]], specs: Sequence[Spec]) -> list[Array]:
    """Return the cotangents of the variables, which have the given specs, and keep the record; see `run_backward`."""
    return [conformed(g, spec) for g, spec in zip(run_backward(recording, seeds, len(specs), True), specs)]


class Lane(NamedTuple):
    """The totals of one of several reverse passes."""

    totals: list[Array]
    owned: bytearray  # a flag for each total

    @classmethod
    def of(cls, nodes: Sequence[OrderedNode]) -> Lane:
        """Return the totals of a reverse pass that hasn't begun."""
        return cls([None] * len(nodes), bytearray(len(nodes)))

    def add(self, cotangents: Iterable[tuple[int, Array]]) -> None:
        """Add cotangents to the totals; each has the index of its node, -1 for a constant."""
        for place, g in cotangents:
            if place >= 0:
                self.totals[place], self.owned[place] = accumulate(self.totals[place], bool(self.owned[place]), g)


def run_backward_together(
    recording: Recording, seeds: Sequence[Iterable[tuple[int, Array]]], variables: int
) -> list[list[Array]]:
    """Return the results of `run_backward` for several sets of seeds, the same number on all ranks; keep the record."""
    nodes = recording.nodes
    lanes = [Lane.of(nodes) for _ in seeds]
    for lane, of_lane in zip(lanes, seeds):
        lane.add(of_lane)
    saved = tracing.__dict__.copy()
    try:
        if recording.reads is not None:
            recording.reads.require_unchanged()
        sweep_together(nodes, lanes, len(nodes), variables)
    except BaseException as error:
        restore_state(saved, error)
        mark_left(recording.channels, error, "a reverse pass")
        raise
    return [lane.totals[:variables] for lane in lanes]


def sweep_together(nodes: list[OrderedNode], lanes: Sequence[Lane], stop: int, first: int) -> None:
    """Run the nodes from `stop` - 1 down to `first` in all lanes."""
    outer = tracing.lane

    def run_lanes(positions: range) -> None:
        for number, lane in enumerate(lanes):
            tracing.lane = number
            sweep(nodes, lane.totals, positions, True, lane.owned)
        tracing.lane = outer

    try:
        for position in range(stop - 1, first - 1, -1):
            node = nodes[position]
            kind, pull = type(node.pull), node.pull
            like: Any = node.like
            if like is None and kind not in (BatchedVjp, StackedVjp):
                continue
            run_lanes(range(stop - 1, position, -1))
            stop, parts = position, None
            is_zero = all(lane.totals[position] is None for lane in lanes)
            if kind is StackedVjp and not is_zero:
                pull, like = node.pull.pull_several, node.pull.like
            if kind is VectorizedVjp or (kind is StackedVjp and not is_zero):
                stacked = pull(stack([conformed(lane.totals[position], like) for lane in lanes]))  # type: ignore[arg-type]
                parts = [[None if part is None else part[k] for part in stacked] for k in range(len(lanes))]
            elif kind is BatchedVjp and (like is not None or not is_zero):
                parts = node.pull.pull_all(len(lanes))
            if parts is None:
                run_lanes(range(position, position - 1, -1))
                continue
            for lane, of_lane in zip(lanes, parts):
                lane.totals[position] = None
                lane.add(zip(node.inputs, of_lane))
        run_lanes(range(stop - 1, first - 1, -1))
    finally:
        tracing.lane = outer


def _sweep_with_callback(
    nodes: list[OrderedNode], totals: list[Array], variables: int, keep: bool, ready: Callable[[int, Array], None]
) -> None:
    # The first node that uses a variable is the last node in the reverse pass that adds to the variable's cotangent.
    first_uses: dict[int, int] = {}
    for position in range(len(nodes) - 1, variables - 1, -1):
        for parent in nodes[position].inputs:
            if parent < variables:
                first_uses[parent] = position
    complete: dict[int, list[int]] = {}
    for variable in range(variables):
        complete.setdefault(first_uses.get(variable, len(nodes)), []).append(variable)
    owned, stop = bytearray(len(nodes)), len(nodes)
    for position in sorted(complete, reverse=True):
        sweep(nodes, totals, range(stop - 1, position - 1, -1), keep, owned)
        for variable in complete[position]:
            ready(variable, totals[variable])
        stop = min(position, stop)
    sweep(nodes, totals, range(stop - 1, variables - 1, -1), keep, owned)


def sweep(nodes: list[Any], totals: list[Array], positions: range, keep: bool, owned: bytearray) -> None:
    """Run the adjoints of the nodes at `positions`, and add the results to the totals of their inputs."""
    for position in positions:
        node, g = nodes[position], totals[position]
        like = node.like
        if like is None:
            if g is None:  # the cotangent of this local step is zero
                if not keep:
                    node.pull = None
                continue
        elif like.dtype is not None:
            # The adjoint of a communication runs even if its cotangent is zero, since other ranks wait for its messages.
            g = like.zeros() if g is None else conform(g, *like)
        totals[position] = None  # frees the cotangent's memory after this step
        for parent, part in zip(node.inputs, node.pull(g)):
            total = totals[parent]
            # The most common case of `accumulate`, without calling it.
            if total is None and type(part) is _ndarray:
                totals[parent] = part
            elif part is not None:
                totals[parent], owned[parent] = accumulate(total, owned[parent], part)
        if not keep:
            node.pull = None  # frees the arrays of the adjoint, even if the user keeps a value of the trace
            nodes[position] = None
