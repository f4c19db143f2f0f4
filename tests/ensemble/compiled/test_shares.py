"""Shares of a solve: all trajectories once, whatever their number, and what threads make of them."""

from __future__ import annotations

import threading
import time

import pytest

from mpiad.ensemble.compiled.shares import each, shares_of

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

    def fun(item):
        if item < 3:
            together.wait(30)  # passes only where three threads are inside at once
        seen.add(threading.get_ident())
        return item * item

    assert each(fun, range(50), 3) == [item * item for item in range(50)]
    assert len(seen) == 3 and threading.get_ident() in seen


@pytest.mark.parametrize("where", ["here", "there"])
def test_what_one_thread_raises_ends_the_others_after_what_they_have_begun(where):
    here, begun = threading.get_ident(), []

    def fun(item):
        begun.append(item)
        if (threading.get_ident() == here) == (where == "here"):
            raise IndexError(f"of item {item}")
        time.sleep(0.05)

    with pytest.raises(IndexError, match="of item"):
        each(fun, range(1000), 2)
    assert len(begun) < 100
