"""Hamiltonian Monte Carlo: proposals at the end of short paths, in steps that conserve the energy of the reference.

For the reference N(m, C), the deviation w = v - m and a momentum p, drawn from N(0, C), the energy is
Ψ(v) + ½ wᵀC⁻¹w + ½ pᵀC⁻¹p. A step with the angle h changes p by -½h C∇Ψ, rotates (w, p) by h, and changes p by -½h C∇Ψ
again. The rotation conserves the quadratic terms, which are infinite on a continuum. A change of p by -k C∇Ψ adds
½k² ∇ΨᵀC∇Ψ - k ∇Ψᵀp. The path is reversible and preserves volume, so that its end is accepted with the chance
min(1, exp(-Δ)), where Δ is the change of the energy.

References
----------
A. Beskos, F. J. Pinski, J. M. Sanz-Serna and A. M. Stuart, "Hybrid Monte Carlo on Hilbert spaces", Stochastic Processes
and their Applications 121 (2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpiad.inverse.sampling_target import Draw, Moves, State, Target

_STEPS = 8  # the largest number of steps of a path


def step(target: Target, state: State, sizes: Sequence[float], draw: Draw) -> Moves:
    """Propose the end of a path with one value and gradient of Φ per step; accept it by the change of the energy."""
    (beta,), reference = sizes, target.reference
    momentum, place, energy = reference.narrowed(draw.deviation()), state, 0.0  # `energy`: the change of p's
    angle = math.asin(beta)
    steps = max(1, min(_STEPS, int(0.5 * math.pi / angle)))  # a quarter turn makes samples of the reference independent
    for k in range(steps + 1):
        if place.slope is None:
            return Moves(state, [0.0], [False])
        gradient, direction = place.slope
        kick = angle if 0 < k < steps else 0.5 * angle
        along, squared = reference.prior.domain.gram(gradient[None], np.stack([momentum, direction]))[0]
        energy += kick * (0.5 * kick * squared - along)
        momentum = momentum - kick * direction
        if k < steps:
            away = place.field - reference.mean
            place = target.at(reference.mean + math.sqrt(1.0 - beta**2) * away + beta * momentum, slope=True)
            momentum = math.sqrt(1.0 - beta**2) * momentum - beta * away
    chance, accepted = draw.accepts(state.psi - place.psi - energy)
    return Moves(place if accepted else state, [chance], [accepted])
