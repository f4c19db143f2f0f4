"""The objective E_q[loss] + w·KL(q‖prior): the loss at draws, distributed over the ranks, and the gradient for the root.

With variational parameters φ and draws θ = T(ε; φ), the pathwise gradient is the mean of (∂loss/∂θ)ᵀ ∂T/∂φ. The
score-function gradient is the mean of (loss_s - b_s) ∂ log q(θ_s; φ)/∂φ over draws s; the baseline b_s is the mean loss of
the other draws (Kool et al., 2019).

KL is computed in closed form, or as the mean of log q - log p at the draws. The estimator "path" omits the explicit
dependence of log q on φ, whose gradient has mean zero. With "path" the noise of the gradient vanishes as q approaches the
exact posterior (Roeder, Wu and Duvenaud, 2017).
"""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

import autograd.numpy as np
import numpy

from mpiad._typing import Array, Comm, Function, Rank, Tree
from mpiad.device import to_device, to_host
from mpiad.differentiation.gradient import cotangents_of_variables, seeds_of_term
from mpiad.differentiation.objective import problem_with
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.errors import ConvergenceError
from mpiad.parallel.parameters import variables_of
from mpiad.primitives import mpi_gather, mpi_scatter, stop_gradient
from mpiad.primitives.operation import suspended
from mpiad.pytrees import flatten, is_variable, leaf_on_device
from mpiad.transport import channel
from mpiad.transport.core.agreement import FAILURES
from mpiad.transport.core.tracing import restoring_state
from mpiad.vi.posterior import FullRankGaussian, MeanFieldGaussian, Posterior
from mpiad.vi.prior import Density, Prior, log_prior

_MIN_EQUAL = 10  # minimum number of equal values that show that the loss is constant
_SUCCEEDED, _NOT_CONVERGED, _NOT_FINITE, _RAISED = 0.0, 1.0, 2.0, 3.0


class Evaluations(NamedTuple):
    """The results of the model at a number of draws, such as those of one epoch."""

    values: Array  # shape (S,)
    gradients: Array  # shape (S, dim)
    valid: Array  # bool, shape (S,); False for draws that failed
    not_converged: int  # number of draws at which a solver in the model didn't converge
    not_finite: int  # number of draws at which the value or the gradient wasn't finite
    raised: int  # number of draws at which the model raised another exception

    @property
    def problem(self) -> str | None:
        """Return why the run must end, None if there are valid draws and no exceptions."""
        if self.raised:
            return f"the model raised at {self.raised} of {len(self.valid)} draws"
        if self.valid.any():
            return None
        counts = f"a solver didn't converge for {self.not_converged}, and the model returned NaN or infinity for"
        return f"the model failed for all {len(self.valid)} draws: {counts} {self.not_finite}"


class Model:
    """The user's loss per draw; `device`: of the draws, by default that of `data`."""

    def __init__(self, loss: Function, data: Tree, differentiated: bool, device: int | None = None):
        self._loss, self._data, self._differentiated, self.device = loss, data, differentiated, device
        self._like = None if device is not None else leaf_on_device(data)
        # Whether the loss raised an exception that ends the run, and the text on it, or on the first dropped draw.
        self.raised, self.trace = False, ""

    def to_device(self, *trees: Tree) -> tuple[Tree, ...]:
        """Copy pytrees from the host to the model's device; return them unchanged if it has none."""
        if self.device is None and self._like is None:
            return trees
        return tuple(to_device(tree, self.device, like=self._like) for tree in trees)

    def row(self, theta: Array) -> Array:
        """Return value, status and gradient at one draw, as one array."""
        row = numpy.zeros(2 + len(theta))
        if not numpy.isfinite(theta).all():  # then the root ends the run
            row[1] = _NOT_FINITE
            return row
        try:
            with restoring_state(), suspended():
                # A copy, because the loss might overwrite the draws, which the update needs.
                row[0], row[2:] = self._evaluated(numpy.array(theta))
        except FAILURES as error:  # all ranks raise together, or the draw is discarded
            fatal = not isinstance(error, ConvergenceError)
            if not self.trace or fatal > self.raised:
                self.raised, self.trace = fatal, "".join(traceback.format_exception(error))
            row[1] = _RAISED if fatal else _NOT_CONVERGED
            return row
        if not numpy.isfinite(row).all():
            found = f"gradient is {row[2:].tolist()!s:.200}" if numpy.isfinite(row[0]) else f"value is {row[0]}"
            self.trace = self.trace or f"the loss's {found} at the draw theta = {theta.tolist()!s:.200}\n"
            row[:] = 0.0
            row[1] = _NOT_FINITE
        return row

    def _evaluated(self, theta: Array) -> tuple[float, Array | float]:
        (theta,) = self.to_device(theta)
        if not self._differentiated:
            return _number(self._loss(theta, self._data)), 0.0
        variables = Variables([theta], [0], lambda leaves: leaves[0])
        traced = trace_backwards(lambda x: self._loss(x, self._data), variables)
        value = _number(traced.build(traced.values))
        (gradient,) = cotangents_of_variables(traced, seeds_of_term(traced, 1.0), variables)
        return value, to_host(gradient)

    def evenly(self, theta: Array | None, dim: int, root: Rank, comm: Comm) -> Array:
        """Evaluate equal shares of the root's draws on all ranks, including the root; return all rows, on the root only."""
        local_draws = mpi_scatter(theta, root, axis=0, comm=comm)
        with channel(comm, "VI.run").evaluating("a draw of VI"):
            found = [self.row(point) for point in local_draws]
        rows = numpy.array(found).reshape(len(local_draws), 2 + dim)
        return mpi_gather(rows, root, axis=0, comm=comm)


def _number(value: object) -> float:
    problem = problem_with(value, 1.0, "VI", "loss must return one real number")
    if problem is not None:
        raise problem.kind(problem.text)
    return float(numpy.reshape(to_host(value), ()))


def evaluations_of(rows: Array) -> Evaluations:
    """Return the evaluations, given the rows that `Model.row` returned for all draws."""
    status = rows[:, 1]
    counts = [int((status == failure).sum()) for failure in (_NOT_CONVERGED, _NOT_FINITE, _RAISED)]
    return Evaluations(rows[:, 0], rows[:, 2:], status == _SUCCEEDED, *counts)


def has_closed_form(posterior: Posterior, prior: Density) -> bool:
    """Return whether KL(q‖prior) has a closed form, that is, whether both distributions are normal."""
    # Types are compared, not attributes, which may have another meaning in a user's class.
    is_gaussian = isinstance(posterior, (MeanFieldGaussian, FullRankGaussian))
    return is_gaussian and isinstance(prior, Prior) and prior.normal is not None


def closed_form(posterior: Any, params: Tree, prior: Any) -> Array:
    """Return KL(q‖prior) of two normal distributions."""
    mean, covariance = posterior.moments(params)
    center, inverse = prior.inverse.like(mean)
    # KL = ½ (tr(Σₚ⁻¹ Σ_q) + differenceᵀ Σₚ⁻¹ difference - dim + log det Σₚ - log det Σ_q).
    difference = mean - center
    # Both matrices are symmetric, and exp(log_sd) is the diagonal of the Cholesky factor of Σ_q.
    total = np.sum(inverse * covariance) + np.dot(difference, np.dot(inverse, difference)) - len(center)
    return 0.5 * total - np.sum(params["log_sd"]) - numpy.sum(numpy.log(prior.terms.on(None)[2]))


class Objective(NamedTuple):
    """The minimized objective and the estimator of its gradient."""

    posterior: Posterior
    prior: Density
    w: float
    gradient: str  # {"pathwise", "score"}
    divergence: str  # {"closed", "draws", "path"}

    def require_dependence(self, evaluations: Evaluations) -> None:
        """Raise a ValueError if the loss doesn't depend on its parameters, as far as the draws show."""
        values, gradients = evaluations.values[evaluations.valid], evaluations.gradients[evaluations.valid]
        has_gradient, is_equal = self.gradient == "pathwise", numpy.ptp(values) == 0
        # The gradient of `maximum`, for example, and a loss with few different values may be zero and equal at a few draws.
        is_constant = len(values) >= _MIN_EQUAL if is_equal else has_gradient
        sign = "its gradient is zero" if has_gradient else f"it is {values[0]:g}"
        if is_constant and not (has_gradient and gradients.any()):
            raise ValueError(
                f"VI: the loss doesn't depend on theta: {sign} at all {len(values)} draws of epoch 0. Compute it from "
                "theta by differentiable functions of autograd.numpy, or use gradient='score' for other models."
            )

    def value_and_gradient(self, params: Tree, noise: Array, evaluations: Evaluations) -> tuple[float, float, Tree]:
        """Return the mean loss, KL without its weight, and the gradient; only `noise` may be on a device."""
        variables, valid = variables_of(params, "VI.run", required=False), evaluations.valid
        noise = noise if valid.all() else noise[numpy.flatnonzero(valid)]
        divergences: list[float] = []

        def surrogate(params: Tree) -> Array:
            """Return a number whose gradient is the estimator; append the value of KL to `divergences`."""
            theta, log_q = self.posterior.draw(params, noise)
            divergence = self._divergence(params, theta, log_q)
            divergences.append(float(to_host(stop_gradient(divergence))))
            model = self._model_term(params, theta, evaluations)
            return model + self.w * divergence if self.w else model

        traced = trace_backwards(surrogate, variables)
        gradients = cotangents_of_variables(traced, seeds_of_term(traced, 1.0), variables)
        return float(np.mean(evaluations.values[valid])), divergences[0], variables.filled(gradients, lambda leaf: None)

    def _model_term(self, params: Tree, theta: Array, evaluations: Evaluations) -> Array:
        count, constant = len(theta), stop_gradient(theta)
        if self.gradient == "pathwise":
            # The model's gradients are constants, so this is linear in θ, and its gradient is that of the mean loss.
            return np.sum(to_device_of(evaluations.gradients[evaluations.valid], constant) * theta) / count
        values = evaluations.values[evaluations.valid]
        others = (np.sum(values) - values) / (count - 1) if count > 1 else 0.0
        # The score is the derivative of log q with respect to φ at a constant θ.
        return np.mean(to_device_of(values - others, constant) * self.posterior.log_prob(params, constant))

    def _divergence(self, params: Tree, theta: Array, log_q: Array) -> Array:
        if self.divergence == "closed":
            return closed_form(self.posterior, params, self.prior)
        if self.divergence == "path":
            # With constant params, only the dependence of log q on φ through θ remains.
            log_q = self.posterior.log_prob(stop_gradient(params), theta)
        log_p = log_prior(self.prior, theta)
        known = to_host(stop_gradient(log_p)) if self.w else numpy.zeros(0)
        if outside := int(numpy.isneginf(known).sum()):
            raise FloatingPointError(
                f"VI: the prior's density is zero at {outside} of {len(theta)} draws, so that KL(q‖prior) is infinite. "
                "Use a posterior within the prior's support, or a prior without bounds (for bounded parameters, draw "
                "unbounded ones and transform them in the loss)."
            )
        if not_finite := int((~numpy.isfinite(known)).sum()):
            raise FloatingPointError(
                f"VI: the prior's log density is NaN or infinite at {not_finite} of {len(theta)} draws, which are finite. "
                "Correct log_prob of the prior."
            )
        return np.mean(log_q - log_p)


def parameter_on_device(params: Tree) -> Array | None:
    """Return a variational parameter that is on a device, None if all are on the host."""
    return leaf_on_device([leaf for leaf in flatten(params)[0] if is_variable(leaf)])


def to_device_of(x: Array, params: Tree) -> Array:
    """Copy a host array to the device of `params` (variational parameters or draws), if they are on one."""
    like = parameter_on_device(params)
    return x if like is None else to_device(x, like=like)
