"""Solves by columns of arrays and by compiled kernels, on the host and on a device: the same tests run over all.

A test with ``usefixtures("solved_by")`` runs twice, and the `solve` of its module goes the one way or the other; a module
that names the ways has those: with "device" problems go to a device, and their solutions come back; with "gpu" ensembles
are solved by `EnsembleGPU`. What kernels are documented not to do is marked ``columns("why")``; that they say so is in
`compiled/test_kernel_choice.py`. To compile a kernel takes tenths of a second, so tests of different modules share
right-hand sides and what is asked for of them.
"""

from __future__ import annotations

import dataclasses
import os
from functools import partial

import launch
import pytest
from device_double import on_device
from mpi4py import MPI

from mpiad.device import to_device, to_host
from mpiad.ensemble import EnsembleGPU, ODEProblem, remake
from mpiad.ensemble.compiled import kernel_choice

WORLD = MPI.COMM_WORLD


@pytest.fixture(scope="session", autouse=True)
def _kernels_kept(tmp_path_factory):
    """Keep kernels for the session, in one folder for all ranks."""
    if launch.KERNELS in os.environ:
        yield  # in the launch's folder, see the conftest of all tests
        return
    with pytest.MonkeyPatch.context() as patch:
        folder = WORLD.bcast(str(tmp_path_factory.mktemp("kernels")) if WORLD.rank == 0 else None)
        patch.setenv("MPIAD_CACHE", folder)
        yield


@pytest.fixture(autouse=True)
def _no_earlier_solves():
    """The choice between arrays and kernels doesn't depend on other tests' solves."""
    kernel_choice._histories.clear()


def pytest_collection_modifyitems(config, items):
    no_kernel = [item for item in items if _by_kernels(item) and item.get_closest_marker("columns")]
    config.hook.pytest_deselected(items=no_kernel)
    items[:] = [item for item in items if item not in no_kernel]
    for item in items:
        if _by_kernels(item) and not item.get_closest_marker("limit"):
            item.add_marker(pytest.mark.limit(240))  # to compile takes long on a busy machine


def _by_kernels(item):
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("solved_by") == "kernels"


@pytest.fixture(params=["columns", "kernels"])
def solved_by(request, monkeypatch):
    """The module's `solve` compiles, or doesn't, where a test doesn't say otherwise."""
    kernels = request.param == "kernels"
    if request.param == "gpu":
        # Here, for on CuPy's arrays kernels are CuPy's own.
        from device_on_cpu import COMPILER, double

        if COMPILER is None:
            pytest.skip("there is no compiler of C++")
        monkeypatch.setattr("mpiad.ensemble.backends.selected_arrays", lambda device: double)
    given = {"ensemblealg": EnsembleGPU()} if request.param == "gpu" else {"compile": kernels}
    solve = partial(request.module.solve, **given)
    monkeypatch.setattr(request.module, "solve", partial(_solved_there, solve) if request.param == "device" else solve)
    return request.param


def _solved_there(solve, problem, *args, **settings):
    """Solve with states and parameters on a device, and return the solution with its states on the host."""
    sol = solve(_moved(problem), *args, **settings)
    return dataclasses.replace(sol, u=to_host(sol.u), u_end=to_host(sol.u_end))


def _moved(problem):
    if not isinstance(problem, ODEProblem) and problem.prob_func is not None:
        return remake(problem, prob_func=lambda prob, i, repeat: _moved(problem.prob_func(prob, i, repeat)))
    moved = {name: to_device(getattr(problem, name), like=on_device(0.0)) for name in ("u0", "p")}
    return remake(problem, **moved) if isinstance(problem, ODEProblem) else remake(
        problem, problem=_moved(problem.problem), **moved
    )  # fmt: skip
