"""A kernel that is compiled for itself, and not kept."""

from __future__ import annotations

from collections.abc import Callable

from mpiad.compiling.cache import Source, code_of, loaded


def one_kernel(text: str, name: str, signature: str, fast: str = "") -> Callable[..., None]:
    """Return the compiled function `name` of a text."""
    return loaded(*code_of([Source(text, name, signature)], fast), [signature])[0]
