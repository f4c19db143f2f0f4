"""Changes of dtype, whose tangent autograd doesn't know."""

from __future__ import annotations

from autograd.numpy.numpy_wrapper import _astype

from mpiad._typing import Array
from mpiad.differentiation.rules.protocol import Argnums

__all__ = ["JVPS", "VJPS"]


def astype_jvp(argnums: Argnums, gs: list, ans: Array, args: tuple, kwargs: dict) -> Array:
    """Cast the tangent like the value."""
    return _astype(gs[0], *args[1:], **kwargs)


VJPS: dict = {}
JVPS = {_astype: astype_jvp}
