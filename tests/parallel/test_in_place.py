"""Collectives that write into their arrays, against sums in plain Python."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.parallel import (
    allreduce_,
    bcast_,
    iallreduce_,
    local_rank,
    reduce_,
    synchronize,
    total_workers,
    value_and_grad,
)  # fmt: skip

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1


def mine(rank=COMM.rank):
    return {"a": np.arange(3.0) * (rank + 1), "n": [np.array([rank, 7])]}


def test_allreduce_writes_the_result_into_every_array():
    x = mine()
    a, n = x["a"], x["n"][0]
    assert allreduce_(x) is x
    np.testing.assert_array_equal(a, sum(mine(r)["a"] for r in range(COMM.size)))
    np.testing.assert_array_equal(n, [sum(range(COMM.size)), 7 * COMM.size])
    np.testing.assert_array_equal(allreduce_(mine()["a"], MPI.MAX), mine(COMM.size - 1)["a"])


def test_reduce_writes_on_the_root_alone():
    x = reduce_(mine(), MPI.SUM, ROOT)
    expected = sum(mine(r)["a"] for r in range(COMM.size)) if COMM.rank == ROOT else mine()["a"]
    np.testing.assert_array_equal(x["a"], expected)


@pytest.mark.parametrize("add_up", [allreduce_, reduce_, lambda x: iallreduce_(x).wait()])
def test_an_array_in_two_places_is_added_up_once(add_up):
    tied = np.arange(4.0) + COMM.rank
    add_up({"in": tied, "out": [tied, tied[1:]]})
    if COMM.rank == 0:
        np.testing.assert_array_equal(tied, sum(np.arange(4.0) + r for r in range(COMM.size)))


def test_bcast_writes_the_roots_arrays():
    x = bcast_(mine(), ROOT)
    np.testing.assert_array_equal(x["a"], mine(ROOT)["a"])
    np.testing.assert_array_equal(x["n"][0], mine(ROOT)["n"][0])


def test_sums_may_be_waited_for_in_any_order_with_barriers_between():
    first, second = mine(), mine()
    one, other = iallreduce_(first), iallreduce_(second)
    first["a"][:] = -1.0  # what was handed in is what is added up
    COMM.Barrier()
    waits = [one, other] if COMM.rank % 2 else [other, one]
    for pending in waits:
        pending.wait()
    for x in (first, second):
        np.testing.assert_array_equal(x["a"], sum(mine(r)["a"] for r in range(COMM.size)))
    assert one.wait() is first


def test_workers():
    assert total_workers() == COMM.size
    assert 0 <= local_rank() < COMM.size


@pytest.mark.parametrize("fun", [allreduce_, reduce_, bcast_, iallreduce_])
def test_what_cannot_be_written_is_refused_on_all_ranks(fun):
    frozen = np.ones(2)
    frozen.flags.writeable = COMM.rank != ROOT
    with pytest.raises(TypeError, match="x must be a writable array, but got a read-only array"):
        fun(frozen)
    with pytest.raises(TypeError, match=r"x\['n'\] .* int 3"):
        fun({"n": 3})


@pytest.mark.parametrize("fun", [allreduce_, reduce_, bcast_, iallreduce_, synchronize])
@pytest.mark.parametrize("dtype", ["f2", ">f8"])
def test_a_refused_dtype_raises_on_all_ranks_before_any_message(fun, dtype):
    x = [np.ones(2), np.ones(2, dtype if fun is synchronize or COMM.rank == ROOT else "f8")]
    for call in (fun, lambda x: mpiad.grad(lambda y: anp.sum(y) if fun(x) else y)(np.ones(2))):
        with pytest.raises(TypeError, match=rf"parallel.{fun.__name__}: x must be an array .* dtype"):
            call(x)
        assert mpiad.mpi_allreduce(1.0) == COMM.size
    np.testing.assert_array_equal(x, np.ones((2, 2)))
    if fun in (allreduce_, reduce_, iallreduce_):
        with pytest.raises(TypeError, match=rf"parallel.{fun.__name__}: op must be MPI.LAND, .*bool.* got MPI.SUM"):
            fun([np.ones(2), np.ones(2, bool)])


def test_running_means_are_written_inside_a_loss_without_being_differentiated():
    mean, root = np.zeros(2), COMM.size - 1

    def loss(p, x):
        mean[:] = mpiad.stop_gradient(p * x)
        pending = iallreduce_(mean)
        reduce_(np.ones(1), root=root)
        pending.wait()
        allreduce_(mean, MPI.MAX)
        copy = bcast_(np.full(2, float(COMM.rank)), root)
        assert copy.tolist() == [root, root]
        assert synchronize({"a": float(COMM.rank)}, root) == {"a": root}
        return anp.sum(p * x)

    x = np.array([1.0, 2.0]) * (COMM.rank + 1)
    total = np.array([1.0, 2.0]) * sum(range(1, COMM.size + 1))
    for evaluate in (value_and_grad(loss), mpiad.value_and_grad(loss, shared=True, objective="mean")):
        np.testing.assert_allclose(evaluate(np.ones(2), x)[1], total / COMM.size)
        np.testing.assert_allclose(mean, total)
