"""What a device array is, and that the stand-in for one is as strict as it says."""

from __future__ import annotations

import subprocess
import sys

import device_double
import numpy as np
import pytest
from device_double import double, on_device, on_host, transfers

from mpiad.transport.core.buffers import spec_of
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array

pytestmark = pytest.mark.serial


def test_arrays_are_told_apart():
    x = on_device(np.arange(6.0).reshape(2, 3))
    assert arrays_of(x) is double and is_device_array(x)
    for host in (np.ones(2), np.float32(1), 1.0, None, [1.0], "x"):
        assert arrays_of(host) is None and not is_device_array(host)


def test_an_unknown_kind_is_refused_by_its_name():
    class Tensor:
        __cuda_array_interface__: dict = {}

    assert is_device_array(Tensor())
    with pytest.raises(TypeError, match=r"Tensor, but only CuPy's are known"):
        arrays_of(Tensor())


def test_a_spec_makes_arrays_on_the_same_device():
    spec = spec_of(on_device(np.ones((2, 3), np.float32)), "test")
    zeros = spec.zeros()
    assert spec.empty().shape == (2, 3) and is_device_array(zeros)
    np.testing.assert_array_equal(on_host(zeros), np.zeros((2, 3), np.float32))
    assert spec_of(on_device(3.0), "test").zeros().shape == ()


_CONVERSIONS = [np.asarray, float, bool, int, list, lambda x: np.array([x, x]), lambda x: x + np.ones(3)]


@pytest.mark.parametrize("convert", [*_CONVERSIONS, lambda x: np.ones(3) * x])
def test_the_stand_in_is_never_converted_silently(convert):
    transfers.reset()
    with pytest.raises(TypeError):
        convert(on_device([1.0, 2.0, 3.0]))
    assert transfers.copies == 0


@pytest.mark.parametrize("convert", [np.percentile, np.sort_complex, np.vander])
def test_functions_that_it_lacks_are_named(convert):
    with pytest.raises(TypeError, match=convert.__name__):
        convert(on_device([1.0, 2.0, 3.0]), *([3] if convert is np.percentile else []))


def test_results_stay_on_the_device():
    x = on_device([1.0, 2.0, 3.0])
    for y in (x + 1, 2 * x, np.sin(x), np.sum(x), x[0], x @ x, np.float32(2) * x, x > 1, x.mean(), np.where(x > 1, x, 0.0)):
        assert type(y) is device_double.DeviceArray
    assert np.sum(x).shape == () and x[0].shape == ()


def test_copies_are_counted():
    transfers.reset()
    x = double.to_device(np.ones(4))
    double.to_host(x + 1)
    assert (transfers.h2d, transfers.d2h, transfers.h2d_bytes, transfers.d2h_bytes) == (1, 1, 32, 32)


def test_a_queued_copy_is_read_after_a_wait_only():
    x, out = on_device([1.0, 2.0]), np.zeros(2)
    double.copy_to_host(x, out)
    event = double.record()
    assert not np.array_equal(out, [1.0, 2.0])
    double.wait(event)
    np.testing.assert_array_equal(out, [1.0, 2.0])


def test_host_memory_must_not_change_while_it_is_copied_from():
    host, x = np.ones(2), double.empty((2,), float)
    double.copy_to_device(host, x)
    host[0] = 5
    with pytest.raises(AssertionError, match="changed while"):
        double.synchronize()
    double.synchronize()


def test_mpi_sees_no_memory_that_may_still_be_written_to():
    x = on_device([1.0, 2.0]) + 1
    with pytest.raises(AssertionError, match="can't read"):
        double.message(x)
    with double.cuda_aware():
        with pytest.raises(AssertionError, match="still be writing"):
            double.message(x)
        double.synchronize()
        np.testing.assert_array_equal(double.message(x), [2.0, 3.0])


def test_nothing_is_loaded_before_a_device_array_is_met(tmp_path):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise RuntimeError('CuPy was loaded')")
    program = "import mpiad, numpy as np; mpiad.grad(lambda x: (x**2).sum())(np.ones(3)); print('done')"
    path = f"{tmp_path}:{sys.path[0]}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=_environment(path))
    assert done.stdout.strip() == "done", done.stderr


def _environment(path: str) -> dict[str, str]:
    import os

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "HYDRA", "MPIAD"))}
    return {**kept, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
