"""Adam and AdamW, with explicit state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.parallel.parameters import each, matching, require_state, zeros_like
from mpiad.parallel.sgd import checked_rate, rate_at
from mpiad.pytrees import flatten, in_blocks, refuse_objects


@dataclass(frozen=True)
class Adam:
    """Adaptive moment estimation (Kingma and Ba, 2015, Algorithm 1).

    Parameters
    ----------
    learning_rate : float or callable
        A function of the number of updates made before this one, for a schedule.
    beta1, beta2 : float
        Decay of the means of gradients and of their squares.
    epsilon : float
        Added to the root of the mean square.

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
        checked_rate(self.learning_rate, type(self).__name__)
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
            `updates`, their number, and the means `first` and `second` in the form of the parameters.
        """
        refuse_objects(params, "params", f"{type(self).__name__}.setup")
        # |g|² is real where parameters are complex: half of the memory.
        second = each(lambda x: np.zeros_like(np.real(x)), params)
        return {"updates": 0, "first": zeros_like(params), "second": second}

    def update(self, state: dict[str, Any], params: Tree, gradient: Tree) -> tuple[dict[str, Any], Tree]:
        """Return the state and the parameters after one update; those given stay as they are.

        Parameters
        ----------
        state : dict
            As `setup` or the last update returned it.
        params, gradient : pytree of arrays
            Leaves that aren't floats stay as they are. The gradient is as `value_and_grad` returns it: with respect to
            complex parameters a + ib it is ∂/∂a - i ∂/∂b, whose conjugate is the direction of ascent.

        Returns
        -------
        (dict, pytree of arrays)

        Raises
        ------
        TypeError, ValueError
            If the gradient or the state doesn't have the form of the parameters, or the state is another optimizer's.
        """
        leaves, build = flatten(params)
        call = type(self).__name__
        require_state(state, ("updates", "first", "second"), call)
        given = matching(gradient, params, leaves, call)
        moments = [
            matching(state[name], params, leaves, call, f"state[{name!r}]", real=name == "second")
            for name in ("first", "second")
        ]
        number = state["updates"] + 1
        rate = rate_at(self.learning_rate, number - 1)
        # Both means start at zero and are too small by these factors (the paper's m̂ and v̂). That of the first is taken
        # into the rate, which saves a pass over the array.
        scale = rate / (1 - self.beta1**number)
        correction = 1 - self.beta2**number

        def formula(x: Array, g: Array, m: Array, v: Array, new_x: Array, first: Array, second: Array) -> None:
            g = g.conj()  # the array itself where it is real
            np.add(self.beta1 * m, (1 - self.beta1) * g, out=first)
            np.add(self.beta2 * v, (1 - self.beta2) * _squares(g), out=second)
            step = scale * first / (np.sqrt(second / correction) + self.epsilon)
            np.subtract(self._decayed(x, rate), step, out=new_x)

        # Block by block through all of them: what the formula holds in between stays in the cache.
        new, first, second = in_blocks(formula, [leaves, given, *moments], results=(0, 2, 3))
        return {"updates": number, "first": build(first), "second": build(second)}, build(new)

    def _decayed(self, x: Array, rate: float) -> Array:
        return x  # nothing decays; AdamW does


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, Algorithm 2).

    Parameters
    ----------
    learning_rate, beta1, beta2, epsilon
        As for `Adam`.
    weight_decay : float
        Each update first shrinks the parameters by this times the learning rate.

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


def _squares(g: Array) -> Array:
    return np.square(g) if g.dtype.kind == "f" else np.abs(g) ** 2
