"""A model whose stages are on different ranks, with replicas of each stage, against the whole model in one process."""

from __future__ import annotations

import logging
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

import mpiad
from mpiad.parallel import SGD, DistributedOptimizer, value_and_grad
from mpiad.parallel.distributed_optimizer import _warned

STAGES = 2
X = np.linspace(-1.0, 1.0, 10)
Y = 0.7 * np.sin(X)


def whole(w: Any) -> Any:
    return anp.mean((w[1] * anp.tanh(w[0] * X) - Y) ** 2)


@pytest.fixture
def grid(rank: int, size: int) -> Any:
    """Return the stage, and the communicators of this replica's stages and of this stage's replicas."""
    if size % STAGES:
        pytest.skip("each replica has two ranks")
    comms = MPI.COMM_WORLD.Split(rank // STAGES), MPI.COMM_WORLD.Split(rank % STAGES)
    mpiad.mpi_init(comms[0])
    yield rank % STAGES, *comms
    for comm in comms:
        comm.Free()


def loss_of(stage: int, stages: Any, everywhere: bool) -> Any:
    def loss(w: Any, x: Any, y: Any) -> Any:
        if stage == 0:
            mpiad.mpi_send(anp.tanh(w * x), 1, comm=stages)
            mean = 0.0
        else:
            mean = anp.mean((w * mpiad.mpi_recv(x, 0, comm=stages) - y) ** 2)
        return mpiad.mpi_bcast(mean, root=1, comm=stages) if everywhere else mean

    return loss


@pytest.mark.parametrize("everywhere", [True, False])
def test_as_in_one_process(everywhere: bool, grid: Any, rank: int, size: int) -> None:
    stage, stages, replicas = grid
    edges = np.linspace(0, 10, replicas.size + 1).astype(int) + (np.arange(replicas.size + 1) == 1) * (size > STAGES)
    x, y = X[edges[rank // STAGES] : edges[rank // STAGES + 1]], Y[edges[rank // STAGES] : edges[rank // STAGES + 1]]
    gradient = mpiad.value_and_grad(loss_of(stage, stages, everywhere), root=1, comm=stages)
    optimizer = DistributedOptimizer(SGD(0.3), comm=replicas)
    w, expected = 0.5, np.array([0.5, 0.5])
    state = optimizer.setup(w)
    for _ in range(4):
        state, w = optimizer.update(state, w, gradient(w, x, y)[1], samples=len(x))
        expected = expected - 0.3 * autograd.grad(whole)(expected)
    np.testing.assert_allclose(w, expected[stage], rtol=1e-13)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("call", ["value_and_grad", "step"])
def test_copies_of_a_loss_on_other_ranks_are_warned_of(
    compiled: bool, call: str, grid: Any, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    stage, stages, replicas = grid
    loss = loss_of(stage, stages, everywhere=True)
    loss = mpiad.jit(loss) if compiled else loss

    def gradient(comm: Any) -> Any:
        if call == "value_and_grad":
            return value_and_grad(loss, comm=comm)(0.5, X, Y)[1]
        optimizer = DistributedOptimizer(SGD(1.0), comm=comm)
        return 0.5 - optimizer.step(optimizer.setup(0.5), 0.5, loss, X, Y)[1]

    _warned.clear()
    with caplog.at_level(logging.WARNING, logger="mpiad"):
        found = gradient(replicas)
        gradient(replicas)
    warned = [record.getMessage() for record in caplog.records if "outside of comm" in record.getMessage()]
    assert len(warned) == 1 and "call mpiad.value_and_grad(loss, comm=stages)" in warned[0]
    np.testing.assert_allclose(found, STAGES * autograd.grad(whole)(np.full(2, 0.5))[stage], rtol=1e-12)
    caplog.clear()
    if call == "value_and_grad":  # all stages are in the communicator
        gradient(MPI.COMM_WORLD)
        gradient(stages)
        assert not caplog.records


def test_a_loss_on_other_ranks_only(grid: Any) -> None:
    _, _, replicas = grid
    with pytest.raises(
        ValueError, match=r"doesn't depend on the parameters .* call mpiad\.value_and_grad\(loss, comm=stag"
    ):
        value_and_grad(lambda w, x: 0.0, comm=replicas)(0.5, X)
