"""Operations of a level as data: weighted sums of shifted rows, with weights that all right-hand sides share.

Smoothing, restriction, interpolation and the operator's product are all of this form, so a fast implementation of it makes
the whole cycle fast: `Sums` uses NumPy or the device's module, `CompiledSums` one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad._typing import LocalArray
from mpiad.linalg.multigrid.colour_layout import Layout
from mpiad.transport.buffers import empty_beside, zeros_beside

Step: TypeAlias = Callable[[LocalArray], None]
"""``step(f)`` computes sums for the right-hand sides f, of shape (systems, colours, size) and contiguous."""


class Term(NamedTuple):
    """A row of the state times one of the coefficients, both shifted by numbers of entries; or without a coefficient."""

    coefficient: int | None
    row: int
    shift: int = 0
    coefficient_shift: int = 0


class WeightedSum(NamedTuple):
    """Inner entries of a row: ``scale * (base - diagonal * row + sum(terms))``, or minus that."""

    out: int  # the row of the state that is computed
    terms: Sequence[Term] = ()  # none of them reads `out`
    base: int | None = None  # a row of the state, or of the right-hand side
    of_right: bool = True  # whether the base is a row of the right-hand side
    diagonal: Term | None = None  # the subtracted term
    scale: int | None = None  # a row of the coefficients
    negative: bool = False  # only for sums with a diagonal, and without base or scale


class Sums:
    """Computes sums, one operation after the other, on the device of the coefficients.

    `coefficients`: shape (n, size). `rows`: number of rows of the state. `state`, of shape (systems, rows, size): zeros at
    first, and reused from cycle to cycle: new memory costs more than the arithmetic.
    """

    def __init__(self, layout: Layout, coefficients: LocalArray, rows: int):
        self._layout, self._coefficients, self._rows = layout, coefficients, rows
        self._memory = zeros_beside(coefficients, (1, rows, layout.size))
        self.allocate(1)

    def step(self, sums: Sequence[WeightedSum]) -> Step:
        """Return a function that computes sums, one after the other."""
        bound, state = list[Step](), None

        def run(f: LocalArray) -> None:
            nonlocal bound, state
            if state is not self.state:
                # Slices are made once: on small levels making them takes longer than using them.
                bound, state = [self._bind(one) for one in sums], self.state
            for compute in bound:
                compute(f)

        return run

    def allocate(self, systems: int) -> None:
        """Allocate the states of `systems` right-hand sides."""
        if systems > len(self._memory):
            self._memory = zeros_beside(self._coefficients, (systems, self._rows, self._layout.size))
        self.state, inner = self._memory[:systems], self._layout.inner
        self._part = empty_beside(self._coefficients, (systems, inner.stop - inner.start))

    def _at(self, shift: int) -> slice:
        inner = self._layout.inner
        return slice(inner.start + shift, inner.stop + shift)

    def _factors(self, term: Term) -> tuple[Any, LocalArray]:
        weights = (
            None if term.coefficient is None else self._coefficients[term.coefficient, self._at(term.coefficient_shift)]
        )
        return weights, self.state[:, term.row, self._at(term.shift)]

    def _bind(self, one: WeightedSum) -> Step:
        state, inner, part = self.state, self._layout.inner, self._part
        out, terms = state[:, one.out, inner], [self._factors(term) for term in one.terms]
        diagonal = None if one.diagonal is None else self._factors(one.diagonal)
        scale = None if one.scale is None else self._coefficients[one.scale, inner]
        gather = np.subtract if one.negative else np.add

        def compute(f: LocalArray) -> None:
            base = None if one.base is None else (f if one.of_right else state)[:, one.base, inner]
            if base is not None and scale is not None and not terms:
                np.multiply(base, scale, out=out)
                return
            if diagonal is not None:
                np.multiply(*diagonal, out=out)
                if base is not None:
                    np.subtract(base, out, out=out)
            elif one.of_right or one.base != one.out:
                out[...] = 0 if base is None else base
            for weights, values in terms:
                if weights is not None:
                    values = np.multiply(weights, values, out=part)
                gather(out, values, out=out)
            if scale is not None:
                np.multiply(out, scale, out=out)

        return compute
