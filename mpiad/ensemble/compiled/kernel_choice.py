"""The choice between a CPU kernel and array operations, for one call of `solve`.

With ``compile="auto"`` the choice depends on an estimate of times: the number of steps, times the operations of a step, in
arrays and in a kernel, compared with the time for compiling or loading the kernel. Times of earlier solves by arrays
count, too, so a problem that is solved repeatedly is compiled when arrays have taken as long as compiling. If the first
solve by arrays takes more steps than estimated, it is given up, and the kernel solves from the start. No clock is read: two
runs that find the same kernels in the cache make the same choice. All ranks and all batches of a solve agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from mpiad._typing import Array, Function
from mpiad.compiling.cache import is_cached
from mpiad.compiling.elementary import is_elementary
from mpiad.compiling.program import OPERATIONS, Program, Refusal
from mpiad.compiling.source import lowered
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleSerial, EnsembleThreads
from mpiad.ensemble.batch import Batch, check_place, is_on_device
from mpiad.ensemble.compiled.kernel_solver import Solver
from mpiad.ensemble.compiled.trace import identity_of
from mpiad.ensemble.compiled.traced_problem import LARGE, TracedProblem, problem_of, remembered, statements, warn_once
from mpiad.ensemble.field_jacobian import jacobian_program
from mpiad.ensemble.outcome import Outcome
from mpiad.ensemble.settings import Acting, Advance, Settings
from mpiad.ensemble.tableaus import Tableau
from mpiad.ensemble.trial import try_once
from mpiad.transport import Channel
from mpiad.transport.core.agreement import FAILURES
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.resources import cores

# Times in seconds, fitted to the fastest of several solves with 1 to 1,000 trajectories of 2 to 30 components, and to the
# compile times of kernels of 300 to 9,500 lines, on an idle core of an x86 server with AVX-512.
#
# Arrays. For each iteration of the loop over steps: per stage; per stage and call of NumPy in f or, if their number isn't
# known, per square root of the operations of f, which are fewer and larger; for implicit methods also per step.
_STAGE, _CALL, _ROOT, _IMPLICIT = 20e-6, 1e-6, 3e-6, 300e-6
# For each step of a trajectory: per stage and component, operation or function of the C library.
_COMPONENT, _OPERATION, _FUNCTION = 8e-9, 0.4e-9, 4e-9
# Kernels, for each step of a trajectory: per stage and component, operation or function of the C library; per function of
# `compiling.elementary`, which are vector instructions.
_LANE_COMPONENT, _LANE_OPERATION, _LANE_FUNCTION, _LANE_ELEMENTARY = 2e-9, 0.1e-9, 10e-9, 1e-9
# Per entry of a Jacobian, and per nonzero entry of a large one: arrays per iteration and step of a trajectory, kernels.
_ENTRY, _NONZERO = (2e-6, 60e-9, 1e-9), (0.3e-6, 10e-9, 25e-9)
# A gradient with its solve, by arrays and by kernels, in units of the solve.
_GRADIENT, _LANE_GRADIENT = 4, 2.5
# The time from an untraced f to a kernel that is on disk (tracing, the kernel's text, the import of LLVM, loading): a
# constant, and an addition per component of a state or, if f is traced, per operation, three times as large with a
# gradient. Compile time of a kernel of n lines: _LINES n^1.5.
_LOADING, _LOADING_COMPONENT, _LOADING_OPERATION, _LINES = 0.04, 0.002, 1e-4, 3e-5
# The least time to compile a kernel, before its text is known. A running solve by arrays may be given up after this
# fraction of the time to get the kernel, and is checked again after this factor of turns.
_COMPILING, _PATIENCE, _CHECKS = 0.3, 0.5, 1.25
# The ratio of an expected number of steps to the estimate above which a solve may be given up.
_EXCEEDED = 1.5
# The least number of steps that is expected for the first solve with rtol = 1e-3.
_STEPS = 5.0
# The largest states for kernels: limits the time of a trace, and for implicit methods the size of factors in the caches.
_MOST_COMPONENTS, _MOST_IMPLICIT = 1000, 300
# What is expected of an f that isn't traced yet, per component: operations, and entries of a large Jacobian.
_OPERATIONS, _ENTRIES = 4, 5
# The number of trajectories that a kernel solves at a time.
_LANES = 16


class Rates(NamedTuple):
    """Estimated times in seconds."""

    iteration: float  # arrays, per iteration of the loop over steps
    column: float  # arrays, per step of a trajectory
    lane: float  # a kernel, per step of a trajectory

    def of_kernel(self, iterations: float, steps: float) -> float:
        """Return the time of a kernel."""
        # A kernel takes as long for one trajectory as for all that it solves at a time.
        return max(steps, _LANES * iterations) * self.lane


@lru_cache(64)
def rates(tableau: Tableau, d: int, program: Program | None, gradient: bool, calls: int = 0) -> Rates:
    """Return the times of a step, with its adjoint if `gradient`; for a typical f if it isn't traced yet.

    `calls`: the number of NumPy's calls in f; 0 if it is unknown.
    """
    operations, functions, elementary = _OPERATIONS * d, 0, 0
    root = operations**0.5
    if program is not None:
        called = [instruction.operation for instruction in lowered(program).instructions]
        operations, functions = program.cost, sum(not OPERATIONS[name].simple for name in called if name in OPERATIONS)
        elementary = sum(is_elementary(OPERATIONS[name].text) for name in called if name in OPERATIONS)
        root = min(round(operations**0.5), statements(program))
    entries = 0
    if tableau.implicit:
        entries = d * d if d <= LARGE else _ENTRIES * d if program is None else len(jacobian_program(program).places)
    iteration = tableau.calls * (_STAGE + (_CALL * calls or _ROOT * root)) + _IMPLICIT * bool(entries)
    column = tableau.calls * (_COMPONENT * d + _OPERATION * operations + _FUNCTION * functions)
    lane = _LANE_COMPONENT * d + _LANE_OPERATION * operations + _LANE_ELEMENTARY * elementary
    lane = tableau.calls * (lane + _LANE_FUNCTION * (functions - elementary))
    per_entry = _NONZERO if d > LARGE else _ENTRY
    times = zip((iteration, column, lane), per_entry, (_GRADIENT, _GRADIENT, _LANE_GRADIENT) if gradient else (1, 1, 1))
    return Rates(*(factor * (time + entry * entries) for time, entry, factor in times))


@dataclass
class Counts:
    """What is known of solves with the same f, method and shape of states, with and without gradients."""

    program: Program | None = None  # of f, if it has been traced
    calls: int = 0  # of NumPy in f, known after a solve with a gradient
    last: tuple[float, float] = (0.0, 0.0)  # numbers of steps in the last solve: the maximum, and the mean


@dataclass
class History:
    """Earlier solves in this process with the same f, method and shape of states, and with or without a gradient."""

    counts: Counts
    loading: float  # the time to get a kernel that is on disk
    cost: float  # the time to get a kernel, as estimated last
    # The work by arrays since a kernel was chosen last: iterations of the loop over steps, and steps of all trajectories.
    iterations: float = 0.0
    steps: float = 0.0
    # By the text of a forward kernel: the estimated time to get it, with the kernel of its gradient; zero after its use.
    costs: dict[str, float] = field(default_factory=dict)

    def expected(self, settings: Settings, batch: Batch) -> tuple[float, float]:
        """Return the expected maximum and mean of the numbers of steps."""
        tableau, fixed = settings.alg.tableau, settings.alg.tableau.error is None
        if self.counts.last[0] and not fixed:
            return self.counts.last
        span, rtol = float(np.abs(batch.end - batch.start).max()), float(np.min(settings.rtol))
        least = span / settings.dt if fixed else _STEPS * (1e-3 / rtol) ** (1 / tableau.error_order)  # type: ignore[operator]
        number = min(max(least, span / settings.dtmax), settings.max_steps)
        return number, number

    def saved(self, settings: Settings, batch: Batch, gradient: bool, iterations: float, steps: float) -> float:
        """Return the time that a kernel saves for numbers of iterations of the loop over steps, and of steps."""
        times = self.rates(settings, batch, gradient)
        return iterations * times.iteration + steps * times.column - times.of_kernel(iterations, steps)

    def rates(self, settings: Settings, batch: Batch, gradient: bool) -> Rates:
        """Return the times of a step."""
        return rates(settings.alg.tableau, len(batch.u0), self.counts.program, gradient, self.counts.calls)

    def learn(self, program: Program, gradient: bool) -> None:
        """Store the program of f."""
        self.counts.program = program
        self.loading = _LOADING + _LOADING_OPERATION * program.cost * (3 if gradient else 1)

    def cost_of(self, solver: Solver, inputs: Batch, gain: float) -> float:
        """Return the time to get a solve's kernels, or a lower bound that is above the `gain`."""
        forward = solver.forward_code(inputs).source.text
        if forward not in self.costs:
            missing = [code for code in solver.codes(inputs) if not is_cached(code.source)]
            # To determine the length of a kernel takes part of the time.
            least = self.loading + sum(_LINES * code.least_length**1.5 for code in missing)
            if least > gain:
                return least
            self.costs[forward] = self.loading + sum(_LINES * code.length**1.5 for code in missing)
        return self.costs[forward]


class Restart(Exception):  # noqa: N818 control flow, not an error
    """Ends a solve by arrays, since a kernel is to solve from the start."""


class _Watch:
    """The comparison of a running solve by arrays with the kernel; `repetitions`: the expected number of such solves.

    The number of steps is estimated from the covered parts of tspan. The solve is given up if more steps than expected will
    be necessary, if a kernel takes less time for the whole solve, its compilation included, and if the steps so far, with
    their part of a gradient, have taken the fraction `_PATIENCE` of the time to get the kernel: steps may become larger, as
    those of stiff problems do.
    """

    def __init__(
        self,
        history: History,
        trace: Callable[[], TracedProblem | None],
        solver: Callable[[TracedProblem], Solver],
        batch: Batch,
        settings: Settings,
        inputs: Batch,
        repetitions: float,
    ):
        self.plan, self._history, self._solver, self._repetitions = lru_cache(1)(trace), history, solver, repetitions
        self._batch, self._settings, self._inputs = batch, settings, inputs
        self._cost = history.loading + _COMPILING if history.cost <= history.loading else history.cost
        self._expectation = history.expected(settings, batch)
        self._is_exact = self._is_over = False

    def __call__(self, advance: Advance) -> float:
        """Return the number of turns after which the solve is to be compared again; raise Restart to end it."""
        if self._is_over or self.is_better(advance):
            self._is_over = True  # the solves of other threads end, too
            raise Restart
        spent = self._times(advance)[0]
        return advance.turns * max(_CHECKS, _PATIENCE * self._cost / max(spent, 1e-9))

    def at_end(self, outcome: Outcome) -> Advance:
        """Return the advance of a solve that has ended."""
        tries = outcome.naccept + outcome.nreject
        turns, steps = float(tries.max(initial=0)), float(tries.sum())
        return Advance(turns, steps, turns, steps, self._batch.size)

    def is_better(self, advance: Advance) -> bool:
        """Return whether a kernel is expected to take less time from the start than arrays from here on."""
        if not self._exceeds(advance):
            return False
        if not self._is_exact:
            plan, history = self.plan(), self._history
            if plan is None:
                self._cost = inf
                return False
            history.learn(plan.program, self._inputs.traced)
            spent, remaining, by_kernel = self._times(advance)
            worth = min(remaining - by_kernel, spent / _PATIENCE)
            self._cost = history.cost = history.cost_of(self._solver(plan), self._inputs, worth)
            self._is_exact = self._cost <= worth
        return self._exceeds(advance)

    def _exceeds(self, advance: Advance) -> bool:
        longest, mean = self._expectation
        # First steps are small, so the number of steps can't be estimated from a few.
        exceeds = advance.all_turns > _EXCEEDED * longest or advance.all_steps > _EXCEEDED * mean * advance.size
        if advance.turns < max(0.5 * longest, _STEPS) or not exceeds:
            return False
        spent, remaining, by_kernel = self._times(advance)
        return spent >= _PATIENCE * self._cost and remaining > self._cost + by_kernel

    def _times(self, advance: Advance) -> tuple[float, float, float]:
        """Return the time by arrays of the steps so far, with their part of a gradient, and those of the other steps.

        The third number is the time of a kernel for the whole solve.
        """
        gradient, history = self._inputs.traced, self._history
        times = history.rates(self._settings, self._batch, gradient)
        shares = self._batch.size / advance.size  # threads solve one share each
        spent = advance.turns * times.iteration + shares * advance.steps * times.column
        turns, steps = self._repetitions * advance.all_turns, self._repetitions * shares * advance.all_steps
        remaining = turns * times.iteration + steps * times.column - (spent / _GRADIENT if gradient else spent)
        earlier = history.saved(self._settings, self._batch, gradient, history.iterations, history.steps)
        return spent + max(earlier, 0.0), remaining, times.of_kernel(turns, steps)


_histories: WeakKeyDictionary[Any, dict[tuple, History]] = WeakKeyDictionary()


def _with_acting(settings: Settings) -> Settings:
    """Return settings with the events that act, as they will be after the events at the start."""
    if not any(event.acts for event in settings.events):
        return settings
    none = np.empty(0)
    acting = Acting(settings.events, none, none, none, none, ())
    return settings._replace(acting=acting, events=tuple(settings.events[e] for e in acting.conditions))


def _described(cost: float, gain: float, loading: float) -> str:
    """Return a text about the choice, given the time to get a kernel, and the time that it saves."""
    action, origin = ("loading", "in the cache") if cost <= loading else ("compiling", f"compiled, estimated {_time(cost)}")
    if cost <= gain:
        return f"kernel: {'in memory' if cost <= 0 else origin}"
    if cost == inf:
        return "arrays: f or an event can't be compiled"
    if gain < 0:
        return f"arrays: estimated {_time(-gain)} faster than a kernel"
    return f"arrays: estimated {_time(gain)}, {action} a kernel {_time(cost)}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.0995 else f"{seconds:.2g} s"


def refuse_mass_on_device(settings: Settings) -> None:
    """Raise NotImplementedError for an implicit method with a mass matrix, in a solve by arrays on a device."""
    if settings.alg.tableau.implicit and settings.mass is not None:
        raise NotImplementedError(
            f"solve: {type(settings.alg).__name__} supports a mass matrix on the host only, but this solve runs on a "
            "device. Copy u0 and p to the host with mpiad.device.to_host, and use EnsembleVectorized()."
        )


class Compiler:
    """The choice for one call of `solve`, and the kernels that it compiles; `count`: the number of trajectories.

    `channel`: that of the ranks that solve the ensemble together. All of them enter the compiler as a context, since
    they agree on the choice once, at the first batch or at the exit. `solves`: the expected number of solves.
    """

    def __init__(
        self, compile: str | bool, backend: EnsembleAlgorithm, count: int, channel: Channel | None = None, solves: int = 1
    ):
        self.compile, self.backend, self.together = compile, backend, channel is not None
        # For the first solve by arrays: see `_Watch`; and whether the ranks have yet to agree on giving it up.
        self._watch: _Watch | None = None
        self._is_open = False
        # The code of CPU kernels, or the texts of those for GPUs, by the names "forward" and "reverse".
        self.kernels: dict[str, Any] = {}
        self._count, self._channel, self._solves = count, channel, solves
        self._history: History | None = None
        self._last_solver: Solver | None = None
        self._chosen = None if compile == "auto" else bool(compile)
        how = "EnsembleSerial" if compile == "auto" else f"compile={compile}"
        self.execution = f"{'kernel' if self._chosen else 'arrays'}: {how}"
        # Warnings about f, which are stored until `log_warnings` if several ranks solve the ensemble (`together`).
        self._pending: list[tuple[Function, str]] = []
        self.not_finite: dict[int, str] = {}  # for some trajectories that failed at the start: see `not_finite_entry`

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._channel is not None and self._chosen is None and (kind is None or issubclass(kind, FAILURES)):
            self._agree(-inf, inf, 0.0)
        if self._is_open and (kind is None or issubclass(kind, FAILURES)) and self._settled(False):
            self._settled(True)

    def run_planned(self, plan: TracedProblem | None, batch: Batch, settings: Settings, inputs: Batch) -> Outcome:
        """Solve all trajectories of a batch, given the result of `plan` for this batch or a similar one."""
        result = self._by_arrays(batch, settings) if plan is None else plan
        if isinstance(result, Outcome):
            outcome = result
        else:
            outcome = self._solver(result, batch, settings).solved(inputs)
            self._history.costs[self.kernels["forward"].source.text] = 0.0  # type: ignore[union-attr]  # set by `plan`
        if self._history is not None and not self.together:
            self.record(outcome.naccept + outcome.nreject)
        return outcome

    def _by_arrays(self, batch: Batch, settings: Settings) -> TracedProblem | Outcome:
        """Solve by arrays, and return the outcome; or the traced problem, if a kernel is to solve from the start."""
        watch, self._watch = self._watch, None
        if watch is None and not self._is_open:
            return self.backend.run(batch, settings)
        ended = 0

        def progress(count: int) -> None:
            nonlocal ended
            ended += count
            settings.progress(count)  # type: ignore[misc]

        watched = settings._replace(watch=watch, progress=settings.progress and progress)
        outcome = None
        try:
            outcome = self.backend.run(batch, watched)
            wants = watch is not None and watch.is_better(watch.at_end(outcome))
        except Restart:
            wants = True
        is_given_up = self._settled(wants)
        plan, failure = None, None
        try:
            plan = watch.plan() if is_given_up and watch is not None else None
        except FAILURES as error:  # raised when the ranks have agreed
            failure = error
        is_given_up = is_given_up and self._settled(plan is not None, every=True)
        if failure is not None:
            raise failure
        if not is_given_up or plan is None:
            return self.backend.run(batch, settings) if outcome is None else outcome
        if settings.progress is not None:
            settings.progress(-ended)
        self._chosen, self.execution = True, "kernel: restarted, since arrays took more steps than estimated"
        return plan

    def _settled(self, vote: bool, every: bool = False) -> bool:
        """Return whether any rank, or `every` rank, votes for a kernel; collective if several ranks solve together."""
        self._is_open = False
        if self._channel is None:
            return vote
        # All vote for it if there is none that votes against it.
        return on_any_rank(self._channel.data, vote != every) != every

    def _solver(self, plan: TracedProblem, batch: Batch, settings: Settings) -> Solver:
        known = self._last_solver
        if known is not None and known.batch is batch and known.settings is settings:
            return known
        threads = max(1, self.backend.threads or len(cores())) if isinstance(self.backend, EnsembleThreads) else 1
        self._last_solver = Solver(self.kernels, plan, batch, settings, threads)
        return self._last_solver

    def record(self, tries: Array, solves: Array | None = None) -> None:
        """Store the numbers of tried steps in all `solves`, one by default, shape (N,), for the choices of later calls."""
        history = self._history
        if history is None or not len(tries):
            return
        last = tries if solves is None else tries / solves
        history.counts.last = float(last.max()), float(last.sum()) / len(last)
        if not self._chosen:
            history.iterations += float(tries.max())
            history.steps += float(tries.sum())

    def problem_of(self, batch: Batch, settings: Settings, most: int) -> TracedProblem | None:
        """Return the traced problem; see `traced_problem.problem_of`, also for a Jacobian that can't be compiled."""
        problem = problem_of(batch, settings.events, most, self.compile is True, self.warn)
        if problem is not None and settings.alg.tableau.implicit:
            try:
                jacobian_program(problem.program)
            except Refusal as error:
                text = f"the Jacobian of f can't be compiled ({error})"
                if self.compile is True:
                    raise TypeError(f"solve: compile=True, but {text}. Leave compile out.") from error
                self.warn(batch.f, f"{text}, so f is called with arrays instead")
                return None
        return problem

    def plan(self, batch: Batch, settings: Settings, inputs: Batch) -> TracedProblem | None:
        """Check f and the events by a first call; return the traced problem if a CPU kernel will solve the batch."""

        def make(known: bool) -> TracedProblem | None:
            # If a cached trace differs only by numbers, f has been checked before, and `problem_of` will call it anyway.
            if not known:
                try_once(batch, settings.events, inputs.traced)
            return self.problem_of(batch, settings, most)

        must, is_traced = self.compile is True, inputs.traced
        most = _MOST_IMPLICIT if settings.alg.tableau.implicit else _MOST_COMPONENTS
        trace = partial(remembered, make, batch, settings.events, is_traced, must, settings.alg.tableau.implicit)
        if is_on_device(batch):
            if must:
                raise NotImplementedError(
                    "solve: compile=True generates machine code for the host, but u0 or p contains device arrays. "
                    "Leave compile out, or copy the arrays to the host with mpiad.device.to_host."
                )
            refuse_mass_on_device(settings)
            check_place(batch)  # for mixed host and device arrays f itself would raise a less helpful error
            try_once(batch, settings.events, False)
            self.execution = "arrays: u0 or p is on a device"
            return None
        if settings.mass is not None and any(event.acts and event.times is None for event in settings.events):
            # The side to which a condition leaves its root depends on u', and kernels don't solve M u' = f for u'.
            if must:
                raise NotImplementedError(
                    "solve: compile=True isn't supported for a mass_matrix together with an event whose affect acts at the "
                    "root of a condition. Leave compile out, or give times= instead of the condition."
                )
            self.execution = "arrays: kernels don't support a mass_matrix together with these events"
        elif not must and len(batch.u0) > most:
            self.execution = f"arrays: a state has more than {most} components"
        elif batch.size and self._chosen is not False and (must or not isinstance(self.backend, EnsembleSerial)):
            if self._history is None:
                loading = _LOADING + _LOADING_COMPONENT * len(batch.u0)
                of_f = _histories.setdefault(identity_of(batch.f), {})
                kind, other = ((batch.shape, settings.alg.tableau, traced) for traced in (is_traced, not is_traced))
                counts = of_f[other].counts if other in of_f else Counts()
                self._history = of_f.setdefault(kind, History(counts, loading, loading))
            plan = trace() if self._chosen else self._choose(trace, self._history, batch, settings, inputs)
            if plan is not None:
                return plan
        calls = try_once(batch, settings.events, is_traced)
        if self._history is not None:
            self._history.counts.calls = calls
        return None

    def _choose(
        self, trace: Callable[[], TracedProblem | None], history: History, batch: Batch, settings: Settings, inputs: Batch
    ) -> TracedProblem | None:
        """Return the traced problem if a kernel will take less time than arrays, its compilation included."""
        longest, mean = history.expected(settings, batch)
        batches = max(1.0, self._count / batch.size / (1 if self._channel is None else self._channel.size))

        def saved() -> float:
            iterations, steps = history.iterations + self._solves * longest * batches, self._solves * self._count * mean
            return history.saved(settings, batch, inputs.traced, iterations, history.steps + steps)

        plan, cost, gain = None, history.cost, saved()
        is_needed = 0.0 in history.costs.values()  # a kernel that may be the one of this solve
        if is_needed or gain >= cost:
            plan = trace()
            if plan is None:
                # f may be traceable in a later solve, but tracing again shouldn't take longer than arrays.
                history.iterations, history.steps, history.cost, cost = 0.0, 0.0, history.loading, inf
            else:
                history.learn(plan.program, inputs.traced)
                cost, gain = history.loading, saved()
                if is_needed or gain >= cost:  # otherwise the kernel's text, which takes part of this time, isn't made
                    worth = inf if is_needed else gain
                    cost = history.cost_of(self._solver(plan, batch, _with_acting(settings)), inputs, worth)
                history.cost = cost
        if cost < inf:
            solver = lambda plan: self._solver(plan, batch, _with_acting(settings))  # noqa: E731
            self._watch = _Watch(history, trace, solver, batch, settings, inputs, batches * self._solves)
        if not self._agree(cost, gain, history.loading):
            return None
        self._watch = None
        history.iterations = history.steps = 0.0
        return plan

    def _agree(self, cost: float, gain: float, loading: float) -> bool:
        """Choose by the largest cost and the smallest gain of all ranks; collective if several ranks solve together."""
        if self._channel is not None:
            estimates = np.empty((self._channel.size, 3))
            self._channel.data.Allgather(np.array([cost, gain, loading], float), estimates)
            cost, gain, loading = (f(column) for f, column in zip((max, min, max), estimates.T.tolist()))
        self._chosen = cost <= gain
        self._is_open = self._channel is not None and not self._chosen
        if cost > -inf:  # any rank has trajectories, and could use a kernel
            self.execution = _described(cost, gain, loading)
        return self._chosen

    def warn(self, f: Function, text: str) -> None:
        """Log a warning about f, or if `together` store it for `log_warnings`."""
        if not self.together:
            warn_once(f, text)
        # Several batches may cause the same warning.
        elif (f, text) not in self._pending:
            self._pending.append((f, text))

    @property
    def warnings(self) -> str:
        """The texts that `log_warnings` will log."""
        return "\n".join(text for _, text in self._pending)

    def log_warnings(self, all_warnings: Sequence[str], rank: int) -> None:
        """Log the stored warnings on the first rank with the same warnings; `all_warnings`: the `warnings` of all ranks."""
        for f, text in self._pending:
            warn_once(f, text, logs=all_warnings.index(all_warnings[rank]) == rank)
