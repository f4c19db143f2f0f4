"""Loops that write over what they read: an array that nobody needs any more, where each entry is read in its own place.

A field of a time step goes where the one before the last was, so that the loop passes over one array less.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpiad.programs.loops import LoopText
from mpiad.programs.memory_plan import spans_of
from mpiad.programs.schedule import Loop, Schedule, Store

__all__ = ["written_over"]


def written_over(schedule: Schedule, texts: Sequence[LoopText | None]) -> list[LoopText | None]:
    """Return the texts of loops, in which one array stands for what is read and what is written over it."""
    spans = spans_of(schedule, texts)
    has_other_shapes = {found.data for found in schedule.buffers if found.kind == "alias"}
    own = {b for b in spans if schedule.buffers[b].kind == "temporary" and b not in has_other_shapes}
    made = list(texts)
    for at, (step, text) in enumerate(zip(schedule.steps, texts)):
        if text is None or not isinstance(step, Loop):
            continue
        for item in step.items:
            b, map = item.place
            whole = {axis.source for axis in map} >= {k for k, n in enumerate(step.shape) if n > 1}
            several = sum(other.place.buffer == b for other in step.items) > 1
            if not isinstance(item, Store) or not whole or several or b not in own or spans[b][0] != at:
                continue
            for c in own & set(text.buffers) - text.written:
                # The later part may be run again, with what it reads of the first.
                same_part = schedule.part(spans[c][0]) == schedule.part(at)
                alike = schedule.buffers[b] == schedule.buffers[c]
                if alike and same_part and spans[c][-1] == at and {m for x, m in text.loads if x == c} == {map}:
                    made[at] = text = _over(text, b, c)
                    break
            if text.over:
                break
    return made


def _over(text: LoopText, b: int, c: int) -> LoopText:
    """Return a loop whose buffer c is b."""
    place = text.buffers.index(c)
    old, new = text.arguments[place][0], text.arguments[text.buffers.index(b)][0]
    return text._replace(
        body=re.sub(rf"\b{old}\[", f"{new}[", text.body),
        arguments=text.arguments[:place] + text.arguments[place + 1 :],
        buffers=text.buffers[:place] + text.buffers[place + 1 :],
        loads=frozenset((b if x == c else x, map) for x, map in text.loads),
        over=(b, c),
    )
