"""Shares of a solve: all trajectories once, whatever their number, and what threads make of them."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

from mpiad.ensemble.compiled import work_shares
from mpiad.ensemble.compiled.work_shares import each, shares_of

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 10_000, 123_457])
def test_every_trajectory_is_in_one_share(count, threads):
    shares = shares_of(count, threads)
    assert [i for first, stop in shares for i in (first, stop)][1:-1:2] == [first for first, _ in shares[1:]]
    assert all(0 < stop - first <= 16_384 for first, stop in shares)
    assert not count or (shares[0][0], shares[-1][1]) == (0, count)
    assert sum(stop - first for first, stop in shares) == count


def test_shares_of_threads_get_smaller_so_that_none_waits_for_long():
    sizes = [stop - first for first, stop in shares_of(100_000, 4)]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True) and sizes[0] <= 100_000 / 8 and sizes[-2] == 512


def test_results_are_in_the_order_of_the_items_by_all_threads():
    seen, together = set(), threading.Barrier(3)

    def fun(item, pause):
        if item < 3:
            together.wait(30)  # passes only where three threads are inside at once
        seen.add(threading.get_ident())
        return item * item

    assert each(fun, range(50), 3) == [item * item for item in range(50)]
    assert len(seen) == 3 and threading.get_ident() in seen


@pytest.mark.parametrize("where", ["here", "there"])
def test_what_one_thread_raises_ends_the_others_after_what_they_have_begun(where):
    here, begun = threading.get_ident(), []

    def fun(item, pause):
        begun.append(item)
        if (threading.get_ident() == here) == (where == "here"):
            raise IndexError(f"of item {item}")
        time.sleep(0.05)

    with pytest.raises(IndexError, match="of item"):
        each(fun, range(1000), 2)
    assert len(begun) < 100


@pytest.mark.parametrize("where", ["here", "there"])
def test_what_one_thread_raises_ends_the_others_at_their_next_pause(where):
    here, together, ended = threading.get_ident(), threading.Barrier(3), []

    def fun(item, pause):
        together.wait(30)
        if (threading.get_ident() == here) == (where == "here"):
            raise IndexError(f"of item {item}")
        try:
            while True:  # it would never end
                pause()
                time.sleep(0.001)
        finally:
            ended.append(item)

    with pytest.raises(IndexError, match="of item"):
        each(fun, range(3), 3)
    assert len(ended) == (2 if where == "here" else 1)


@pytest.mark.thorough
def test_interrupts_at_any_moment_of_waiting_leave_no_lock_behind(monkeypatch, request):
    """A lock that the waiting thread holds forever would stop the other thread, which then never ends."""
    here, begun, count = threading.get_ident(), [], 1500 if request.config.getoption("thorough") else 500
    monkeypatch.setattr(work_shares, "_POLLING", 10.0)

    def fun(item, pause):
        if threading.get_ident() != here:
            begun.append(item)
            while True:
                pause()
        while not begun:
            time.sleep(0)
        signal.setitimer(signal.ITIMER_REAL, next(delays))

    delays = iter(np.random.default_rng(0).uniform(2e-4, 8e-4, count).tolist())
    handler, interval = signal.signal(signal.SIGALRM, signal.default_int_handler), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns, and handle signals, in the middle of short functions too
    gc.disable()  # Python ignores an interrupt in a callback of the garbage collector (hypothesis has one)
    try:
        for _ in range(count):
            begun.clear()
            with pytest.raises(KeyboardInterrupt):
                each(fun, range(2), 2)
    finally:
        gc.enable()
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("twice", [False, True])
def test_an_interrupt_while_others_are_waited_for_ends_them_and_leaves_none_behind(twice):
    here, together, ended = threading.get_ident(), threading.Barrier(2), threading.Event()

    def fun(item, pause):
        together.wait(30)
        if threading.get_ident() == here:
            return
        time.sleep(0.1)  # by then the other one waits
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                pause()
                time.sleep(0.001)
        finally:
            if twice:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        each(fun, range(2), 2)
    assert ended.is_set()
