"""Rules for device arrays, where autograd's own make arrays of NumPy's: zeros, identities, lists of places.

Each is a formula of `autograd.numpy` functions, so that it can be differentiated again. The host's arrays never meet
them: `protocol.inherited_vjp` asks here only where the result is on a device. Nothing here copies to the host or waits
for the device.
"""

from __future__ import annotations

from mpiad.differentiation.rules.on_device import (
    array_exponents,
    bounds,
    contractions,
    diagonals,
    differences,
    divisions,
    factorizations,
    moments,
    ordering,
    transforms,
    unavailable_functions,
)
from mpiad.differentiation.rules.protocol import DEVICE_JVPS, DEVICE_REFUSALS, DEVICE_VJPS

__all__: list[str] = []

for _family in (
    bounds, contractions, diagonals, differences, divisions, factorizations, moments, ordering, array_exponents, transforms
):  # fmt: skip
    DEVICE_VJPS.update(_family.VJPS)
    DEVICE_JVPS.update(_family.JVPS)
DEVICE_REFUSALS.update(unavailable_functions.REFUSALS)
