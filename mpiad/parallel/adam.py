"""Optimizers with explicit state: stochastic gradient descent, Adam and AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import Array, Tree
from mpiad.differentiation.trace import Variables
from mpiad.parallel.parameters import matching_leaves, require_state
from mpiad.programs.traced_array import TracedArray
from mpiad.pytrees import flatten, is_variable, join, map_leaves, places_by_kind, refuse_objects, split

_MIN_LONG_SIZE = 1 << 13  # entries; shorter arrays are concatenated
_BOUNDS = {"momentum": 1, "beta1": 1, "beta2": 1, "epsilon": math.inf, "weight_decay": math.inf}
_BLOCK_SIZE = 1 << 14  # entries, so that the arrays and temporaries of a formula fill a second-level cache

State: TypeAlias = dict[str, Any]
"""Numbers and pytrees by name."""
Updated: TypeAlias = tuple[State, Tree]
"""State and parameters after an update."""


class Part(NamedTuple):
    """Parameters that are updated by one rule."""

    rule: Rule
    places: list[int]  # their indices among all leaves
    columns: list[list[Array]]  # the parameters, and each moment of them
    factors: list[float]  # see `Rule.factors`

    def updated(self, gradients: Sequence[Array] | Mapping[int, Array], scale: float = 1.0) -> list[list[Array]]:
        """Return the new columns; `gradients`: of all leaves, multiplied by `scale`."""
        # Small arrays are concatenated, because the overhead of a NumPy call equals the time for a few thousand entries.
        params, *moments = self.columns
        columns = [params, [gradients[k] for k in self.places], *moments]
        is_long = [isinstance(x, TracedArray) or type(x) is np.ndarray and x.size >= _MIN_LONG_SIZE for x in params]
        groups = [[k] for k, alone in enumerate(is_long) if alone]
        out = list(map(list, self.columns))
        for indices in groups + places_by_kind(params, [k for k, alone in enumerate(is_long) if not alone]):
            inputs = [join([column[k] for k in indices]) for column in columns]
            shapes = [np.shape(params[k]) for k in indices]
            for new, flat in zip(out, _applied(self.rule, inputs, self.factors, scale)):
                for index, part in zip(indices, split(flat, shapes)):
                    new[index] = part
        return out


class Update(NamedTuple):
    """A prepared update: parameters of this module's rules, and a function that finishes the update.

    ``finish(columns, gradients, scale)`` returns state and parameters, given the new columns of each part. The gradients of
    all leaves, which it multiplies by `scale`, are for parameters that belong to no part.
    """

    parts: list[Part]
    finish: Callable[[list[list[list[Array]]], Sequence[Array], float], Updated]

    def applied(self, gradients: list[Array], scale: float = 1.0) -> Updated:
        """Return the new state and parameters."""
        return self.finish([part.updated(gradients, scale) for part in self.parts], gradients, scale)


@dataclass(frozen=True)
class Rule:
    """An optimizer whose update is an elementwise formula of parameters, gradients and moments, all real."""

    learning_rate: float | Callable[[int], float]

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of pytrees in the state, which begin with zeros."""
        raise NotImplementedError

    def formula(self, x: Array, g: Array, *others: Array, out: Sequence[Array | None]) -> tuple[Array, ...]:
        """Return new parameters and moments, written to `out`; `others`: the moments, and the numbers of `factors`."""
        raise NotImplementedError

    def factors(self, rate: float, updates: int) -> list[float]:
        """Return the numbers in the formula that depend on the learning rate and the number of previous updates."""
        return [rate]

    def __post_init__(self) -> None:
        name, rate = type(self).__name__, self.learning_rate
        if not callable(rate) and not (isinstance(rate, Real) and 0 < rate < math.inf):
            allowed = "above zero, or a function of the number of updates"
            raise ValueError(f"{name}: learning_rate must be {allowed}, but got {rate!r}.")
        for field, value in list(vars(self).items()):
            if field in _BOUNDS and not (isinstance(value, Real) and 0 <= float(value) < _BOUNDS[field]):
                raise ValueError(f"{name}: {field} must be a number in [0, {_BOUNDS[field]}), but got {value!r}.")
            if isinstance(value, Real) and not isinstance(value, bool):
                # With a number of NumPy, the formula would have its dtype instead of that of the parameters.
                object.__setattr__(self, field, float(value))

    def setup(self, params: Tree) -> State:
        """Return the state before the first update.

        Parameters
        ----------
        params : pytree of arrays

        Returns
        -------
        dict
            `updates`, the number of updates, and running means in the structure of the parameters: `first` and `second` of
            `Adam`, the `velocity` of `SGD` with momentum.
        """
        refuse_objects(params, "params", f"{type(self).__name__}.setup")

        def start(leaf: Array) -> Array:
            return np.zeros_like(leaf) if is_variable(leaf) else leaf

        return {"updates": 0, **{name: map_leaves(start, params) for name in self.moments}}

    def prepare(self, state: State, params: Tree) -> Update:
        """Return the update; raise a TypeError or ValueError for a state or schedule that can't be used."""
        call, (leaves, build) = type(self).__name__, flatten(params)
        require_state(state, ("updates", *self.moments), call)
        places = [k for k, leaf in enumerate(leaves) if is_variable(leaf)]
        moments = [matching_leaves(state[name], params, leaves, call, f"state[{name!r}]") for name in self.moments]
        trees = [Variables(column, places, build) for column in (leaves, *moments)]
        updates = state["updates"]
        # A file may have made `updates` a number of NumPy; see `__post_init__`.
        factors = [float(x) if isinstance(x, np.floating) else x for x in self.factors(rate_at(self, updates), updates)]

        def finish(new: list[list[list[Array]]], gradients: Sequence[Array], scale: float) -> Updated:
            updated, *others = [tree.filled(column) for tree, column in zip(trees, new[0])]
            return {"updates": updates + 1, **dict(zip(self.moments, others))}, updated

        return Update([Part(self, places, [[tree.leaves[k] for k in places] for tree in trees], factors)], finish)

    def update(self, state: State, params: Tree, gradient: Tree) -> Updated:
        """Return the state and the parameters after one update; the arguments are unchanged.

        Parameters
        ----------
        state : dict
            The result of `setup` or of the last update.
        params, gradient : pytree of arrays
            Leaves that aren't floats remain unchanged. The gradient is that of `value_and_grad`: with respect to a complex
            parameter a + ib it is ∂/∂a - i ∂/∂b, whose conjugate is the direction of steepest ascent. A complex parameter
            is updated like the two real ones a and b.

        Returns
        -------
        (dict, pytree of arrays)

        Raises
        ------
        TypeError, ValueError
            If the gradient or the state doesn't match the parameters, or the state is another optimizer's.
        """
        update = self.prepare(state, params)
        return update.applied(matching_leaves(gradient, params, flatten(params)[0], type(self).__name__))


def _applied(rule: Rule, inputs: list[Array], factors: list[float], scale: float) -> list[Array]:
    """Apply a formula to flat arrays: parameters, the gradient, which is multiplied by `scale`, and moments."""
    # All replicas must have the same bits, whether they run a program or interpret the formula.
    dtype, is_traced = inputs[0].dtype, isinstance(inputs[0], TracedArray)
    if dtype.kind == "c":
        inputs[1] = inputs[1].conj()
        if is_traced:  # programs have no views of another dtype
            found = _applied(rule, [np.concatenate([x.real, x.imag]) for x in inputs], factors, scale)
            return [x[: x.size // 2] + 1j * x[x.size // 2 :] for x in found]
        inputs = [x.view(x.real.dtype) for x in inputs]
    if is_traced and not dtype.isnative:
        inputs[0].recorder.refuse("it updates parameters in another byte order")
    if isinstance(scale, TracedArray):
        scale = scale.astype(inputs[1].dtype)
    outputs = [np.empty_like(x) for k, x in enumerate(inputs) if k != 1 and not is_traced]

    def computed(part: slice) -> tuple[Array, ...]:
        x, g, *moments = [x[part] for x in inputs]
        g = scale * g if isinstance(scale, TracedArray) or scale != 1.0 else g
        return rule.formula(x, g, *moments, *factors, out=[x[part] for x in outputs] or [None] * len(inputs))

    if type(inputs[0]) is np.ndarray:
        for start in range(0, len(inputs[0]), _BLOCK_SIZE):  # blocks, whose temporaries fit into the cache
            computed(slice(start, start + _BLOCK_SIZE))
    else:
        outputs = list(computed(slice(None)))
    return [x.view(dtype) for x in outputs] if dtype.kind == "c" else outputs


@dataclass(frozen=True)
class SGD(Rule):
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
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise ValueError(f"SGD: nesterov=True needs a momentum above zero, but got {self.momentum!r}.")

    @property
    def moments(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return ("velocity",) if self.momentum else ()

    def formula(self, x: Array, g: Array, *others: Array, out: Sequence[Array | None]) -> tuple[Array, ...]:
        """Return new parameters and velocities."""
        *velocity, rate = others
        g = g + self.weight_decay * x if self.weight_decay else g
        if not velocity:
            return (np.subtract(x, rate * g, out=out[0]),)
        v = np.add(self.momentum * velocity[0], g, out=out[1])
        step = g + self.momentum * v if self.nesterov else v
        return np.subtract(x, rate * step, out=out[0]), v


def rate_at(optimizer: Rule, updates: int) -> float:
    """Return an optimizer's learning rate after a number of updates; raise a ValueError if a schedule has none."""
    rate = optimizer.learning_rate
    if not callable(rate):
        return rate
    found: Any = rate(updates)
    if np.ndim(found) or np.asarray(found).dtype.kind not in "fiu" or not 0 <= float(found) < math.inf:
        raise ValueError(
            f"{type(optimizer).__name__}: the schedule learning_rate({updates}) must return a finite number from 0, but "
            f"returned {found!r:.60}."
        )
    return float(found)


@dataclass(frozen=True)
class Adam(Rule):
    """Adaptive moment estimation (Kingma and Ba, 2015, Algorithm 1).

    Parameters
    ----------
    learning_rate : float or callable
        A number; or, for a schedule, a function of the number of previous updates.
    beta1, beta2 : float
        Decay rates of the running means of gradients and of their squares.
    epsilon : float
        Added to the square root of the mean of squares.

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

    @property
    def moments(self) -> tuple[str, ...]:
        """The means of gradients and of their squares."""
        return "first", "second"

    def factors(self, rate: float, updates: int) -> list[float]:
        """Return factors that correct the bias of the means, which start at zero (the paper's m̂ and v̂)."""
        # The correction of the first mean is applied to the learning rate, which saves a pass over the array.
        return [rate / (1 - self.beta1 ** (updates + 1)), 1 - self.beta2 ** (updates + 1)]

    def formula(self, x: Array, g: Array, *others: Array, out: Sequence[Array | None]) -> tuple[Array, ...]:
        """Return new parameters and means."""
        m, v, scale, correction, *kept = others
        first = np.add(self.beta1 * m, (1 - self.beta1) * g, out=out[1])
        second = np.add(self.beta2 * v, (1 - self.beta2) * np.square(g), out=out[2])
        step = scale * first / (np.sqrt(second / correction) + self.epsilon)
        return np.subtract(x * kept[0] if kept else x, step, out=out[0]), first, second


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

    def factors(self, rate: float, updates: int) -> list[float]:
        """Return the factors of `Adam`, and that of the decay."""
        return [*super().factors(rate, updates), 1 - rate * self.weight_decay]
