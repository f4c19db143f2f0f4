"""Return codes have names and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.ensemble import ReturnCode
from mpiad.ensemble.outcome import came_through, codes_of

pytestmark = pytest.mark.serial


def test_names_and_numbers():
    names = np.array([code.value for code in ReturnCode])
    np.testing.assert_array_equal(codes_of(names), np.arange(len(names)))
    np.testing.assert_array_equal(codes_of(names[::-2]), [code.code for code in list(ReturnCode)[::-2]])
    np.testing.assert_array_equal(ReturnCode.names_of(codes_of(names)), names)
    assert codes_of(names[:0]).shape == (0,)
    np.testing.assert_array_equal(came_through(codes_of(names)), [not code.failed for code in ReturnCode])
