"""Rules for device arrays, where autograd's own make arrays of NumPy's: zeros, identities, lists of places.

Each is a formula of `autograd.numpy` functions, so that it can be differentiated again. The host's arrays never meet
them: `protocol.inherited_vjp` asks here only where the result is on a device. Nothing here copies to the host or waits
for the device.
"""

from __future__ import annotations

import autograd.numpy as anp
from autograd.numpy import linalg

from mpiad.differentiation.rules.on_device import linear_algebra
from mpiad.differentiation.rules.protocol import DEVICE_JVPS, DEVICE_REFUSALS, DEVICE_VJPS

__all__: list[str] = []

DEVICE_VJPS.update(linear_algebra.VJPS)
DEVICE_JVPS.update(linear_algebra.JVPS)

_ASSEMBLY = "it makes an array of NumPy's. Import mpiad.device.numpy in place of autograd.numpy"
# What isn't available, and what to do instead.
DEVICE_REFUSALS.update({
    anp.concatenate_args: ("concatenate", _ASSEMBLY),
    anp.array_from_args: ("array", _ASSEMBLY),
    anp.make_diagonal: ("make_diagonal", "multiply by a mask, as in x[..., None] * identity"),
    anp.real_if_close: ("real_if_close", "the host doesn't know the values. Use real"),
    linalg.eig: ("linalg.eig", "copy the matrix with mpiad.device.to_host"),
})  # fmt: skip
