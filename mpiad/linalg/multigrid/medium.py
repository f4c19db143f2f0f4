"""The coefficients of an elliptic operator: checked on all ranks, and what follows from them for the cycle."""

from __future__ import annotations

import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import LocalArray
from mpiad.domain import Domain
from mpiad.errors import NotFiniteError
from mpiad.linalg.host_and_device import require_together
from mpiad.linalg.multigrid.elliptic import Sides
from mpiad.linalg.vectors import on_host
from mpiad.transport import MAX, Channel
from mpiad.transport.agreement import agreed, raising_together
from mpiad.transport.collectives import allreduce

_CALL = "linalg.Multigrid"


def coefficients(domain: Domain, kappa: object, c: object, used: Channel) -> tuple[LocalArray, LocalArray]:
    """Return κ and c on this rank's points, in double precision on the host; one copy of each on a device. Collective.

    A TypeError or ValueError on all ranks, where one is traced or isn't real, they are in two places, one has another
    shape, isn't finite, or is negative, which says at which point; where a periodic dimension can't be coarsened.
    """
    with raising_together(used):
        require_together(_CALL, kappa=getval(kappa), c=getval(c))
        fields = [_field(domain, kappa, "kappa", False), _field(domain, c, "c", True)]
        _check_rings(domain)
    return fields[0], fields[1]


def has_constants(sides: Sides, c: LocalArray, mean_zero: bool, used: Channel) -> bool:
    """Tell whether constants are in the operator's kernel; collective.

    A ValueError on all ranks, where they are and `mean_zero` isn't given, or the other way round; where some ranks give it.
    """
    given = any(side for pair in sides.fixed for side in pair)
    # Sides are arguments that have been compared, but c lies with each rank: its largest value decides for all.
    largest, with_it, without_it = allreduce(used, np.array([c.max(), mean_zero, not mean_zero], float), MAX, _CALL)
    if with_it and without_it:
        raise agreed(used, ValueError(f"{_CALL}: mean_zero must be the same on all ranks, but is True on some only."))
    singular = not given and float(largest) == 0.0
    if singular and not mean_zero:
        raise agreed(used, ValueError(
            f"{_CALL}: the operator is singular: no side has boundary='dirichlet' and c is zero everywhere, so a constant "
            "can be added to any solution. Pin it: mean_zero=True takes the solution with mean zero; or give the "
            "value on one side, or a small c."
        ))  # fmt: skip
    if mean_zero and not singular:
        raise agreed(used, ValueError(
            f"{_CALL}: mean_zero=True is for singular operators, but this one has a side with a value, or c > 0 somewhere: "
            "its solution is unique. Leave it out."
        ))  # fmt: skip
    return singular


def contrast(kappa: LocalArray, used: Channel) -> float:
    """Return the largest κ divided by the least; all ranks of the domain call it."""
    # One reduction for both: the least is minus the greatest of the negatives.
    highest, lowest = allreduce(used, np.array([kappa.max(), -kappa.min()]), MAX, _CALL)
    with np.errstate(over="ignore"):
        return float(highest / -lowest)


def _check_rings(domain: Domain) -> None:
    for axis, (n, wraps) in enumerate(zip(domain.shape, domain.periodic)):
        if wraps and n % 2:
            raise ValueError(
                f"{_CALL}: a periodic dimension must have an even number of points, but dimension {axis} has {n}. "
                "Multiples of a power of two coarsen furthest."
            )


def _field(domain: Domain, value: object, name: str, zero_allowed: bool) -> LocalArray:
    if isbox(value):
        raise TypeError(
            f"{_CALL}: {name} is traced, and no derivative flows through a preconditioner: give it "
            f"mpiad.stop_gradient({name}). linalg.solve_elliptic differentiates by it."
        )
    found = np.asarray(on_host(value))
    if found.dtype.kind not in "fiu":
        raise TypeError(f"{_CALL}: {name} must be real numbers, but got {type(value).__name__} of dtype {found.dtype}.")
    if found.shape not in ((), domain.local_shape):
        raise ValueError(
            f"{_CALL}: {name} must be a number or an array of shape {domain.local_shape}, this rank's block, but has shape "
            f"{found.shape}."
        )
    field = np.broadcast_to(found, domain.local_shape).astype(np.float64)
    usable = np.isfinite(field) & (field >= 0.0 if zero_allowed else field > 0.0)
    if not usable.all():
        kind = ValueError if np.isfinite(field).all() else NotFiniteError
        raise kind(_wrong(domain, field, usable, name, zero_allowed))
    return field


def _wrong(domain: Domain, field: LocalArray, usable: np.ndarray, name: str, zero_allowed: bool) -> str:
    first = np.unravel_index(int(np.argmin(usable)), field.shape)
    place = tuple(int(i) + cells.start for i, cells in zip(first, domain.owned))
    wanted = "zero or more" if zero_allowed else "positive"
    advice = "" if zero_allowed else " Of a field that is learned, take the exponential."
    return (
        f"{_CALL}: {name} must be {wanted} and finite, but is {float(field[first])!r} at point {place} of the grid, and "
        f"wrong at {int(np.count_nonzero(~usable))} of {field.size} points of this rank.{advice}"
    )
