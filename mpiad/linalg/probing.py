"""The matrix of an operator on a domain, found by products with a few fields.

An operator that looks no further than the halo sees at most one of two points that are more than two halos apart. So a
field that is one at many such points, and zero between, shows as many columns at once: 2 halo + 1 products for each
dimension, multiplied, are enough, whatever the size of the grid.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import scipy.sparse

from mpiad._typing import Function
from mpiad.domain import Domain
from mpiad.primitives import mpi_allgather
from mpiad.transport import channel
from mpiad.transport.agreement import raise_together
from mpiad.transport.user_failures import DeferredFailures

_CALL = "DistributedMatrix.from_operator"


def operator_rows(matvec: Function, domain: Domain, params: tuple) -> tuple[Any, int]:
    """Return this rank's rows of an operator's matrix, its points numbered block after block, and their number.

    A TypeError or ValueError on all ranks, where the operator returns something else than an array of the block's shape, or
    looks further than the halo; where a periodic dimension is too short for that to be found out.
    """
    used = channel(domain.comm, _CALL)
    count = math.prod(domain.local_shape)
    counts = mpi_allgather(np.array(count), comm=domain.comm)
    numbers = (sum(counts[: used.rank]) + np.arange(count, dtype=float)).reshape(domain.local_shape)
    # Each halo cell gets the number of the point that it is a copy of; -1 says that there is none.
    around = domain.exchange(numbers, -1.0)
    steps = tuple(_apart(n, h, p) for n, h, p in zip(domain.shape, domain.halo, domain.periodic))
    places = list(np.meshgrid(*[np.arange(s.start, s.stop) for s in domain.owned], indexing="ij"))
    found: list[tuple[np.ndarray, ...]] = []
    failures = DeferredFailures(domain.comm, _CALL)
    for colour in itertools.product(*map(range, steps)):
        lit = _has_colour(places, steps, colour)
        image = _image(matvec, lit.astype(float), params, failures)
        rest = image != 0.0
        for offset in itertools.product(*[range(-h, h + 1) for h in domain.halo]):
            window = tuple(slice(h + d, h + d + n) for h, d, n in zip(domain.halo, offset, domain.local_shape))
            # Of the points of one colour this is the only one that a point can see along this offset.
            taken = rest & (around[window] >= 0.0) & _has_colour(_moved(places, offset, domain), steps, colour)
            found.append((numbers[taken] - numbers.flat[0], around[window][taken], image[taken]))
            rest &= ~taken
        raise_together(used, _too_far(rest, domain))
    rows, columns, values = (np.concatenate(part) for part in zip(*found))
    shape = count, int(sum(counts))
    return scipy.sparse.csr_matrix((values, (rows.astype(np.int64), columns.astype(np.int64))), shape), count


def _has_colour(places: list[np.ndarray], steps: tuple[int, ...], colour: tuple[int, ...]) -> np.ndarray:
    return np.logical_and.reduce([place % step == c for place, step, c in zip(places, steps, colour)])


def _moved(places: list[np.ndarray], offset: tuple[int, ...], domain: Domain) -> list[np.ndarray]:
    sides = zip(places, offset, domain.shape, domain.periodic)
    return [(place + d) % n if periodic else place + d for place, d, n, periodic in sides]


def _apart(n: int, halo: int, periodic: bool) -> int:
    least = 2 * halo + 1
    if not periodic:
        return min(n, least)
    # Around a ring the colours must close up, so their number must divide that of the points.
    return next((k for k in range(least, n + 1) if n % k == 0), n)


def _image(matvec: Function, field: np.ndarray, params: tuple, failures: DeferredFailures) -> np.ndarray:
    image = failures.attempt("matvec", lambda u: matvec(u, *params), field, again=lambda: np.zeros(field.shape))
    if not isinstance(image, np.ndarray) or image.shape != field.shape or image.dtype.kind not in "fc":
        shown = f"{image.shape} {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        text = f"{_CALL}: matvec must return an array of floats of shape {field.shape}, but returned {shown}."
        failures.note(TypeError(text))  # after an exception only that counts
    failures.raise_together()
    return image


def _too_far(rest: np.ndarray, domain: Domain) -> Exception | None:
    if not rest.any():
        return None
    place = tuple(int(k) for k in np.argwhere(rest)[0])
    return ValueError(
        f"{_CALL}: at point {place} of a block matvec depends on points beyond the halo of {domain.halo}, or isn't linear "
        "(it adds something of its own). Give the domain as wide a halo as the operator looks."
    )
