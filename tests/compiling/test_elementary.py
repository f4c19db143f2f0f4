"""The exponential and the hyperbolic tangent of kernels, compared with extended precision, in vectors and alone."""

from __future__ import annotations

import numpy as np
import pytest
from one_kernel import one_kernel

pytestmark = pytest.mark.serial
LOOP = """
def run(x, out):
    for i in range(x.size):
        out[i] = math.{}(x[i])
"""
LANES = """
def run(x, out):
    for k in range(0, x.size, 8):
        a = x[k : k + 8]
        b = out[k : k + 8]
        for l in lanes(8):
            b[l] = math.{}(a[l])
"""


def computed(text, name, x):
    signature, out = f"void({x.dtype}[::1], {x.dtype}[::1])", np.empty_like(x)
    one_kernel(text.format(name), "run", signature, "contract arcp")(x, out)
    return out


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("name", "ulps"), [("exp", 1), ("tanh", 3)])
@pytest.mark.filterwarnings("ignore:overflow")
def test_functions_of_vectors(name, ulps, dtype):
    rng, info = np.random.default_rng(6), np.finfo(dtype)
    least, largest = np.log(float(info.smallest_subnormal)), np.log(float(info.max))
    parts = [rng.normal(size=20_000), rng.uniform(least - 1, largest + 1, 20_000), np.linspace(-1, 1, 20_000)]
    parts += [np.linspace(least - 1, np.log(float(info.tiny)), 4000), 10 ** rng.uniform(-300, 2, 4000)]
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, info.max, info.min, info.smallest_subnormal]
    x = np.concatenate([*parts, special]).astype(dtype)
    found, exact = computed(LANES, name, x), getattr(np, name)(x.astype(np.longdouble))
    rounded = exact.astype(dtype)
    finite = np.isfinite(rounded)
    error = np.abs(found[finite] - exact[finite]) / np.spacing(np.abs(rounded[finite]))
    assert error.max() <= ulps
    limit = exact > np.longdouble(info.max)  # where rounding to infinity or to the largest number are both within an ulp
    np.testing.assert_array_equal(found[~finite & ~limit], rounded[~finite & ~limit])
    assert np.all(found[limit] >= info.max)
    np.testing.assert_array_equal(np.signbit(found[-8:-6]), np.signbit(rounded[-8:-6]))
    # A number has the same result whatever its neighbors and its place: in vectors, in remainders and alone.
    for length in (1, 3, 13, x.size - 1):
        np.testing.assert_array_equal(computed(LOOP, name, x[-length:].copy()), found[-length:])
