"""The distribution that chains sample, relative to a Gaussian reference, and the random numbers of their steps.

The posterior π ∝ exp(-Φ) μ has the density exp(-Ψ) relative to a Gaussian ν: the prior μ itself, or a Laplace approximation
with mean m, eigenvalues λ and eigenvectors u (see `Posterior`). With w = v - m and the coordinates p = uᵀ R w,

    Ψ(v) = Φ(v) + log dν/dμ(v) = Φ(v) + (m - m₀)ᵀ R w - ½ Σ λ p²,

up to a constant. It contains no difference of two norms of w, which would lose all digits on fine meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpiad._typing import LocalArray
from mpiad.inverse.gaussian_prior import GaussianPrior
from mpiad.inverse.laplace_approximation import Posterior
from mpiad.optimize.objective_evaluation import Evaluation
from mpiad.transport.core.random_keys import generator_of


class MisfitEvaluation(Evaluation):
    """Values and gradients of Φ on all ranks; NaN if a solver doesn't converge."""

    call = "inverse.sample"

    def untraced(self, vector: np.ndarray) -> float:
        """Return the value, without a forward pass for `gradient`."""
        return self.attempted(lambda: self._untraced(vector), lambda: math.nan)


Slope = Callable[[Posterior, LocalArray], np.ndarray]
"""Converts a gradient of Ψ to the form that a method uses, given the reference."""


class State(NamedTuple):
    """A field, and what is known of it."""

    field: LocalArray
    misfit: float  # Φ
    psi: float  # Ψ; infinite if Φ or its gradient isn't finite
    slope: np.ndarray | None = None  # the gradient of Ψ as the method uses it, if it was evaluated


class Moves(NamedTuple):
    """A step of a chain; a step has one or several stages."""

    state: State
    chances: list[float]  # of acceptance in each stage; NaN if the stage wasn't reached
    accepted: list[bool]


class Target:
    """The posterior relative to the Gaussian `reference`; `slope` is None for methods without gradients."""

    def __init__(self, evaluation: MisfitEvaluation, reference: Posterior, slope: Slope | None):
        self.reference, self._evaluation, self._slope = reference, evaluation, slope
        shift = reference.prior.apply(reference.mean - reference.prior.mean)
        self._duals = np.concatenate([reference.duals, shift[None]])
        self.solves = np.zeros(3, int)  # numbers of values, of gradients, and of fields at which they weren't finite

    def at(self, field: LocalArray, slope: bool = False) -> State:
        """Return the state at a field, by one evaluation of Φ, and with `slope` of its gradient; collective."""
        reference, vector = self.reference, field.ravel()
        misfit = float(self._evaluation.value(vector) if slope else self._evaluation.untraced(vector))
        *coordinates, linear = reference.prior.domain.gram(self._duals, (field - reference.mean)[None])[:, 0]
        weights, known = reference.values * coordinates, None
        psi = misfit + linear - 0.5 * float(weights @ coordinates)
        self.solves[0] += 1
        if slope and math.isfinite(psi):
            self.solves[1] += 1
            gradient = np.reshape(self._evaluation.gradient(vector), field.shape)  # type: ignore[arg-type]
            gradient = gradient + np.tensordot(np.append(-weights, 1.0), self._duals, 1)
            if math.isfinite(reference.prior.domain.dot(gradient, gradient)):  # on all ranks or on none
                known = self._slope(reference, gradient)  # type: ignore[misc]
            else:
                psi = math.inf
        if math.isfinite(psi):
            return State(field, misfit, psi, known)
        self.solves[2] += 1
        return State(field, misfit, math.inf)


class Draw:
    """The random numbers of a step, which depend on the key, the chain and the step only."""

    def __init__(self, prior: GaussianPrior, key: int, chain: int, step: int):
        self.random = generator_of(key, chain, step)
        self._prior, self._key, self._numbers = prior, key, (chain, step)

    def deviation(self, second: bool = False) -> LocalArray:
        """Return the first or the second sample of the prior without its mean, by one solve; collective."""
        sequence = np.random.SeedSequence(self._key, spawn_key=(*self._numbers, int(second)))
        return self._prior.sqrt(self._prior.domain.normal(sequence, self._prior.noise))

    def accepts(self, log_ratio: float) -> tuple[float, bool]:
        """Return the chance min(1, exp(log_ratio)) of a proposal, 0 for NaN, and whether it is accepted."""
        chance = 0.0 if math.isnan(log_ratio) else math.exp(min(log_ratio, 0.0))
        return chance, self.random.random() < chance
