"""Which GPU a rank gets, with a CuPy that counts GPUs and does nothing else."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mpiad.device import select, transfer
from mpiad.transport import world

pytestmark = pytest.mark.serial


class NoDriver(Exception):
    pass


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(count, local_rank)`: install a CuPy that sees so many; returns the list of those that were made current."""

    def install(count, local_rank=0):
        used: list[int] = []

        def seen():
            if count is None:
                raise NoDriver("cudaErrorNoDevice")
            return count

        def device(number):
            return SimpleNamespace(use=lambda: used.append(number))

        runtime = SimpleNamespace(getDeviceCount=seen, CUDARuntimeError=NoDriver)
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Device=device)))
        monkeypatch.setattr(world, "local_rank", lambda: local_rank)
        monkeypatch.setattr(transfer, "_selected", [])  # other tests select nothing
        return used

    return install


@pytest.mark.parametrize(
    ("count", "local", "ids", "expected"),
    [(4, 2, None, 2), (2, 3, None, 1), (1, 5, None, 0), (4, 1, [3, 1], 1), (4, 2, (3, 1), 3), (8, 5, 6, 6), (2, 0, [1], 1)],
)
def test_the_gpu_of_a_rank(count, local, ids, expected, gpus):
    used = gpus(count, local)
    assert select(ids) == expected and used == [expected]


@pytest.mark.parametrize("ids", [[0, 2], 2, [-1]])
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(ids, gpus):
    used = gpus(2, 3)
    with pytest.raises(ValueError, match=r"names GPU -?\d, but this process \(local rank 3\) sees 2: 0 to 1") as error:
        select(ids)
    assert f"ids={ids!r}" in str(error.value) and used == []


@pytest.mark.parametrize("ids", [[], ["0"], [True], 1.5, "01"])
def test_what_names_no_gpu_is_refused(ids, gpus):
    gpus(2)
    with pytest.raises(ValueError, match="indices of GPUs"):
        select(ids)


@pytest.mark.parametrize("count", [0, None])
def test_a_node_without_gpus(count, gpus):
    gpus(count)
    with pytest.raises(RuntimeError, match="no GPU is visible to this process"):
        select()
