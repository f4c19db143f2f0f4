"""The types of a kernel's arguments."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

__all__ = ["Argument", "arguments_of"]


class Argument(NamedTuple):
    """The type of an argument.

    Parameters
    ----------
    dtype : dtype
    ndim : int or None
        Of a contiguous array; None is a number.
    """

    dtype: np.dtype
    ndim: int | None


def arguments_of(signature: str) -> list[Argument]:
    """Return the types of a signature such as ``void(int64, float64[:, ::1])``."""
    found = re.findall(r"(\w+)(\[[^\]]*\])?(?:, |\)$)", signature.removeprefix("void("))
    return [
        Argument(np.dtype(name.replace("boolean", "bool")), axes.count(":") - 1 if axes else None) for name, axes in found
    ]
