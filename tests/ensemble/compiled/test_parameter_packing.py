"""Parameters as rows of numbers, and back."""

from __future__ import annotations

import numpy as np
import pytest

from mpiad.ensemble.batch import Parameters
from mpiad.ensemble.compiled.trace import packing_of
from mpiad.pytrees import flatten

pytestmark = pytest.mark.serial


def test_rows_go_there_and_back():
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": (3, 2.5, "text"), "c": np.arange(8.0).reshape(2, 4)}
    leaves, build = flatten(tree)
    p = Parameters(leaves, [False, False, False, False, True], build)
    packing = packing_of(p)
    assert [part.place for part in packing.parts] == [0, 2, 4] and packing.size == 9
    assert packing.shared == tuple(range(7)) and packing.varying == (7, 8)
    own, common = packing.split(leaves, 4, np.float32)
    np.testing.assert_array_equal(common, [0, 1, 2, 3, 4, 5, 2.5])
    np.testing.assert_array_equal(own, tree["c"])
    assert own.dtype == common.dtype == np.float32
    back = packing.joined(2 * own, 3 * common, 4)
    np.testing.assert_array_equal(back[0], 3 * tree["a"])
    np.testing.assert_array_equal(back[4], 2 * tree["c"])
    assert back[2] == 7.5 and sorted(back) == [0, 2, 4]


def test_complex_numbers_are_two_scalars_each():
    own = np.arange(8.0).reshape(2, 4) * (1 - 2j)
    common = np.array([1 + 2j, 3 + 4j], np.complex64)
    packing = packing_of(Parameters([own, common, 7.0], [True, False, False], tuple))
    assert packing.varying == (0, 1, 2, 3) and packing.shared == (4, 5, 6, 7, 8)
    rows, scalars = packing.split([own, common, 7.0], 4, float)
    np.testing.assert_array_equal(rows, [own[0].real, own[0].imag, own[1].real, own[1].imag])
    np.testing.assert_array_equal(scalars, [1, 2, 3, 4, 7])
    back = packing.joined(rows, scalars, 4)
    np.testing.assert_array_equal(back[0], own)
    np.testing.assert_array_equal(back[1], common)


def test_no_parameters_at_all():
    packing = packing_of(Parameters([None], [False], lambda leaves: leaves[0]))
    own, common = packing.split([None], 5, float)
    assert packing.size == 0 and own.shape == (0, 5) and common.shape == (0,)
    assert packing.joined(own, common, 5) == {}


def test_integers_that_differ_between_trajectories_are_parameters():
    packing = packing_of(Parameters([np.arange(4), np.arange(4)], [True, False], tuple))
    assert packing.varying == (0,) and packing.shared == ()
