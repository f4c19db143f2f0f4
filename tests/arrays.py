"""The arrays that the primitives are tested with: dtypes, shapes and layouts in memory."""

import numpy as np
import pytest

EXACT_DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


def contiguous(values):
    """Return the values as they are."""
    return values


def fortran(values):
    """Return the values with the first axis the fastest."""
    return np.asfortranarray(values)


def strided(values):
    """Return the values as every other entry of a longer array, backwards."""
    longer = np.full((2 * values.shape[0], *values.shape[1:]), 77, values.dtype)
    view = longer[::-2]
    view[...] = values
    return view


def spread(values):
    """Return the first entry along the last axis as all of them: a view that can't be written to."""
    return np.broadcast_to(values[..., :1], values.shape)


ANY_DTYPE = [((), contiguous), ((2, 3), fortran)]
DOUBLES = [((5,), contiguous), ((0,), contiguous), ((2, 0), contiguous), ((5,), strided), ((2, 3), spread)]
CASES = [(dtype, *case) for dtype in ("f4", "f8", "c8", "c16") for case in ANY_DTYPE]
CASES += [("f8", *case) for case in DOUBLES] + [("c8", (2, 3), strided)]


def named(dtype, shape, layout):
    """Return the name of a case in the name of a test."""
    return f"{dtype}-{'x'.join(map(str, shape)) or '0d'}-{layout.__name__}"


def each_of(cases):
    """Return the mark of a test that takes each case."""
    return pytest.mark.parametrize("dtype, shape, layout", cases, ids=[named(*case) for case in cases])


each_array = each_of(CASES)
each_real_array = each_of([case for case in CASES if case[0][0] == "f"])
each_root = pytest.mark.parametrize("root", [0, 1, -1], ids=["first", "second", "last"])
"""Roots counted as Python counts; a test's root is `root % size`."""
