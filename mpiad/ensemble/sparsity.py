"""The sparsity pattern of ∂f/∂u: from the program of f, or given by the user as `ODEProblem.jac_sparsity`.

In a program each value depends on the states on which its arguments depend. If f can't be traced, the given pattern is
checked. NaN in the components of a group of columns (see `coloring`) must not reach other rows than those of the pattern.
An entry outside of the pattern through which NaN passes is missing if a tangent at the state, or near it, isn't zero there.
In regular intervals the product of the Jacobian with a random vector is compared with the tangent along this vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.compiling.derivatives import PARTIALS
from mpiad.compiling.program import Program
from mpiad.differentiation.coloring import colors_of
from mpiad.ensemble.column_lu import Places, sums_by_row
from mpiad.ensemble.linearization import Field, jacobian_by_tangents

# Operations with a derivative with respect to some of their arguments only.
_DEPENDS = {"where": slice(1, None), "copysign": slice(0, 1)}


def pattern_of(program: Program) -> Places:
    """Return the entries of ∂f/∂u that aren't structurally zero, sorted by row."""
    d, masks, zeros = program.groups["state"], list[int](), set[int]()
    for number, (operation, arguments, value) in enumerate(program.instructions):
        # The states on which a value depends, as bits.
        mask = 1 << value[1] if operation == "input" and value[0] == "state" else 0  # type: ignore[index, operator]
        if operation == "constant" and value == 0:
            zeros.add(number)
        if operation in PARTIALS and not (operation == "multiply" and zeros.intersection(arguments)):
            for argument in arguments[_DEPENDS.get(operation, slice(None))]:
                mask |= masks[argument]
        masks.append(mask)
    length = -(-d // 8)
    rows = [np.frombuffer(masks[output].to_bytes(length, "little"), np.uint8) for output in program.outputs]
    columns = [np.flatnonzero(np.unpackbits(row, bitorder="little")) for row in rows]
    return Places(np.repeat(np.arange(d), list(map(len, columns))), np.concatenate(columns))


def given_pattern(sparsity: Any, d: int) -> Places:
    """Return the nonzero entries of a user's pattern, sorted by row; raise a TypeError or a ValueError if it is invalid."""
    if isbox(sparsity) or not (scipy.sparse.issparse(sparsity) or isinstance(sparsity, (np.ndarray, list, tuple))):
        kind = "a traced array" if isbox(sparsity) else type(sparsity).__name__
        raise TypeError(f"solve: jac_sparsity must be an array or a SciPy sparse matrix, but is {kind}.")
    pattern: Any = scipy.sparse.coo_array(sparsity)
    shape = pattern.shape
    if shape != (d, d):
        raise ValueError(f"solve: jac_sparsity must have shape {(d, d)}, as u0 has {d} components, but has {shape}.")
    # In CSR format, duplicates are added.
    return Places(*(indices.astype(int) for indices in pattern.tocsr().sorted_indices().nonzero()))


def groups_of(places: Places, d: int) -> Array:
    """Return masks of groups of columns, shape (groups, d); the columns of a group have no row in common."""
    pattern = scipy.sparse.csc_array((np.ones(len(places.rows)), places), (d, d))
    near = (pattern.T @ pattern).tocsr()
    colors = colors_of(near, np.full(d, -1), d)
    return colors == np.arange(colors.max(initial=-1) + 1)[:, None]


def refuse_missing(places: Places, entries: Places, d: int) -> None:
    """Raise a ValueError if the user's pattern, `places`, lacks one of the `entries`."""
    missing = np.setdiff1d(entries.rows * d + entries.columns, places.rows * d + places.columns)
    if missing.size:
        row, column = divmod(int(missing[0]), d)
        raise ValueError(
            f"solve: jac_sparsity has no entry in row {row} and column {column}, but component {row} of f depends on "
            f"component {column} of u ({missing.size} entries are missing). Add the entry."
        )


# A product is compared at each Jacobian whose number is a multiple of this one. The tolerance is in units of the precision.
_INTERVAL, _TOLERANCE = 20, 1e5
_MOVED = 0.01  # relative size of the perturbation of states


class PatternCheck:
    """The checks of a user's pattern for an f that can't be traced; errors as in `refuse_missing`."""

    def __init__(self, field: Field, places: Places, groups: Array):
        self._field, self._places, self._groups, self._count = field, places, groups, 0

    def by_nan(self, u: Array, leaves: Sequence[Any], t: Array) -> None:
        """Check with NaN in the columns of each group."""
        entries = scipy.sparse.csr_array((np.ones(len(self._places.rows)), self._places), (len(u), len(u)))
        finite, allowed = np.isfinite(self._field.array(u, leaves, t)), entries @ self._groups.T > 0
        for k, group in enumerate(self._groups):
            value = self._field.array(np.where(group[:, None], np.nan, u), leaves, t)
            if (np.isnan(value) & finite & ~allowed[:, k, None]).any():
                factors = np.cos(np.arange(u.size)).reshape(u.shape).astype(u.dtype)
                for state in (u, u + _MOVED * (1 + np.abs(u)) * factors):
                    self._refuse_nonzero(state, leaves, t)
                return  # the products of NaN with zeros are NaN, too

    def by_product(self, u: Array, leaves: Sequence[Any], t: Array, entries: Array) -> None:
        """Check the `entries` of a Jacobian, shape (m, n), by the tangent along a random vector, in regular intervals."""
        self._count += 1
        if (self._count - 1) % _INTERVAL:
            return
        vector = np.random.default_rng(self._count).uniform(0.5, 1.5, len(u)).astype(u.dtype)
        _, (along,), _ = jacobian_by_tangents(self._field, u, leaves, t, vector[None])
        terms = entries * vector[self._places.columns, None]
        product, size = (sums_by_row(x, self._places.rows, len(u)) for x in (terms, np.abs(terms)))
        if (np.abs(along - product) > _TOLERANCE * np.finfo(u.dtype).eps * (size + np.abs(along))).any():
            self._refuse_nonzero(u, leaves, t)

    def _refuse_nonzero(self, u: Array, leaves: Sequence[Any], t: Array) -> None:
        _, columns, _ = jacobian_by_tangents(self._field, u, leaves, t)
        nonzero = np.nonzero(np.array([(np.nan_to_num(column) != 0).any(axis=1) for column in columns]).T)
        refuse_missing(self._places, Places(*nonzero), len(u))
