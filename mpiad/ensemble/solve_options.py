"""The arguments of `solve`, checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.compiling.arguments import is_complex
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleGPU
from mpiad.ensemble.batch import Batch, refuse_traced_times
from mpiad.ensemble.event import Event
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.settings import Progress, Settings
from mpiad.ensemble.tableaus import Algorithm
from mpiad.primitives.checks import positive_count
from mpiad.pytrees import flatten
from mpiad.transport import Channel
from mpiad.transport.core.agreement import alike_on_all
from mpiad.transport.devices.device_arrays import is_device_array, named

# Arguments that ranks compare by their texts.
_COMPARED = "alg ensemblealg rtol atol save_everystep dense_output dt dtmax max_steps compile progress throw".split()
_LEAST_RTOL = 100 * float(np.finfo(float).eps)


class SolveOptions(NamedTuple):
    """The arguments of `solve`, by name."""

    problem: Any
    alg: Any
    ensemblealg: Any
    trajectories: Any
    rtol: Any
    atol: Any
    dt: Any
    dtmax: Any
    max_steps: Any
    compile: Any
    # `fit` has only some of the following options, `steady_state` has none. `checked_options` sets `mass` and `backend`.
    saveat: Any = None
    save_everystep: bool = False
    events: Any = ()
    batch_size: Any = None
    gradient: Any = None
    checkpoints: Any = None
    dense_output: bool = False
    progress: bool = False
    throw: bool = False
    mass: Any = None  # the mass matrix of the problem
    backend: Any = None  # `ensemblealg`, or the `inner` of an EnsembleMPI

    @property
    def acting(self) -> bool:
        """Whether any of the events changes the state."""
        return any(event.acts for event in self.events)


# Names of arguments in other libraries.
_RENAMED = {
    "reltol": "rtol", "abstol": "atol", "callback": "events", "maxiters": "max_steps", "t_eval": "saveat", "method": "alg",
    "max_step": "dtmax", "first_step": "dt",
}  # fmt: skip


def refuse_unknown(call: str, given: Mapping[str, Any]) -> None:
    """Raise a TypeError for the unknown arguments ``given["others"]`` of a call with the arguments `given`."""
    for name in given["others"]:
        instead = _RENAMED.get(name)
        advice = f"; the argument is called {instead}" if instead in given else ""
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{advice}.")


def checked_options(options: SolveOptions) -> SolveOptions:
    """Return the checked arguments; raise an error if one is invalid, or `saveat` is traced."""
    _check_kinds(options)
    _check_numbers(options)
    events = tuple(options.events) if isinstance(options.events, (list, tuple)) else (options.events,)
    for event in events:
        if not isinstance(event, Event):
            raise TypeError(f"solve: events must be mpiad.ensemble.Event, but got {event!r}. Make one: Event(condition).")
    if options.gradient not in (None, "tangent", "adjoint"):
        hint = " With None, the default, solve chooses." if options.gradient == "auto" else ""
        raise ValueError(f"solve: gradient must be 'tangent', 'adjoint' or None, but got {options.gradient!r}.{hint}")
    if options.compile not in ("auto", True, False):
        raise ValueError(f"solve: compile must be 'auto', True or False, but got {options.compile!r}.")
    if options.save_everystep and options.saveat is not None:
        raise ValueError(
            f"solve: give either saveat or save_everystep=True, not both, but got saveat={options.saveat!r:.60} as well."
        )
    if options.dense_output and options.checkpoints is not None:
        raise ValueError(
            f"solve: dense_output=True interpolates in stored steps, but checkpoints={options.checkpoints} stores only "
            "some of them. Leave out one of the two options, or pass saveat."
        )
    count = _trajectories(options)
    saveat = options.saveat
    if saveat is not None:
        refuse_traced_times("solve: saveat", saveat)
        if is_device_array(saveat):
            got = f"{named(saveat)} of shape {saveat.shape}"
            raise TypeError(f"solve: saveat must be times on the host, but got {got}. Pass mpiad.device.to_host(saveat).")
        saveat = np.asarray(saveat)
        if saveat.ndim == 2 and len(saveat) != count:
            raise ValueError(f"solve: saveat has {len(saveat)} rows, but there are {count} trajectories.")
    # The bound is that of SciPy; for smaller tolerances the error estimate consists of rounding errors.
    rtol = np.maximum(options.rtol, _LEAST_RTOL) if np.ndim(options.rtol) else max(options.rtol, _LEAST_RTOL)
    backend = options.ensemblealg.inner if isinstance(options.ensemblealg, EnsembleMPI) else options.ensemblealg
    mass = _mass_of(options)
    return options._replace(events=events, trajectories=count, saveat=saveat, rtol=rtol, mass=mass, backend=backend)


def options_of_states(call: str, given: SimpleNamespace, **others: Any) -> SolveOptions:
    """Return the checked options of the solves in `fit` or `steady_state`, whose arguments are `given`."""
    names = [name for name in SolveOptions._fields if hasattr(given, name)]
    options = checked_options(SolveOptions(**{name: getattr(given, name) for name in names}, **others))
    if any(getattr(options.problem, name, None) is not None for name in ("output_func", "reduction")):
        raise ValueError(
            f"{call}: the ensemble has an output_func or a reduction, which {call} doesn't call. Leave them out: "
            "remake(ensemble, output_func=None, reduction=None)."
        )
    if isinstance(options.backend, EnsembleGPU):
        raise NotImplementedError(f"{call}: EnsembleGPU isn't supported; take EnsembleVectorized() or EnsembleThreads().")
    return options


def settings_of(
    options: SolveOptions, batch: Batch, saveat: Array | None, record: bool, ends: bool = False, progress: Progress = None
) -> Settings:
    """Return the settings for a batch of plain arrays; raise an error if options don't fit the shape or dtype of states."""
    mass, d = options.mass, len(batch.u0)
    if options.alg.tableau.implicit and is_complex(batch.u0):
        raise NotImplementedError(
            f"solve: {type(options.alg).__name__} needs real states, but u0 is {batch.u0.dtype}. Take a Runge-Kutta "
            "method, such as RK45(), or give the real and imaginary parts as components of a real state."
        )
    tolerances = []
    for name, given in (("rtol", options.rtol), ("atol", options.atol)):
        if type(given) is float:
            tolerances.append(given)
            continue
        if np.ndim(given) and np.shape(given) != batch.shape:
            expected = f"one number, or have the shape of a state, {batch.shape}"
            raise ValueError(f"solve: {name} must be {expected}, but has shape {np.shape(given)}.")
        tolerances.append(np.reshape(given, (-1, 1)) if np.ndim(given) else given)
    rtol, atol = tolerances
    if np.ndim(rtol):
        atol = np.broadcast_to(atol, (d, 1))
    events = tuple(event.for_states(batch.shape) for event in options.events)
    if mass is not None:
        if mass.shape != (d, d):
            expected = f"{(d, d)}, as u0 has {d} components"
            raise ValueError(f"solve: mass_matrix must have shape {expected}, but has {mass.shape}.")
        mass = mass.astype(batch.u0.real.dtype)
    steps, checkpoints = (options.dt, options.dtmax, options.max_steps), options.checkpoints
    rest = None if options.save_everystep else checkpoints, progress, ends, mass, options.gradient
    return Settings(options.alg, rtol, atol, *steps, events, saveat, record, *rest)


def checked_together(used: Channel, given: SolveOptions) -> SolveOptions:
    """Return the result of `checked_options`; raise errors, also about differences between ranks, on all ranks."""

    def described(options: SolveOptions) -> list[object]:
        scalars = ", ".join(f"{name}={getattr(given, name)}" for name in _COMPARED)
        scalars += f", trajectories={options.trajectories}, {len(options.events)} events, {_kind(given.problem)}"
        saveat = None if options.saveat is None else np.asarray(options.saveat, float)
        # Arrays are also compared, since their texts contain few digits and abbreviate long arrays.
        tolerances = [np.asarray(tolerance, float) for tolerance in (given.rtol, given.atol)]
        return [f"saveat={given.saveat}, {scalars}", scalars, saveat, *tolerances, options.mass]

    return alike_on_all(used, lambda: checked_options(given), described, "solve")


def _kind(problem: object) -> str:
    """Return a text with the properties of a problem that determine the communication."""
    names = ("prob_func", "output_func", "reduction", "u0", "p")
    parts = [name for name in names if getattr(problem, name, None) is not None]
    return f"{type(problem).__name__} of {', '.join(parts) or 'nothing else'}, seed={getattr(problem, 'seed', None)}"


def _mass_of(options: SolveOptions) -> Array | None:
    """Return the problem's mass matrix, None for the identity; raise an error if it is invalid or unsupported."""
    problem = options.problem.problem if isinstance(options.problem, EnsembleProblem) else options.problem
    given = problem.mass_matrix
    if given is None:
        return None
    if isbox(given) or is_device_array(given):
        raise TypeError("solve: mass_matrix must be a constant array on the host, but it is traced, or on a device.")
    mass = np.asarray(given)
    if mass.dtype.kind not in "biuf" or mass.ndim != 2 or mass.shape[0] != mass.shape[1] or not np.isfinite(mass).all():
        got = f"shape {mass.shape} and dtype {mass.dtype}"
        raise ValueError(f"solve: mass_matrix must be a square matrix of finite real numbers, but has {got}.")
    if not options.alg.tableau.takes_mass:
        advice = "Take Rodas5P(), or multiply f by its inverse."
        raise ValueError(f"solve: {type(options.alg).__name__} doesn't support the problem's mass_matrix. {advice}")
    return mass


_KINDS = {"problem": (ODEProblem, EnsembleProblem), "alg": (Algorithm,), "ensemblealg": (EnsembleAlgorithm,)}


def _check_kinds(options: SolveOptions) -> None:
    for name, kinds in _KINDS.items():
        value = getattr(options, name)
        if not isinstance(value, kinds):
            hint = " Write RK45() with parentheses." if isinstance(value, type) else ""
            names = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"solve: {name} must be an {names}, but got {value!r}.{hint}")


def _check_numbers(options: SolveOptions) -> None:
    for name in ("dtmax", "dt"):
        value = getattr(options, name)
        if value is None and name == "dt":
            if options.alg.tableau.error is None:
                raise ValueError(f"solve: {type(options.alg).__name__} takes fixed steps and needs their size, as dt=0.01.")
        elif not isinstance(value, (int, float, np.integer, np.floating)) or not value > 0:
            raise ValueError(f"solve: {name} must be above zero, but got {value!r}.")
    for name, value in (("rtol", options.rtol), ("atol", options.atol)):
        if type(value) is not float or not 0 <= value < math.inf:  # the most frequent case needs no arrays
            array = np.asarray(value)
            if array.dtype.kind not in "iuf" or not (np.isfinite(array) & (array >= 0)).all():
                raise ValueError(f"solve: {name} must be zero or more, and finite, but got {value!r}.")
    for name in ("max_steps", "batch_size", "checkpoints"):
        if (value := getattr(options, name)) is not None or name == "max_steps":
            positive_count(value, f"solve: {name}")


def check_combinations(options: SolveOptions, hosted: bool) -> None:
    """Raise a NotImplementedError if other options don't support events with an affect, or dense output."""
    if options.acting and not hosted:
        raise NotImplementedError(
            "solve: events with an affect aren't supported with arrays on a device or EnsembleGPU. Copy them to the host "
            "with mpiad.device.to_host, and use EnsembleVectorized()."
        )
    if options.dense_output and not hosted:
        raise NotImplementedError(
            "solve: dense_output=True isn't supported on a device. Pass the times as saveat, or copy the arrays to the "
            "host with mpiad.device.to_host."
        )


def _trajectories(options: SolveOptions) -> int:
    problem, count = options.problem, options.trajectories
    if isinstance(problem, ODEProblem):
        if count is not None:
            raise ValueError(f"solve: trajectories={count!r} needs an EnsembleProblem, but got one ODEProblem.")
        return 1
    lengths = {name: _length(getattr(problem, name)) for name in ("u0", "p") if getattr(problem, name) is not None}
    if count is None and not lengths:
        raise ValueError(f"solve: trajectories=N is needed if the ensemble has no arrays u0= or p=, but got {count!r}.")
    count = positive_count(next(iter(lengths.values())) if count is None else count, "solve: trajectories", 0)
    for name, length in lengths.items():
        if length != count:
            raise ValueError(f"solve: {name}= of the ensemble has {length} rows, but there are {count} trajectories.")
    if problem.p is not None and problem.problem.p is not None:
        own, rows = ([np.shape(leaf) for leaf in flatten(p)[0]] for p in (problem.problem.p, problem.p))
        if own != [shape[1:] for shape in rows]:
            raise ValueError(
                f"solve: each row of p= of the ensemble must have the shape of its problem's p, {own}, but p= has {rows}. "
                "If the problem's p has one entry, and p= has shape (N,), give p[:, None]."
            )
    return count


def _length(tree: Array) -> int:
    shapes = {getattr(leaf, "shape", ()) for leaf in flatten(tree)[0]}
    lengths = {shape[0] if shape else -1 for shape in shapes}  # -1 for scalars
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "solve: u0= and p= of the ensemble must be arrays, or p a pytree of arrays, with one row per trajectory, but "
            f"have parts of shapes {sorted(shapes)}. Write np.array([...]) for a list of rows."
        )
    return lengths.pop()
