"""Sixteen bits an entry: half a step of error, steps as small as the field is smooth, nothing that rounding adds up."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.timestepping import snapshots
from mpiad.timestepping.snapshots import coded

pytestmark = pytest.mark.serial

X, Y, Z = np.meshgrid(*[np.linspace(0.0, 1.0, n) for n in (13, 20, 31)], indexing="ij")
K, ROUGH = np.linspace(-35.0, 35.0, 700), np.cos(np.arange(700.0) ** 2)
ROWS = np.linspace(0, 1.5, 60)[:, None] + np.zeros(40)
RANDOM = np.random.default_rng(0)


@pytest.fixture(params=["NumPy", "compiled"], autouse=True)
def passes(request, monkeypatch):
    """Small fields take compiled passes, too, where they have rows of 32 entries."""
    monkeypatch.setattr(snapshots, "_MIN_ENTRIES", 0 if request.param == "compiled" else 1 << 60)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize(
    "field, relative",
    [
        (np.sin(3 * X + 2 * Y) * np.cos(4 * Z + Y), 3e-6),  # smooth: far below the step of 16 bits, 3e-5
        (RANDOM.standard_normal((13, 20, 31)), 6e-5),
        (np.sin(np.arange(700.0) / 9), 2e-5),
        (1e-200 + 0 * X[0], 1e-7),
        (np.where(np.arange(400) == 399, 1e30, np.arange(400.0)), 6e-5),  # the largest isn't like the others
        (2 * np.sin(3 * X + 2 * Y) + np.where(X == 0, RANDOM.standard_normal(X.shape) / 9, 0), 2e-4),  # nor are the first
        (9 * np.exp(-((K / 9) ** 2)) + ROUGH * np.where(np.abs(K) < 2, 0.1, 0.22), 6e-5),  # and all others twice as rough
        (-3 - np.cos(ROWS) - np.where(ROWS > 1.49, np.abs(ROUGH[:40]) / 9, 0), 2e-4),  # below zero, the last still lower
        (np.where(K == K[0], -1e3, ROUGH), 1e-7),  # the first, which is kept in full, takes no bits from the others
        (1e-310 + 0 * X[0], 0),
    ],
)
def test_entries_are_off_by_half_a_step(dtype, field, relative):
    with np.errstate(under="ignore"):
        array = field.astype(dtype)
    if dtype in (np.complex64, np.complex128):
        array = array * np.asarray(1.0 - 0.7j, dtype)
    found = coded(array)
    again = found.array(array.dtype, None)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert found.differences.nbytes == 2 * array.size * (2 if array.dtype.kind == "c" else 1)
    parts = np.abs((again - array).real).max(), np.abs((again - array).imag).max()
    rounding = 4.0 * np.finfo(dtype).eps * np.abs(array).max() + 2.0**24 * np.finfo(float).tiny
    assert max(parts) <= 0.5001 * found.step + rounding
    assert found.step <= relative * np.abs(array).max()
    if dtype == np.float64 and found.step:
        expected = np.diff(np.rint(array * (1 / found.step)), found.order, axis=0)[found.order == 0 :]
        np.testing.assert_array_equal(found.differences[max(found.order, 1) :], expected)


@pytest.mark.parametrize("factor", [1.0, 1.0 - 0.7j])
def test_a_field_close_to_the_one_before_it_is_kept_by_its_change(factor):
    now, before = (factor * np.sin(3 * X + 2 * Y + t) * np.cos(4 * Z + Y) for t in (0.0, 0.01))
    found = coded(now, before)
    assert found.relative
    again = found.array(now.dtype, before)
    assert max(np.abs((again - now).real).max(), np.abs((again - now).imag).max()) <= 0.5001 * found.step
    assert found.step <= 5e-8
    assert not coded(now, -before).relative


@pytest.mark.parametrize("scale", [1e-31, 1e-32, 1e-36, 1e-40, 0.0])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_small_fields_in_single_precision(dtype, scale):
    """As accurate as fields of size one, up to the spacing of subnormal numbers."""
    now, before = (scale * np.sin(3 * X + 2 * Y + t) * np.cos(4 * Z + Y) for t in (0.0, 0.01))
    factor = 1.0 if dtype == np.float32 else 1.0 - 0.7j
    array, previous = (factor * now).astype(dtype), (factor * before).astype(dtype)
    for last in (None, previous):
        found = coded(array, last)
        error = np.abs(found.array(array.dtype, last) - array).max()
        assert error <= 3e-6 * scale + 2 * np.finfo(np.float32).smallest_subnormal
        assert found.differences.nbytes * 2 == array.nbytes


def test_what_is_not_finite_is_left_as_it_is():
    for value in (np.nan, np.inf, -np.inf):
        assert coded(np.where(np.arange(300) == 7, value, 1.0)) is None
