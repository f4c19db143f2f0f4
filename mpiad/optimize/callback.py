"""The user's callback: how it wants to be called."""

from __future__ import annotations

import inspect

from mpiad._typing import Function

__all__ = ["takes_result"]


def takes_result(callback: Function | None) -> bool:
    """Return whether a callback wants an OptimizeResult, as SciPy sees it: by the name of its only parameter."""
    if callback is None:
        return False
    try:
        return set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except ValueError:  # some builtins don't say
        return False
