"""What ranks beside the root give as x0: the root's or nothing, and the same error on all ranks for anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

from mpiad.errors import ReplicationError
from mpiad.optimize import least_squares, minimize, mpi_optimize

COMM = MPI.COMM_WORLD


def bowl(x: Any) -> Any:
    return anp.sum((x - 3.0) ** 2)


def refused(solve: Callable[[Any], Any], root: int, of_root: Any, of_others: Any) -> ReplicationError:
    """Return the error of a solve for which one rank gives another start than the root; it's the same on all ranks."""
    other = (root + 1) % COMM.size
    with pytest.raises(ReplicationError) as caught:
        solve(of_root if COMM.rank == root else of_others if COMM.rank == other else None)
    error = caught.value
    assert error.ranks == [other] and f"rank {root}" in str(error)
    assert all(found == str(error) for found in COMM.allgather(str(error)))
    return error


@pytest.mark.mpi(min_size=2)
def test_another_start_than_the_root_s_is_refused_by_all_calls(size: int) -> None:
    root = size - 1
    solves = {
        "minimize": lambda x0: minimize(bowl, x0, objective="mean", root=root),
        "minimize ": lambda x0: mpi_optimize(bowl, lambda x: 2 * (x - 3.0), x0, objective="mean", root=root),
        "least_squares": lambda x0: least_squares(lambda x: x - 3.0, x0, root=root),
    }
    for call, solve in solves.items():
        error = refused(solve, root, np.zeros(66), np.zeros(67))
        assert str(error).startswith(f"{call.strip()}: x0") and "(67,)" in str(error) and "(66,)" in str(error)
        assert "domain.minimize" in str(error) and "method='L-BFGS-sharded'" in str(error)
        error = refused(solve, root, np.array([1.0, np.nan, 2.0, 4.0]), np.array([1.0, np.nan, 2.5, 4.0]))
        assert (error.path, error.index, error.absolute) == ("x0", (2,), 0.5) and "2.5" in str(error)
        assert solve(np.zeros(3) if COMM.rank == root else None).success


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("of_root", "of_others", "path"),
    [
        (np.zeros(2), np.zeros(2, complex), "x0"),
        ({"a": np.zeros(2), "b": 1.0}, {"a": np.zeros(2), "b": 2.0}, "x0['b']"),
        ({"a": np.zeros(2), "b": 1.0}, {"a": np.zeros(2)}, "x0['b']"),
        ([np.zeros(2)], [np.zeros(2), np.zeros(2)], "x0[1]"),
        ({"a": np.zeros(2), "n": 3}, {"a": np.zeros(2), "n": 4}, "x0['n']"),
        (np.zeros(2), "a name", "x0"),
    ],
)
def test_forms_and_values_that_differ(of_root: Any, of_others: Any, path: str) -> None:
    assert refused(lambda x0: minimize(lambda x: 0.0, x0), 0, of_root, of_others).path == path


@pytest.mark.parametrize(
    ("of_root", "of_others"),
    [
        (np.array([0.0, np.nan]), np.array([-0.0, -np.nan])),
        (np.full(2, 0.5), np.full(2, 0.5, np.float32)),
        ([1, 2], np.array([1.0, 2.0])),
        (2, np.float32(2.0)),
        ({"a": [np.ones(2)], "name": "bowl", "kind": None}, {"name": "bowl", "a": (np.ones(2),), "kind": None}),
    ],
)
def test_equal_starts_are_taken(of_root: Any, of_others: Any, rank: int) -> None:
    seen = []
    minimize(lambda x: seen.append(x) or 0.0, of_root if rank == 0 else of_others, jac=lambda x: x, options={"maxfun": 1})
    assert len(seen) >= 1
