"""What a solve over ranks communicates: a few collectives before and after it, and none while trajectories advance."""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from ode_systems import lorenz

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, Event, ODEProblem, remake, solve
from mpiad.transport import channel

RHO = np.linspace(0, 21, 29)[:, None]
LORENZ = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 1.0)), p=RHO)
DOSE = Event(times=lambda p: [0.3], affect=lambda u, p, t: [u[0] + 1.0, u[1], u[2]])
MOVING_DOSE = Event(times=lambda p: [0.3 + 0 * p[0]], affect=DOSE.affect)
KERNELS = [False, True]


class Counting:
    """A communicator that notes which of its operations were called."""

    def __init__(self, comm):
        self._comm, self.calls = comm, []

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        if not callable(found):
            return found

        def called(*args, **kwargs):
            self.calls.append(name)
            return found(*args, **kwargs)

        return called


@pytest.fixture
def counted():
    """Return a communicator, and a function that returns what a call communicates over it."""
    comm = MPI.COMM_WORLD.Dup()
    used = channel(comm, "test")
    bare, reverse = used.data, used.reverse

    def calls(fun):
        used.data, used.reverse = Counting(bare), Counting(reverse)
        try:
            fun()
            return used.data.calls + used.reverse.calls
        finally:
            used.data, used.reverse = bare, reverse

    return comm, calls


def loss(p, way, **arguments):
    return anp.sum(solve(remake(LORENZ, p=p), ensemblealg=way, **arguments).u_end ** 2)


@pytest.mark.parametrize("compile", KERNELS)
def test_as_many_whatever_the_number_of_steps(compile, counted):
    comm, calls = counted
    way = EnsembleMPI(comm=comm)
    gradient = mpiad.grad(loss, shared=True, comm=comm)
    for fun in (loss, gradient):
        found, steps = [], []
        for rtol in (1e-2, 1e-10):
            found.append(calls(partial(fun, RHO, way, rtol=rtol, atol=1e-3 * rtol, compile=compile)))
            steps.append(solve(LORENZ, rtol=rtol, atol=1e-3 * rtol).naccept.sum())
        assert steps[1] > 10 * steps[0]
        assert found[0] == found[1] != []


@pytest.mark.parametrize("compile", KERNELS)
@pytest.mark.parametrize(
    "arguments, most", [({}, 4), ({"saveat": 0.25}, 5), ({"batch_size": 3}, 5)], ids=["ends", "saveat", "batches"]
)
def test_few(arguments, most, compile, counted, size):
    comm, calls = counted
    for gather, more in ((True, 0), (False, -1)):
        way, found = EnsembleMPI(gather=gather, comm=comm), []
        for count in (29, 29, 7 * size, 1):
            some = remake(LORENZ, p=np.linspace(1, 20, count)[:, None])
            found.append(calls(partial(solve, some, ensemblealg=way, compile=compile, **arguments)))
        # However many trajectories there are, on all ranks or one, and whether shares were balanced before.
        assert found[0] == found[1] == found[2]
        assert found[3] == found[0] or "batch_size" in arguments  # there one batch is more than there is
        assert 1 <= len(found[0]) <= most + more
        assert comm.allgather(found[0]) == [found[0]] * size


@pytest.mark.parametrize(
    "arguments, events, traced",
    [
        ({}, 0, 1),
        ({"saveat": 0.25}, 0, 2),
        ({"saveat": 0.25, "events": DOSE}, 1, 2),
        ({"saveat": 0.25, "events": MOVING_DOSE}, 1, 4),
    ],
    ids=["ends", "saveat", "doses", "doses at differentiated times"],
)
def test_one_message_each_for_arguments_choice_header_and_results(arguments, events, traced, counted):
    comm, calls = counted
    way = EnsembleMPI(comm=comm)
    for compile in ("auto", True):
        run = partial(solve, LORENZ, ensemblealg=way, compile=compile, **arguments)
        run()
        # The choice of arrays, and the vote on giving them up.
        choice = ["Allgather", "Allreduce"] if compile == "auto" else []
        # The results of all trajectories come in one message, the events, whose number differs, in another.
        every = ["Allgather", *choice, "Allgather", "Allgatherv", *["Allgatherv"] * events]
        assert calls(run) == every
    # Traced results: the states, and, if they have derivatives, the final times and those of the events.
    gradient = calls(lambda: mpiad.grad(loss, shared=True, comm=comm)(RHO, way, compile=True, **arguments))
    assert gradient.count("Allgatherv") == 1 + events + traced and "allgather" not in gradient


def test_generators_are_compared_with_the_other_arguments(counted):
    comm, calls = counted
    drawn = lambda prob, i, repeat, rng: remake(prob, p=rng.uniform(1.0, 20.0, 1))  # noqa: E731
    way, some = EnsembleMPI(comm=comm), EnsembleProblem(LORENZ.problem, prob_func=drawn, rng=np.random.default_rng(3))
    run = lambda rng: solve(remake(some, rng=rng), ensemblealg=way, trajectories=8, compile=True)  # noqa: E731
    assert calls(partial(run, np.random.default_rng(3))) == calls(partial(run, 3))
    # The root draws a key for None, and sends it.
    assert calls(partial(run, None)) == [*calls(partial(run, 3))[:1], "bcast", *calls(partial(run, 3))[1:]]
    # A comparison draws nothing: the generator advances once per solve.
    generator, other = np.random.default_rng(3), np.random.default_rng(3)
    first, second = (run(generator).u_end for _ in range(2))
    single = [solve(remake(some, rng=other), trajectories=8, compile=True).u_end for _ in range(2)]
    assert np.array_equal(first, single[0]) and np.array_equal(second, single[1])


def test_arguments_that_differ_where_a_text_leaves_them_out(rank, size):
    times = np.linspace(0.0, 1.0, 3001)
    if rank == size - 1:
        times[1500] += 1e-5
    if size == 1:
        assert solve(LORENZ, ensemblealg=EnsembleMPI(), saveat=times).t[1500] == times[1500]
        return
    with pytest.raises(ValueError, match="must give the same arguments, but they differ in parts that aren't shown"):
        solve(LORENZ, ensemblealg=EnsembleMPI(), saveat=times)
