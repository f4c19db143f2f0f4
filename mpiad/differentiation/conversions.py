"""What to call instead, where a function of autograd's asks a device array for one of NumPy's.

Its `array` and `stack` do so inside the function itself, before any rule of ours is looked up, and the arrays can only say
that they don't convert. So the exception is completed when it leaves the trace.
"""

from __future__ import annotations

from types import TracebackType

__all__ = ["name_conversion"]

_REFUSAL = "Implicit conversion to a NumPy array"
_WRAPPERS = "autograd.numpy.numpy_wrapper"


def name_conversion(error: BaseException, trace: TracebackType | None) -> None:
    """Complete the text of a refused conversion with the function that asked for it, and with ours that doesn't."""
    if type(error) is not TypeError or not str(error).startswith(_REFUSAL):
        return
    from mpiad.device import numpy as ours

    while trace is not None:
        code = trace.tb_frame.f_code
        if trace.tb_frame.f_globals.get("__name__") == _WRAPPERS and code.co_name in ours.__all__:
            name = code.co_name
            error.args = (
                f"autograd.numpy.{name} makes an array of NumPy's, but was given one on a device. Call "
                f"mpiad.device.numpy.{name} instead (import mpiad.device.numpy as np). The array itself says: {error}",
            )
            return
        trace = trace.tb_next
