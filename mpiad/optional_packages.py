"""Import of packages that mpiad doesn't require."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional_package(name: str, title: str, requirement: str, call: str) -> Any:
    """Return the package; raise an ImportError that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{call} needs {title}, which can't be imported ({error}). Install it: pip install {requirement!r}."
        ) from error
