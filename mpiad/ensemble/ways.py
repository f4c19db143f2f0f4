"""How gradients are computed: what `solve` was asked for."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Ways"]


class Ways(NamedTuple):
    """How plain gradients are computed.

    Parameters
    ----------
    gradient : {"tangent", "adjoint"} or None
        By tangents or by an adjoint; None: by the number of directions.
    adjoint : {"discrete", "continuous"}
    """

    gradient: str | None
    adjoint: str
