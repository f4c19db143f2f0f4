"""Solves by columns of arrays and by compiled kernels: the same tests run over both.

A test with ``usefixtures("solved_by")`` runs twice, and the `solve` of its module goes the one way or the other. What
kernels are documented not to do is marked ``columns("why")``; that they say so is in `compiled/test_choice.py`. A kernel
takes a second or more to compile, so tests of different modules share right-hand sides and what is asked for of them.
"""

from __future__ import annotations

from functools import partial

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope="session", autouse=True)
def _kernels_kept(tmp_path_factory):
    """Keep kernels for the session, in one folder for all ranks: one compiles, the others wait for it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = WORLD.bcast(str(tmp_path_factory.mktemp("kernels")) if WORLD.rank == 0 else None)
        patch.setenv("MPIAD_CACHE", folder)
        yield


def pytest_collection_modifyitems(config, items):
    no_kernel = [item for item in items if _by_kernels(item) and item.get_closest_marker("columns")]
    config.hook.pytest_deselected(items=no_kernel)
    items[:] = [item for item in items if item not in no_kernel]
    for item in items:
        if _by_kernels(item) and not item.get_closest_marker("limit"):
            item.add_marker(pytest.mark.limit(240))  # to compile takes seconds, and more on a busy machine


def _by_kernels(item):
    return "callspec" in dir(item) and item.callspec.params.get("solved_by") == "kernels"


@pytest.fixture(params=["columns", "kernels"])
def solved_by(request, monkeypatch):
    """The module's `solve` compiles, or doesn't, where a test doesn't say otherwise."""
    kernels = request.param == "kernels"
    if kernels:
        pytest.importorskip("numba")
    monkeypatch.setattr(request.module, "solve", partial(request.module.solve, compile=kernels))
    return request.param
