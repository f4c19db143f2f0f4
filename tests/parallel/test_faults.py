"""Trainings that go wrong in the middle of sums that are under way, and what they leave behind."""

import gc
import weakref

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from mpi4py import MPI

import mpiad
import mpiad.debug
from mpiad.errors import UnfinishedMessagesError
from mpiad.parallel import SGD, DistributedOptimizer, value_and_grad
from mpiad.transport import channel

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
START = (np.ones(1), np.ones(1), np.ones(1))
raising: list[int] = []


@primitive
def layer(x, number):
    return x * 1.0


def _layer_adjoint(ans, x, number):
    def vjp(g):
        if number in raising:
            raise KeyError("in the reverse pass")
        return g

    return vjp


defvjp(layer, _layer_adjoint, None)


def loss(p, x):
    for number in range(3):
        x = layer(x * p[number], number)
    return anp.mean(x**2)


@pytest.fixture
def comm():
    found = COMM.Dup()
    yield found
    raising.clear()
    found.Free()


def gradient(comm):
    return value_and_grad(loss, comm=comm, bucket_bytes=8)(START, np.arange(1.0, 4.0) + comm.rank)[1]


@pytest.mark.parametrize("layers", [(0, 1), (2, 0), (2, 2)])
def test_an_exception_among_sums_under_way_asks_for_a_reset(comm, layers):
    """The ranks have started different numbers of sums, some perhaps none, which then would be those of other arrays."""
    exact = gradient(comm)
    raising.append(layers[0] if comm.rank == ROOT else layers[1])
    with pytest.raises(KeyError):
        gradient(comm)
    raising.clear()
    with pytest.raises(UnfinishedMessagesError, match=r"KeyError ended a gradient whose sums .* mpiad.reset"):
        gradient(comm)
    mpiad.reset(comm)
    assert gradient(comm) == exact


def test_what_raises_before_any_sum_needs_no_reset(comm):
    with pytest.raises(TypeError, match="one real number"):
        value_and_grad(lambda p, x: x, comm=comm)(START, np.ones(2))
    with pytest.raises(ValueError, match=f"none of the {COMM.size} rank"):
        value_and_grad(loss, comm=comm)(START, np.ones(0))
    gradient(comm)


@pytest.mark.skipif(COMM.size < 2, reason="needs two ranks")
@pytest.mark.unguarded
def test_parameters_that_differ_in_form_are_refused_on_all_ranks(comm):
    text = rf"but on rank {ROOT} params\['layers'\]\[1\] has shape \(3,\) and dtype float64, and on the root, rank 0, "
    text += r"params\['layers'\]\[1\] has shape \(2,\)"
    # Neither an integer nor an empty list is trained.
    params = {"epoch": 3, "frozen": [], "layers": [np.ones(4), np.ones(3 if COMM.rank == ROOT else 2)]}
    with pytest.raises(ValueError, match=text):
        value_and_grad(lambda p: anp.sum(p["layers"][0]) + anp.sum(p["layers"][1]), comm=comm)(params)
    optimizer = DistributedOptimizer(SGD(0.1), comm=comm)
    with pytest.raises(ValueError, match=text):
        optimizer.update(optimizer.setup(params), params, params)
    with pytest.raises(ValueError, match=text):
        optimizer.step(optimizer.setup(params), params, lambda p: anp.sum(p["layers"][0]))
    params = [np.ones(1)] * (2 if COMM.rank == ROOT else 1)
    with pytest.raises(ValueError, match=rf"on rank {ROOT} params\[1\] has .* rank 0, there is no further leaf"):
        optimizer.step(optimizer.setup(params), params, lambda p: anp.sum(p[0]))
    with pytest.raises(ValueError, match=rf"on rank {ROOT} bucket_bytes is 9, and on the root, rank 0, bucket_bytes is 8"):
        value_and_grad(loss, comm=comm, bucket_bytes=8 + (COMM.rank == ROOT))(START, np.ones(3))
    gradient(comm)


def test_a_watch_may_come_and_go(comm):
    exact = gradient(comm)
    for _ in range(2):
        with mpiad.debug.checked():
            assert gradient(comm) == exact
        assert gradient(comm) == exact


def test_freed_communicators_leave_nothing_behind():
    """MPI has some thousand communicators: one that is kept for each that the user frees would run out of them."""
    found = []
    for _ in range(3):
        comm = COMM.Dup()
        gradient(comm)
        mpiad.reset(comm)
        gradient(comm)
        own = channel(comm, "test").duplicates()
        found.append(weakref.ref(channel(comm, "test")))
        comm.Free()
        assert all(duplicate == MPI.COMM_NULL for duplicate in own)
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def test_gradients_return_their_memory_without_the_garbage_collector():
    held = []

    def watched(p, x):
        whole = np.array(x)
        held.append(weakref.ref(whole))
        return anp.mean((anp.tanh(p * whole)) ** 2)

    optimizer = DistributedOptimizer(SGD(0.1), accumulate=2)
    state, p = optimizer.setup(1.0), 1.0
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            state, p, _ = optimizer.step(state, p, watched, np.ones(5))
        assert [ref() for ref in held] == [None] * 4
    finally:
        gc.enable()
