"""The arguments of `solve`, checked before anything is computed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Function
from mpiad.compiling.arguments import is_complex
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleGPU
from mpiad.ensemble.batch import Batch, refuse_traced_times
from mpiad.ensemble.batch_sum import BatchSum
from mpiad.ensemble.event import Event
from mpiad.ensemble.members import check_spans, rng_of
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, arrays_of_rows
from mpiad.ensemble.ranks import EnsembleMPI
from mpiad.ensemble.settings import Progress, Settings
from mpiad.ensemble.tableaus import Algorithm
from mpiad.primitives.checks import positive_count
from mpiad.pytrees import flatten
from mpiad.transport import Channel
from mpiad.transport.core.agreement import abridged, alike_on_all
from mpiad.transport.devices.device_arrays import is_device_array, named

# Arguments that ranks compare by their texts.
_COMPARED = "alg ensemblealg rtol atol save_everystep dense_output dt dtmax max_steps compile progress throw".split()
_values_compared = attrgetter(*_COMPARED)
_LEAST_RTOL = 100 * float(np.finfo(float).eps)


class SolveOptions(NamedTuple):
    """The arguments of `solve`, unchecked or the result of `checked_options`."""

    problem: ODEProblem | EnsembleProblem
    alg: Algorithm
    ensemblealg: EnsembleAlgorithm
    trajectories: int | None
    rtol: float | Array
    atol: float | Array
    dt: float | None
    dtmax: float
    max_steps: int
    compile: str | bool
    unknown: TypeError | None = None  # the error about unknown arguments, which all ranks raise together
    # `fit` has only some of the following options, `steady_state` has none.
    saveat: Array = None  # a number, an array or None
    save_everystep: bool = False
    events: tuple[Event, ...] = ()
    batch_size: int | None = None
    gradient: str | None = None
    checkpoints: int | None = None
    dense_output: bool = False
    progress: bool = False
    throw: bool = False
    mass: Array | None = None  # the mass matrix of the problem, if checked

    @property
    def ensemble(self) -> EnsembleProblem:
        """The problem as an ensemble."""
        return EnsembleProblem(self.problem) if isinstance(self.problem, ODEProblem) else self.problem

    @property
    def count(self) -> int:
        """The number of trajectories, if checked."""
        return 1 if self.trajectories is None else self.trajectories

    @property
    def backend(self) -> EnsembleAlgorithm:
        """The backend of the solves of one rank."""
        return self.ensemblealg.inner if isinstance(self.ensemblealg, EnsembleMPI) else self.ensemblealg

    @property
    def acting(self) -> bool:
        """Whether any of the events changes the state."""
        return any(event.acts for event in self.events)


# Names of arguments in other libraries.
_RENAMED = {
    "reltol": "rtol", "abstol": "atol", "callback": "events", "maxiters": "max_steps", "t_eval": "saveat", "method": "alg",
    "max_step": "dtmax", "first_step": "dt",
}  # fmt: skip


def error_of_unknown(call: Function, names: Iterable[str]) -> TypeError | None:
    """Return the error for the names of unknown arguments in a call of a function; None if there are none."""
    for name in names:
        instead = _RENAMED.get(name)
        advice = f"; the argument is called {instead}" if instead in inspect.signature(call).parameters else ""
        return TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}{advice}.")
    return None


def as_tuple(events: Event | Sequence[Event]) -> tuple[Event, ...]:
    """Return the events of a user's argument, which may be a single event."""
    return tuple(events) if isinstance(events, (list, tuple)) else (events,)  # type: ignore[return-value]


def checked_options(options: SolveOptions) -> SolveOptions:
    """Return the checked arguments; raise an error if one is invalid, or `saveat` is traced."""
    if options.unknown is not None:
        raise options.unknown
    _check_kinds(options)
    _check_numbers(options)
    for event in options.events:
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
    if isinstance(problem := options.problem, EnsembleProblem) and isinstance(problem.reduction, BatchSum):
        if problem.output_func is not None or problem.u_init is not None:
            text = "a BatchSum calls no output_func, and has no u_init. Leave them out of the EnsembleProblem"
            raise ValueError(f"solve: {text}.")
    count = _trajectories(options)
    saveat = options.saveat
    if saveat is not None:
        refuse_traced_times("solve: saveat", saveat)
        if is_device_array(saveat):
            got = f"{named(saveat)} of shape {saveat.shape}"
            raise TypeError(f"solve: saveat must be times on the host, but got {got}. Pass mpiad.device.to_host(saveat).")
        saveat = np.asarray(saveat)
        if saveat.dtype.kind not in "iuf":
            raise TypeError(f"solve: saveat must be a number or an array of numbers, but got {options.saveat!r:.80}.")
        if saveat.ndim > 2:
            expected = f"a number, a list, or of shape ({count}, n_saved)"
            raise ValueError(f"solve: saveat must be {expected}, but has {saveat.shape}.")
        if saveat.ndim == 2 and len(saveat) != count:
            raise ValueError(f"solve: saveat has {len(saveat)} rows, but there are {count} trajectories.")
    # The bound is that of SciPy; for smaller tolerances the error estimate consists of rounding errors.
    is_number = type(options.rtol) is float or not np.ndim(options.rtol)  # `ndim` makes an array of a number
    rtol = max(options.rtol, _LEAST_RTOL) if is_number else np.maximum(options.rtol, _LEAST_RTOL)
    return options._replace(trajectories=count, saveat=saveat, rtol=rtol, mass=_mass_of(options))


def options_of_states(call: str, options: SolveOptions) -> SolveOptions:
    """Return the checked options of the solves in `fit` or `steady_state`."""
    options = checked_options(options)
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
    for name, tolerance in (("rtol", options.rtol), ("atol", options.atol)):
        if type(tolerance) is float:
            tolerances.append(tolerance)
            continue
        if np.ndim(tolerance) and np.shape(tolerance) != batch.shape:
            expected = f"one number, or have the shape of a state, {batch.shape}"
            raise ValueError(f"solve: {name} must be {expected}, but has shape {np.shape(tolerance)}.")
        tolerances.append(np.reshape(tolerance, (-1, 1)) if np.ndim(tolerance) else tolerance)
    rtol, atol = tolerances
    if np.ndim(rtol):
        atol = np.broadcast_to(atol, (d, 1))
    events = tuple(event.for_states(batch.shape) for event in options.events)
    if mass is not None:
        if mass.shape != (d, d):
            expected = f"{(d, d)}, as u0 has {d} components"
            raise ValueError(f"solve: mass_matrix must have shape {expected}, but has {mass.shape}.")
        mass = mass.astype(batch.u0.real.dtype)
    checkpoints = None if options.save_everystep else options.checkpoints
    settings = Settings(options.alg, rtol, atol, options.dt, options.dtmax, options.max_steps, events, saveat, record)
    return settings._replace(checkpoints=checkpoints, progress=progress, ends=ends, mass=mass, gradient=options.gradient)


def checked_together(channel: Channel, arguments: SolveOptions) -> SolveOptions:
    """Return the result of `checked_options`; raise errors, also about differences between ranks, on all ranks."""

    def described(options: SolveOptions) -> list[object]:
        values = _values_compared(arguments)
        others = f"trajectories={options.trajectories}, {len(options.events)} events, {_kind(arguments.problem)}"
        saveat = None if options.saveat is None else abridged(np.asarray(options.saveat, float))
        # Arrays are also compared, since their texts contain few digits and abbreviate long arrays.
        both = arguments.rtol, arguments.atol
        tolerances = [np.asarray(tolerance, float) for tolerance in both if type(tolerance) is not float]

        def text() -> str:
            named = [f"{name}={value}" for name, value in zip(_COMPARED, values)]
            return ", ".join([f"saveat={arguments.saveat}", *named, others])

        return [text, values, others, saveat, *tolerances, options.mass]

    return alike_on_all(channel, lambda: checked_options(arguments), described, "solve")


def _kind(problem: object) -> str:
    """Return a text with the properties of a problem that determine the communication."""
    names = ("prob_func", "output_func", "reduction", "u0", "p", "tspan")
    parts = [name for name in names if getattr(problem, name, None) is not None]
    return f"{type(problem).__name__} of {', '.join(parts) or 'nothing else'}, {rng_of(problem, 'ensemble.solve')}"


def _mass_of(options: SolveOptions) -> Array | None:
    """Return the problem's mass matrix, None for the identity; raise an error if it is invalid or unsupported."""
    problem = options.problem.problem if isinstance(options.problem, EnsembleProblem) else options.problem
    matrix = problem.mass_matrix
    if matrix is None:
        return None
    if isbox(matrix) or is_device_array(matrix):
        raise TypeError("solve: mass_matrix must be a constant array on the host, but it is traced, or on a device.")
    mass = np.asarray(matrix)
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
    lengths = {name: _length(rows) for name, rows in arrays_of_rows(problem).items()}
    if count is None and not lengths:
        text = "trajectories=N is needed if the ensemble has no arrays u0=, p= or tspan="
        raise ValueError(f"solve: {text}, but got {count!r}.")
    count = positive_count(next(iter(lengths.values())) if count is None else count, "solve: trajectories", 0)
    for name, length in lengths.items():
        if length != count:
            raise ValueError(f"solve: {name}= of the ensemble has {length} rows, but there are {count} trajectories.")
    if problem.tspan is not None:
        check_spans(problem)
    if problem.p is not None and problem.problem.p is not None:
        shapes, rows = ([np.shape(leaf) for leaf in flatten(p)[0]] for p in (problem.problem.p, problem.p))
        if shapes != [shape[1:] for shape in rows]:
            raise ValueError(
                f"solve: each row of p= of the ensemble must have the shape of its problem's p, {shapes}, but p= has "
                f"{rows}. If the problem's p has one entry, and p= has shape (N,), give p[:, None]."
            )
    return count


def _length(tree: Array) -> int:
    shapes = {getattr(leaf, "shape", ()) for leaf in flatten(tree)[0]}
    lengths = {shape[0] if shape else -1 for shape in shapes}  # -1 for scalars
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            "solve: u0=, p= and tspan= of the ensemble must be arrays, or p a pytree of arrays, with one row per "
            f"trajectory, but have parts of shapes {sorted(shapes)}. Write np.array([...]) for a list of rows."
        )
    return lengths.pop()
