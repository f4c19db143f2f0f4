"""The kinds of device arrays that tests run on: the stand-in everywhere, CuPy's where there is a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import device_double
import numpy as np


class StandIn:
    """Puts values on the stand-in's device and looks at them there, uncounted."""

    name = "stand-in"
    kind = device_double.DeviceArray
    put = staticmethod(device_double.on_device)
    look = staticmethod(device_double.on_host)

    def start_counting(self) -> None:
        device_double.transfers.reset()

    def copies(self) -> tuple[int, int] | None:
        """(host to device, device to host) since `start_counting`; None where nobody counts."""
        return device_double.transfers.h2d, device_double.transfers.d2h


class Cupy:
    """The same with CuPy's arrays, which nobody counts."""

    name = "cupy"

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self.kind = self._cupy.ndarray

    def put(self, values: Any) -> Any:
        return self._cupy.asarray(values, order="C")

    def look(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {key: self.look(part) for key, part in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(*map(self.look, x)) if hasattr(x, "_fields") else type(x)(map(self.look, x))
        return self._cupy.asnumpy(x) if isinstance(x, self.kind) else x

    def start_counting(self) -> None:
        pass

    def copies(self) -> tuple[int, int] | None:
        return None


def why_no_gpu() -> str:
    """Say why CuPy's arrays can't be tested here; empty where they can."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return f"CuPy can't be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        np.testing.assert_array_equal(cupy.asnumpy(cupy.arange(3) + 1), [1, 2, 3])
    except Exception as error:
        return f"CuPy finds no GPU that it can use ({type(error).__name__}: {error})"
    return "" if count else "CuPy finds no GPU"


def available() -> list[Any]:
    """The kinds that can be tested here."""
    return [StandIn(), *([] if why_no_gpu() else [Cupy()])]
