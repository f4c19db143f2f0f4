"""Products of long vectors on one thread are those of the whole vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpiad.transport import resources

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("size", [1, 64, 65, 128, 129, 150])
def test_products_in_stretches_are_those_of_whole_vectors(size, rng, monkeypatch):
    monkeypatch.setattr(resources, "_serial_length", 64)
    x, y = rng.uniform(0.5, 1.5, (2, size))
    assert resources.vdot(x, y) == pytest.approx(math.fsum(x * y), rel=1e-13)
    of_complex = resources.vdot(x + 2j * y, y - 1j * x)
    exact = math.fsum(-x * y), math.fsum(-(x**2 + 2 * y**2))
    np.testing.assert_allclose([of_complex.real, of_complex.imag], exact, rtol=1e-13)
    rows = np.stack([x, y])
    np.testing.assert_allclose(resources.vdots(rows, y), [math.fsum(x * y), math.fsum(y * y)], rtol=1e-13)
    np.testing.assert_allclose(resources.combination(np.array([2.0, -1.0]), rows), 2 * x - y, rtol=1e-13)
    np.testing.assert_allclose(resources.gram(rows), [[math.fsum(a * b) for a in rows] for b in rows], rtol=1e-13)
