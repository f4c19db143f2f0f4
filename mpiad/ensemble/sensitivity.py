"""Saved states of an ensemble, and their derivatives with respect to a few variables per trajectory.

The tangents are propagated by the kernel of the solve or, without a kernel, by a pass over the recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.differentiation.forward import Bundle
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.compiled.reverse_sweep import carried_tangents
from mpiad.ensemble.consistent_start import consistent_start
from mpiad.ensemble.directions import LEAVES, U0, arguments_of, numbers_of, push_run
from mpiad.ensemble.members import as_state
from mpiad.ensemble.problem import ODEProblem
from mpiad.ensemble.run import Run
from mpiad.ensemble.settings import Settings
from mpiad.ensemble.solution import solution_of
from mpiad.pytrees import flatten
from mpiad.transport.core.tracing import restoring_state

# Maximum number of entries of tangents in a kernel. Compiling takes 5 s with 64 entries, and more than 20 s with 144.
_CARRIED = 64

Generator = Callable[[ODEProblem, Array], ODEProblem]
Tangents = list[Any] | None


class States(NamedTuple):
    """Saved states of n trajectories, and their derivatives."""

    u: Array  # shape (n, n_saved, d); NaN if a trajectory failed
    tangents: Array  # shape (m, n, n_saved, d)
    tries: Array  # int, shape (n,); numbers of tried steps


class _TracedBatch(NamedTuple):
    """A batch as a function of the variables x: the batch with traced inputs, and the tangents of these inputs."""

    batch: Batch
    u0: Tangents
    leaves: dict[int, list[Any]]


class SensitivitySolve:
    """Solves trajectories of an untraced batch as functions of variables x, by default the parameters p."""

    def __init__(self, compiler: Compiler, batch: Batch, settings: Settings, generator: Generator | None):
        # ``generator(problem, x)`` returns the problem with the variables x, which have one column per trajectory.
        self._compiler, self._generator = compiler, generator
        self._batch, self._settings, self._times = batch, settings, np.asarray(settings.saveat)

    def states(self, x: Array, ids: Array) -> States:
        """Return the saved states of n trajectories for variables x, shape (n, m), and their tangents per variable."""
        traced = self._traced(np.ascontiguousarray(x.T), self._batch.share(ids))
        batch, times = traced.batch.plain(), self._times if self._times.ndim == 1 else self._times[ids]
        leaves = [batch.p.leaves[place] for place in traced.leaves]
        numbers = sum(np.size(leaf) // batch.size for leaf in leaves) + (len(batch.u0) if traced.u0 else 0)
        in_kernel = not any(map(np.iscomplexobj, (batch.u0, *leaves))) and numbers * len(batch.u0) <= _CARRIED
        settings = self._settings._replace(saveat=times, gradient="tangent" if in_kernel else "adjoint")
        outcome = self._compiler.run(batch, settings, traced.batch)
        u = solution_of(outcome, batch, settings).u.reshape(len(ids), -1, len(batch.u0))
        tangents = self._tangents(Run(batch, settings, outcome), traced, x.shape[1])
        return States(u, tangents, outcome.naccept + outcome.nreject)

    def _traced(self, x: Array, batch: Batch) -> _TracedBatch:
        """Insert variables of shape (m, n) into a batch."""
        tangents = unit_tangents(x)
        with restoring_state(), Bundle() as bundle:
            variables = bundle.variable(x, tangents)
            if self._generator is None:
                p = Parameters([variables], [True], lambda leaves: leaves[0])
                traced = _TracedBatch(batch._replace(p=p), None, {0: tangents})
            else:
                traced = _generated(bundle, self._generator, batch, variables)
            settings = self._settings
            if settings.mass is None:
                return traced
            consistent, _ = consistent_start(traced.batch, settings.mass, settings.rtol, settings.atol)
            return traced._replace(batch=consistent, u0=bundle.parts(consistent.u0)[1])

    def _tangents(self, run: Run, traced: _TracedBatch, m: int) -> Array:
        """Return the tangents of the saved states, shape (m, n, n_saved, d)."""
        solver, places = run.outcome.solver, list(traced.leaves)
        carried = None if solver is None else carried_tangents(solver, run, traced.u0 is not None, places)
        if carried is None:
            tangents = {U0: traced.u0 or [None] * m, **{LEAVES + place: gs for place, gs in traced.leaves.items()}}
            return np.stack(push_run(run, arguments_of(run), tangents)[0])
        saved: Array = carried[1]
        if self._generator is None and traced.u0 is None:
            return saved
        total = np.zeros_like(saved, shape=(m, *saved.shape[1:]))
        # The chain rule, since a kernel returns the tangents along single initial values and parameters.
        argnums = [U0] * (traced.u0 is not None) + [LEAVES + place for place in places]
        for derivative, number in zip(saved, numbers_of(run, argnums, arguments_of(run))):
            tangents = traced.u0 if number.argnum == U0 else traced.leaves[number.argnum - LEAVES]
            for j, g in enumerate(tangents or []):
                if g is not None:
                    total[j] += derivative * g[number.index][:, None, None]
        return total


def unit_tangents(x: Array) -> list[Array]:
    """Return m unit tangents of variables of shape (m, n), one for each variable."""
    tangents = [np.zeros_like(x) for _ in x]
    for j, tangent in enumerate(tangents):
        tangent[j] = 1.0
    return tangents


def _generated(bundle: Bundle, generator: Generator, batch: Batch, x: Array) -> _TracedBatch:
    """Return a batch with the u0 and p that `generator` returns for the variables x, shape (m, n)."""
    count, shape, varies = batch.size, batch.shape, batch.p.varies

    def constant(leaf: Array) -> Any:
        # Constants are also traced, without tangents, so that all values with an axis of trajectories are traced.
        return bundle.variable(leaf, [None] * len(x))

    # If all trajectories have the same tspan, it is a pair of numbers, as in the user's problem.
    span: Any = (float(batch.start[0]), float(batch.end[0])) if batch.one_span else (batch.start, batch.end)
    p = batch.p.build([constant(leaf) if own else leaf for leaf, own in zip(batch.p.leaves, varies)])
    made = generator(ODEProblem(batch.f, constant(batch.u0.reshape(*shape, count)), span, p), x)
    if not isinstance(made, ODEProblem) or made.f is not batch.f or made.tspan is not span:
        raise TypeError(
            "fit: prob_generator must return its problem with another u0 or p, but the same f and tspan, for example "
            f"remake(problem, p=x), but returned {made!r:.100}."
        )
    u0, u0_along = _initial(bundle, made.u0, batch)
    parts, build = flatten(made.p)
    for part in parts:
        if isbox(part) and np.shape(part)[-1:] != (count,):
            raise ValueError(
                f"fit: prob_generator returned a part of p of shape {np.shape(part)}, without an axis of trajectories. "
                f"It is called with columns, x of shape {x.shape}: write sums as np.sum(x, axis=0)."
            )
    found = [bundle.parts(part) for part in parts]
    along = {place: gs for place, (_, gs) in enumerate(found) if gs is not None and any(g is not None for g in gs)}
    given = [part if place in along else plain for place, (part, (plain, _)) in enumerate(zip(parts, found))]
    traced = bundle.variable(u0, u0_along) if u0_along else u0
    return _TracedBatch(batch._replace(u0=traced, p=Parameters(given, [*map(isbox, parts)], build)), u0_along, along)


def _initial(bundle: Bundle, given: Array, batch: Batch) -> tuple[Array, Tangents]:
    """Return initial states, shape (d, n), and their tangents, or None if all are zero."""
    u0, tangents = bundle.parts(as_state(given))
    full = (*batch.shape, batch.size)
    if u0.shape == batch.shape != full:
        u0 = np.broadcast_to(u0[..., None], full)
    if u0.shape != full:
        raise ValueError(
            f"fit: prob_generator returned u0 of shape {u0.shape}, but {full} was expected, with an axis of trajectories, "
            "since it is called with columns of variables."
        )
    flat = u0.reshape(-1, batch.size)
    if tangents is None or all(g is None for g in tangents):
        return flat, None
    return flat, [None if g is None else np.reshape(g, flat.shape) for g in tangents]
