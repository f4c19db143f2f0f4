"""What an interrupt leaves: nothing, at whatever line it comes."""

import sys

import autograd.numpy as anp
import interrupts
import numpy as np
import pytest
from interrupts import MINE, TOTAL, WORLD

import mpiad
from mpiad.differentiation.tape import OrderedTape
from mpiad.primitives.operation import suspended
from mpiad.programs.recorder import Recorder
from mpiad.transport.core.tracing import restore_state

EXITS = {
    "a trace": (OrderedTape, interrupts.gradient),
    "an operator": (suspended, interrupts.operator),
    "a trace for jit": (Recorder, interrupts.compiled_on_tape),
}


def interrupt_at(is_there, run):
    """Interrupt a program at the first call of a function that the condition on its frame selects, and reset if needed."""

    def interrupting(frame, event, arg):
        if is_there(frame):
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(interrupting)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        sys.settrace(None)
    if interrupts.mpiad_fails():
        mpiad.reset()


@pytest.mark.parametrize("name", EXITS)
def test_an_interrupt_at_the_entry_of_an_exit(name):
    """So that none of it has run."""
    context, make = EXITS[name]
    run, expected = make()

    interrupt_at(lambda frame: frame.f_code.co_name == "__exit__" and isinstance(frame.f_locals["self"], context), run)
    assert type(mpiad.mpi_allreduce(1.0)) is np.float64
    np.testing.assert_allclose(run(), expected, rtol=1e-12)
    np.testing.assert_allclose(mpiad.grad(interrupts.of_total)(MINE), np.cos(TOTAL), rtol=1e-12)


def test_an_interrupt_while_a_trace_is_ended():
    """The result can't be read: the trace ends with an exception, and its handler is interrupted."""
    before = interrupts.state()
    run, expected = interrupts.failing_result()

    interrupt_at(lambda frame: frame.f_code is restore_state.__code__, run)
    assert interrupts.state() == before
    np.testing.assert_allclose(run(), expected, rtol=1e-12)


def test_values_kept_of_an_interrupted_trace_are_constants():
    kept = []

    def keeping(x):
        kept.append(anp.sin(x))
        return mpiad.mpi_allreduce(anp.sum(kept[0]))

    def interrupting(frame, event, arg):
        if frame.f_code is OrderedTape.end_values.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(interrupting)
    try:
        with pytest.raises(KeyboardInterrupt):
            mpiad.grad(keeping)(MINE)
    finally:
        sys.settrace(None)
    if interrupts.mpiad_fails():
        mpiad.reset()
    found = mpiad.grad(lambda x: mpiad.mpi_allreduce(anp.sum(x * kept[0])))(MINE)
    np.testing.assert_allclose(found, np.sin(MINE), rtol=1e-14)


def test_interrupts_before_lines_leave_nothing(request):
    """Some of those of `python tests/interrupts.py`, which interrupts every line of what traces, replays and solves."""
    number, programs = (60, interrupts.PROGRAMS) if WORLD.size == 1 else (24, interrupts.PROGRAMS[:9])
    number //= 1 if request.config.getoption("thorough") else 2
    assert len(interrupts.campaign(number, 7, programs)) == number
