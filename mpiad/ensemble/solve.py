"""`solve`: the solution of an ODE, or of an ensemble of ODEs.

`solve` checks its options; `_over_ranks` divides an ensemble among ranks, and gathers the results; `_ensemble` solves it
batch by batch; `solved_batch` prepares one batch of plain arrays and its settings, for a GPU's kernel (`solved_on_gpu`) or
`_by_kernel_or_arrays`. There `Compiler` traces f and calls a CPU kernel (`kernel_solver.Solver.solved`), or else the
backend's loop over steps in NumPy (`working_set.integrate`). Both return an `Outcome`; `solution_of` makes it a solution.

If inputs are traced, the steps are recorded. `differentiable` makes the results a function of the traced inputs: the
adjoint of a kernel is in `compiled.kernel_derivatives`, that of arrays in `adjoint`, and tangents are in `directions`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Tree
from mpiad.device.assembly import concatenate
from mpiad.ensemble.backends import EnsembleAlgorithm, EnsembleGPU, EnsembleSerial, EnsembleVectorized
from mpiad.ensemble.batch import Batch, is_on_device, not_finite_entries, save_times, with_states_on_device
from mpiad.ensemble.batch_sum import BatchFailures, BatchSum, SummedSolution, batch_sum, summed_over_ranks
from mpiad.ensemble.compiled.cuda.gpu_solve import DeviceSolution, solved_on_gpu
from mpiad.ensemble.compiled.kernel_choice import Compiler
from mpiad.ensemble.consistent_start import consistent_start
from mpiad.ensemble.dense_output import DenseOutput
from mpiad.ensemble.device_rounds import DeviceRun
from mpiad.ensemble.differentiable import differentiable
from mpiad.ensemble.event import Event
from mpiad.ensemble.events import EventRows, traced_times
from mpiad.ensemble.jumps import Jump
from mpiad.ensemble.jumps_in_time import warn_of_jumps_in_time
from mpiad.ensemble.members import initial_states, key_of, own_members, refuse_in_trace
from mpiad.ensemble.methods.dormand_prince import RK45
from mpiad.ensemble.outcome import Outcome, ReturnCode, evaluations, failures, text_of_not_finite
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem, compared_parts, digest_of
from mpiad.ensemble.rank_outcomes import RankReport, outcomes_of_all
from mpiad.ensemble.ranks import EnsembleMPI, ShardedSolution, gathered, sharded, trees_of_all
from mpiad.ensemble.reduction import combined, joined, reduced
from mpiad.ensemble.run import Run
from mpiad.ensemble.settings import MOVING, Acting, Progress, Settings
from mpiad.ensemble.solution import EnsembleSolution, solution_of, unshared
from mpiad.ensemble.solve_options import (
    SolveOptions,
    as_tuple,
    check_combinations,
    checked_options,
    checked_together,
    error_of_unknown,
    settings_of,
)
from mpiad.ensemble.step_observers import EventColumns
from mpiad.ensemble.tableaus import Algorithm
from mpiad.ensemble.trial import with_plain_numbers
from mpiad.errors import IntegrationError
from mpiad.primitives.cotangents import spec_like
from mpiad.progress import progress_bar
from mpiad.pytrees import named_leaves
from mpiad.transport import Channel, channel
from mpiad.transport.core.agreement import FAILURES, alike_on_all, raising_together

_log = logging.getLogger("mpiad")

_RK45, _VECTORIZED = RK45(), EnsembleVectorized()
_NO_TIMES = np.empty(0)


def solve(
    problem: ODEProblem | EnsembleProblem,
    alg: Algorithm = _RK45,
    ensemblealg: EnsembleAlgorithm = _VECTORIZED,
    *,
    trajectories: int | None = None,
    saveat: float | Array | None = None,
    save_everystep: bool = False,
    dense_output: bool = False,
    rtol: float | Array = 1e-3,
    atol: float | Array = 1e-6,
    dt: float | None = None,
    dtmax: float = np.inf,
    max_steps: int = 100_000,
    events: Event | tuple[Event, ...] = (),
    batch_size: int | None = None,
    gradient: str | None = None,
    checkpoints: int | None = None,
    compile: str | bool = "auto",
    progress: bool = False,
    throw: bool = False,
    **others: Any,
) -> Any:
    """Solve an ODE, or each trajectory of an ensemble, with its own time, step size and error control.

    Parameters
    ----------
    problem : ODEProblem or EnsembleProblem
    alg : RK45, Tsit5, BS3, Vern7, RK4, Rosenbrock23 or Rodas5P
        `RK45` by default; the last two are for stiff problems.
    ensemblealg : EnsembleVectorized, EnsembleSerial, EnsembleThreads, EnsembleGPU or EnsembleMPI
        The backend; vectorized by default. Backends on the host give bitwise equal results if either all or none of them
        use a kernel (see `compile`); otherwise, and on GPUs, the results are equal up to rounding.
    trajectories : int, optional
        N; required if the ensemble has no arrays of initial states or parameters.
    saveat : number, list of numbers, or array of shape (N, n_saved), optional
        Times at which states are saved. A number is the interval between saved times, from the start; the final state is
        also saved; if trajectories have different tspans, ``sol.t`` has one row per trajectory, padded with NaN. A list
        contains the same times for all trajectories, an array one row of times per trajectory. By default the initial and
        final states are saved. Times must be sorted from the start to the end, and not traced.
    save_everystep : bool
        Save after every accepted step; ``sol.t`` and ``sol.u`` of an ensemble are padded with NaN.
    dense_output : bool
        Store all steps, so that ``sol(t)`` returns the states at any times.
    rtol : float, or array with the shape of a state
        Relative tolerance: the error of a step is at most ``atol + rtol * abs(u)``, in the root mean square over the
        components; at least 100 times the machine precision.
    atol : float, or array with the shape of a state
        Absolute tolerance.
    dt : float, optional
        Size of the first step; for RK4, of every step.
    dtmax : float
        Maximum step size.
    max_steps : int
        Maximum number of steps per trajectory, rejected steps included.
    events : Event or tuple of Event
        Events to detect or to apply. If an event changes the state at a saved time, the state after the event is saved.
    batch_size : int, optional
        Number of trajectories that are solved together, which limits the memory; all by default. With a `BatchSum` the
        solutions of one batch at a time are in memory, also for the gradient.
    gradient : {"tangent", "adjoint"}, optional
        How a gradient is computed in reverse mode: by tangents propagated with the solve, or by an adjoint sweep back over
        the steps. The default is tangents in a kernel of a small system if a trajectory is differentiated with respect to
        at most four numbers, tspan isn't differentiated, and all events act at constant times after the start that all
        trajectories share, otherwise the adjoint. Both give the same result. With other events, or with respect to tspan,
        "tangent" is slow: it repeats the steps once for each differentiated number.
    checkpoints : int, optional
        For a gradient: store the states before every `checkpoints`-th step (and the times and sizes of all steps), and
        recompute the other states, which costs about one more solve. A kernel instead divides the trajectories into
        `checkpoints` groups, and stores all steps of one group at a time. By default all states are stored.
    compile : {"auto", True, False}
        Whether to compile f into a kernel, in which each trajectory's solve and its gradient run as one loop of machine
        code. "auto" uses a kernel if f can be compiled, kernels support all options, and by an estimate this solve and
        earlier ones of the same f without a kernel take longer than getting the kernel; never with EnsembleSerial, always
        with EnsembleGPU. True raises an error if there can be no kernel. Results with and without a kernel agree up to
        rounding.
    progress : bool
        Whether to display on standard error the number of finished trajectories and an estimate of the remaining time. With
        several ranks, rank 0 displays the progress of its own trajectories.
    throw : bool
        Whether to raise an IntegrationError if a trajectory fails. By default failures are logged, and have return codes.
    **others
        Any other argument raises a TypeError. For a name of SciPy or SciML, such as ``t_eval`` or ``reltol``, the error
        states the argument's name here.

    Returns
    -------
    ODESolution or EnsembleSolution
        A SummedSolution if the ensemble's reduction is a `BatchSum`.

    Raises
    ------
    NotImplementedError
        If `saveat`, or a value that f closes over, is traced, or options can't be combined.
    TypeError, ValueError
        If an argument is invalid, f doesn't return the derivative of each column, or arguments differ between ranks.
    IntegrationError
        With `throw`, if a trajectory fails.

    Ranks
    -----
    Each rank solves independently; with `EnsembleMPI`, all ranks of its communicator call `solve` with the same problem and
    solve together. After the solve they compare the contents of host arrays, the code of the problem's functions, and the
    values that these functions read in addition to their arguments (objects aren't compared).

    Notes
    -----
    With ``compile=True`` or ``compile=False``, a trajectory's results depend neither on the other trajectories or their
    number nor on the backend on the host, bit for bit, if f computes each column independently (with a matrix product in f,
    the results agree up to rounding).

    Examples
    --------
    >>> from mpiad.ensemble import EnsembleProblem, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> print(solve(decay, saveat=0.5).u.ravel().round(3))
    [1.    0.606 0.368]
    >>> end = lambda p: np.sum(solve(EnsembleProblem(decay, p=p), rtol=1e-8, atol=1e-10).u_end)
    >>> print(mpiad.grad(end, objective="sum")(np.array([[1.0], [2.0]])).ravel().round(4))
    [-0.3679 -0.1353]
    """
    refuse_in_trace(problem, "ensemble.solve")
    arguments = SolveOptions(
        problem=problem,
        alg=alg,
        ensemblealg=ensemblealg,
        trajectories=trajectories,
        rtol=rtol,
        atol=atol,
        dt=dt,
        dtmax=dtmax,
        max_steps=max_steps,
        compile=compile,
        unknown=error_of_unknown(solve, others),
        saveat=saveat,
        save_everystep=save_everystep,
        events=as_tuple(events),
        batch_size=batch_size,
        gradient=gradient,
        checkpoints=checkpoints,
        dense_output=dense_output,
        progress=bool(progress),
        throw=throw,
    )
    group = channel(ensemblealg.comm, "ensemble.solve") if isinstance(ensemblealg, EnsembleMPI) else None
    options = checked_options(arguments) if group is None else checked_together(group, arguments)
    single, shared = isinstance(problem, ODEProblem), None if isinstance(problem, ODEProblem) else group
    if single:
        serial = isinstance(options.backend, EnsembleSerial)
        options = options._replace(problem=options.ensemble, ensemblealg=options.backend if serial else _VECTORIZED)
    compiler, key = Compiler(compile, options.backend, options.count, group), key_of(problem, group, "ensemble.solve")
    if isinstance(getattr(problem, "reduction", None), BatchSum):
        return _summed(options, compiler, group, key)
    if shared is not None and isinstance(ensemblealg, EnsembleMPI):
        sol = _over_ranks(options, compiler, ensemblealg, shared, key)
    else:
        with compiler:
            sol = _ensemble(options, compiler, range(1, options.count + 1), key, options.progress and not single)
        if group is not None:
            compiler.log_warnings([compiler.warnings], 0)
            compiler.record(sol.naccept + sol.nreject)
    outcomes = sol.outcomes if isinstance(sol, ShardedSolution) else sol
    _report(outcomes, compiler.not_finite, throw, shared is None or shared.rank == 0)
    # The problem may be that of another solution, with the sources of other kernels.
    solved = problem.with_kernels(compiler.kernels) if compiler.kernels or problem._kernels else problem
    sol.problem, sol.alg, sol.execution = solved, alg, compiler.execution
    return sol[0] if single else unshared(sol)


def _over_ranks(
    options: SolveOptions, compiler: Compiler, mpi: EnsembleMPI, channel: Channel, key: int
) -> EnsembleSolution:
    """Solve an ensemble over the ranks of a communicator; collective. An exception of one rank is raised on all ranks."""
    # Nothing is communicated while trajectories are solved. Afterwards states are gathered by `mpi_allgather`, whose
    # adjoint returns to each rank the cotangents of its share.
    problem, count = options.ensemble, options.count
    bounds = mpi.bounds(count, channel.size)
    first, last = int(bounds[channel.rank]), int(bounds[channel.rank + 1])
    share: EnsembleSolution | BaseException
    try:
        with compiler:
            share = _ensemble(options, compiler, range(first + 1, last + 1), key, options.progress and channel.rank == 0)
        digest = digest_of(problem, options.events)
    except FAILURES as error:  # raised on all ranks together
        share, digest = error, 0
    report = RankReport(bool(compiler.kernels), compiler.warnings, digest, compiler.not_finite)
    calls = partial(evaluations, alg=options.alg, with_dt=options.dt is not None)
    times = None if options.saveat is None or options.saveat.ndim < 2 else np.array(options.saveat, float)
    compared = partial(compared_parts, problem, options.events)
    has_outputs = problem.output_func is not None or problem.reduction is not None
    states = () if not mpi.gather else ("u_end",) if has_outputs else ("u_end", "u")
    share, outcomes = outcomes_of_all(channel, share, calls, report, compared, times, states)
    compiler.not_finite = outcomes.not_finite
    compiler.log_warnings(outcomes.warnings, channel.rank)
    # All ranks compute the shares of the next solve from the same numbers of steps.
    components, tries = prod(share.u_end.shape[1:]), outcomes.naccept + outcomes.nreject
    on_any = outcomes.headers.combined
    mpi.remember(tries, components, bool(on_any.compiled), bool(on_any.traced))
    compiler.record(tries)
    if not mpi.gather:
        return sharded(share, outcomes, mpi.comm, np.arange(first, last), has_outputs)
    outputs = None
    if has_outputs:
        trees = trees_of_all(channel, mpi.comm, share.u)
        with raising_together(channel, Exception):
            parts = [tree for tree, a, b in zip(trees, bounds, bounds[1:]) if a < b or count == 0]
            outputs = combined(problem, parts, count)
    # If there is no prob_func, each rank knows the initial states of all trajectories.
    start = None if problem.prob_func else partial(initial_states, problem, range(1, count + 1))
    return gathered(channel, mpi.comm, share, outcomes, start, outputs)


def _ensemble(options: SolveOptions, compiler: Compiler, numbers: range, key: int, progress: bool) -> EnsembleSolution:
    """Solve some trajectories, numbered from 1."""
    problem = options.ensemble

    def solved(numbers: range, repeat: int = 1) -> EnsembleSolution:
        batch, template = own_members(problem, numbers, repeat, key, options.count)
        sol = solved_batch(options, compiler, batch, on_end if repeat == 1 else None, numbers.start - 1)
        if template is not batch and not options.save_everystep and np.ndim(options.saveat) < 2:
            # Saved times aren't communicated, so a rank without trajectories computes those of trajectory 1.
            sol.t = save_times(options.saveat, template.plain())
        return sol

    batches = _batches(numbers, options.batch_size)
    with _progress(len(numbers)) if progress else nullcontext() as on_end:
        if problem.output_func is None and problem.reduction is None:
            parts = [solved(numbers) for numbers in batches]
            return parts[0] if len(parts) == 1 else joined(parts)
        return reduced(problem, batches, solved)


def _summed(options: SolveOptions, compiler: Compiler, channel: Channel | None, key: int) -> SummedSolution:
    """Solve an ensemble with a `BatchSum`; collective if there is a channel."""
    count, rank, bounds = options.count, 0, np.array([0, options.count])
    if channel is not None and isinstance(options.ensemblealg, EnsembleMPI):
        rank, bounds = channel.rank, options.ensemblealg.bounds(count, channel.size)
    mine = range(int(bounds[rank]) + 1, int(bounds[rank + 1]) + 1)
    failures, batches = BatchFailures(), _batches(mine, options.batch_size)
    unsolved = set(batches)  # derivatives solve batches again, without messages, reports and progress

    def solved(ensemble: EnsembleProblem, numbers: range) -> EnsembleSolution:
        # Without a prob_func, the ensemble's rows are those of the batch.
        own, known = (numbers, count) if ensemble.prob_func else (range(1, len(numbers) + 1), 0)
        batch, _ = own_members(ensemble, own, 1, key, known)
        if numbers in unsolved:
            unsolved.remove(numbers)
            sol = solved_batch(options, compiler, batch, on_end, numbers.start - 1)
            failures.add(sol, numbers)
            return sol
        again = Compiler(options.compile, options.backend, count)
        again.together = compiler.together  # the same device
        return solved_batch(options, again, batch, None, numbers.start - 1)

    def share() -> Tree:
        with compiler:
            return batch_sum(options.ensemble, batches, solved)

    def described(sums: Tree) -> list[object]:
        specs = {name: spec_like(x) for name, x in named_leaves(sums, "the sum")}
        text = ", ".join([f"{name} has shape {spec.shape} and dtype {spec.dtype}" for name, spec in specs.items()])
        return [f"a BatchSum in which {text}", text, digest_of(options.ensemble, options.events)]

    with _progress(len(mine)) if options.progress and rank == 0 else nullcontext() as on_end:
        sums = share() if channel is None else alike_on_all(channel, share, described, "solve")
    not_finite = compiler.not_finite
    if channel is not None:
        reports = channel.data.allgather((failures, compiler.warnings, not_finite))
        compiler.log_warnings([warnings for _, warnings, _ in reports], rank)
        failures, not_finite = BatchFailures.of_all([one for one, *_ in reports]), {}
        for *_, texts in reports:
            not_finite |= texts
        if options.ensemblealg.gather:  # type: ignore[attr-defined]
            sums = summed_over_ranks(sums, channel)
    if text := failures.text(count):
        text += text_of_not_finite(not_finite)
        if options.throw:
            raise IntegrationError(text)
        if rank == 0:
            _log.warning("%s", text)
    problem = options.ensemble.with_kernels(compiler.kernels) if compiler.kernels else options.ensemble
    return SummedSolution(sums, failures.counts.total(), problem, options.alg, compiler.execution)


def _batches(numbers: range, batch_size: int | None) -> list[range]:
    size = max(1, batch_size or len(numbers))
    return [numbers[i : i + size] for i in range(0, len(numbers), size)] or [numbers]


@contextmanager
def _progress(count: int) -> Iterator[Callable[[int], None]]:
    """Display the progress of trajectories; yield the function that receives the number of newly ended ones."""
    with progress_bar("trajectories", count) as bar:

        def ended(count: int) -> None:
            with bar.get_lock():  # threads may solve shares
                bar.update(count)

        yield ended


def solved_batch(
    options: SolveOptions, compiler: Compiler, inputs: Batch, on_end: Progress = None, first: int = 0
) -> EnsembleSolution:
    """Solve a batch; `first`: the index of its first trajectory in the ensemble."""
    record = options.save_everystep or options.dense_output or inputs.traced
    # Copies, since derivatives are computed later, when the user may have changed the parameters.
    if record:
        inputs, options = inputs.snapshot(), options._replace(events=tuple([event.snapshot() for event in options.events]))
    if isinstance(options.backend, EnsembleSerial) and compiler.compile is not True:
        inputs = with_plain_numbers(inputs)
    start = batch = inputs.plain()
    on_gpu = isinstance(options.backend, EnsembleGPU)
    hosted = not (on_gpu or is_on_device(batch))
    check_combinations(options, hosted)
    # Whether only initial and final states are saved; if so, steps aren't searched for saved times.
    ends = (hosted or on_gpu) and options.saveat is None and not options.save_everystep and not options.events
    times = None if options.save_everystep else _NO_TIMES if ends else save_times(options.saveat, batch, first)
    settings = settings_of(options, batch, times, record, ends, on_end)
    failed = None
    if settings.mass is not None and not is_on_device(batch):
        inputs, failed = consistent_start(inputs, settings.mass, settings.rtol, settings.atol)
        batch = inputs.plain()
    solved = partial(_by_kernel_or_arrays, options, compiler)
    if on_gpu:
        sol = solved_on_gpu(compiler, inputs, batch, settings, solved)
        if isinstance(sol, DeviceSolution):
            compiler.execution = "kernel: EnsembleGPU"
    else:
        sol = solved(inputs, batch, settings)
    if failed is not None and failed.any():
        codes = np.where(failed, ReturnCode.InitialFailure.code, sol.codes)
        sol._codes, sol.retcode = codes, ReturnCode.names_of(codes)
    if not sol._all_survived:
        stuck = np.flatnonzero(~sol.survivors & (sol.naccept == 0))
        compiler.not_finite |= not_finite_entries(start, stuck, first)
    return sol


def _by_kernel_or_arrays(
    options: SolveOptions, compiler: Compiler, inputs: Batch, batch: Batch, settings: Settings
) -> EnsembleSolution:
    """Solve a batch by a CPU kernel if `compiler` chooses one, otherwise by arrays, on the host or on their device."""
    moved = with_states_on_device(inputs)
    if moved is not inputs:
        inputs, batch = moved, moved.plain()
    plan = compiler.plan(batch, settings, inputs)
    warn_of_jumps_in_time(compiler.warn, plan, inputs, options.events)
    run = lambda batch, settings: compiler.run_planned(plan, batch, settings, inputs)  # noqa: E731
    if options.acting:
        return solved_with_events(run, batch, settings, inputs, options.dense_output)
    outcome = run(batch, settings)
    sol = solution_of(outcome, batch, settings)
    if inputs.traced:
        run = (Run if outcome.record is None else DeviceRun)(batch, settings, outcome)
        sol = differentiable(sol, run, inputs)
    return replace(sol, dense=DenseOutput(batch, settings, outcome, inputs)) if options.dense_output else sol


def _report(sol: EnsembleSolution, not_finite: dict[int, str], throw: bool, logs: bool) -> None:
    """Log the number of failed trajectories, their codes and the first; with `throw` raise an IntegrationError."""
    if sol._all_survived:
        return
    failed = np.flatnonzero(~sol.survivors)
    first = failed[0]
    text = (
        f"solve: {failures(ReturnCode, sol.retcode, failed, 'trajectories failed')}: {sol.retcode[first]} at "
        f"t = {getval(sol.t_reached[first]):.6g} after {sol.naccept[first]} steps."
    )
    text += text_of_not_finite(not_finite)
    if throw:
        raise IntegrationError(text)
    if logs:
        _log.warning("%s", text)


# Solves with events that change the state.
#
# Events at the start act before the first step. Later events act during the solve, in NumPy (`step_observers`) or in a
# kernel (`compiled.jump_text`): a step ends at an event, and the trajectory continues from the state after the event. For
# derivatives all steps form one record, with jumps between steps (`jumps`). The record is differentiated like that of any
# solve (`differentiable`), also with respect to given times. The time at which a condition vanishes depends on the
# trajectory, and so do all later times (the saltation term). Trajectories that fail contribute no derivatives, not even of
# states before an event.


class GivenTimes:
    """The given times of events, for a batch of plain arrays."""

    def __init__(self, events: Sequence[Event], batch: Batch):
        self.signs = signs = np.where(batch.end < batch.start, -1.0, 1.0)  # -1: integrated backwards in time
        self._events = [(e, event) for e, event in enumerate(events) if event.times is not None]
        due = self._of(batch)
        shape = len(due) + 1, batch.size
        # One column is enough if all trajectories have the same times and direction.
        self.are_common = all(np.ndim(time) == 0 for _, time in due)
        directions = signs[:1] if self.are_common and (signs == signs[:1]).all() else signs
        signed = np.stack([np.full(len(directions), np.inf), *(directions * time for _, time in due)])
        event = np.array([[-1], *([e] for e, _ in due)])
        # At equal times, earlier events in the list come first.
        order = np.lexsort((np.broadcast_to(event, signed.shape), signed), axis=0)
        signed = np.take_along_axis(signed, order, axis=0)
        self._order = np.broadcast_to(order, shape)
        # Shape (m + 1, N), in the direction of the solve; the times in the last row are infinite.
        self.event = np.broadcast_to(event[order, 0], shape)
        self.first = np.count_nonzero(signed < signs * batch.start, axis=0)  # the first time that isn't before the start
        self.times = np.broadcast_to(directions * signed, shape)

    def _of(self, batch: Batch) -> list[tuple[int, Array]]:
        """Return the indices of events and their given times, each a number or of shape (N,); parameters may be traced."""
        due = []
        for e, event in self._events:
            for time in event.due(batch.p.build(batch.p.leaves)):
                plain = np.asarray(getval(time))
                if plain.shape not in ((), (batch.size,)) or plain.dtype.kind not in "iuf":
                    raise ValueError(
                        f"Event: times(p) must return a list of times, each a number or of shape {(batch.size,)} here, one "
                        f"for each column, but got {np.array2string(plain, threshold=6)} of shape {plain.shape}."
                    )
                if np.isnan(plain).any():
                    raise ValueError(
                        "Event: times(p) must return a list of times, but one of them is NaN: "
                        f"{np.array2string(plain, threshold=6)}. Give numpy.inf for no time."
                    )
                due.append((e, time))
        return due

    def passed(self, stop: Array) -> tuple[Array, ...]:
        """Return the last passed times: trajectories, events, times, -1 - indices in `times`; `stop`: the next indices."""
        counts = np.maximum(stop - self.first, 0)
        ids, ends = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
        slot = np.arange(len(ids)) - np.repeat(ends - counts - self.first, counts)
        columns = ids if self.times.strides[1] or not ids.size else 0  # all columns of a broadcast array are equal
        return ids, self.event[slot, columns], self.times[slot, columns], -1 - slot

    def traced(self, batch: Batch) -> Array:
        """Return `times` as a function of traced parameters."""
        due = [time for _, time in self._of(batch)]
        if not any(map(isbox, due)):
            return self.times
        rows = [anp.reshape(time * np.ones(batch.size), (1, -1)) for time in due]
        return anp.concatenate([np.full((1, batch.size), np.inf), *rows], axis=0)[self._order, np.arange(batch.size)]


def solved_with_events(
    solve: Callable[[Batch, Settings], Outcome], batch: Batch, settings: Settings, inputs: Batch, dense: bool
) -> EnsembleSolution:
    """Apply events at the start, call `solve`, and return the solution with derivatives for traced `inputs`."""
    if inputs.traced and (dense or settings.saveat is None):
        raise NotImplementedError(
            "solve: derivatives of solves with events with an affect aren't supported with dense_output=True or "
            "save_everystep=True. Pass the times as saveat."
        )
    times = GivenTimes(settings.events, batch)
    due = times.traced(inputs) if inputs.traced else None
    begun, acting = started(batch, settings, times, isbox(due))
    outcome = solve(begun, acting)
    run = Run(batch, settings, outcome)

    def events(reached: Array = None, crossed: Array = None) -> EventRows:
        """Return the roots of conditions and the given times that have passed, with derivatives for traced times."""
        ids, event, when, source = times.passed(outcome.slots)
        table = outcome.event_table
        if table is not None and table.size:
            # The last part: for roots of conditions the column of the table, for given times -1 - the index of the time.
            roots = *table[:2].astype(int), table[4], np.arange(table.shape[1])
            ids, event, when, source = map(np.concatenate, zip(roots, (ids, event, when, source)))
            # At equal times, roots of conditions come first.
            order = np.lexsort((times.signs[ids] * when, ids))
            ids, event, when, source = ids[order], event[order], when[order], source[order]
        if due is not None and crossed is not None:
            place_of_due = len(crossed) + (-1 - source) * due.shape[1] + ids
            places = np.where(source < 0, place_of_due, np.append(run.crossed_row, -1)[np.maximum(source, 0)])
            every = concatenate([crossed, anp.reshape(due, (-1,))])
            when = traced_times(ids, when, places, run.live, reached, every)
        return EventRows(ids, event, when)

    sol = solution_of(outcome, batch, settings, events)
    if due is not None:
        sol = differentiable(sol, run, inputs, due, events)
    return replace(sol, dense=DenseOutput(begun, acting, outcome, inputs)) if dense else sol


def started(batch: Batch, settings: Settings, times: GivenTimes, varies: bool) -> tuple[Batch, Settings]:
    """Apply the events at the start; return the batch of the states after them, and the settings of the solve.

    `varies`: whether the given times have derivatives.
    """
    jumps: list[Jump] = []
    every, u, slots = np.arange(batch.size), batch.u0.copy(), times.first.copy()
    acting = Acting(settings.events, times.times, times.event, slots, np.full(batch.size, MOVING), ())
    columns = EventColumns(batch, acting, slots, times.signs, jumps, every, u, batch.start, np.zeros_like(every))
    with np.errstate(all="ignore"):
        columns.meet_given_times()
    ended = columns.codes != MOVING
    if jumps or ended.any():
        batch = batch._replace(u0=u, end=np.where(ended, batch.start, batch.end) if ended.any() else batch.end)
    # Events at the starts of other trajectories mustn't change how the derivatives of a trajectory are computed.
    varies = varies or bool(jumps) or bool(ended.any()) or not times.are_common
    acting = acting._replace(codes=columns.codes, started=tuple(jumps) if settings.record else (), varies=varies)
    events = tuple(settings.events[e] for e in acting.conditions)
    return batch, settings._replace(events=events, acting=acting)
