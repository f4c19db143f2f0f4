"""u' of M u' = f(u, p, t) at columns, by which states move where no step says it: f itself, where M is the identity.

Where M is singular, f leaves a part N z of u' open, with the null vectors N of M. The algebraic equations Lᵀ f = 0 hold all
along a trajectory, so Lᵀ (f_u u' + f_t) = 0, and with N A⁻¹ Lᵀ of `consistent_start` that part is found in one step.

Further steps with the same matrix, which are ordinary traced arithmetic, hand on the derivatives: one for each order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.differentiation.products import jvp
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.consistent_start import applied, gains, null_vectors
from mpiad.ensemble.field_jacobian import jacobian_of
from mpiad.ensemble.linearization import Field

# The last two are for first and second derivatives.
_STEPS = 3


def rates_of_change(batch: Batch, mass: Array | None, u: Array, leaves: Sequence[Any], t: Array) -> Array:
    """Return u' of at least two columns, shape (d, n), by their parameters' leaves; what isn't M may be traced."""
    field = Field(batch)
    rate = field.array(u, leaves, t)
    if mass is None:
        return rate
    rate, free = applied(np.linalg.pinv(mass)[..., None], rate), null_vectors(mass)
    if not free.shape[1]:
        return rate
    plain, p = getval(u), batch.p.of_columns([getval(leaf) for leaf in leaves], len(batch.shape) > 1)
    jacobian = np.zeros_like(plain, shape=(len(plain), *plain.shape))
    jacobian_of(batch).write(jacobian, plain, p, getval(t))
    gain, still = gains(jacobian, free, null_vectors(mass.T)), np.zeros_like(getval(t))
    for _ in range(_STEPS):
        along = jvp(lambda s, rate=rate: field.array(u + s * rate, leaves, t + s), still, still + 1)[1]
        rate = rate - applied(gain, along)
    return rate
