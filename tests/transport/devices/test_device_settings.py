"""The variables that say how device arrays travel."""

from __future__ import annotations

import sys

import pytest
from mpi4py import MPI

from mpiad.transport.devices import device_settings
from mpiad.transport.devices.device_settings import DeviceSettings, from_environment, may_bring_arrays

NAMES = ("MPIAD_CUDA_AWARE", "MPIAD_DEVICE_PINNED")
SHOW = """
import os, sys
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
for k, name in enumerate(("MPIAD_CUDA_AWARE", "MPIAD_DEVICE_PINNED")):
    value = sys.argv[1 + 2 * rank + k]
    os.environ.pop(name, None)
    if value != "-":
        os.environ[name] = value
try:
    import mpiad
    mpiad.mpi_init()
    from mpiad.transport.devices.device_settings import present
    found = present()
    mpiad.mpi_print(found.cuda_aware, found.pinned)
except ValueError as error:
    sys.stdout.write(f"rank {rank}: {error}\\n")
"""


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.serial
def test_defaults(environment):
    assert from_environment() == DeviceSettings(None, 256 << 20)


@pytest.mark.serial
def test_what_is_asked_for(environment):
    for name, value in zip(NAMES, ("0", "0")):
        environment.setenv(name, value)
    assert from_environment() == DeviceSettings(False, 0)


@pytest.mark.serial
@pytest.mark.parametrize(
    "value, expected",
    [("4M", "0 or more, but got '4M'"), ("-100", "0 or more, but got '-100'"), ("1e9", "0 or"), ("9" * 30, "0 or more")],
)
def test_other_values_are_refused(environment, value, expected):
    environment.setenv("MPIAD_DEVICE_PINNED", value)
    with pytest.raises(ValueError, match=f"MPIAD_DEVICE_PINNED must be a number of bytes, {expected}"):
        from_environment()


@pytest.mark.parametrize(
    "variables, brings, supports, exchanges",
    [
        ({}, False, False, False),
        ({}, True, False, False),
        ({}, True, None, False),
        ({}, True, True, True),
        ({"MPIAD_CUDA_AWARE": "0"}, True, True, False),
        ({"MPIAD_CUDA_AWARE": "1"}, True, False, True),
        ({"MPIAD_CUDA_AWARE": "1"}, False, False, False),
        ({}, False, True, False),
    ],
)
def test_large_sums_are_exchanged_where_mpi_may_get_device_memory(
    environment, rank, size, variables, brings, supports, exchanges
):
    here = rank == size - 1
    environment.setattr(device_settings, "may_bring_arrays", lambda: brings and here)
    environment.setattr(device_settings, "supports_cuda", lambda: supports)
    for name, value in variables.items() if here else ():
        environment.setenv(name, value)
    before = device_settings.present()
    try:
        device_settings.start(MPI.COMM_WORLD)
        assert device_settings.exchanges((4 << 20) + 1) is exchanges and not device_settings.exchanges(4 << 20)
    finally:
        device_settings.put(before)


@pytest.mark.serial
@pytest.mark.parametrize("installed, gpu, expected", [(True, True, True), (True, False, False), (False, True, False)])
def test_arrays_may_come_where_cupy_and_a_gpu_are(monkeypatch, installed, gpu, expected):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(device_settings, "may_use_gpu", lambda: gpu)
    assert may_bring_arrays() is expected


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize(
    "asked, expected",
    [
        pytest.param("- - - -", "None 268435456", marks=pytest.mark.thorough),
        ("1 - - 1024", "True 1024"),
        ("1 100 0 200", "False 100"),
    ],
)
def test_ranks_agree(mpirun, asked, expected):
    done = mpirun(2, SHOW, *asked.split())
    assert done.stdout.splitlines() == [expected] * 2, done.stdout + done.stderr


@pytest.mark.launches
def test_a_wrong_value_of_one_rank_is_refused_on_all(mpirun):
    done = mpirun(2, SHOW, *"- - - 4M".split())
    assert sorted(line.partition(" has")[0] for line in done.stdout.splitlines()) == [
        "rank 0: MPIAD_CUDA_AWARE or MPIAD_DEVICE_PINNED",
        "rank 1: MPIAD_DEVICE_PINNED must be a number of bytes, 0 or more, but got '4M'.",
    ]


@pytest.mark.serial
@pytest.mark.parametrize("value, ipc", [("0", False), ("1", True), ("", True)])
def test_sharing_of_device_memory_can_be_switched_off(environment, value, ipc):
    environment.setenv("MPIAD_CUDA_IPC", value)
    assert from_environment().ipc is ipc
