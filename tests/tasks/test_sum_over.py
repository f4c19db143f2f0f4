"""`sum_over`: the sum over items is that of one process, with its derivatives, whichever group did which item."""

from __future__ import annotations

import re
import threading

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.errors import ConvergenceError, WorkerError
from mpiad.tasks import RankGroups, sum_over

WORLD = MPI.COMM_WORLD
ITEMS = np.linspace(0.5, 2.0, 7)
CELLS = 60  # every number of ranks up to six divides it


def divisors(size):
    return [k for k in range(1, size + 1) if size % k == 0]


def ring(item, mine, comm):
    """The sum of sin²(a x) x_left over a ring of cells, a block on each rank of a group: the same number on all of them."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    behind = mpiad.mpi_exchange(mine[-1:], right, left, comm=comm)
    local = anp.sum(anp.sin(item * mine) ** 2 * anp.concatenate([behind, mine[:-1]]))
    return mpiad.mpi_allreduce(local, comm=comm)


def on_one_process(x):
    """Return the sum of `ring` over all items, its gradient, and the Hessian times ones, by their formulas."""
    value, gradient, product = 0.0, np.zeros(CELLS), np.zeros(CELLS)
    for a in ITEMS:
        behind, before = np.roll(x, 1), np.roll(x, -1)
        value += np.sum(np.sin(a * x) ** 2 * behind)
        gradient += a * np.sin(2 * a * x) * behind + np.sin(a * before) ** 2
        product += 2 * a**2 * np.cos(2 * a * x) * behind + a * np.sin(2 * a * x) + a * np.sin(2 * a * before)
    return value, gradient, product


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_value_and_derivatives_of_shared_variables_are_those_of_one_process(schedule, size):
    x = np.linspace(0.1, 1.3, CELLS)
    expected = on_one_process(x)
    for count in divisors(size):

        def loss(x, count=count):
            def misfit(item, comm):
                cells = CELLS // comm.size
                return ring(item, x[comm.rank * cells : (comm.rank + 1) * cells], comm)

            return sum_over(ITEMS, misfit, groups=count, schedule=schedule)

        value, gradient = mpiad.value_and_grad(loss, shared=True)(x)
        found = value, gradient, mpiad.hvp(loss, shared=True)(x, np.ones(CELLS)), mpiad.jvp(loss, x, np.ones(CELLS))[1]
        for ours, theirs in zip(found, [*expected, expected[1].sum()]):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_all_groupings_give_the_same_bits(schedule, size):
    """Where an item's number is the same in all of them, as it is where one rank computes it."""
    terms = np.exp(7 * np.sin(np.arange(101.0) ** 2))
    found = [sum_over(terms, lambda term, comm: term, groups=count, schedule=schedule) for count in divisors(size)]
    assert {float(value) for value in found} == {float(np.sum(terms))}


def test_pieces_on_all_ranks_have_a_taylor_rate_of_two(rank, size):
    """Variables in pieces on all ranks of all groups: each group collects its blocks across the groups."""
    groups = RankGroups(divisors(size)[min(1, len(divisors(size)) - 1)])  # two groups of two ranks, of four
    cells, random = CELLS // size, np.random.default_rng(rank)
    x, direction = random.standard_normal(cells), random.standard_normal(cells)

    def loss(piece):
        block = mpiad.mpi_allgather(piece, axis=0, comm=groups.across)
        return sum_over(ITEMS, lambda item, comm: ring(item, block, comm), groups=groups)

    value, gradient = mpiad.value_and_grad(loss)(x)
    slope = mpiad.mpi_allreduce(gradient @ direction)
    rests = [abs(loss(x + h * direction) - value - h * slope) for h in (1e-3, 5e-4)]
    assert np.log2(rests[0] / rests[1]) > 1.9
    groups.free()


@pytest.mark.parametrize("objective, expected", [("root", 0.0), ("sum", None), ("mean", None)])
def test_an_items_number_is_that_of_its_groups_first_rank_or_the_sum_or_the_mean(objective, expected, size):
    for count in divisors(size):
        total = sum_over(range(5), lambda item, comm: item + comm.rank, groups=count, objective=objective)
        width = size // count
        shares = {"root": 10.0, "sum": 10.0 * width + 5 * width * (width - 1) / 2, "mean": 10.0 + 5 * (width - 1) / 2}
        assert total == shares[objective]


@pytest.mark.mpi(min_size=2)
def test_a_dynamic_schedule_balances_items_of_different_cost(size):
    """100 items with a spread of ten in cost, the costly ones all of one group if it were static; counted by waits."""
    costs = [0.1 if k % size == 0 and k < 60 else 0.01 for k in range(100)]

    def efficiency():
        waited: list[float] = []

        def wait(item, comm):
            threading.Event().wait(item)
            waited.append(item)
            return item

        assert sum_over(costs, wait, groups=size, schedule="dynamic") == np.sum(costs)
        return sum(costs) / (size * max(WORLD.allgather(sum(waited))))

    # On cores that others use as well, tries go wrong; were the items dealt in turn, all of them would.
    assert any(efficiency() >= 0.9 for _ in range(12))


@pytest.mark.interpreted
def test_a_compiled_loss_is_that_of_the_interpreter(size):
    x = np.linspace(0.1, 1.3, CELLS)
    count = divisors(size)[-1]

    def loss(x):
        return sum_over(ITEMS, lambda item, comm: ring(item, x, comm), groups=count, schedule="dynamic")

    compiled = mpiad.jit(mpiad.value_and_grad(loss, shared=True))
    for scale in (1.0, 0.5):
        value, gradient = compiled(scale * x)
        np.testing.assert_allclose(value, on_one_process(scale * x)[0], rtol=1e-12)
        np.testing.assert_allclose(gradient, on_one_process(scale * x)[1], rtol=1e-12)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("kind, raised", [(KeyError, WorkerError), (ConvergenceError, ConvergenceError)])
def test_an_item_that_fails_on_one_group_is_named_on_all_ranks(schedule, kind, raised, rank, size):
    done = []

    def failing(item, comm):
        if item == 3 and comm.rank == comm.size - 1:
            raise kind("no such layer")
        done.append(item)
        return 1.0

    for count in divisors(size):
        with pytest.raises(raised, match=rf"item 3 failed on rank \d with .*{kind.__name__}.*no such layer") as caught:
            sum_over(range(40), failing, groups=count, schedule=schedule)
        where = int(re.findall(r"on rank (\d)", str(caught.value))[0])
        assert (where + 1) % (size // count) == 0
        if raised is WorkerError:
            assert caught.value.index == 3 and caught.value.rank == where and "no such layer" in caught.value.traceback
        # The next call is whole: nothing of the failed one is under way.
        assert sum_over(range(4), lambda item, comm: item, groups=count, schedule=schedule) == 6
    if schedule == "dynamic":
        assert len(sum(WORLD.allgather(done), [])) < 40 * len(divisors(size))


@pytest.mark.parametrize(
    "given, kind, text",
    [
        ({"groups": 0}, ValueError, "can't form 0 groups"),
        ({"groups": 7}, ValueError, r"can't form 7 groups of equal size. Possible numbers of groups: 1"),
        ({"groups": 1.0}, TypeError, "number of groups must be an integer, but got float 1.0"),
        ({"schedule": "guided"}, ValueError, "schedule must be 'static' or 'dynamic', but got 'guided'"),
        ({"objective": "max"}, ValueError, "objective must be one of .* but got 'max'"),
        ({"fun": 3}, TypeError, "fun must be callable, but got int 3"),
        ({"items": 3}, TypeError, "not iterable"),
        ({"fun": lambda item, comm: np.ones(2)}, WorkerError, r"item 0 failed on rank 0.*one real number.*shape \(2,\)"),
    ],
)
def test_what_cannot_be_used_is_refused(given, kind, text):
    called = {"items": range(3), "fun": lambda item, comm: 1.0, "groups": 1, **given}
    with pytest.raises(kind, match=text):
        sum_over(**called)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_give_other_arguments_are_told_so(rank):
    with pytest.raises(ValueError, match=r"same arguments, but rank 0 gave 3 items.* and rank 1 gave 4 items"):
        sum_over(range(3 + (rank == 1)), lambda item, comm: 1.0, groups=1)
    with pytest.raises(ValueError, match="same arguments, but rank 0 gave 1 groups and rank 1 gave 2 groups|can't form"):
        RankGroups(1 + (rank == 1))


def test_groups_know_their_ranks(rank, size):
    for count in divisors(size):
        groups = RankGroups(count)
        members, across = groups.comm.allgather(rank), groups.across.allgather(rank)
        width = size // count
        assert members == list(range(groups.index * width, (groups.index + 1) * width))
        assert across == list(range(rank % width, size, width))
        groups.free()


@pytest.mark.launches
def test_a_rank_that_fails_alone_ends_the_job_where_its_group_waits_for_it(mpirun):
    """What the others wait for can't be told from the agreement that the failed rank comes to, were it one communicator."""
    done = mpirun(2, """
import mpiad

def failing(item, comm):
    if item == 1 and comm.rank == 0:
        raise KeyError("alone")
    return mpiad.mpi_allreduce(1.0, comm=comm)

mpiad.tasks.sum_over(range(3), failing, groups=1)
""", timeout=20)  # fmt: skip
    assert done.returncode != 0
    assert "KeyError: 'alone'" in done.stderr


@pytest.mark.skipif(WORLD.size == 1, reason="one rank may communicate with itself")
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_communication_of_all_ranks_inside_an_item_raises_at_once(schedule):
    text = "an item of tasks.sum_over is evaluated by one group of ranks .*on its argument comm"
    with pytest.raises(WorkerError, match=text):
        sum_over([1.0, 2.0, 3.0], lambda x, comm: mpiad.mpi_allreduce(x), groups=WORLD.size, schedule=schedule)
    found = sum_over([1.0, 2.0, 3.0], lambda x, comm: mpiad.mpi_allreduce(x), groups=1, schedule=schedule)
    assert found == 6.0 * WORLD.size


def test_reset_renews_the_groups(size):
    """A reset of the communicator also serves the groups that the library has made of its ranks."""
    groups = size // 2 if size % 2 == 0 else 1

    def loss(x, fails):
        total = x * sum_over([1.0, 2.0], lambda a, comm: mpiad.mpi_allreduce(a, comm=comm), groups=groups)
        if fails:
            raise KeyError("on all ranks")
        return total

    expected = loss(1.0, False)
    for _ in range(2):
        with pytest.raises(KeyError):
            mpiad.value_and_grad(loss)(1.0, True)
        mpiad.reset()
        assert mpiad.value_and_grad(loss)(1.0, False)[0] == expected
