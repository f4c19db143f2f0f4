"""Functions of higher layers that lower layers call; the package root, which alone may import all layers, assigns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

minimize_field: Callable[..., OptimizeResult]
"""`optimize.minimize.minimize_field`, for `Domain.minimize`."""
