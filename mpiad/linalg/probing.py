"""Probing: the matrix of a linear operator with a known sparsity pattern, from products with a few vectors.

Columns that have no row in common may have the same *color*: the product with a vector that is one at the columns of a
color, and zero elsewhere, contains all entries of these columns.

For the stencil of a domain's halo, points whose indices are equal modulo the number of colors, at least 2 halo + 1 per
dimension, have the same color. Along a periodic dimension this number must divide the number of points, so it may be
larger. For any other pattern each column takes the first color that no column with a common row has. A rank colors its
columns in their order; ranks with conflicting columns do so one after the other, and all others at the same time. So the
colors depend on the ranks, but no rank stores anything about the whole matrix.

References
----------
A. H. Gebremedhin, F. Manne and A. Pothen, What color is your Jacobian? Graph coloring for computing derivatives, SIAM
Review 47 (2005).
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import autograd.numpy as anp
import numpy as np
import scipy.sparse
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, Rank
from mpiad.device.assembly import stack
from mpiad.differentiation.coloring import colors_of, first_missing
from mpiad.domain import Domain
from mpiad.primitives import mpi_allgather, mpi_allreduce, mpi_alltoall
from mpiad.redistribution import GhostExchange
from mpiad.transport import MAX, Channel, channel
from mpiad.transport.core.agreement import raise_together, raising_together
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.exits.user_failures import DeferredFailures

_MOST_PROBED = 2000  # unknowns up to which an operator without a pattern is probed by a product per column


class Probing:
    """The pattern of this rank's rows, a CSR matrix (n, N) of column colors, and `colors` of this rank's columns."""

    def __init__(self, rows: Any, colors: np.ndarray, count: int, halo: tuple[int, ...] | None):
        self.rows, self.colors = rows, colors
        self.count, self.halo = count, halo  # the number of colors, the same on all ranks, and the halo of a stencil
        self.latest: Any = None  # the last matrix, after the entries of the pattern that it contains
        # The place of each entry in the products with the fields of all colors.
        self._places = rows.data * rows.shape[0] + np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))

    def values(
        self, matvec: Function, params: tuple, shape: tuple[int, ...], comm: Comm, call: str, takes_batches: bool = False
    ) -> Array:
        """Return the entries in the order of `rows`; raise on all ranks if a product reaches beyond the halo."""
        failures, images = DeferredFailures(comm, call), np.zeros((0, *shape))
        if self.count and takes_batches:
            fields = (self.colors == np.arange(self.count)[:, None]).astype(float)
            images = checked_product(matvec, fields.reshape(self.count, *shape), params, failures, call)
        elif self.count:
            fields = ((self.colors == color).astype(float).reshape(shape) for color in range(self.count))
            images = stack([checked_product(matvec, field, params, failures, call) for field in fields])
        entries = anp.reshape(images, (-1,))[self._places]
        if self.halo is not None:
            is_wrong = np.count_nonzero(getval(images)) != np.count_nonzero(getval(entries))
            error = _halo_error(getval(images), self._places, self.halo, call) if is_wrong else None
            raise_together(channel(comm, call), error)
        return entries


_of_domains: weakref.WeakKeyDictionary[Domain, Probing] = weakref.WeakKeyDictionary()
_latest: list[Any] = []  # of the last sparse pattern, for the next Newton solve: communicator, arrays, probing


def probing_of(pattern: Any, count: int, comm: Comm, call: str) -> Probing:
    """Return the probing of operators with a pattern, for this rank's number of unknowns; for errors see `from_pattern`."""
    domain = pattern if isinstance(pattern, Domain) else None
    if domain is not None and domain in _of_domains:
        return _of_domains[domain]
    group = channel(comm, call)
    offsets = np.concatenate([[0], np.cumsum(mpi_allgather(np.array(count), comm=comm))])
    if domain is not None:
        rows, own = _of_stencil(domain, offsets, group.rank)
    else:
        with raising_together(group):
            rows = _rows_of(pattern, offsets, group.rank, call)
        if pattern is not None:
            latest = [*_latest]  # other threads may replace it
            arrays = offsets, rows.indptr, rows.indices
            same = bool(latest) and latest[0] is comm and all(map(np.array_equal, latest[1], arrays))
            if not on_any_rank(group.data, not same):
                return latest[2]
        # Without a pattern, which is for one rank only, each column has a color of its own.
        own = np.arange(count) if pattern is None else _colors(rows, offsets, group, comm)
    start, stop = offsets[group.rank : group.rank + 2].tolist()
    rows.data = GhostExchange(rows.indices, (start, stop), comm).fetch(own)
    probing = Probing(rows, own, int(mpi_allreduce(own.max(initial=-1), MAX, comm=comm)) + 1, domain and domain.halo)
    if domain is not None:
        _of_domains[domain] = probing
    elif pattern is not None:
        _latest[:] = comm, (offsets, rows.indptr, rows.indices), probing
    return probing


def _of_stencil(domain: Domain, offsets: np.ndarray, rank: Rank) -> tuple[scipy.sparse.csr_matrix, np.ndarray]:
    """Return the pattern of this rank's rows, and the colors of its columns; points are numbered by blocks."""
    counts = []
    for n, h, wraps in zip(domain.shape, domain.halo, domain.periodic):
        divisors = (k for k in range(2 * h + 1, n + 1) if not wraps or n % k == 0)
        counts.append(next(divisors, n))
    indices = [np.arange(cells.start, cells.stop) % k for cells, k in zip(domain.owned, counts)]
    own = np.ravel_multi_index(np.ix_(*indices), counts).reshape(-1)
    # Each halo cell gets the number of the point of which it is a copy, or -1 beyond a physical side.
    numbers = domain.exchange(np.arange(*offsets[rank : rank + 2], dtype=float).reshape(domain.local_shape), -1.0)
    windows = itertools.product(*[range(2 * h + 1) for h in domain.halo])
    columns = [numbers[tuple(slice(d, d + n) for d, n in zip(window, domain.local_shape))] for window in windows]
    columns = np.stack(columns, axis=-1).reshape(len(own), -1).astype(np.int64)
    row, number = np.nonzero(columns >= 0)
    entries = np.ones(len(row)), (row, columns[row, number])
    return scipy.sparse.csr_matrix(entries, (len(own), int(offsets[-1]))), own


def _rows_of(pattern: Any, offsets: np.ndarray, rank: Rank, call: str) -> scipy.sparse.csr_matrix:
    """Return a given pattern as a CSR matrix of this rank's rows, sorted and without repeated entries."""
    count, total = int(offsets[rank + 1] - offsets[rank]), int(offsets[-1])
    if pattern is None:
        pattern = np.ones((count, total))
    elif isinstance(pattern, tuple):
        row, column = pattern
        if np.shape(row) != np.shape(column):
            shapes = f"{np.shape(row)} and {np.shape(column)}"
            raise ValueError(f"{call}: rows and columns of pattern must have the same shape, but have {shapes}.")
        row, column = positions(row, column, np.shape(row), (total, total), offsets, rank, f"{call}: pattern")
        pattern = np.ones(len(row)), (row, column)
    elif pattern.shape[1] != total:
        raise ValueError(f"{call}: pattern must have {total} columns, for all ranks' unknowns, but has {pattern.shape[1]}.")
    rows: Any = scipy.sparse.csr_matrix(pattern, (count, total), copy=True)
    rows.sum_duplicates()
    return rows


def _colors(rows: scipy.sparse.csr_matrix, offsets: np.ndarray, group: Channel, comm: Comm) -> np.ndarray:
    """Return the colors of this rank's columns: columns with a row in common have different colors; collective."""
    start, stop = offsets[group.rank : group.rank + 2].tolist()
    columns, places = np.unique(rows.indices, return_inverse=True)
    narrow = scipy.sparse.csr_matrix((np.ones(len(places)), places, rows.indptr), (len(rows.indptr) - 1, len(columns)))
    pairs: Any = (narrow.T @ narrow).tocoo()
    # The owner of a column gets all columns with which it shares a row.
    owners = np.searchsorted(offsets, columns, side="right")[pairs.row] - 1
    sent = np.stack([columns[pairs.row], columns[pairs.col]], axis=1)[np.argsort(owners, kind="stable")]
    column, other = mpi_alltoall(sent.astype(np.int64), np.bincount(owners, minlength=group.size), comm=comm).T
    own, (numbers, exchange) = stop - start, local_numbers(other, start, stop, comm)
    colors = np.full(own + exchange.n_needed, -1)
    near = scipy.sparse.csr_matrix((np.ones(len(other)), (column - start, numbers)), (own, len(colors)))
    rounds: list[int] = []
    for partners in group.data.allgather([rank for rank, _ in exchange.sources]):
        rounds.append(first_missing({rounds[rank] for rank in partners if rank < len(rounds)}))
    for number in range(max(rounds) + 1):
        if number == rounds[group.rank]:
            colors_of(near, colors, own)
        colors[own:] = exchange.fetch(colors[:own])
    return colors[:own]


def local_numbers(numbers: np.ndarray, start: int, stop: int, comm: Comm) -> tuple[np.ndarray, GhostExchange]:
    """Return local numbers, this rank's from 0 on and then the ghosts', and the exchange of the ghosts; collective."""
    is_own = (numbers >= start) & (numbers < stop)
    ghosts = np.unique(numbers[~is_own])
    local = np.where(is_own, numbers - start, stop - start + np.searchsorted(ghosts, numbers))
    return local, GhostExchange(ghosts, (start, stop), comm)


def checked_product(matvec: Function, field: np.ndarray, params: tuple, failures: DeferredFailures, call: str) -> Array:
    """Return the operator's product with a field; raise on all ranks if it fails or isn't an array like the field."""
    made = failures.attempt("matvec", lambda u: matvec(u, *params), field, again=lambda: np.zeros(field.shape))
    image = getval(made)
    if not isinstance(image, np.ndarray) or image.shape != field.shape or image.dtype.kind not in "fc":
        result = f"{image.shape} {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        text = f"{call}: matvec must return an array of floats of shape {field.shape}, but returned {result}."
        failures.note(TypeError(text))  # ignored if matvec has already raised an exception
    failures.raise_together()
    return made


def _halo_error(images: np.ndarray, places: np.ndarray, halo: tuple[int, ...], call: str) -> Exception:
    is_outside = images != 0.0
    is_outside.flat[places] = False
    point = tuple(int(k) for k in np.argwhere(is_outside)[0, 1:])
    return ValueError(
        f"{call}: at point {point} of a block, matvec depends on points beyond the halo of {halo}, or isn't linear "
        "(it adds a constant). Give the domain a halo as wide as the stencil of the operator."
    )


def kind_of(pattern: object) -> str:
    """Return a description of a pattern that must be the same on all ranks."""
    kinds = {type(None): "None", tuple: "rows and columns"}
    return kinds.get(type(pattern), "a Domain" if isinstance(pattern, Domain) else "a sparse matrix")


def require_pattern(call: str, name: str, shape: tuple[int, ...], pattern: Any, group: Channel) -> None:
    """Raise an error if a pattern doesn't fit operators on blocks like the argument `name`, which has a shape."""
    count = math.prod(shape)
    if isinstance(pattern, Domain):
        if shape != pattern.local_shape:
            raise ValueError(f"{call}: {name} must have the domain's local shape, {pattern.local_shape}, but has {shape}.")
    elif pattern is None and (group.size > 1 or count > _MOST_PROBED):
        raise ValueError(
            f"{call}: without a pattern, the operator must be on one rank and have at most {_MOST_PROBED} unknowns, but "
            f"there are {group.size} rank(s), and {count} unknowns on this one. Pass the Domain, or a sparse matrix with "
            "the nonzero entries, as pattern=."
        )
    elif pattern is not None and not (kind_of(pattern) == "rows and columns" and len(pattern) == 2):
        if not scipy.sparse.issparse(pattern) or pattern.shape[0] != count:
            shown = f"one of shape {pattern.shape}" if scipy.sparse.issparse(pattern) else type(pattern).__name__
            expected = f"a Domain or a sparse matrix with {count} rows, or a pair of arrays (rows, columns)"
            raise TypeError(f"{call}: pattern must be {expected}, but got {shown}.")


def positions(
    rows: Array,
    columns: Array,
    shape: tuple[int, ...],
    of_matrix: tuple[int, int],
    offsets: np.ndarray,
    rank: Rank,
    call: str,
    remedy: str = "",
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row, in this rank's part, and the column of entries with a shape; raise an error if one is invalid."""
    found = []
    for name, given in (("rows", rows), ("columns", columns)):
        indices = np.asarray(given, None if np.size(given) else np.int64)
        if indices.dtype.kind not in "iu":
            raise TypeError(f"{call}: {name} must be an array of integers, but has dtype {indices.dtype}.")
        try:
            found.append(np.broadcast_to(indices, shape).reshape(-1).astype(np.int64))
        except ValueError:
            raise ValueError(
                f"{call}: {name} must broadcast to the shape of values, {shape}, but has shape {indices.shape}."
            ) from None
    (row, column), first, stop = found, int(offsets[rank]), int(offsets[rank + 1])
    outside = (row < 0) | (row >= of_matrix[0]) | (column < 0) | (column >= of_matrix[1])
    foreign = (row < first) | (row >= stop)
    owned = f"rows {first} to {stop - 1}" if stop > first else "no rows"
    pass_it = f"Pass each entry on the rank that owns its row{remedy}"
    for wrong, problem in (
        (outside, f"is outside of the shape {of_matrix}. Rows and columns are numbered from 0"),
        (foreign, f"belongs to another rank: this rank owns {owned}. {pass_it}"),
    ):
        if wrong.any():
            entry = f"an entry of rank {rank}, in row {row[np.argmax(wrong)]} and column {column[np.argmax(wrong)]}"
            raise ValueError(f"{call}: {entry} ({np.count_nonzero(wrong)} of {wrong.size} entries), {problem}.")
    return row - first, column
