"""The arguments of `fit`, looked at before anything is computed."""

from __future__ import annotations

import math
from numbers import Integral
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.ensemble.gpu import EnsembleGPU
from mpiad.ensemble.levenberg_marquardt import Stopping
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, digests_of
from mpiad.ensemble.solve_options import SolveOptions, checked_options
from mpiad.pytrees import flatten
from mpiad.transport import Channel
from mpiad.transport.agreement import alike_on_all
from mpiad.transport.device_arrays import is_device_array

# Those that an error shows whole where ranks differ.
_SHORT = (
    "alg", "ensemblealg", "ftol", "xtol", "gtol", "x_scale", "max_nfev", "rtol", "dt", "dtmax", "max_steps", "batch_size",
    "compile",
)  # fmt: skip


# The arguments of `fit`, by its names: one object, which all parts of a fit get.
FitArguments: TypeAlias = SimpleNamespace


class FitPlan(NamedTuple):
    """The arguments, looked at, with a row for each trajectory where they may differ."""

    options: SolveOptions
    start: Array
    lower: Array
    upper: Array
    scale: Array | None
    stopping: Stopping


def planned_together(used: Channel, given: FitArguments) -> FitPlan:
    """Return `planned` of the arguments, which must be the same on all ranks; what one finds wrong all raise."""

    def described(plan: FitPlan) -> list[Any]:
        said = ", ".join(f"{name}={getattr(given, name)}" for name in _SHORT)
        saveat = [] if plan.options.saveat is None else [np.asarray(plan.options.saveat, float)]
        shown = f"p0={given.p0!r:.60}, bounds={given.bounds!r:.60}, saveat={given.saveat!r:.60}, atol={given.atol!r:.60}"
        arrays = plan.start, plan.lower, plan.upper, np.asarray(plan.options.atol, float), *saveat
        return [f"{shown}, {said}", said, *arrays, digests_of(plan.options.problem)]

    return alike_on_all(used, lambda: planned(given), described, "fit")


def planned(given: FitArguments) -> FitPlan:
    """Return the arguments in the form that the fits need.

    A NotImplementedError where one is traced, or lives on a device; a TypeError or ValueError where one can't be used.
    """
    start = _start(given.p0)
    ensemble = EnsembleProblem(given.ensemble) if isinstance(given.ensemble, ODEProblem) else given.ensemble
    solve_like = {name: getattr(given, name) for name in SolveOptions._fields if hasattr(given, name)}
    options = checked_options(SolveOptions(problem=ensemble, trajectories=len(start), gradient="tangent", **solve_like))
    _check_functions(given, ensemble)
    if isinstance(options.backend, EnsembleGPU):
        raise NotImplementedError("fit: EnsembleGPU can't fit; take EnsembleVectorized() or EnsembleThreads().")
    for leaf in flatten(given.data)[0]:
        _check_plain("data", leaf)
        if leaf is not None and np.shape(leaf)[:1] != (len(start),):
            raise ValueError(
                f"fit: data must have one row for each trajectory, {len(start)} as p0, but has shape {np.shape(leaf)}. "
                "What all share the residuals can close over."
            )
    lower, upper = _bounds(given.bounds, start)
    scale = None
    if not isinstance(given.x_scale, str) or given.x_scale != "jac":
        scale = _by_trajectory("x_scale", given.x_scale, start)
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError(f"fit: x_scale must be 'jac' or numbers above zero, but got {given.x_scale!r:.60}.")
    for name in ("ftol", "xtol", "gtol"):
        value = getattr(given, name)
        if not isinstance(value, (int, float, np.number)) or not 0 <= value < math.inf:
            raise ValueError(f"fit: {name} must be a number, zero or more, but got {value!r}.")
    # As SciPy's least_squares.
    most = 100 * start.shape[1] if given.max_nfev is None else given.max_nfev
    if not isinstance(most, Integral) or most < 1:
        raise ValueError(f"fit: max_nfev must be an integer above zero, but got {most!r}.")
    stopping = Stopping(float(given.ftol), float(given.xtol), float(given.gtol), int(most))
    return FitPlan(options, start, lower, upper, scale, stopping)


def _check_functions(given: FitArguments, ensemble: EnsembleProblem) -> None:
    if not callable(given.residuals):
        raise TypeError(f"fit: residuals must be a function residuals(u, p, data), but got {given.residuals!r:.60}.")
    if given.prob_generator is not None and not callable(given.prob_generator):
        raise TypeError(f"fit: prob_generator must be a function of a problem and x, but got {given.prob_generator!r:.60}.")
    if ensemble.output_func is not None or ensemble.reduction is not None:
        raise ValueError(
            "fit: the ensemble has an output_func or a reduction, which a fit has no use for: residuals(u, p, data) gets "
            "the saved states. Leave them out: remake(ensemble, output_func=None, reduction=None)."
        )


def _check_plain(name: str, x: Array) -> None:
    if isbox(x):
        raise NotImplementedError(
            f"fit: {name} is traced, but a fit has no derivative here. Pass mpiad.stop_gradient({name})."
        )
    if is_device_array(x):
        raise NotImplementedError(
            f"fit: {name} is a device array, but fits run on the host. Pass mpiad.device.to_host({name})."
        )


def _start(p0: Array) -> Array:
    _check_plain("p0", p0)
    start = np.asarray(p0)
    if start.ndim != 2 or not start.shape[1] or start.dtype.kind not in "iuf":
        raise ValueError(
            f"fit: p0 must be real numbers of shape (N, m), one row of variables for each trajectory, but has shape "
            f"{start.shape} and dtype {start.dtype}."
        )
    return start.astype(float)


def _bounds(bounds: tuple[Array, Array], start: Array) -> tuple[Array, Array]:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ValueError(f"fit: bounds must be two, lower and upper ones, but got {bounds!r:.60}.")
    lower, upper = (_by_trajectory(name, bound, start) for name, bound in zip(("lower bounds", "upper bounds"), bounds))
    wrong = ~(lower <= upper) | (start < lower) | (start > upper)
    if wrong.any():
        i, j = (int(k) for k in np.argwhere(wrong)[0])
        raise ValueError(
            f"fit: p0 must lie within the bounds, and these in order, but variable {j} of trajectory {i + 1} starts at "
            f"{start[i, j]!r} with bounds {lower[i, j]!r} and {upper[i, j]!r}."
        )
    return lower, upper


def _by_trajectory(name: str, value: Array, start: Array) -> Array:
    _check_plain(name, value)
    try:
        return np.broadcast_to(np.asarray(value, float), start.shape).copy()
    except (TypeError, ValueError):
        raise ValueError(
            f"fit: {name} must be one number, or have the shape ({start.shape[1]},) of a trajectory's variables or "
            f"{start.shape} of all, but got {value!r:.60}."
        ) from None
