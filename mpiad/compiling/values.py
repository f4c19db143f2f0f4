"""The types of the kernel language, and how values are converted.

Numbers are booleans, 64-bit integers, and floats of single and double precision, as LLVM's i1, i64, float and double.
Array entries of fewer bits are widened when loaded. As in NumPy, a 64-bit integer and a single-precision float make a
double. An array is the address of its first entry and its lengths; it is contiguous.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

BOOLEAN, INTEGER, SINGLE, DOUBLE = KINDS = ("i1", "i64", "float", "double")

# The types of an array's entries in memory.
ELEMENTS = {
    "float64": "double",
    "float32": "float",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "bool": "i8",
}


class Value(NamedTuple):
    """A number."""

    kind: str  # {"i1", "i64", "float", "double"}
    text: str  # its name in LLVM's intermediate representation, or a constant


class ArrayValue(NamedTuple):
    """A contiguous array."""

    dtype: str  # NumPy's name
    data: str  # name of the address of its first entry
    shape: tuple[str, ...]  # names of its lengths


def kind_of(dtype: np.dtype) -> str:
    """Return the kind of a number of this dtype in a kernel."""
    return {"f": DOUBLE if dtype.itemsize == 8 else SINGLE, "i": INTEGER, "b": BOOLEAN}[dtype.kind]


def common_kind(a: str, b: str) -> str:
    """Return the kind to which two numbers are converted before they are added."""
    if {a, b} == {INTEGER, SINGLE}:
        return DOUBLE
    return KINDS[max(KINDS.index(a), KINDS.index(b))]


def float_literal(x: float) -> str:
    """Return a double as LLVM reads it to the last bit, whatever the locale."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"


def literal_value(text: str) -> float:
    """Return the double that `float_literal` has written."""
    return struct.unpack("<d", struct.pack("<Q", int(text, 16)))[0]
