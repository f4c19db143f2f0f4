"""Overlap of communication and computation: loops run while messages are in flight.

An exchange of halos changes only the edges of a buffer. So the loop after the exchange is divided: its interior, which
doesn't read the edges, is computed while the messages are in flight, and the rest after they have arrived. The order of the
communications stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mpiad._typing import Array
from mpiad.programs.array_program import Call
from mpiad.programs.fusion import Loop, Schedule, root_of
from mpiad.programs.loops import Box, LoopText, as_rows, cut

_SMALL = 1 << 13  # minimum number of entries of a loop that is divided to overlap with messages


class Action(NamedTuple):
    """An operation of a replay: a step of the schedule, or a part of a step."""

    kind: str  # "loop", "call", "begin" or "end"
    at: int  # number of the step
    boxes: tuple[Array, ...] = ()  # for a loop: the boxes that it computes in this action


def is_divided(schedule: Schedule, at: int) -> bool:
    """Return whether a loop may be computed in parts, since it follows an exchange."""
    step = schedule.steps[at]
    if not isinstance(step, Loop) or math.prod(step.shape) < _SMALL:
        return False
    return at not in (0, *schedule.part_starts) and _unchanged_block(schedule, at - 1) is not None


def actions_of(schedule: Schedule, texts: Sequence[LoopText | None], overlaps: bool) -> list[Action]:
    """Return the actions of a program in order; `overlaps`: whether loops may run while messages are in flight."""
    actions: list[Action] = []
    remaining: list[Action] = []
    for at, text in enumerate(texts):
        if text is None:
            parts = _parts(schedule, at, texts[at + 1]) if overlaps and at + 1 < len(texts) else None
            if parts is None:
                actions.append(Action("call", at))
            else:
                before, after = parts
                actions += [Action("begin", at), Action("loop", at + 1, before), Action("end", at)]
                remaining = [Action("loop", at + 1, after)]
        elif remaining:
            actions += remaining
            remaining = []
        else:
            actions.append(Action("loop", at, text.boxes))
    return actions


def _unchanged_block(schedule: Schedule, at: int) -> Sequence[tuple[int, int]] | None:
    """Return the block of the buffer, a range along each of the last axes, that an exchange doesn't change.

    Return None if the step isn't an exchange, or sends nothing.
    """
    step = schedule.steps[at]
    if isinstance(step, Loop) or not step.in_place:
        return None
    call: Call = schedule.program.nodes[step.node].data
    return call.fun.in_place.still(*call.args[1:])


def _parts(schedule: Schedule, at: int, text: LoopText | None) -> tuple[tuple[Array, ...], tuple[Array, ...]] | None:
    """Return the boxes of a loop that don't need the messages of the exchange before it, and the boxes that do.

    `at`: the exchange. `text`: of the loop. Return None if more than half of the entries need the messages.
    """
    if text is None or not text.divisible or at + 1 in schedule.part_starts:
        return None
    unchanged, buffer = _unchanged_block(schedule, at), schedule.steps[at].inputs[0]
    inner = None if unchanged is None else _inner(schedule, at + 1, text, buffer, unchanged)
    if inner is None or 2 * _size(inner) < math.prod(schedule.steps[at + 1].shape):
        return None
    before, after = [], []
    for boxes in text.boxes:
        inside: list[Box] = []
        outside: list[Box] = []
        for row in boxes.tolist():
            cut(list(zip(row[::2], row[1::2])), inner, inside, outside)
        before.append(as_rows(inside, boxes.shape[1]))
        after.append(as_rows(outside, boxes.shape[1]))
    return tuple(before), tuple(after)


def _inner(
    schedule: Schedule, at: int, text: LoopText, buffer: int, unchanged: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return the box in which a loop reads only the block `unchanged` of a buffer; None if the box is unknown."""
    roots = {root_of(schedule.buffers, b) for b in text.written}
    # A loop that doesn't read the buffer can't run early: it might write to another buffer in the same memory.
    if buffer in roots or buffer not in {root_of(schedule.buffers, b) for b, _ in text.loads}:
        return None
    inner = [(0, n) for n in schedule.steps[at].shape]
    for b, map in text.loads:
        if root_of(schedule.buffers, b) != buffer:
            continue
        if b != buffer:  # the loop reads the buffer in another shape
            return None
        for (source, stride, offset), (low, high) in zip(map[len(map) - len(unchanged) :], unchanged):
            if source is None:
                if not low <= offset < high:
                    return None
                continue
            ends = [(low - offset) / stride, (high - 1 - offset) / stride]
            first, last = inner[source]
            inner[source] = max(first, math.ceil(min(ends))), min(last, math.floor(max(ends)) + 1)
    return inner


def _size(box: Box) -> int:
    return math.prod([max(last - first, 0) for first, last in box])
