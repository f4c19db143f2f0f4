"""NumPy as autograd sees it while a program is traced: its `array` makes traced arrays of traced values.

autograd.numpy's `array`, and with it `stack`, call numpy.array, the one function that asks nobody. So while there are
traces, the name `numpy` in that module of autograd's stands for an object that does, and is NumPy otherwise.
"""

from __future__ import annotations

from typing import Any

import autograd.numpy.numpy_wrapper
import numpy as np

from mpiad._typing import Array
from mpiad.programs.steps import Traced

__all__ = ["array_of", "let_arrays_be_traced"]

numpy_wrapper: Any = autograd.numpy.numpy_wrapper


class _NumPy:
    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def array(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = _traced(x)
        if found is None or not found.recorder.is_noting():
            return np.array(x, *args, **kwargs)
        return found.recorder.call(array_of, (x, *args), kwargs)


def array_of(x: Any, *args: Any, **kwargs: Any) -> Array:
    """Return numpy.array of what may hold traced arrays."""
    return np.array(x, *args, **kwargs)


def _traced(x: Any) -> Any:
    if isinstance(x, Traced):
        return x
    if isinstance(x, (list, tuple)):
        return next((found for part in x if (found := _traced(part)) is not None), None)
    return None


def let_arrays_be_traced(on: bool) -> None:
    """Let autograd.numpy's `array` know traced arrays, or not."""
    numpy_wrapper._np = _NumPy() if on else np
