"""Where a program is: the line of the user's own code, below all that libraries put on top of it."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType

__all__ = ["place", "place_of_thread"]

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(
    os.path.abspath(folder) + os.sep for folder in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)


def place(frame: FrameType | None) -> str:
    """Return "file.py:12 in function" of the innermost frame that is in no library; "" where all are."""
    while frame is not None:
        code = frame.f_code
        if not (code.co_filename.startswith(("<frozen", _HERE)) or code.co_filename.startswith(_INSTALLED)):
            within = "" if code.co_name == "<module>" else f" in {code.co_name}"
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{within}"
        frame = frame.f_back
    return ""


def place_of_thread(thread: int) -> str:
    """Return the place of another thread, by its identity."""
    return place(sys._current_frames().get(thread))
