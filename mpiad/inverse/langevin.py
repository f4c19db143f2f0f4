"""Semi-implicit Langevin proposals: those of `crank_nicolson`, moved along the gradient.

For the reference N(m, C) and the deviation w = v - m, the proposal is N(a w - (1 - a) C∇Ψ(v), β²C) with a = √(1 - β²). With
a = (2 - δ)/(2 + δ) this is the trapezoidal rule (θ = ½) with step δ for dw = -(w + C∇Ψ) dt + √2 C^½ dB. It has a density
relative to the proposal without the gradient, N(a w, β²C), which leaves N(m, C) invariant:

    log r(v, v') = -∇Ψ(v)ᵀ (w' - a w)/(1 + a) - ∇Ψ(v)ᵀ C ∇Ψ(v) (1 - a)/(2 (1 + a)).

References
----------
A. Beskos, G. Roberts, A. Stuart and J. Voss, "MCMC methods for diffusion bridges", Stochastics and Dynamics 8 (2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpiad._typing import LocalArray
from mpiad.inverse.laplace_approximation import Posterior
from mpiad.inverse.sampling_target import Draw, Moves, State, Target


def slope(reference: Posterior, gradient: LocalArray) -> np.ndarray:
    """Return the gradient and its product with the covariance, of shape (2, *local_shape)."""
    return np.stack([gradient, reference.apply(gradient)])


def log_density(beta: float, along_new: float, along_old: float, squared: float) -> float:
    """Return log r, given the products of the gradient with w' and w, and its squared norm with respect to C."""
    a = math.sqrt(1.0 - beta**2)
    return -(along_new - a * along_old + 0.5 * (1.0 - a) * squared) / (1.0 + a)


def step(target: Target, state: State, sizes: Sequence[float], draw: Draw) -> Moves:
    """Propose a field with one value and gradient of Φ; accept it by the ratio of exp(-Ψ) and of r in both directions."""
    (beta,), reference = sizes, target.reference
    a, (gradient, direction) = math.sqrt(1.0 - beta**2), state.slope  # type: ignore[misc]
    here = state.field - reference.mean
    there = a * here - (1.0 - a) * direction + beta * reference.narrowed(draw.deviation())
    new, log_ratio = target.at(reference.mean + there, slope=True), -math.inf
    if new.slope is not None:
        rows = np.stack([gradient, new.slope[0]]), np.stack([here, there, direction, new.slope[1]])
        (here_here, here_there, squared, _), (there_here, there_there, _, new_squared) = reference.prior.domain.gram(*rows)
        log_ratio = state.psi - new.psi + log_density(beta, there_here, there_there, new_squared)
        log_ratio -= log_density(beta, here_there, here_here, squared)
    chance, accepted = draw.accepts(log_ratio)
    return Moves(new if accepted else state, [chance], [accepted])
