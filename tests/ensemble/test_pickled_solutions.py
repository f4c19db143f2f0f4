"""Solutions over ranks as pickles: what becomes of the communicator that they belong to."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from ode_systems import lorenz

from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, solve
from mpiad.errors import CommunicatorError

P = np.linspace(0.0, 21.0, 5)[:, None]
TIMES = [0.25, 0.5]


def solved(comm: Any, gather: bool) -> Any:
    problem = EnsembleProblem(ODEProblem(lorenz, [1.0, 0.0, 0.0], (0.0, 0.5)), p=P)
    return solve(problem, ensemblealg=EnsembleMPI(gather=gather, comm=comm), saveat=TIMES, dense_output=True)


@pytest.fixture
def duplicate() -> Any:
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.mark.parametrize("comm", [None, MPI.COMM_WORLD], ids=["none", "world"])
def test_the_world_is_known_by_its_name(comm: Any) -> None:
    sol = solved(comm, False)
    read = pickle.loads(pickle.dumps(sol))
    np.testing.assert_array_equal(read.mean(), sol.mean())
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(solved(comm, True)))(TIMES), solved(None, True).u)


def test_a_share_takes_statistics_over_the_communicator_that_it_is_given(duplicate: Any) -> None:
    sol = solved(duplicate, False)
    read = pickle.loads(pickle.dumps(sol))
    np.testing.assert_array_equal(read.u, sol.u)
    np.testing.assert_array_equal(read(TIMES), sol(TIMES))
    for ask in (read.mean, read.std, read.summary, lambda: read.quantile(0.5)):
        with pytest.raises(CommunicatorError, match="pickled.*Set sol.comm"):
            ask()
    read.comm = duplicate
    np.testing.assert_array_equal(read.mean(), sol.mean())
    assert read.summary() == sol.summary()


def test_gathered_states_are_there_and_those_between_say_what_to_do(duplicate: Any) -> None:
    sol = solved(duplicate, True)
    read = pickle.loads(pickle.dumps(sol))
    np.testing.assert_array_equal(read.u, sol.u)
    for one in (read, read[2], pickle.loads(pickle.dumps(sol[2]))):
        with pytest.raises(CommunicatorError, match="pickled.*saveat"):
            one([0.1])


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy])
def test_copies_belong_to_the_same_communicator(made: Any, duplicate: Any) -> None:
    sol, all_of_it = solved(duplicate, False), solved(duplicate, True)
    assert made(sol).comm is duplicate
    np.testing.assert_array_equal(made(sol).mean(), sol.mean())
    np.testing.assert_array_equal(made(all_of_it)([0.1]), all_of_it([0.1]))
