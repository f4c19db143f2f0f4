"""Return codes of solves and fits, and `Outcome`, the raw results of a solve."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.jumps import Jump
from mpiad.ensemble.record import Steps
from mpiad.ensemble.settings import MOVING, Acting, Settings
from mpiad.ensemble.tableaus import Algorithm
from mpiad.transport.devices.device_arrays import is_device_array

_log = logging.getLogger("mpiad")

# Values of `save_step` for saved values that aren't computed in a step: the initial state, a value at a time that wasn't
# reached or of a failed trajectory, and the final state.
INITIAL, NOWHERE, FINAL = -1, -2, -3
_BY_TRAJECTORY = ("t_reached", "codes", "naccept", "nreject", "saved", "save_step", "slots", "resumed")


class NamedCode(str, Enum):
    """A code, which is a string equal to its name; arrays store its number."""

    def __str__(self) -> str:
        return self.value

    @property
    def code(self) -> int:
        """The number that represents the code in arrays."""
        return type(self)._member_names_.index(self.name)

    @classmethod
    def names_of(cls, codes: Array) -> Array:
        """Return the names of the codes in an array of numbers."""
        return np.array(cls._member_names_)[codes]


class ReturnCode(NamedCode):
    """The reason why a trajectory ended, a string equal to its name.

    Examples
    --------
    >>> from mpiad.ensemble import ODEProblem, ReturnCode, solve
    >>> blow_up = ODEProblem(lambda u, p, t: [u[0] ** 2], [1.0], (0.0, 2.0))
    >>> sol = solve(blow_up)
    >>> print(sol.retcode, sol.retcode == ReturnCode.DtLessThanMin, sol.t_reached < 1.1)
    DtLessThanMin True True
    """

    Success = "Success"
    """The end of tspan was reached."""
    Terminated = "Terminated"
    """A terminal event ended the trajectory before the end of tspan."""
    MaxIters = "MaxIters"
    """The maximum number of steps was tried. Raise max_steps, or use `Rodas5P` if the problem is stiff."""
    DtLessThanMin = "DtLessThanMin"
    """Steps became smaller than the resolution of time: at a singularity or discontinuity, or for a small tolerance."""
    Unstable = "Unstable"
    """A step of the smallest (or fixed) size, or the affect of an event, gave NaN or infinity."""
    Zeno = "Zeno"
    """Events with affects occurred repeatedly at intervals close to zero."""
    InitialFailure = "InitialFailure"
    """The mass matrix is singular, and no state near u0 satisfies the algebraic equations, or the index isn't 1."""

    @property
    def failed(self) -> bool:
        """Whether neither the end of tspan nor a terminal event was reached."""
        return self not in (ReturnCode.Success, ReturnCode.Terminated)


class ConvergenceCode(NamedCode):
    """The reason why a fit or the search for a steady state ended, a string equal to its name.

    Examples
    --------
    >>> from mpiad.ensemble import ConvergenceCode, EnsembleProblem, ODEProblem, steady_state
    >>> growth = ODEProblem(lambda u, p, t: [u[0] * (p[0] - u[0])], [0.5], (0.0, 1.0), [1.0])
    >>> found = steady_state(EnsembleProblem(growth, p=np.array([[1.0], [2.0]])))
    >>> print(found.retcode == ConvergenceCode.Success)
    [ True  True]
    """

    Success = "Success"
    """The fit or the search converged."""
    MaxIters = "MaxIters"
    """The fit or the search didn't converge within the maximum number of evaluations or steps."""
    Singular = "Singular"
    """The data don't determine all variables, or f = 0, conserved combinations and long solves determine no state."""
    InitialFailure = "InitialFailure"
    """At the start the solve failed, or the residuals or f weren't finite."""
    ConvergenceFailure = "ConvergenceFailure"
    """Steps became too small, because longer steps led to points at which the solve failed or f wasn't finite."""


# The codes of failures come last.
_FIRST_FAILURE = [code.failed for code in ReturnCode].index(True)


def codes_of(names: Array) -> Array:
    """Return the numbers of the names in an array, the inverse of `ReturnCode.names_of`."""
    return (np.asarray(names)[:, None] == [code.value for code in ReturnCode]).argmax(axis=1)


def came_through(codes: Array) -> Array:
    """Return a mask of the numbers in `codes` that don't represent failures."""
    return codes < _FIRST_FAILURE


@dataclass
class Outcome:
    """The results of N trajectories, written when the trajectories end."""

    u_end: Array  # shape (d, N); the last accepted state
    t_reached: Array  # shape (N,)
    codes: Array  # int, shape (N,); numbers of return codes
    naccept: Array  # int, shape (N,)
    nreject: Array  # int, shape (N,)
    saved: Array | None = None  # shape (N, n_saved, d), or None; NaN at times that weren't reached
    save_step: Array | None = None  # int, shape (N, n_saved), or None; the step of each saved value (see INITIAL)
    # If events change states, shape (N,): the index of the next given time, and the number of continuations after events.
    slots: Array = field(default_factory=lambda: np.empty(0, np.int64))
    resumed: Array = field(default_factory=lambda: np.empty(0, np.int64))
    # Shape (5, m), sorted by trajectory and time: trajectory, event, step (from 0), fraction of the step, and time.
    event_table: Array | None = None
    # If steps are recorded: for each share of the trajectories, the index of its first trajectory, and all accepted steps.
    steps: list[tuple[int, Steps]] = field(default_factory=list)
    solver: Any = None  # for derivatives of a solve by kernels: the object that computes `steps` on demand
    tapes: list[Any] = field(default_factory=list)  # the steps in the layout of a kernel
    last: Array | None = None  # int, shape (N,); the index of each trajectory's last row in `tapes`, or -1
    carried: tuple[Array, Array] | None = None  # tangents from a kernel, of shapes (m, d, N) and (m, N, n_saved, d)
    event_tangents: Array | None = None  # shape (m, events); of the times in `event_table`, if `carried` includes them
    record: Any = None  # the recorded steps of a differentiable solve on a device
    saved_times: Array | None = None  # shape (N, n_saved) if a solve on a device saved every step, else None
    jumps: list[Jump] = field(default_factory=list)  # the changes of states by events, if steps are recorded

    @property
    def failed(self) -> Array:
        """A mask of the trajectories that failed, shape (N,)."""
        return ~came_through(self.codes)

    def recorded(self) -> list[tuple[int, Steps]]:
        """Return `steps`, computed by a kernel if necessary."""
        if self.solver is not None and not self.steps:
            solved = self.solver.recorded(self)
            self.steps = [(tape.first, tape.steps(solved.last, solved.naccept, self.u_end.dtype)) for tape in solved.tapes]
        return self.steps

    def every_step(self) -> tuple[Array, Array]:
        """Return the times at the starts and ends of all steps, (N, n), and the states, (N, n, d), padded with NaN."""
        if self.saved_times is not None:
            return self.saved_times, self.saved  # type: ignore[return-value]
        (d, count), most = self.u_end.shape, int(self.naccept.max(initial=0)) + 1
        times = np.full((count, most), np.nan)
        u = np.full((count, most, d), np.nan, self.u_end.dtype)
        for first, steps in self.recorded():
            ids = np.repeat(np.arange(len(steps.counts)), steps.counts)
            numbers = np.arange(len(ids)) - np.repeat(np.cumsum(steps.counts) - steps.counts, steps.counts)
            times[first + ids, numbers] = steps.times(ids, numbers)[0]
            u[first + ids, numbers] = steps.states(ids, numbers).T
        # The record has only the states before each step.
        rows = np.arange(count)
        times[rows, self.naccept], u[rows, self.naccept] = self.t_reached, self.u_end.T
        return times, u

    @classmethod
    def empty(cls, batch: Batch, settings: Settings) -> Outcome:
        """Return the initial outcome of a solve."""
        d, n = batch.u0.shape
        saved = save_step = None
        if settings.saveat is not None and not is_device_array(batch.u0):  # on a device see `device_rounds`
            saved = np.full((n, settings.saveat.shape[-1], d), np.nan, batch.u0.dtype)
            save_step = np.full(saved.shape[:2], NOWHERE, np.int32) if settings.record else None
            empty = np.flatnonzero(batch.start == batch.end)  # the trajectories without steps
            if len(empty):
                times = np.broadcast_to(settings.saveat, saved.shape[:2])
                rows, columns = np.nonzero(times[empty] == batch.start[empty, None])
                saved[empty[rows], columns] = batch.u0.T[empty[rows]]
                if save_step is not None:
                    save_step[empty[rows], columns] = INITIAL
        parts = np.full(n, ReturnCode.Success.code, np.int8), np.zeros(n, np.int64), np.zeros(n, np.int64), saved, save_step
        outcome = cls(batch.u0.copy(), batch.start.copy(), *parts)
        if settings.acting is not None:
            outcome.slots, outcome.resumed = settings.acting.first.copy(), np.zeros_like(settings.acting.first)
        return outcome

    @staticmethod
    def joined(parts: list[Outcome]) -> Outcome:
        """Return the concatenated outcomes of several shares, with a list of the shares' steps."""
        tables, steps, jumps, offset = [], [], [], 0
        for part in parts:
            if part.event_table is not None:
                tables.append(part.event_table + np.array([[offset], [0], [0], [0], [0]]))
            steps += [(first + offset, record) for first, record in part.steps]
            jumps += [jump._replace(ids=jump.ids + offset) for jump in part.jumps]
            offset += len(part.codes)
        names = [name for name in _BY_TRAJECTORY if getattr(parts[0], name) is not None]
        arrays: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return Outcome(
            np.concatenate([part.u_end for part in parts], axis=1),
            event_table=np.concatenate(tables, axis=1) if tables else None,
            steps=steps,
            jumps=jumps,
            **arrays,
        )


def evaluations(naccept: Array, nreject: Array, alg: Algorithm, with_dt: Array | bool) -> Array:
    """Return the number of calls of f per trajectory; `with_dt`: whether the user chose the size of the first step."""
    tries = naccept + nreject
    at_start = np.where(with_dt, 1, 2)  # the second call is used to choose the size of the first step
    return np.where(tries > 0, at_start + alg.tableau.calls * tries, 0)


class FactorizationCounts:
    """Base class of solutions: the numbers of matrix factorizations and Jacobians."""

    naccept: Array
    nreject: Array
    alg: Algorithm | None

    @property
    def nlu(self) -> Array:
        """Number of factorizations per trajectory: for Rosenbrock methods one per tried step, otherwise 0."""
        tries = self.naccept + self.nreject
        return tries if self.alg is not None and self.alg.tableau.implicit else 0 * tries

    @property
    def njac(self) -> Array:
        """Number of Jacobians of f: one per factorization."""
        return self.nlu


def failures(kinds: type[NamedCode], retcode: Array, failed: Array, predicate: str) -> str:
    """Return a text with the number of failures, their codes and the first; `predicate`: for example "fits failed"."""
    counts = [f"{count} {kind}" for kind in kinds if (count := np.count_nonzero(retcode[failed] == kind))]
    return f"{len(failed)} of {len(retcode)} {predicate} ({', '.join(counts)}); the first is number {failed[0] + 1}"


def text_of_not_finite(not_finite: dict[int, str]) -> str:
    """Return a sentence that names the first entry that isn't finite, or "": see `not_finite_entries`."""
    return f" For trajectory {min(not_finite) + 1}, {not_finite[min(not_finite)]}." if not_finite else ""


def report(call: str, what: str, retcode: Array, not_finite: dict[int, str]) -> None:
    """Log the failures among the codes of `what`, such as "fits"; `not_finite`: see `not_finite_entries`."""
    failed = np.flatnonzero(retcode != ConvergenceCode.Success)
    if len(failed):
        text = failures(ConvergenceCode, retcode, failed, f"{what} ended without success")
        _log.warning("%s: %s.%s", call, text, text_of_not_finite(not_finite))


def complete(outcome: Outcome, acting: Acting) -> None:
    """Add the jumps and return codes of events at the start, and replace event numbers by indices in the user's list."""
    outcome.jumps = [*acting.started, *outcome.jumps]
    ended = acting.codes != MOVING
    outcome.codes[ended] = acting.codes[ended]
    table = outcome.event_table
    if table is not None:
        table[1] = np.array(acting.conditions)[table[1].astype(int)]
    steps = outcome.save_step
    if steps is not None:
        # A value saved when an event changes the state belongs to the next step, or is the final state if no step follows.
        steps[steps == outcome.naccept[:, None]] = FINAL
