"""Whether MPI takes device memory: who is asked, in which order, and that all ranks get one answer."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from device_double import DeviceArray, double, on_device, on_host, transfers
from mpi4py import MPI

import mpiad
from mpiad.transport.devices import device_settings, staging
from mpiad.transport.devices.device_settings import DeviceSettings
from mpiad.transport.watch import watch_settings


@pytest.fixture(autouse=True)
def afresh():
    """Ask again in each test, and after it."""
    before = device_settings.put(DeviceSettings())
    staging._tried.clear()
    yield
    staging._tried.clear()
    device_settings.put(before)


def saying(monkeypatch, supports):
    monkeypatch.setattr(staging, "supports_cuda", lambda: supports)


class Memory:
    """What MPI is given and reads something else from, as a misconfigured one does."""

    def __init__(self, values):
        self.other = np.zeros_like(values)
        self.__cuda_array_interface__ = {
            "shape": values.shape, "typestr": values.dtype.str, "version": 3, "data": (self.other.ctypes.data, False),
        }  # fmt: skip


@pytest.mark.parametrize("supports", [False, None], ids=["no", "unknown"])
def test_nothing_is_tried_where_the_library_does_not_say_yes(monkeypatch, supports):
    saying(monkeypatch, supports)
    monkeypatch.setattr(double, "message", lambda x: pytest.fail("device memory was given to MPI"))
    assert not staging.takes_directly(double)


def test_what_the_library_says_is_tried_out(monkeypatch):
    saying(monkeypatch, True)
    with double.cuda_aware():
        assert staging.takes_directly(double)
        transfers.reset()
        assert staging.takes_directly(double) and transfers.copies == 0  # once
        assert "works" in staging.device_access()


@pytest.mark.unguarded
def test_nonblocking_collectives_of_open_mpi_get_copies(monkeypatch):
    """They would crash; under watch all collectives are nonblocking ones."""
    saying(monkeypatch, True)
    with double.cuda_aware():
        for blocking_only in (False, True):
            monkeypatch.setattr(staging, "_BLOCKING_ONLY", blocking_only)
            assert staging.takes_directly(double)
            transfers.reset()
            total = mpiad.mpi_wait(mpiad.mpi_iallreduce(on_device(np.arange(3.0))))
            np.testing.assert_array_equal(on_host(total), mpiad.mpi_size() * np.arange(3.0))
            assert (transfers.d2h > 0) is blocking_only
            before = watch_settings.put(watch_settings.Settings(timeout=60.0))
            try:
                assert staging.takes_directly(double) is not blocking_only
            finally:
                watch_settings.put(before)


def test_an_mpi_that_delivers_other_numbers_is_not_believed(monkeypatch, caplog):
    saying(monkeypatch, True)
    monkeypatch.setattr(double, "message", lambda x: Memory(on_host(x)))
    assert not staging.takes_directly(double)
    assert "other numbers" in caplog.text and "fails" in staging.device_access()


def test_an_mpi_that_refuses_is_not_believed(monkeypatch, caplog):
    saying(monkeypatch, True)

    def refuse(x):
        raise BufferError("not CPU-accessible")

    monkeypatch.setattr(double, "message", refuse)
    assert not staging.takes_directly(double)
    assert "BufferError: not CPU-accessible" in caplog.text


@pytest.mark.parametrize("forced", [True, False])
def test_the_variable_overrides_both(monkeypatch, forced):
    saying(monkeypatch, not forced)
    device_settings.put(DeviceSettings(cuda_aware=forced))
    assert staging.takes_directly(double) is forced
    assert f"MPIAD_CUDA_AWARE={forced:d}" in staging.device_access()


def test_each_rank_gives_mpi_what_it_takes_there(monkeypatch, rank, size):
    """One rank's test fails: its arrays are copied; MPI reads those of the others on the device."""
    device_settings.put(DeviceSettings())
    saying(monkeypatch, True)
    if rank == size - 1:
        monkeypatch.setattr(double, "message", lambda x: Memory(on_host(x)))
    x = on_device(np.arange(40.0) + rank)
    with double.cuda_aware():
        mpiad.mpi_barrier()
        staging.takes_directly(double)
        for call, is_blocking in ((mpiad.mpi_allreduce, True), (lambda x: mpiad.mpi_wait(mpiad.mpi_iallreduce(x)), False)):
            transfers.reset()
            total = call(x)
            is_copied = rank == size - 1 or (staging._BLOCKING_ONLY and not is_blocking)
            assert type(total) is DeviceArray and transfers.copies == (2 if is_copied else 0)
            np.testing.assert_array_equal(on_host(total), sum(np.arange(40.0) + r for r in range(size)))


class Loaded:
    """A library that has some of the functions that MPIs have for this question."""

    def __init__(self, **functions):
        for name, function in functions.items():
            setattr(self, name, function)


def answering(supported, error=MPI.SUCCESS):
    def query(kind, found):
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = kind in supported
        return error

    return query


def never():
    raise AssertionError("MPICH before 4 would end the process here")


@pytest.mark.serial
@pytest.mark.parametrize(
    "loaded, supports",
    [
        (Loaded(MPIX_Query_cuda_support=lambda: 1), True),
        (Loaded(MPIX_Query_cuda_support=lambda: 0, MPIX_Query_rocm_support=lambda: 1), False),
        (Loaded(MPIX_Query_cuda_support=lambda: 0), False),
        (Loaded(MPIX_GPU_query_support=answering([0]), MPIX_Query_cuda_support=never), True),
        (Loaded(MPIX_GPU_query_support=answering([2]), MPIX_Query_cuda_support=never), False),
        (Loaded(MPIX_GPU_query_support=answering([0, 2], MPI.ERR_ARG), MPIX_Query_cuda_support=never), False),
    ],
    ids=["openmpi", "openmpi-rocm", "openmpi-no", "mpich", "mpich-hip", "mpich-error"],
)
def test_how_each_library_is_asked(monkeypatch, loaded, supports):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: loaded)
    monkeypatch.setattr(device_settings.ctypes, "byref", lambda value: ctypes.pointer(value))
    assert device_settings.supports_cuda() is supports
    assert device_settings.device_buffers() == ("yes (CUDA)" if supports else "no")


@pytest.mark.serial
def test_a_library_that_cannot_be_loaded_is_asked_by_its_info(monkeypatch):
    def fail(path):
        raise OSError

    class World:
        def Get_info(self):
            return MPI.Info.Create({"mpi_memory_alloc_kinds": "system,mpi,cuda:device"})

    monkeypatch.setattr(ctypes, "CDLL", fail)
    monkeypatch.setattr(device_settings, "MPI", type("Fake", (), {"COMM_WORLD": World()}))
    assert device_settings.supports_cuda() is True


@pytest.mark.serial
def test_this_library_answers():
    assert device_settings.supports_cuda() is not None or device_settings.device_buffers() == "unknown"
