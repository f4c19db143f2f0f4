"""`mpi_map`: each item is evaluated once, and the results come back in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad import mpi_map
from mpiad.errors import WorkerError
from mpiad.tasks.map import WorkerGroup

WORLD = MPI.COMM_WORLD


def expect(results: Any, expected: list[Any], rank: int, root: int = 0) -> None:
    assert results == (expected if rank == root else None)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 200])
@pytest.mark.parametrize("batch", [1, 3])
def test_results_in_order_and_each_item_once(count: int, batch: int, rank: int, size: int) -> None:
    seen: list[int] = []

    def square(item: int) -> int:
        seen.append(item)
        return item**2

    expect(mpi_map(square, range(count), batch=batch), [k**2 for k in range(count)], rank)
    everyone = WORLD.allgather(seen)
    assert sorted(sum(everyone, [])) == list(range(count))
    if size > 4:
        assert not everyone[0]  # the root hands out
    elif count > batch * (size - 1):
        assert everyone[0]


@pytest.mark.mpi(min_size=3)
def test_all_workers_get_their_share_and_a_slow_one_less(rank: int, size: int) -> None:
    """Items go to whoever is free, not in turn."""
    seen: list[int] = []
    pause = threading.Event()

    def slow_on_the_last(item: int) -> int:
        seen.append(item)
        pause.wait(0.15 if rank == size - 1 else 0.025)
        return item

    mpi_map(slow_on_the_last, range(20))
    counts = [len(part) for part in WORLD.allgather(seen)]
    assert all(counts[1:]) and counts[-1] < counts[1]


def test_any_root_and_results_everywhere(rank: int, size: int) -> None:
    root = size - 1
    items = "abc" if rank == root else None
    expect(mpi_map(str.upper, items, root=root), ["A", "B", "C"], rank, root)
    assert mpi_map(str.upper, items, root=root, everywhere=True) == ["A", "B", "C"]


def test_another_communicator(rank: int, size: int) -> None:
    half = WORLD.Split(rank % 2, -rank)
    mpiad.mpi_init(half)
    results = mpi_map(lambda item: (item, rank % 2), range(5), comm=half)
    expect(results, [(k, rank % 2) for k in range(5)], half.rank)
    half.Free()


class Arriving:
    """Counts its arrivals on the root."""

    arrived = 0

    def __init__(self, value: int):
        self.value = value

    def __reduce__(self) -> tuple:
        return arrive, (self.value,)


def arrive(value: int) -> int:
    Arriving.arrived += 1
    return value


def test_a_generator_is_read_no_further_than_needed(rank: int, size: int) -> None:
    taken = [0]
    Arriving.arrived = 0

    def count() -> Iterator[int]:
        while taken[0] < 50:
            assert taken[0] - Arriving.arrived <= 2 * max(1, size - 1) + (1 < size <= 4)
            taken[0] += 1
            yield taken[0]

    results = mpi_map(lambda item: Arriving(item) if size > 1 else arrive(item), count())
    if rank == 0:
        assert results == list(range(1, 51)) and taken[0] == Arriving.arrived == 50


@pytest.mark.parametrize("shape", [(3,), (200, 300)])
def test_arrays_come_as_they_were_and_can_be_written(shape: tuple, rank: int) -> None:
    workspace = np.zeros(shape)  # used again for each item

    def fill(item: dict) -> dict:
        workspace[...] = item["a"] + 1
        item["a"][...] = -1  # its own copy
        return {"sum": workspace, "order": np.asfortranarray(workspace), "view": workspace[::2]}

    buffer = np.empty(shape)

    def items() -> Iterator[dict]:
        for k in range(12):
            buffer[...] = k
            yield {"a": buffer, "name": f"item {k}"}

    results = mpi_map(fill, items())
    if rank == 0 and WORLD.size > 1:
        for k, result in enumerate(results):
            for name in ("sum", "order", "view"):
                assert (result[name] == k + 1).all() and result[name].flags.writeable
            assert result["sum"].shape == shape and result["order"].flags.f_contiguous
            result["sum"][...] = 0


def fails_at(bad: int) -> Any:
    def fun(item: int) -> int:
        if item == bad:
            raise ZeroDivisionError(f"no value at {item}")
        return item

    return fun


@pytest.mark.parametrize("bad", [0, 5, 29])
@pytest.mark.parametrize("batch", [1, 4])
def test_an_exception_is_raised_on_all_ranks(bad: int, batch: int, rank: int, size: int) -> None:
    with pytest.raises(WorkerError) as caught:
        mpi_map(fails_at(bad), range(30), batch=batch)
    error = caught.value
    assert error.index == bad and error.rank in range(0 if size <= 4 else 1, size)
    assert f"rank {error.rank} raised ZeroDivisionError: no value at {bad} at item {bad}" in str(error)
    assert "test_map.py" in error.traceback and error.traceback.rstrip() in str(error)
    assert len(set(WORLD.allgather(str(error)))) == 1
    expect(mpi_map(abs, [-1, 2]), [1, 2], rank)
    assert mpiad.mpi_allreduce(1.0) == size


def test_no_item_begins_after_a_failure(rank: int, size: int) -> None:
    begun = [0]

    def fun(item: int) -> int:
        begun[0] += 1
        raise ZeroDivisionError

    with pytest.raises(WorkerError):
        mpi_map(fun, range(1000))
    assert begun[0] <= 1


def test_exceptions_among_the_results(rank: int) -> None:
    results = mpi_map(lambda item: 1 // item, [1, 0, -1, 0], return_exceptions=True, everywhere=True, batch=2)
    assert results[0] == 1 and results[2] == -1
    for index in (1, 3):
        assert isinstance(results[index], WorkerError) and results[index].index == index
        assert "ZeroDivisionError" in results[index].traceback


def test_exit_in_the_function(rank: int, size: int) -> None:
    def fun(item: int) -> None:
        raise SystemExit(3)

    with pytest.raises(WorkerError, match="SystemExit: 3") as caught:
        mpi_map(fun, [1])
    assert caught.value.exit_code == 3


def test_an_exception_in_the_items(rank: int) -> None:
    def items() -> Iterator[int]:
        yield from range(4)
        raise LookupError("no more")

    with pytest.raises(WorkerError, match="rank 0 raised LookupError: 'no more'|LookupError: no more") as caught:
        mpi_map(abs, items())
    assert caught.value.index == 4 and caught.value.rank == 0


def test_items_that_cannot_be_begun(rank: int, size: int) -> None:
    class Items:
        def __iter__(self) -> Iterator[int]:
            raise FileNotFoundError("samples.bin")

    with pytest.raises(WorkerError, match="FileNotFoundError: samples.bin") as caught:
        mpi_map(abs, Items() if rank == size - 1 else None, root=size - 1)
    assert caught.value.rank == size - 1
    assert mpi_map(abs, [-1], everywhere=True) == [1]


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_pickled(rank: int) -> None:
    with pytest.raises(WorkerError, match="pickle") as caught:
        mpi_map(abs, [1, 2, lambda: 0])
    assert caught.value.index == 2 and caught.value.rank == 0
    with pytest.raises(WorkerError, match="pickle") as caught:
        mpi_map(lambda item: (lambda: 0) if item == 3 else item, range(6))
    assert caught.value.index == 3 and (caught.value.rank != 0 or WORLD.size <= 4)


def test_wrong_arguments_are_raised_on_all_ranks(rank: int, size: int) -> None:
    last = rank == size - 1
    with pytest.raises(TypeError, match="fun must be callable, but got int 3"):
        mpi_map(3 if last else abs, [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="items must be iterable on the root, but got int 5"):
        mpi_map(abs, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="items must be iterable on the root, but got NoneType"):
        mpi_map(abs)
    with pytest.raises(ValueError, match="batch must be an integer above zero, but got 0"):
        mpi_map(abs, [1], batch=0 if last else 1)
    with pytest.raises(ValueError, match="root"):
        mpi_map(abs, [1], root=size)
    if size > 1:
        with pytest.raises(ValueError, match="all ranks must give the same"):
            mpi_map(abs, [1], everywhere=last)
    expect(mpi_map(abs, [-3]), [3], rank)


def test_traced_items_and_results_are_refused() -> None:
    with pytest.raises(WorkerError, match=r"items hold a traced value, but.*mpiad\.stop"):
        mpiad.grad(lambda x: (mpi_map(abs, [1.0, {"a": [x]}]), anp.sum(x))[1])(np.ones(2))
    with pytest.raises(WorkerError, match="fun returned a traced value, but"):
        mpiad.grad(lambda x: (mpi_map(lambda item: item * x, [1.0]), anp.sum(x))[1])(np.ones(2))


def test_derivatives_inside_an_item(rank: int) -> None:
    alone = MPI.COMM_SELF.Dup()
    mpiad.mpi_init(alone)
    slope = mpiad.grad(lambda x: mpiad.mpi_allreduce(x**3, comm=alone), comm=alone)
    outer = mpiad.grad(lambda x: x * sum(mpi_map(lambda k: slope(float(k)), range(4), everywhere=True)), objective="sum")
    assert outer(2.0) == 3 * 14.0
    alone.Free()


def test_progress_on_the_root_alone(capsys: pytest.CaptureFixture, rank: int, size: int) -> None:
    root = size - 1
    mpi_map(abs, range(20), root=root, progress=True)
    shown = capsys.readouterr().err
    assert not shown if rank != root else "items: 100%" in shown and "| 20/20 [" in shown


def test_nothing_is_left_behind() -> None:
    from mpiad.transport import channel

    before = len(channel(None, "test").derived)
    mpi_map(abs, range(3))
    with pytest.raises(WorkerError):
        mpi_map(fails_at(1), range(3))
    with pytest.raises(TypeError):
        mpi_map(abs, 5)  # type: ignore[arg-type]
    assert len(channel(None, "test").derived) == before


@pytest.mark.skipif(WORLD.size == 1, reason="one rank may communicate with itself")
@pytest.mark.parametrize(
    "fun, items",
    [
        (lambda x: mpiad.mpi_allreduce(x), [1.0, 2.0, 3.0]),
        (lambda x: mpi_map(abs, [x]), [1.0, 2.0, 3.0]),
        (lambda x: mpiad.grad(lambda y: y**2)(x), [1.0]),
        (abs, (mpiad.mpi_allreduce(float(k)) for k in range(3))),
    ],
)
def test_communication_inside_an_item_raises_at_once(fun, items):
    """It hung, or took another call's numbers."""
    with pytest.raises(WorkerError, match="an item of mpi_map is evaluated by one rank .*communicate on MPI.COMM_SELF"):
        mpi_map(fun, items)
    assert mpiad.mpi_allreduce(1.0) == WORLD.size


def test_items_may_communicate_and_nest_on_a_communicator_of_one_rank():
    own = lambda x: mpiad.mpi_allreduce(x, comm=MPI.COMM_SELF)  # noqa: E731
    found = mpi_map(lambda k: sum(mpi_map(own, range(k), comm=MPI.COMM_SELF)), range(5), everywhere=True)
    assert found == [0, 0, 1, 3, 6]


@pytest.mark.thorough
@pytest.mark.skipif(WORLD.size == 1, reason="one rank may communicate with itself")
def test_a_table_of_waits_shows_what_the_root_waits_for():
    """It "computes", as if the item that waits for it had only to be patient; items may take longer than the limit."""
    other = WORLD.Dup()
    mpiad.mpi_init(other)
    with mpiad.debug.checked(timeout=0.5):
        assert mpi_map(lambda x: (time.sleep(1.0), x)[1], [3.0], everywhere=True) == [3.0]
        with pytest.raises(WorkerError, match="DeadlockError: rank 0 has waited .*rank 0 -> rank 1 -> rank 0") as found:
            mpi_map(lambda x: mpiad.mpi_allreduce(x, comm=other), [1.0])
    rows = [line.split() for line in str(found.value).splitlines() if line.startswith(("  0 ", "  1 "))]
    assert [row[1] for row in rows[:2]] == ["waits", "waits"]
    assert rows[0][4].startswith("mpi_map(from")
    mpiad.reset(other)
    other.Free()


@pytest.mark.serial
def test_each_rank_that_died_in_a_map_is_marked_as_lost(monkeypatch):
    """By stand-ins for an MPI that survives it: of four ranks the second and the last are missing at the end."""
    remaining, lost = SimpleNamespace(Free=lambda: None), []
    group = object.__new__(WorkerGroup)
    group._survives, group.comm = True, SimpleNamespace(Shrink=lambda: remaining)
    group._user_channel = SimpleNamespace(size=4, drop=lambda comm: None, lose=lost.append)
    monkeypatch.setattr("mpiad.tasks.map.ranks_within", lambda used, comm: {id(remaining): [0, 2]}[id(comm)])
    group.close()
    assert lost == [[1, 3]]
