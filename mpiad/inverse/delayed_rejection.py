"""Delayed rejection in the informed subspace: a Crank-Nicolson proposal, and if it is rejected, a Langevin proposal.

The coordinates z = √(1 + λ) uᵀ R (v - m) of the k eigenvectors u are standard normal under the Laplace approximation. Both
stages change these coordinates only. A second proposal z₂ is accepted by the ratio

    π(z₂) q₁(z₂, z₁) (1 - α₁(z₂, z₁)) q₂(z₂, z) / (π(z) q₁(z, z₁) (1 - α₁(z, z₁)) q₂(z, z₂)),

in which z₁ is the rejected proposal. The rest of the field, independent of z under the approximation, is then changed by a
Crank-Nicolson step of its own. (For the whole field q₁(z₂, z₁)/q₁(z, z₁) degenerates as the mesh is refined.)

References
----------
.. [1] L. Tierney and A. Mira, "Some adaptive Monte Carlo methods for Bayesian inference", Statistics in Medicine 18 (1999).
.. [2] T. Cui, K. J. H. Law and Y. M. Marzouk, "Dimension-independent likelihood-informed MCMC", J. Comput. Phys. 304
   (2016), for proposals that differ in the subspace and its complement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpiad._typing import LocalArray
from mpiad.inverse.langevin import log_density
from mpiad.inverse.laplace_approximation import Posterior
from mpiad.inverse.sampling_target import Draw, Moves, State, Target


def slope(reference: Posterior, gradient: LocalArray) -> np.ndarray:
    """Return the derivatives with respect to z, shape (k,)."""
    found = reference.prior.domain.gram(reference.vectors, gradient[None])[:, 0]
    return found / np.sqrt(1.0 + reference.values)


def step(target: Target, state: State, sizes: Sequence[float], draw: Draw) -> Moves:
    """Change the informed coordinates by two stages at most, and then the rest of the field."""
    reference, (first, second, third) = target.reference, sizes
    scale = np.sqrt(1.0 + reference.values)
    # The noise is that of a field, since the signs of eigenvectors may depend on the number of ranks. The informed
    # coordinates of a sample of the prior are standard normal, and independent of the rest of the sample.
    deviation = draw.deviation()
    p, noise = reference.prior.domain.gram(np.stack([state.field - reference.mean, deviation]), reference.duals)
    z = scale * p

    def moved(new: np.ndarray, with_slope: bool) -> State:
        return target.at(state.field + np.tensordot((new - z) / scale, reference.vectors, 1), with_slope)

    z1 = math.sqrt(1.0 - first**2) * z + first * noise
    tried = moved(z1, False)
    chance, accepted = draw.accepts(state.psi - tried.psi)
    chances, moves = [chance, math.nan], [accepted, False]
    if accepted:
        state, z = tried, z1
    else:
        if state.slope is None and (known := target.at(state.field, slope=True)).slope is not None:
            state = known  # otherwise the gradient isn't finite, and there is no second stage
        if state.slope is not None:
            a = math.sqrt(1.0 - second**2)
            z2 = a * z - (1.0 - a) * state.slope + second * reference.coordinates(draw.deviation(second=True))
            new = moved(z2, True)
            chances[1], moves[1] = draw.accepts(_second_log_ratio(sizes, (state, z), (tried, z1), (new, z2)))
            if moves[1]:
                state, z = new, z2

    rest = np.stack([state.field - reference.mean, deviation])
    rest -= np.tensordot(np.stack([z / scale, noise]), reference.vectors, 1)
    new = target.at(state.field + (math.sqrt(1.0 - third**2) - 1.0) * rest[0] + third * rest[1])
    chance, accepted = draw.accepts(state.psi - new.psi)
    return Moves(new if accepted else state, [*chances, chance], [*moves, accepted])


Place = tuple[State, np.ndarray]  # with its coordinates z


def _second_log_ratio(sizes: Sequence[float], here: Place, tried: Place, new: Place) -> float:
    """Return the logarithm of the second stage's ratio; the densities of ν cancel, as in `langevin`."""
    (state, z), (rejected, z1), (last, z2), (first, second, _) = here, tried, new, sizes
    # If a proposal from `last` to `rejected` were always accepted, the rejection had probability zero.
    if last.slope is None or last.psi >= rejected.psi:
        return -math.inf
    a = math.sqrt(1.0 - first**2)
    log_ratio = state.psi - last.psi
    log_ratio += (np.sum((z1 - a * z) ** 2) - np.sum((z1 - a * z2) ** 2)) / (2.0 * first**2)
    log_ratio += math.log(-math.expm1(last.psi - rejected.psi)) - math.log(-math.expm1(state.psi - rejected.psi))
    for sign, (at, start), (_, end) in ((1.0, new, here), (-1.0, here, new)):
        log_ratio += sign * log_density(second, at.slope @ end, at.slope @ start, at.slope @ at.slope)  # type: ignore
    return float(log_ratio)
