"""Commands beside the same statements in NumPy."""

import ctypes

import numpy as np
import pytest

from mpiad.compiling.cache import kernel_of
from mpiad.compiling.commands import Commands

pytestmark = [pytest.mark.serial, pytest.mark.interpreted]
rng = np.random.default_rng(4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2)])
def test_copies_and_sums(shape, dtype):
    x, y, out = _three(shape, dtype)
    before, commands = out.copy(), Commands()
    commands.copy(y, x)
    commands.add(out, y)
    commands.add(out, x)
    assert commands.run(0, len(commands)) == len(commands)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(out, before + x + x)


def _three(shape, dtype):
    values = rng.standard_normal((3, 2, *shape))
    made = [v[0] + 1j * v[1] if np.dtype(dtype).kind == "c" else v[0] for v in values]
    return [np.array(x, dtype) for x in made]


def test_numbers():
    """Tags of messages are counts modulo the number of tags."""
    base, made, commands = np.array([2**40]), np.zeros(1, np.int64), Commands()
    commands.number(made.ctypes.data, base, 12345, 536870911)
    commands.run(0, 1)
    assert made[0] == (2**40 + 12345) % 536870911
    base[0] = 3
    commands.run(0, 1)
    assert made[0] == 12348


def test_comparisons_stop_at_the_first_difference():
    """Bits are compared: NaN is equal to itself, 0.0 differs from -0.0. The commands go on behind the one that stopped."""
    x, zeros, commands = np.array([1.0, np.nan]), np.array([0.0]), Commands()
    made = np.zeros(2)
    commands.compare(x, x.copy())
    commands.compare(zeros, -zeros)
    commands.compare(np.zeros(0), np.zeros(0))
    commands.copy(made, x)
    assert commands.run(0, len(commands)) == 1
    np.testing.assert_array_equal(made, 0.0)
    assert commands.run(2, len(commands)) == len(commands) == 3
    np.testing.assert_array_equal(made, x)


def test_calls_of_kernels():
    """A call runs a chain of two kernels; the commands stop behind one that reports an error."""
    scale = kernel_of(
        "def scale(x, n):\n    for i in range(n):\n        x[i] = 2.0 * x[i]\n", "scale", "linked(float64[::1], int64)"
    )
    x, error, after = np.arange(4.0), np.zeros(1, np.int64), np.zeros(1)
    blocks = (ctypes.c_int64 * 10)()
    first = ctypes.addressof(blocks)
    blocks[0:5] = scale.function.address, first + 40, x.ctypes.data, 4, 4
    blocks[5:10] = 0, 0, x.ctypes.data, 4, 2
    commands = Commands()
    commands.call(scale.function.address, first, error.ctypes.data)
    commands.copy(after, np.ones(1))
    assert commands.run(0, 2) == 2
    np.testing.assert_array_equal(x, [0.0, 4.0, 4.0, 6.0])
    error[0], after[0] = 7, 0.0
    assert commands.run(0, 2) == 0
    assert after[0] == 0.0
