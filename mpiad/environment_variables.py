"""The environment variables that the library reads, and the meaning of their values.

`switch` ignores invalid values. `check`, called when the library starts, raises an error for invalid switches and paths.
"""

from __future__ import annotations

import os
from typing import TypeVar

_OFF, _ON = ("0", "false", "no", "off"), ("1", "true", "yes", "on")
_SWITCHES = dict.fromkeys(_OFF, False) | dict.fromkeys(_ON, True)
# The names of the variables by the type of the value; those of tests and their launcher, too.
_NAMES = {
    "switch": "ABORT CUDA_AWARE CUDA_IPC DEBUG DEBUG_SITES HUGE_PAGES MALLOPT RECOVERY THREADS",
    "path": "CACHE TRACE LAUNCH_FOLDER",
    "number": "DEVICE_PINNED TIMEOUT LAUNCH_RANKS TEST_PATIENCE TEST_TIMEOUT",
}
VARIABLES = {f"MPIAD_{name}": kind for kind, names in _NAMES.items() for name in names.split()}


_Default = TypeVar("_Default", bool, None)


def switch(name: str, default: _Default) -> bool | _Default:
    """Return whether a switch is on; `default` if the variable is unset or invalid."""
    return _SWITCHES.get(os.environ.get(name, "").lower(), default)


def path(name: str) -> str | None:
    """Return a variable's path: "" if the variable is unset, None if its value is 0, false, no or off."""
    value = os.environ.get(name, "")
    return None if value.lower() in _OFF else value


def check() -> None:
    """Raise a ValueError if a switch or a path has an invalid value; numbers are checked by the functions that use them."""
    for name, kind in VARIABLES.items():
        value = os.environ.get(name, "")
        if kind == "switch" and value and value.lower() not in _SWITCHES:
            raise ValueError(f"{name} must be 1, true, yes or on, or 0, false, no or off, but got {value!r}.")
        if kind == "path" and value.lower() in _ON:
            raise ValueError(f"{name} must be a path, or 0 for none, but got {value!r}.")
