"""Value, gradient and Hessian products at a point, for distributed variables."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box

from mpiad._typing import Array, Function, Scalar, Tree
from mpiad.device import assembly, to_host
from mpiad.differentiation import linearize
from mpiad.optimize.least_squares import LOSSES
from mpiad.optimize.objective_evaluation import Evaluation, Program
from mpiad.optimize.sharded.convergence import NewtonSettings
from mpiad.optimize.totals import Totals
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like
from mpiad.transport.devices.device_arrays import arrays_of
from mpiad.transport.exits.user_failures import WrongValueError

_TOLERANCE = 1e-6  # tolerance of the relative difference between the ranks' values of the regularizer


class Derivatives(NamedTuple):
    """Value, gradient and Hessian products at a point."""

    value: float  # the objective; NaN if a solver inside the function hasn't converged
    gradient: Array  # this rank's part
    multiply: Callable[[Array], Array]  # this rank's part of the product with the Hessian, or an approximation


class SecondOrderEvaluation:
    """Evaluation of second-order derivatives; every rank calls the same method with its part of the variables."""

    def __init__(self, evaluation: Evaluation, program: Program, totals: Totals, settings: NewtonSettings):
        self._evaluation, self._packing, self._agreement = evaluation, evaluation.packing, evaluation.agreement
        self._program, self.totals, self.settings = program, totals, settings
        self.products = 0  # number of Hessian products
        if settings.product == "gauss-newton":
            self._derivatives = self._gauss_newton
        else:
            given = program.jac is not None or program.hessp is not None
            by_differentiation = functools.partial(self._differentiated, evaluation.value_at)
            self._derivatives = self._from_user if given else by_differentiation

    def at(self, x: Array) -> Derivatives:
        """Return the derivatives at a point."""
        not_finite = Derivatives(math.nan, x * math.nan, lambda v: v * math.nan)
        found = self._evaluation.attempted(lambda: self._derivatives(x), lambda: not_finite)

        def multiply(v: Array) -> Array:
            self.products += 1
            return found.multiply(v)

        return found._replace(multiply=multiply)

    def _differentiated(self, fun: Function, x: Array) -> Derivatives:
        """Return value, gradient and products from one trace of a function."""
        found = self._evaluation.differentiated(fun, self._packing.unpack(x))
        gradient = self._packing.pack_gradient(found.gradient)
        return Derivatives(float(found.value), gradient, functools.partial(self._multiplied, found.product))

    def _multiplied(self, product: Callable[[Tree], Tree], v: Array) -> Array:
        return self._packing.pack_gradient(self._agreement.run(lambda: product(self._packing.unpack(v))))

    def _from_user(self, x: Array) -> Derivatives:
        """Return the results of the user's functions; without `hessp`, products are computed by differentiation."""
        value, gradient = self._evaluation.both(x)
        # The Hessian is built at the first product, since it isn't needed at points that the line search rejects.
        hessian = functools.cache(lambda: self._evaluation.hessian(x))
        return Derivatives(value, gradient, lambda v: hessian()(v))  # type: ignore[arg-type]

    def _gauss_newton(self, x: Array) -> Derivatives:
        """Return the derivatives of misfit plus regularizer, with the products of the Gauss-Newton approximation."""
        tree = self._packing.unpack(x)
        stored = self._agreement.run(lambda: linearize(lambda x: self._agreement.run(lambda: self._residuals(x)))(tree))
        half, cotangent, weigh = self._agreement.run(lambda: self._misfit(stored.value))
        gradient = self._packing.pack_gradient(self._agreement.run(lambda: stored.vjp(cotangent)))
        own_value, regularizer = math.nan, self.settings.regularizer

        def multiply(v: Array) -> Array:
            return self._multiplied(lambda u: stored.vjp(weigh(stored.jvp(u))), v)

        if regularizer is None:
            value = self._checked(self.totals.reduce([half], [], [])[0])
            return Derivatives(value, gradient, multiply)

        def regularizer_with_value(x: Tree) -> Scalar:
            nonlocal own_value
            found = regularizer(x)
            own_value = to_host(stop_gradient(found))
            return found

        other = self._differentiated(regularizer_with_value, x)
        gap = abs(float(own_value) - other.value) / max(abs(other.value), sys.float_info.min)
        # `differs` is False if the root's value isn't finite or this rank's is NaN, both possible at trial points.
        differs = gap > _TOLERANCE and self._program.objective == "root"
        value, differs = self.totals.reduce([half], [float(differs)], [])
        self._checked(value)
        if differs:
            raise ValueError(
                "minimize: option regularizer must return the same number on all ranks with objective='root', but the "
                f"root's is {other.value:.6g} and another rank's differs. Add the ranks' parts (Domain.sum, "
                "mpiad.mpi_allreduce), or pass objective='sum'."
            )
        return Derivatives(value + other.value, gradient + other.gradient, lambda v: multiply(v) + other.multiply(v))

    def _misfit(self, residuals: Array) -> tuple[float, Array, Callable[[Array], Array]]:
        """Return this rank's part of the misfit, ½ r · Γ⁻¹ r or a robust loss, its gradient, and Hessian products."""
        loss, scale = self.settings.loss, self.settings.f_scale
        if loss != "linear":
            # The weights ρ' of iteratively reweighted least squares are positive. The exact ones, ρ' + 2 ρ'' z, vanish or
            # are negative for outliers, and the matrix would be singular if most residuals are outliers at x0.
            flat, arrays = to_host(residuals).reshape(-1), arrays_of(residuals)
            with np.errstate(all="ignore"):  # residuals at a trial point may not be finite
                rho, weights, _ = LOSSES[loss]((flat / scale) ** 2)
            weights = weights.reshape(np.shape(residuals))
            weights = weights if arrays is None else arrays.to_device(weights)
            return 0.5 * scale**2 * float(np.sum(rho)), weights * residuals, lambda v: weights * v
        weigh = self.settings.noise_precision
        cotangent = residuals if weigh is None else weigh(residuals)
        if np.shape(cotangent) != np.shape(residuals):
            raise WrongValueError(
                f"minimize: option noise_precision must return the residuals' shape {np.shape(residuals)}, but got "
                f"{np.shape(cotangent)}."
            )
        return 0.5 * float(to_host(anp.sum(residuals * cotangent))), cotangent, weigh or (lambda v: v)

    def _checked(self, value: float) -> float:
        if value < 0.0:
            raise ValueError(
                "minimize: option noise_precision must be symmetric and positive definite, but r · Γ⁻¹ r = "
                f"{2.0 * value:.3e} for the residuals r of all ranks."
            )
        return value

    def _residuals(self, x: Tree) -> Array:
        out = self._program.fun(x, *self._program.args)
        if out is None:
            return anp.zeros(0)
        array = out if type(out) in Box.types or hasattr(out, "dtype") else assembly.array(out)
        if spec_like(array).dtype.kind != "f":
            raise WrongValueError(
                f"minimize: with product='gauss-newton' fun must return real residuals or None, but got {out!r:.60}."
            )
        if array.ndim == 0:
            raise WrongValueError(
                "minimize: with product='gauss-newton' fun must return an array of this rank's residuals, whose squares "
                f"are summed, but got the number {out!r:.60}. Return the residuals themselves; for an objective that is a "
                "number use product='full'."
            )
        self._evaluation.at_start.note("residuals", array)
        return array

    def on_vectors(self, operator: Callable[[Tree], Tree] | None, name: str) -> Callable[[Array], Array] | None:
        """Return an operator on this rank's vectors, given the user's operator on pytrees like x."""
        if operator is None:
            return None

        def applied(vector: Array) -> Array:
            try:
                return self._packing.pack(operator(self._packing.unpack(vector)))
            except TypeError as error:
                raise WrongValueError(f"{error} The option {name} returned or raised this.") from None

        return lambda vector: self._agreement.run(lambda: applied(vector))
