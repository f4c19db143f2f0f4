"""Numbers of traces, in step with autograd's own counter.

A trace inside another must have the higher number, also where one is autograd's and the other ours, so ours are drawn
from autograd's counter. That is one for all threads, and an exception leaves it raised; ours is put back in either
case, and never lowered below a trace that another thread has open.
"""

from __future__ import annotations

import threading

from autograd.tracer import trace_stack

__all__ = ["enter", "leave"]

_lock = threading.Lock()


class _Depth(threading.local):
    here = 0


_depth = _Depth()
_open, _base = 0, -1


def enter() -> tuple[int, int]:
    """Open a trace; return its number and what the counter was before."""
    global _open, _base
    with _lock:
        before = trace_stack.top
        if _open == 0:
            _base = before  # what the counter goes back to when no thread has a trace open any more
        _open += 1
        _depth.here += 1
        trace_stack.top = before + 1
        return before + 1, before


def leave(number: int, before: int) -> None:
    """Close the trace `number`, and with it what an exception inside it left open."""
    global _open
    with _lock:
        _open -= 1
        _depth.here -= 1
        if _open == 0:
            trace_stack.top = _base
        # All other open traces are around this one, or lower than it: nobody needs the higher number.
        elif _open == _depth.here or trace_stack.top == number:
            trace_stack.top = before
