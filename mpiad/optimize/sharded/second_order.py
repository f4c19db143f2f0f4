"""Value, gradient and Hessian products at a point, for distributed variables."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import autograd.numpy as anp
from autograd.tracer import Box

from mpiad._typing import Array, Tree
from mpiad.device import to_host
from mpiad.differentiation import SecondOrder, linearize
from mpiad.optimize.objective_evaluation import Evaluation, Program
from mpiad.optimize.packing import LocalPacking
from mpiad.optimize.root_protocol import Totals
from mpiad.optimize.sharded.convergence import NewtonSettings
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like
from mpiad.transport.user_failures import WrongValueError

_SAME = 1e-6  # by how much, relative to the root's, regularizers of other ranks may differ: sums round differently


class Derivatives(NamedTuple):
    """Value, gradient and Hessian products at a point."""

    value: float  # the objective; NaN if a solver inside the function hasn't converged
    gradient: Array  # this rank's part
    # From this rank's part of a direction to its part of the product with the Hessian, or with an approximation.
    multiply: Callable[[Array], Array]


class SecondOrderEvaluation:
    """The stages of evaluations: every rank calls the same method with its part of the variables.

    `evaluation`: of the same program. `products`: number of products so far.
    """

    def __init__(
        self, evaluation: Evaluation, program: Program, packing: LocalPacking, totals: Totals, settings: NewtonSettings
    ):
        self._evaluation, self._program, self._packing, self._agreement = evaluation, program, packing, evaluation.agreement
        self.totals, self.settings, self.products = totals, settings, 0
        if settings.product == "gauss-newton":
            self._derivatives = self._of_residuals
        else:
            given = program.jac is not None or program.hessp is not None
            self._derivatives = self._as_given if given else self._at_once

    def at(self, x: Array) -> Derivatives:
        """Return the derivatives at a point."""
        unknown = Derivatives(math.nan, x * math.nan, lambda v: v * math.nan)
        found = self._evaluation.attempted(lambda: self._derivatives(x), lambda: unknown)

        def multiply(v: Array) -> Array:
            # Counted when requested: one may consist of several of the user's.
            self.products += 1
            return found.multiply(v)

        return found._replace(multiply=multiply)

    def _at_once(self, x: Array) -> Derivatives:
        """Return value, gradient and products from one record."""
        return self._packed(self._evaluation.differentiated(self._evaluation.value_at, self._packing.unpack(x)))

    def _packed(self, found: SecondOrder) -> Derivatives:
        return Derivatives(float(found.value), self._flat(found.gradient), lambda v: self._multiplied(found.product, v))

    def _multiplied(self, product: Callable[[Tree], Tree], v: Array) -> Array:
        nest = self._packing.unpack(v)
        return self._flat(self._agreement.run(lambda: product(nest)))

    def _flat(self, gradient: Tree) -> Array:
        return self._packing.pack_gradient(gradient).copy()  # otherwise it is only valid until the next one

    def _as_given(self, x: Array) -> Derivatives:
        """Return the results of the user's functions, and products by differentiation if no function is given for these."""
        value, gradient = self._evaluation.both(x)
        kept: list[Callable] = []

        def multiply(v: Array) -> Array:
            if not kept:
                # At the first product only: a point that the line search rejects needs none.
                kept.append(self._evaluation.hessian(x))
            return kept[0](v).copy()

        return Derivatives(value, gradient.copy(), multiply)  # type: ignore[union-attr]

    def _of_residuals(self, x: Array) -> Derivatives:
        """Return half the sum of all ranks' squared residuals and the regularizer's value; products of JᵀJ and its own."""
        nest = self._packing.unpack(x)
        kept = self._agreement.run(lambda: linearize(lambda x: self._agreement.run(lambda: self._residuals(x)))(nest))
        # Jᵀr from the record of r that the products also use.
        gradient = self._flat(self._agreement.run(lambda: kept.vjp(kept.value)))
        half, own, regularizer = 0.5 * float(to_host(anp.sum(kept.value**2))), math.nan, self.settings.regularizer

        def multiply(v: Array) -> Array:
            return self._multiplied(lambda u: kept.vjp(kept.jvp(u)), v)

        if regularizer is None:
            (value,) = self.totals.of([half], [], [])
            return Derivatives(value, gradient, multiply)

        def noted(x: Tree) -> Any:
            nonlocal own
            found = regularizer(x)
            own = to_host(stop_gradient(found))
            return found

        other = self._packed(self._evaluation.differentiated(noted, self._packing.unpack(x)))
        gap = abs(float(own) - other.value) / max(abs(other.value), sys.float_info.min)
        # False if a value isn't finite, as at trial points.
        differs = gap > _SAME and self._program.objective == "root"
        value, differs = self.totals.of([half], [float(differs)], [])
        if differs:
            raise ValueError(
                "minimize: option regularizer must return the same number on all ranks with objective='root', but the "
                f"root's is {other.value:.6g} and another rank's differs. Add up what the ranks hold (Domain.sum, "
                "mpiad.mpi_allreduce), or pass objective='sum'."
            )
        return Derivatives(value + other.value, gradient + other.gradient, lambda v: multiply(v) + other.multiply(v))

    def _residuals(self, x: Tree) -> Array:
        out = self._program.fun(x, *self._program.args)
        if out is None:
            return anp.zeros(0)
        array = out if type(out) in Box.types or hasattr(out, "dtype") else anp.array(out)
        if spec_like(array).dtype.kind != "f":
            raise WrongValueError(
                f"minimize: with product='gauss-newton' fun must return real residuals or None, but got {out!r:.60}."
            )
        if array.ndim == 0:
            raise WrongValueError(
                "minimize: with product='gauss-newton' fun must return an array of this rank's residuals, whose squares "
                f"are added up, but got the number {out!r:.60}. Return the residuals before their squares and sums are "
                "taken; for an objective that is a number take product='full'."
            )
        self._evaluation.at_start.note("residuals", array)
        return array

    def on_vectors(self, given: Callable[[Tree], Tree] | None, name: str) -> Callable[[Array], Array] | None:
        """Return an operator of the user, of the form of x, on this rank's vectors; None if none is given."""
        if given is None:
            return None

        def packed(x: Tree) -> Array:
            try:
                return self._packing.pack(given(x))
            except TypeError as error:
                raise WrongValueError(f"{error} The option {name} returned it.") from None

        def apply(vector: Array) -> Array:
            nest = self._packing.unpack(vector)
            return self._agreement.run(lambda: packed(nest))

        return apply
