"""Stochastic gradient descent, with explicit state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.parallel.parameters import matching, require_state, zeros_like
from mpiad.pytrees import flatten, in_blocks, refuse_objects


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum: v ← μ v + g, x ← x - η v.

    Parameters
    ----------
    learning_rate : float or callable
        η; a function of the number of updates made before this one, for a schedule.
    momentum : float
        μ, from 0 to below 1.
    nesterov : bool
        x ← x - η (g + μ v) instead (Sutskever et al., 2013, in the form of the velocity before the rate).

    Examples
    --------
    >>> from mpiad.parallel import SGD
    >>> optimizer, x = SGD(learning_rate=0.1), np.array([1.0, 2.0])
    >>> state = optimizer.setup(x)
    >>> state, x = optimizer.update(state, x, np.array([1.0, -1.0]))
    >>> print(x)
    [0.9 2.1]
    """

    learning_rate: float | Callable[[int], float] = 1e-2
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        checked_rate(self.learning_rate, "SGD")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"SGD: momentum must lie in [0, 1), but got {self.momentum!r}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError(f"SGD: nesterov=True needs a momentum above zero, but got {self.momentum!r}.")

    def setup(self, params: Tree) -> dict[str, Any]:
        """Return the state before the first update: `updates`, their number, and with momentum the `velocity`."""
        refuse_objects(params, "params", "SGD.setup")
        return {"updates": 0, **({"velocity": zeros_like(params)} if self.momentum else {})}

    def update(self, state: dict[str, Any], params: Tree, gradient: Tree) -> tuple[dict[str, Any], Tree]:
        """Return the state and the parameters after one update; those given stay as they are.

        Parameters and errors are those of `Adam.update`, complex gradients too.
        """
        leaves, build = flatten(params)
        require_state(state, ("updates", "velocity") if self.momentum else ("updates",), "SGD")
        given = matching(gradient, params, leaves, "SGD")
        rate = rate_at(self.learning_rate, state["updates"])
        new: dict[str, Any] = {"updates": state["updates"] + 1}
        if not self.momentum:
            found = in_blocks(lambda x, g, new_x: np.subtract(x, rate * g.conj(), out=new_x), [leaves, given], [0])
            return new, build(found[0])

        speeds = matching(state["velocity"], params, leaves, "SGD", "state['velocity']")

        def formula(x: Array, g: Array, v: Array, new_x: Array, velocity: Array) -> None:
            g = g.conj()
            np.add(self.momentum * v, g, out=velocity)
            step = g + self.momentum * velocity if self.nesterov else velocity
            np.subtract(x, rate * step, out=new_x)

        moved, velocity = in_blocks(formula, [leaves, given, speeds], results=(0, 2))
        return {**new, "velocity": build(velocity)}, build(moved)


def checked_rate(rate: float | Callable[[int], float], name: str) -> None:
    """Raise a ValueError where a learning rate isn't a positive number or a function."""
    if not callable(rate) and not (isinstance(rate, Real) and 0 < rate < math.inf):
        allowed = "above zero, or a function of the number of updates"
        raise ValueError(f"{name}: learning_rate must be {allowed}, but got {rate!r}.")


def rate_at(rate: float | Callable[[int], float], updates: int) -> float:
    """Return the rate after some updates."""
    return float(rate(updates) if callable(rate) else rate)
