"""The library's environment variables: a misspelt one changes nothing, and nobody would notice."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

__all__ = ["VARIABLES", "misspelt"]

_SWITCH = ("", "0", "1")
# Each with the values it takes; None where it takes any.
VARIABLES: dict[str, tuple[str, ...] | None] = {
    "MPIAD_ABORT": _SWITCH, "MPIAD_CACHE": None, "MPIAD_CUDA_AWARE": _SWITCH, "MPIAD_DEBUG": _SWITCH,
    "MPIAD_DEBUG_SITES": _SWITCH, "MPIAD_DEVICE_CHUNK": None, "MPIAD_DEVICE_PINNED": None, "MPIAD_HUGE_PAGES": _SWITCH,
    "MPIAD_MALLOPT": _SWITCH, "MPIAD_RECOVERY": _SWITCH, "MPIAD_THREADS": _SWITCH, "MPIAD_TIMEOUT": None,
    "MPIAD_TRACE": None,
    # Of the tests.
    "MPIAD_LAUNCH_FOLDER": None, "MPIAD_LAUNCH_RANKS": None, "MPIAD_TEST_PATIENCE": None, "MPIAD_TEST_TIMEOUT": None,
}  # fmt: skip


def misspelt(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable of the environment that looks like one of the library's and isn't."""
    said = []
    for name, value in sorted(environment.items()):
        if not name.upper().startswith("MPIAD"):
            continue
        values = VARIABLES.get(name)
        if name not in VARIABLES:
            close = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.0)[0]
            said.append(f"{name}={value!r} means nothing to mpiad. The closest variable that does is {close}.")
        elif values is not None and value not in values:
            listed = " or ".join(repr(value) for value in values if value)
            said.append(f"{name}={value!r} is taken for unset: it may be {listed}.")
    return said
