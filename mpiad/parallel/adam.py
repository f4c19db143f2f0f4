"""Optimizers with explicit state: stochastic gradient descent, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.parallel.parameters import map_trained, matching_leaves, require_state
from mpiad.pytrees import flatten, in_blocks, refuse_objects


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum: v ← μ v + g + λ x, x ← x - η v.

    Parameters
    ----------
    learning_rate : float or callable
        η: a number; or, for a schedule, a function of the number of previous updates.
    momentum : float
        μ, from 0 to below 1.
    nesterov : bool
        Update x ← x - η (g + λ x + μ v) instead (Sutskever et al., 2013, with a velocity that isn't multiplied by η).
    weight_decay : float
        λ, the factor of the penalty λ|x|²/2 in the loss, as in PyTorch's `SGD`; `AdamW` has a decay without momentum.

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
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_rates(self, self.learning_rate, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"SGD: momentum must lie in [0, 1), but got {self.momentum!r}.")
        if self.nesterov and self.momentum == 0:
            raise ValueError(f"SGD: nesterov=True needs a momentum above zero, but got {self.momentum!r}.")

    def setup(self, params: Tree) -> dict[str, Any]:
        """Return the initial state: `updates`, the number of updates, and with momentum the `velocity`."""
        refuse_objects(params, "params", "SGD.setup")
        return {"updates": 0, **({"velocity": map_trained(np.zeros_like, params)} if self.momentum else {})}

    def update(self, state: dict[str, Any], params: Tree, gradient: Tree) -> tuple[dict[str, Any], Tree]:
        """Return the state and the parameters after one update, with the arguments and exceptions of `Adam.update`."""
        leaves, build = flatten(params)
        require_state(state, ("updates", "velocity") if self.momentum else ("updates",), "SGD")
        gradients = matching_leaves(gradient, params, leaves, "SGD")
        rate = rate_at(self, state["updates"])
        new: dict[str, Any] = {"updates": state["updates"] + 1}
        if not self.momentum:

            def plain_formula(x: Array, g: Array, new_x: Array) -> None:
                np.subtract(x, rate * self._decayed(x, g), out=new_x)

            return new, build(in_blocks(plain_formula, [leaves, gradients], [0])[0])

        velocities = matching_leaves(state["velocity"], params, leaves, "SGD", "state['velocity']")

        def formula(x: Array, g: Array, v: Array, new_x: Array, velocity: Array) -> None:
            g = self._decayed(x, g)
            np.add(self.momentum * v, g, out=velocity)
            step = g + self.momentum * velocity if self.nesterov else velocity
            np.subtract(x, rate * step, out=new_x)

        new_leaves, velocity = in_blocks(formula, [leaves, gradients, velocities], results=(0, 2))
        return {**new, "velocity": build(velocity)}, build(new_leaves)

    def _decayed(self, x: Array, g: Array) -> Array:
        """Return the direction of steepest ascent of the loss with its penalty."""
        return g.conj() + self.weight_decay * x if self.weight_decay else g.conj()


def _check_rates(optimizer: Any, rate: float | Callable[[int], float], decay: float) -> None:
    name = type(optimizer).__name__
    if not callable(rate) and not (isinstance(rate, Real) and 0 < rate < math.inf):
        allowed = "above zero, or a function of the number of updates"
        raise ValueError(f"{name}: learning_rate must be {allowed}, but got {rate!r}.")
    if not (isinstance(decay, Real) and 0 <= decay < math.inf):
        raise ValueError(f"{name}: weight_decay must be a number from 0, but got {decay!r}.")


def rate_at(optimizer: Any, updates: int) -> float:
    """Return an optimizer's learning rate after a number of updates; raise a ValueError if a schedule has none."""
    rate = optimizer.learning_rate
    found: Any = rate(updates) if callable(rate) else rate
    if np.ndim(found) or np.asarray(found).dtype.kind not in "fiu" or not 0 <= float(found) < math.inf:
        raise ValueError(
            f"{type(optimizer).__name__}: the schedule learning_rate({updates}) must return a finite number from 0, but "
            f"returned {found!r:.60}."
        )
    return float(found)


@dataclass(frozen=True)
class Adam:
    """Adaptive moment estimation (Kingma and Ba, 2015, Algorithm 1).

    Parameters
    ----------
    learning_rate : float or callable
        A number; or, for a schedule, a function of the number of previous updates.
    beta1, beta2 : float
        Decay rates of the running means of gradients and of their squares.
    epsilon : float
        Added to the square root of the mean of squares.

    Notes
    -----
    The square of a complex derivative is |g|², as in optax; PyTorch squares real and imaginary parts separately.

    Examples
    --------
    >>> from mpiad.parallel import Adam
    >>> optimizer, x = Adam(learning_rate=0.1), np.array([1.0, 2.0])
    >>> state = optimizer.setup(x)
    >>> state, x = optimizer.update(state, x, np.array([5.0, -0.2]))
    >>> print(x.round(6))
    [0.9 2.1]
    """

    learning_rate: float | Callable[[int], float] = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_rates(self, self.learning_rate, getattr(self, "weight_decay", 0.0))
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"{type(self).__name__}: {name} must lie in [0, 1), but got {value!r}.")

    def setup(self, params: Tree) -> dict[str, Any]:
        """Return the state before the first update.

        Parameters
        ----------
        params : pytree of arrays

        Returns
        -------
        dict
            `updates`, the number of updates, and the means `first` and `second` in the structure of the parameters.
        """
        refuse_objects(params, "params", f"{type(self).__name__}.setup")
        # |g|² is real, also for complex parameters.
        second = map_trained(lambda x: np.zeros_like(np.real(x)), params)
        return {"updates": 0, "first": map_trained(np.zeros_like, params), "second": second}

    def update(self, state: dict[str, Any], params: Tree, gradient: Tree) -> tuple[dict[str, Any], Tree]:
        """Return the state and the parameters after one update; the arguments are unchanged.

        Parameters
        ----------
        state : dict
            The result of `setup` or of the last update.
        params, gradient : pytree of arrays
            Leaves that aren't floats remain unchanged. The gradient is that of `value_and_grad`: with respect to a complex
            parameter a + ib it is ∂/∂a - i ∂/∂b, whose conjugate is the direction of steepest ascent.

        Returns
        -------
        (dict, pytree of arrays)

        Raises
        ------
        TypeError, ValueError
            If the gradient or the state doesn't match the parameters, or the state is another optimizer's.
        """
        leaves, build = flatten(params)
        call = type(self).__name__
        require_state(state, ("updates", "first", "second"), call)
        gradients = matching_leaves(gradient, params, leaves, call)
        moments = [
            matching_leaves(state[name], params, leaves, call, f"state[{name!r}]", real=name == "second")
            for name in ("first", "second")
        ]
        number = state["updates"] + 1
        rate = rate_at(self, number - 1)
        # The bias of the means, which start at zero, is corrected (the paper's m̂ and v̂). The correction of the
        # first mean is applied to the learning rate, which saves a pass over the array.
        scale = rate / (1 - self.beta1**number)
        correction = 1 - self.beta2**number

        def formula(x: Array, g: Array, m: Array, v: Array, new_x: Array, first: Array, second: Array) -> None:
            g = g.conj()  # no copy if g is real
            np.add(self.beta1 * m, (1 - self.beta1) * g, out=first)
            squares = np.square(g) if g.dtype.kind == "f" else np.abs(g) ** 2
            np.add(self.beta2 * v, (1 - self.beta2) * squares, out=second)
            step = scale * first / (np.sqrt(second / correction) + self.epsilon)
            np.subtract(self._decayed(x, rate), step, out=new_x)

        new, first, second = in_blocks(formula, [leaves, gradients, *moments], results=(0, 2, 3))
        return {"updates": number, "first": build(first), "second": build(second)}, build(new)

    def _decayed(self, x: Array, rate: float) -> Array:
        return x  # overridden by AdamW


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, Algorithm 2).

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        As for `Adam`.
    weight_decay : float
        Each update first multiplies the parameters by ``1 - learning_rate * weight_decay``.

    Examples
    --------
    >>> from mpiad.parallel import AdamW
    >>> optimizer, x = AdamW(learning_rate=0.1, weight_decay=0.5), np.array([1.0, 2.0])
    >>> state, x = optimizer.update(optimizer.setup(x), x, np.zeros(2))
    >>> print(x)
    [0.95 1.9 ]
    """

    weight_decay: float = 1e-2

    def _decayed(self, x: Array, rate: float) -> Array:
        return x * (1 - rate * self.weight_decay)
