"""What a program does while messages travel: in which order its steps are begun, and ended, and in which parts.

An exchange in a buffer changes the buffer's edges. The loops after it that read none of these come before its end, and the
first one that does is cut in two: its interior is computed while the messages are under way, the rest afterwards. The
communications of a program stay in their order, since nothing but loops is moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mpiad._typing import Array
from mpiad.programs.array_program import Call
from mpiad.programs.loop_body import Box, as_rows, cut
from mpiad.programs.loop_threads import LARGE, shares_of
from mpiad.programs.loops import LoopText
from mpiad.programs.schedule import Loop, Schedule, root_of

# Entries of a loop below which its two halves cost more than the messages take.
_SMALL = 1 << 13


class Action(NamedTuple):
    """What is done at once."""

    kind: str  # "loop", "call", "begin" or "end"
    at: int  # of which step
    # Of a loop: the boxes that its kernel takes, of each thread; all of them, or a part.
    shares: tuple[tuple[Array, ...], ...] = ()


def is_divided(schedule: Schedule, at: int) -> bool:
    """Tell whether a loop may be computed in parts: one after an exchange, or a large one.

    It doesn't depend on how many threads there are, so that neither does its text.
    """
    step = schedule.steps[at]
    if not isinstance(step, Loop) or math.prod(step.shape) < _SMALL:
        return False
    waits = at not in (0, *schedule.cuts) and _still(schedule, at - 1) is not None
    return waits or math.prod(step.shape) >= LARGE


def actions_of(schedule: Schedule, texts: Sequence[LoopText | None], overlaps: bool) -> list[Action]:
    """Return what a program does, one after the other; `overlaps`: loops run while messages are under way."""
    actions: list[Action] = []
    late: list[Action] = []
    for at, text in enumerate(texts):
        if text is None:
            parts = _parts(schedule, at, texts[at + 1]) if overlaps and at + 1 < len(texts) else None
            if parts is None:
                actions.append(Action("call", at))
            else:
                now, afterwards = parts
                entries = math.prod(schedule.steps[at + 1].shape)
                actions += [Action("begin", at), Action("loop", at + 1, shares_of(now, entries)), Action("end", at)]
                late = [Action("loop", at + 1, (afterwards,))]
        elif late:
            actions += late
            late = []
        else:
            shares = shares_of(text.boxes, math.prod(schedule.steps[at].shape)) if text.divisible else (text.boxes,)
            actions.append(Action("loop", at, shares))
    return actions


def _still(schedule: Schedule, at: int) -> Sequence[tuple[int, int]] | None:
    """Return the part of its buffer that an exchange leaves alone, None where a step is no exchange or nothing travels."""
    step = schedule.steps[at]
    if isinstance(step, Loop) or not step.in_place:
        return None
    call: Call = schedule.program.nodes[step.node].data
    return call.fun.in_place.still(*call.args[1:])


def _parts(schedule: Schedule, at: int, text: LoopText | None) -> tuple[tuple[Array, ...], tuple[Array, ...]] | None:
    """Return the boxes of the loop after an exchange that don't need its messages, and the others; None where few don't."""
    if text is None or not text.divisible or at + 1 in schedule.cuts:
        return None
    still, buffer = _still(schedule, at), schedule.steps[at].inputs[0]
    inner = None if still is None else _inner(schedule, at + 1, text, buffer, still)
    if inner is None or 2 * _size(inner) < math.prod(schedule.steps[at + 1].shape):
        return None
    now, afterwards = [], []
    for boxes in text.boxes:
        inside: list[Box] = []
        outside: list[Box] = []
        for row in boxes.tolist():
            cut(list(zip(row[::2], row[1::2])), inner, inside, outside)
        now.append(as_rows(inside, boxes.shape[1]))
        afterwards.append(as_rows(outside, boxes.shape[1]))
    return tuple(now), tuple(afterwards)


def _inner(
    schedule: Schedule, at: int, text: LoopText, buffer: int, still: Sequence[tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return the box of a loop in which it reads of a buffer but what stays; None where that can't be told."""
    roots = {root_of(schedule.buffers, b) for b in text.written}
    # Where it reads nothing of it, the buffer's memory may be another one's by then.
    if buffer in roots or buffer not in {root_of(schedule.buffers, b) for b, _ in text.loads}:
        return None
    inner = [(0, n) for n in schedule.steps[at].shape]
    for b, map in text.loads:
        if root_of(schedule.buffers, b) != buffer:
            continue
        if b != buffer:  # in another shape
            return None
        for (source, stride, offset), (low, high) in zip(map[len(map) - len(still) :], still):
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
