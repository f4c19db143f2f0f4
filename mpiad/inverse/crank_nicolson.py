"""The preconditioned Crank-Nicolson method: proposals that leave a Gaussian reference invariant.

References
----------
.. [1] S. L. Cotter, G. O. Roberts, A. M. Stuart and D. White, "MCMC methods for functions: modifying old algorithms to make
   them faster", Statistical Science 28 (2013).
.. [2] F. J. Pinski, G. Simpson, A. M. Stuart and H. Weber, "Algorithms for Kullback-Leibler approximation of probability
   measures in infinite dimensions", SIAM J. Sci. Comput. 37 (2015), for references other than the prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpiad.inverse.sampling_target import Draw, Moves, State, Target


def step(target: Target, state: State, sizes: Sequence[float], draw: Draw) -> Moves:
    """Propose m + √(1 - β²) (v - m) + β C^½ ξ; the proposal's density cancels in the ratio, which is that of exp(-Ψ)."""
    (beta,), mean = sizes, target.reference.mean
    noise = target.reference.narrowed(draw.deviation())
    new = target.at(mean + math.sqrt(1.0 - beta**2) * (state.field - mean) + beta * noise)
    chance, accepted = draw.accepts(state.psi - new.psi)
    return Moves(new if accepted else state, [chance], [accepted])
