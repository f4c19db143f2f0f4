"""Overlap of communication and computation: loops run while messages are in flight, and large loops run in threads.

An exchange of halos changes only the edges of a buffer. So the loop after the exchange is divided: its interior, which
doesn't read the edges, is computed while the messages are in flight, and the rest after they have arrived. The order of the
communications stays the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import NamedTuple

import numpy as np

from mpiad._typing import Array, Shape
from mpiad.programs.array_program import Lookup
from mpiad.programs.fusion import Loop, Schedule, root_of
from mpiad.programs.loops import LoopText, divided
from mpiad.programs.traced_array import Step
from mpiad.transport.resources import loop_threads

# Multithreaded loops, if a rank has more than one core.
#
# A large loop is divided along its first axis. All threads run the same machine code, so the results don't depend on the
# number of threads. Loops with reductions aren't divided, since the order of their operations is fixed.

LARGE = 1 << 20  # entries from which a loop is multithreaded; for fewer, starting threads takes longer than they save


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="mpiad loops")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process doesn't have its parent's threads


def run_together(kernel: Callable[[int], None], blocks: Sequence[int]) -> None:
    """Run a kernel on blocks of arguments: on the first in the calling thread, and on each other one in a thread."""
    others = [_threads().submit(kernel, block) for block in blocks[1:]]
    kernel(blocks[0])
    interrupt = None
    while not all(other.done() for other in others):
        try:
            wait(others)
        except KeyboardInterrupt as error:  # the arrays must stay alive as long as other threads compute
            interrupt = error
    if interrupt is not None:
        raise interrupt


def shares_of(boxes: tuple[Array, ...], shape: Shape) -> tuple[tuple[Array, ...], ...]:
    """Return the boxes (see `LoopText`) of a divisible loop for each thread; one thread gets all boxes of a short loop."""
    # The last thread computes the boxes at the edges.
    threads = loop_threads()
    if math.prod(shape) < LARGE or threads < 2:
        return (boxes,)
    plain, edges = boxes[0], boxes[1:]
    first, last = plain[:, :1], plain[:, 1:2]
    shares = []
    for k in range(threads):
        low, high = (first + (last - first) * place // threads for place in (k, k + 1))
        part = np.hstack([low, high, plain[:, 2:]])
        shares.append((part, *(edges if k == threads - 1 else [x[:0] for x in edges])))
    return tuple(shares)


_SMALL = 1 << 13  # minimum number of entries of a loop that is divided to overlap with messages


class Action(NamedTuple):
    """An operation of a replay: a step of the schedule, or a part of a step."""

    kind: str  # "loop", "call", "begin" or "end"
    at: int  # number of the step
    # For a loop: the boxes that each thread computes in this action. A loop that isn't divisible computes all entries in
    # one action, even if it has no boxes (see `LoopText.boxes`).
    shares: tuple[tuple[Array, ...], ...] = ()


def is_divided(schedule: Schedule, at: int) -> bool:
    """Return whether a loop may be computed in parts: if it follows an exchange, or is large."""
    # The answer doesn't depend on the number of threads, and therefore the text of the loop doesn't either.
    step = schedule.steps[at]
    if not isinstance(step, Loop) or math.prod(step.shape) < _SMALL:
        return False
    waits = at not in (0, *schedule.part_starts) and _unchanged_block(schedule, at - 1) is not None
    return waits or math.prod(step.shape) >= LARGE


def actions_of(schedule: Schedule, texts: Sequence[LoopText | None], overlaps: bool) -> list[Action]:
    """Return the actions of a program in order; `overlaps`: whether loops may run while messages are in flight."""
    actions: list[Action] = []
    divided: set[int] = set()  # loops after an exchange, whose actions are appended together with those of the exchange
    for at, text in enumerate(texts):
        if text is None:
            parts = _parts(schedule, at, texts[at + 1]) if overlaps and at + 1 < len(texts) else None
            if parts is None:
                actions.append(Action("call", at))
            else:
                before, after = parts
                early = Action("loop", at + 1, shares_of(before, schedule.steps[at + 1].shape))
                actions += [Action("begin", at), early, Action("end", at), Action("loop", at + 1, (after,))]
                divided.add(at + 1)
        elif at not in divided:
            shares = shares_of(text.boxes, schedule.steps[at].shape) if text.divisible else (text.boxes,)
            actions.append(Action("loop", at, shares))
    return actions


def _unchanged_block(schedule: Schedule, at: int) -> Sequence[tuple[int, int]] | None:
    """Return the range along each of the last axes that an exchange doesn't change; None if the step sends nothing."""
    step = schedule.steps[at]
    if isinstance(step, Loop) or not step.in_place:
        return None
    call: Step = schedule.program.nodes[step.node].data
    return call.fun.in_place.still(*call.args[1:])


def _parts(schedule: Schedule, at: int, text: LoopText | None) -> tuple[tuple[Array, ...], tuple[Array, ...]] | None:
    """Return a loop's boxes without and with need for messages of the exchange `at`; None if more than half need them."""
    inner = None if text is None else interior(schedule, at, text)
    if inner is None:
        return None
    before, after = zip(*[divided(rows, inner) for rows in text.boxes])  # type: ignore[union-attr]
    return before, after


def interior(schedule: Schedule, at: int, text: LoopText, sets_constants: bool = True) -> list[tuple[int, int]] | None:
    """Return the box of the loop after step `at` that needs no message of this step; None if it is less than half.

    `sets_constants`: whether the exchange sets constants at the sides before it starts its messages.
    """
    unchanged = None if not text.divisible or at + 1 in schedule.part_starts else _unchanged_block(schedule, at)
    if unchanged is None:
        return None
    step, nodes = schedule.steps[at], schedule.program.nodes
    if not sets_constants:  # beyond the argument, nothing is in the buffer yet
        node = nodes[step.node]
        starts = node.data.fun.in_place.given(*node.data.args[1:])
        ends = [start + n for start, n in zip(starts, nodes[node.inputs[0]].shape[-len(starts) :])]
        unchanged = [(max(low, start), min(high, end)) for (low, high), start, end in zip(unchanged, starts, ends)]
    inner = _inner(schedule, at + 1, text, root_of(schedule.buffers, step.inputs[0]), unchanged)
    entries = 0 if inner is None else math.prod([max(last - first, 0) for first, last in inner])
    return None if 2 * entries < max(math.prod(schedule.steps[at + 1].shape), 1) else inner


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
        if schedule.buffers[b].shape != schedule.buffers[buffer].shape:
            return None
        for (source, stride, offset), (low, high) in zip(map[len(map) - len(unchanged) :], unchanged):
            if isinstance(source, Lookup):
                return None
            if source is None:
                if not low <= offset < high:
                    return None
                continue
            ends = [(low - offset) / stride, (high - 1 - offset) / stride]
            first, last = inner[source]
            inner[source] = max(first, math.ceil(min(ends))), min(last, math.floor(max(ends)) + 1)
    return inner
