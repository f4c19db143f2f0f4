"""The settings of the watch: deadlines of waits (`MPIAD_TIMEOUT`) and debug mode (`MPIAD_DEBUG`).

In debug mode the ranks compare their messages, too, and the lines of their calls. `mpiad.debug.checked` changes the
settings at run time.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from mpiad.environment_variables import switch
from mpiad.transport.devices.staging import set_nonblocking

DEBUG_TIMEOUT = 300.0


class Settings(NamedTuple):
    """The settings of the watch."""

    debug: bool = False
    timeout: float | None = None  # maximum number of seconds of a wait
    call_sites: bool = True  # whether lines are compared, in debug mode

    @property
    def watches(self) -> bool:
        """Whether the watch is on."""
        return self.debug or self.timeout is not None

    @property
    def compares_lines(self) -> bool:
        """Whether ranks must call from the same line."""
        return self.debug and self.call_sites


_present = Settings()


def present() -> Settings:
    """Return the current settings."""
    return _present


def debug() -> bool:
    """Return whether debug mode is on."""
    return _present.debug


def put(settings: Settings) -> Settings:
    """Change the settings and return the previous ones; `switch.apply` puts them into effect."""
    global _present
    before, _present = _present, settings
    set_nonblocking(always=settings.watches)
    return before


def seconds_of(value: object, name: str) -> float | None:
    """Return a number of seconds, None for no limit; raise a ValueError for anything but a nonnegative number."""
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0:  # NaN too
        raise ValueError(f"{name} must be a number of seconds, 0 for no limit, but got {value!r}.")
    return seconds if 0 < seconds < math.inf else None


def from_environment() -> Settings:
    """Return the settings in the environment."""
    checks = switch("MPIAD_DEBUG", False)
    given = os.environ.get("MPIAD_TIMEOUT")
    timeout = seconds_of(given, "MPIAD_TIMEOUT") if given else (DEBUG_TIMEOUT if checks else None)
    return Settings(checks, timeout, switch("MPIAD_DEBUG_SITES", True))
