"""`DistributedOptimizer`: an optimizer that combines the ranks' gradients and makes the same update on all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, Tree
from mpiad.device import to_host
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.gradient import seeds_of_term
from mpiad.differentiation.objective import PendingError, problem_with, raise_everywhere
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.errors import NotFiniteError, UnfinishedMessagesError
from mpiad.parallel.adam import Part, Rule, State, Update, Updated
from mpiad.parallel.buckets import BUCKET_BYTES, ENDED, Plan, Sums, are_active, plan_of
from mpiad.parallel.data import count_samples, described_batch, require_equal_replicas, valid_count
from mpiad.parallel.parameter_groups import ParameterGroups, prepared
from mpiad.parallel.parameters import (
    Optimizer,
    described,
    matching_leaves,
    require_optimizer,
    require_same_leaves,
    require_state,
    variables_of,
)
from mpiad.parallel.synchronize import synchronize
from mpiad.primitives.checks import positive_count
from mpiad.primitives.cotangents import conformed, spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.function import Jitted, shared
from mpiad.programs.signature import form_of
from mpiad.programs.traced_array import untraced
from mpiad.pytrees import fetched, flatten, leaf_paths
from mpiad.transport import SUM, Channel, Spec, channel
from mpiad.transport.core.agreement import FAILURES, KINDS, Failure, agreed, raising_together
from mpiad.transport.core.channels import Used
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.core.tracing import opaque_step, restoring_state, tracing
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.resources import vdot
from mpiad.transport.watch import watch_settings
from mpiad.transport.world import level_of_repeats

_NUMBER = Spec((), np.dtype(float))


def value_and_grad(
    loss: Function,
    *,
    samples: Callable[..., int] | None = None,
    comm: Comm = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Callable[..., tuple[float, Tree]]:
    """Make the function that evaluates the mean loss over all samples and its gradient with respect to the parameters.

    The mean is over samples, not over ranks: each rank's loss and gradient are multiplied by its number of samples, and the
    sums are divided by the total number. The result depends on the division among the ranks only through rounding. The
    gradients of all ranks are summed in a few messages, which start while the reverse pass is still running.

    Parameters
    ----------
    loss : callable
        ``loss(params, *batch)`` returns the mean over this rank's samples, one real number. It isn't called on a rank
        without samples, so every rank needs samples if `loss` communicates. If it is a result of `jit`, so is the returned
        function, which may also be called in functions that are compiled.
    samples : callable, optional
        ``samples(params, *batch)`` returns the number of this rank's samples. By default it is the length of the first
        array of the batch or, if a `DistributedDataContainer` holds a list, the length of its batch; 1 if there is neither.
    comm : mpi4py intracommunicator, optional
        The ranks whose losses are averaged. If other ranks have further stages of the model, see `DistributedOptimizer`.
    bucket_bytes : int
        Maximum size of a message in bytes: gradients of one dtype are concatenated. A larger array has its own message.

    Returns
    -------
    callable
        ``(params, *batch) -> (mean, gradient)``, the same on all ranks. The gradient has the structure of the parameters,
        with None for leaves that aren't floats.

    Raises
    ------
    TypeError
        On all ranks, if `loss` doesn't return a real number, or no parameter has a real or complex floating-point dtype.
    ValueError
        On all ranks, if no rank has a sample, a number of samples isn't an integer from 0, the loss doesn't depend on the
        parameters on any rank, or the ranks' parameters differ in number, shape or dtype.

    Ranks
    -----
    All ranks of `comm` call the result, with parameters of the same structure, shapes and dtypes.

    Adjoint
    -------
    None: for derivatives of the gradient, use `mpiad.value_and_grad` with ``shared=True``.

    Examples
    --------
    >>> loss, gradient = mpiad.parallel.value_and_grad(lambda w, x: np.mean((w - x) ** 2))(1.0, np.zeros(3))
    >>> print(loss, gradient)
    1.0 2.0
    """
    loss = shared(loss)
    evaluate = _evaluation(loss, samples, comm, bucket_bytes)
    if isinstance(loss, Jitted):  # with the sums inside the reverse pass as one program, which keeps `comm` and thus its id
        evaluate = loss.derived((id(comm), samples, bucket_bytes), lambda: evaluate, True)
    return recoverable("parallel.value_and_grad", comm)(evaluate)


class _Checks(NamedTuple):
    """The checks of a step in `totals`: the comparison of the replicas if it is due, and the batch for errors."""

    compare: Callable[[], None] | None = None
    batch: tuple | None = None  # None if the loss may be infinite or NaN
    owns: bool = True  # whether this rank has own parameters, if there are any


def _evaluation(
    loss: Any, samples: Function | None, comm: Comm, bucket_bytes: int, call: str = "parallel.value_and_grad",
    optimizer: DistributedOptimizer | None = None, known: tuple[Variables, int] | None = None,
) -> Function:  # fmt: skip
    """Return the result of `value_and_grad`, not compiled, or the evaluation in a step of an `optimizer`.

    Without `loss`, it takes the parameters and this rank's gradients, times its number of samples, and only sums them.
    """

    def evaluate(params: Tree, *batch: Tree) -> tuple:
        used = channel(comm, "parallel.value_and_grad")
        if known is None:
            with _raising_in_totals(used, call):
                variables = variables_of(params, call) if optimizer is None else optimizer._variables(params, call)
                count = count_samples(samples, params, batch, call)
        else:
            variables, count = known
        leaves, places, _, shared = variables
        specs = [spec_like(leaves[k]) for k in places]
        if tracing.recorder is not None:
            specs = list(map(untraced, specs))
        plan = plan_of(tuple([specs[k] for k in shared]), bucket_bytes)
        accumulates = optimizer is not None and optimizer.accumulate > 1 and loss is not None
        position = {} if accumulates else {k: index for index, k in enumerate(shared)}
        parts: list[Array] = list(batch) if loss is None else [None] * len(specs)
        found: list[Array] = [None] * len(specs)

        def deliver(k: int, g: Array) -> None:
            parts[k] = conformed(g, specs[k])
            if k in position:
                sums.add(position[k], parts[k])

        structure = variables._replace(leaves=[0.0] * len(leaves))  # without traced values
        sum_up = partial(totals, used, plan, structure, call, count, optimizer=optimizer, leaves=leaves)
        with restoring_state(), suspended(body=False), Sums(used, plan if position else plan_of((), 0)) as sums:
            if count and loss is not None:
                floats = [np.float64(leaf) if type(leaf) is float else leaf for leaf in leaves]
                traced = trace_backwards(lambda x: loss(x, *batch), variables._replace(leaves=floats))
                value = getval(traced.build(traced.values))
                _warn_of_other_ranks(used, traced.recording.channels, call)
                # If any rank's loss is invalid, `totals` raises on all ranks, before any of them starts sums.
                count_of_all, mean = sum_up(loss=value, problem=traced.problem, depends=traced.places[0] >= 0)
                # With this seed, the gradient is that of the sum of the losses instead of their mean.
                ready = deliver if sums.begin() else None
                found = run_backward(traced.recording, seeds_of_term(traced, count), len(specs), ready=ready)
            else:  # the sums are collective, so a rank without samples contributes zeros
                count_of_all, mean = sum_up(depends=loss is None)
            if loss is None:
                sums.add_all([parts[k] for k in shared])
            for k in [k for k, part in enumerate(parts) if part is None]:
                deliver(k, found[k])
            # Not the mean of the ranks' means, in which samples of small batches would have a larger weight.
            divisor = count_of_all if optimizer is None or optimizer.reduction == "mean" else 1
            for k, g in zip(position, sums.wait(divisor)):
                parts[k] = g
        if optimizer is not None:  # own and accumulated gradients aren't divided yet
            return mean, parts, divisor
        return mean, variables.filled([g[()] for g in parts], lambda leaf: None)

    return evaluate


_log = logging.getLogger("mpiad")
_warned: set[tuple[str, str]] = set()  # pairs of communicators


def _warn_of_other_ranks(channel: Channel, channels: set[Used], call: str) -> None:
    """Log a warning if the loss communicates with ranks whose losses aren't part of the mean, but of the adjoint."""
    for other, _ in channels:
        pair = channel.label, other.label
        if other is channel or pair in _warned or set(other.members).issubset(channel.members):
            continue
        _warned.add(pair)
        _log.log(
            level_of_repeats(),
            "%s: the loss communicates with ranks outside of comm, on the %s, so that the gradient is that of the sum of "
            "the losses that all these ranks return. If they return copies of one loss, it is multiplied by their number. "
            "For stages of one model, call mpiad.value_and_grad(loss, comm=stages) and then optimizer.update.",
            call,
            other.label,
        )


def value(loss: Function, *, samples: Callable[..., int] | None = None, comm: Comm = None) -> Callable[..., float]:
    """Make the function that evaluates the mean over all samples, without a gradient, of a loss or an accuracy.

    Parameters
    ----------
    loss : callable
        ``loss(params, *batch)``: the mean over this rank's samples, one real number, as in `value_and_grad`. It isn't
        called on a rank without samples.
    samples : callable, optional
        As in `value_and_grad`.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    callable
        ``(params, *batch) -> mean``, the same on all ranks.

    Raises
    ------
    TypeError
        On all ranks, if `loss` doesn't return a real number, or the parameters contain an unsupported object.
    ValueError
        On all ranks, if no rank has a sample, or a number of samples isn't an integer from 0.

    Ranks
    -----
    All ranks of `comm` call the result.

    Adjoint
    -------
    None: traced parameters are refused.

    Examples
    --------
    >>> accuracy = mpiad.parallel.value(lambda w, x, y: np.mean((x > w) == y))
    >>> print(accuracy(0.5, np.array([0.2, 0.7, 0.9, 0.4]), np.array([False, True, True, True])))
    0.75
    """

    @recoverable("parallel.value", comm)
    def evaluate(params: Tree, *batch: Tree) -> float:
        call = "parallel.value"
        used = channel(comm, call)
        with _raising_in_totals(used, call):
            variables = variables_of(params, call, required=False)
            count = count_samples(samples, params, batch, call)
        with restoring_state(), suspended():
            found = loss(params, *batch) if count else 0.0
            return totals(used, plan_of((), 0), variables, call, count, loss=found)[1]

    return evaluate


@contextmanager
def _raising_in_totals(channel: Channel, call: str) -> Iterator[None]:
    """Return a context whose exception all ranks raise: the ranks without one call `totals` later."""
    try:
        yield
    except FAILURES as error:  # the other ranks mustn't wait
        failure = Failure.of(error)
        problem = PendingError(KINDS[failure.builtin], failure.text)
        totals(channel, plan_of((), 0), Variables([], [], list), call, 0, problem=problem)


class _Step(NamedTuple):
    """A call of `step` or `update` with valid parameters and state; `specs`: of the trained parameters."""

    channel: Channel
    call: str
    state: State
    params: Tree
    variables: Variables
    specs: list[Spec]
    update: Update  # of the inner optimizer
    samples: Function | None  # see `DistributedOptimizer.step`


class DistributedOptimizer:
    """An optimizer that sums the gradients of all ranks before each update.

    Parameters
    ----------
    optimizer : object
        `Adam`, `AdamW`, `SGD`, `ParameterGroups`, or any object with ``setup(params) -> state`` and ``update(state,
        params, gradient) -> (state, params)``.
    reduction : {"mean", "sum"}
        Whether to divide summed gradients by the total number of samples (in `update` without `samples`: of gradients).
    accumulate : int
        The number of gradients that are added up on each rank before an update.
    clip_norm : float, optional
        Maximum 2-norm of the reduced gradient over all trained parameters, in which a shared leaf counts once, and own
        leaves count on every rank; gradients with a larger norm are scaled down, by the same factor on all ranks.
    own : callable, optional
        ``own(path)`` returns whether a leaf belongs to each rank for itself, given its path as in error messages, for
        example ``"params['head'][0]"``. Own leaves may differ between ranks in value, shape and number. Their gradients
        aren't summed; with "mean", they are derivatives of the mean loss over all samples.
    skip_nonfinite : bool
        Whether to skip batches with a loss that isn't finite on a rank, and updates with a reduced gradient that isn't
        finite: parameters and optimizer remain unchanged on all ranks, and the state counts them in `skipped`. By default
        `step` raises an error for such a loss.
    check_every : int, optional
        Number of calls between comparisons of the ranks' shared parameters, by a small reduction. By default only the first
        call compares them.
    synchronize : bool
        Whether the first call of `step` begins with the parameters of rank 0 on all ranks, except own leaves.
    bucket_bytes : int
        Maximum size of a message in bytes, as in `value_and_grad`.
    comm : mpi4py intracommunicator, optional
        The ranks with copies of the parameters. If other ranks have further stages of the model, compute gradients by
        `mpiad.value_and_grad` on the communicator of the stages, and call `update`.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid, for example the optimizer's class instead of an object.

    Examples
    --------
    >>> optimizer = mpiad.parallel.DistributedOptimizer(mpiad.parallel.SGD(0.25))
    >>> w = np.ones(2)
    >>> state, w, loss = optimizer.step(optimizer.setup(w), w, lambda w, x: np.mean((w - x) ** 2), np.zeros((3, 2)))
    >>> print(w, loss)
    [0.75 0.75] 1.0
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        reduction: str = "mean",
        accumulate: int = 1,
        clip_norm: float | None = None,
        own: Callable[[str], bool] | None = None,
        skip_nonfinite: bool = False,
        check_every: int | None = None,
        synchronize: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        comm: Comm = None,
    ):
        require_optimizer(optimizer, "DistributedOptimizer: the optimizer")
        if own is not None and not callable(own):
            raise TypeError(f"DistributedOptimizer: own must be a function of a leaf's path, but got {own!r:.60}.")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"DistributedOptimizer: reduction must be 'mean' or 'sum', but got {reduction!r}.")
        for name, count in (("accumulate", accumulate), ("check_every", 1 if check_every is None else check_every)):
            positive_count(count, f"DistributedOptimizer: {name}")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"DistributedOptimizer: clip_norm must be above zero, but got {clip_norm!r}.")
        self.optimizer, self.reduction, self.accumulate = optimizer, reduction, accumulate
        self.clip_norm, self.bucket_bytes, self.comm = clip_norm, bucket_bytes, comm
        self.own, self.skip_nonfinite, self.check_every, self.synchronize = own, skip_nonfinite, check_every, synchronize
        self._calls = 0  # without those that end earlier by an error of any rank, so that all ranks have the same number
        self._checks = _Checks()  # of the current step

    def setup(self, params: Tree) -> State:
        """Return the initial state.

        Parameters
        ----------
        params : pytree of arrays

        Returns
        -------
        dict
            `optimizer`, the inner optimizer's state; if `accumulate` exceeds 1, also this rank's accumulated gradient
            (`gradient`), and its numbers of accumulated steps (`steps`) and samples (`samples`); with `skip_nonfinite` the
            number of skipped batches and updates (`skipped`).

        Raises
        ------
        Exception
            On all ranks, if the inner optimizer's `setup` raises it on a rank: a ValueError for a group without leaves.

        Ranks
        -----
        All ranks of `comm` call it.
        """
        with raising_together(channel(self.comm, "DistributedOptimizer.setup"), Exception):
            return {"optimizer": self.optimizer.setup(params), **self._counters}

    @property
    def _counters(self) -> dict[str, int | list[Array] | None]:
        """The entries of the state besides the inner optimizer's, before the first step."""
        accumulation = {} if self.accumulate == 1 else {"gradient": None, "steps": 0, "samples": 0}
        return accumulation | ({"skipped": 0} if self.skip_nonfinite else {})

    def update(self, state: State, params: Tree, gradient: Tree, samples: int | None = None) -> Updated:
        """Sum the gradients of all ranks, and make one update, the same on all ranks.

        Parameters
        ----------
        state : dict
        params : pytree of arrays
            The same on all ranks.
        gradient : pytree of arrays
            This rank's gradient, in the structure of the parameters. If `samples` is given, it is the gradient of the mean
            loss over these samples.
        samples : int, optional
            The number of this rank's samples, used as the weight of its gradient; if it is 0, the gradient is ignored.
            Either all ranks or none pass it.

        Returns
        -------
        (dict, pytree of arrays)
            The new state and parameters. The parameters are unchanged if more gradients are to be accumulated.

        Raises
        ------
        TypeError, ValueError
            On all ranks, if a rank's gradient or state doesn't match the parameters, or the state is another optimizer's;
            if no rank has a sample, or `samples` isn't an integer from 0; if the ranks' parameters differ in number, shape
            or dtype; if no rank has an own leaf.
            On this rank only, if its gradient, state or `samples` is invalid and no update is due yet.
        ReplicationError
            On all ranks, if shared parameters differ between ranks and are compared in this call.

        Ranks
        -----
        All ranks of `comm` call it.
        """
        call = "DistributedOptimizer.update"
        used, count = channel(self.comm, call), 1
        # Before the last accumulated step, other ranks don't wait.
        last = self.accumulate == 1 or (isinstance(state, dict) and state.get("steps", 0) + 1 >= self.accumulate)
        with _raising_in_totals(used, call) if last else nullcontext():
            step = self._prepared(used, state, params, call)
            parts = [spec.zeros() for spec in step.specs]
            count = 1 if samples is None else valid_count(samples, call)
            if count:
                found = matching_leaves(gradient, params, step.variables.leaves, call)
                # The factor gets the dtype of the gradient, since a NumPy integer would convert float32 to float64.
                parts = [
                    found[k] if count == 1 else found[k] * spec.dtype.type(count)
                    for k, spec in zip(step.variables.places, step.specs)
                ]
        self._checks = self._due_checks(step)
        return self._reduced(step, parts, count)

    def step(
        self,
        state: State,
        params: Tree,
        loss: Function,
        *batch: Tree,
        samples: Callable[..., int] | None = None,
    ) -> tuple[State, Tree, float]:
        """Evaluate the mean loss and its gradient, and make one update; sums overlap with the reverse pass.

        Parameters
        ----------
        state : dict
        params : pytree of arrays
        loss : callable
            ``loss(params, *batch)``: the mean over this rank's samples, as in `value_and_grad`. If it is a result of `jit`,
            the step is one compiled program: loss, reverse pass, sums, clipping, and the update of `Adam`, `AdamW` or
            `SGD`. With accumulated gradients, loss and reverse pass are one program, clipping and update another one.
        *batch : object
        samples : callable, optional
            As in `value_and_grad`.

        Returns
        -------
        (dict, pytree of arrays, float)
            State and parameters as returned by `update`, and the mean loss of all samples before the update.

        Raises
        ------
        TypeError, ValueError, ReplicationError
            As in `value_and_grad` and `update`; on all ranks also for a state that doesn't match on one of them. Exceptions
            of any type in `own`, `samples`, the function of `ParameterGroups`, a schedule or the `update` of a user's
            optimizer are raised on all ranks, too.
        NotFiniteError
            On all ranks, if the loss of a rank isn't finite, unless batches are skipped (`skip_nonfinite`).

        Ranks
        -----
        All ranks of `comm` call it.
        """
        return recoverable("DistributedOptimizer.step", self.comm)(self._step)(state, params, shared(loss), batch, samples)

    def _step(
        self, state: State, params: Tree, loss: Function, batch: tuple, samples: Function | None
    ) -> tuple[State, Tree, float]:
        call = "DistributedOptimizer.step"
        used = channel(self.comm, call)
        if self.synchronize and not self._calls:
            leaves, build = flatten(params)
            paths = leaf_paths(params, "params")
            with raising_together(used, Exception):
                shared = {path: leaf for path, leaf in zip(paths, leaves) if self.own is None or not self.own(path)}
            root_leaves = synchronize(shared, comm=self.comm)
            params = build([root_leaves.get(path, leaf) for path, leaf in zip(paths, leaves)])
        with _raising_in_totals(used, call):
            step = self._prepared(used, state, params, call, samples)
            count = count_samples(samples, params, batch, call)
        self._checks = self._due_checks(step, None if self.skip_nonfinite else batch)
        known = None if isinstance(loss, Jitted) else (step.variables, count)
        evaluate = _evaluation(loss, samples, self.comm, self.bucket_bytes, call, self, known)
        with restoring_state(), suspended():
            if self.accumulate == 1:
                return self._make_update(step, loss, batch, evaluate)
            if isinstance(loss, Jitted):
                evaluate = loss.derived(self._key(step), lambda: evaluate, True)
            mean, parts, _ = evaluate(params, *batch)
            if self.skip_nonfinite and not math.isfinite(mean):
                return {**state, "skipped": state["skipped"] + 1}, params, mean
            self._checks = _Checks()
            return *self._reduced(step, parts, count, loss), mean

    def _prepared(self, channel: Channel, state: State, params: Tree, call: str, samples: Function | None = None) -> _Step:
        """Check parameters and state, and call the functions of the user that neither loss nor gradient needs."""
        variables = self._variables(params, call)
        specs = [spec_like(variables.leaves[k]) for k in variables.places]
        require_state(state, ("optimizer", *self._counters), call)
        gradients = state.get("gradient")
        if gradients is not None:
            # NumPy's sums are in the machine's byte order.
            sums = [spec._replace(dtype=spec.dtype.newbyteorder("=")) for spec in specs]
            given = list(map(spec_like, gradients))
            if given != sums:
                got, expected = (", ".join(map(described, found)) for found in (given, sums))
                text = f"must match the parameters, {expected:.200}, but the state has {got:.200}."
                raise ValueError(f"{call}: the accumulated gradients {text}")
        update = prepared(self.optimizer, state["optimizer"], params)
        return _Step(channel, call, state, params, variables, specs, update, samples)

    def _variables(self, params: Tree, call: str) -> Variables:
        """Return the trained parameters, without frozen ones, and which of them all ranks share."""
        variables = variables_of(params, call)
        groups = self.optimizer if isinstance(self.optimizer, ParameterGroups) else None
        if self.own is None and groups is None:
            return variables
        paths = leaf_paths(params, "params")
        places = [k for k in variables.places if groups is None or not groups.is_frozen(paths[k])]
        if not places:
            raise ValueError(f"{call}: all parameters are frozen, {', '.join(paths):.200}.")
        own = {k for k in variables.places if self.own is not None and self.own(paths[k])}
        return variables._replace(places=places, shared=[k for k, place in enumerate(places) if place not in own])

    def _due_checks(self, step: _Step, batch: tuple | None = None) -> _Checks:
        """Return the checks of a step, with a comparison of the replicas if it is due."""
        used, call, state = step.channel, step.call, step.state
        due = used.size > 1 and (self._calls % self.check_every if self.check_every else self._calls) == 0
        compared: dict[str, Tree] = {"params": step.params}
        if watch_settings.debug():
            settings = {"reduction": self.reduction, "clip_norm": self.clip_norm, "steps": state.get("steps")}
            if isinstance(self.optimizer, Rule):
                updates = settings["updates"] = state["optimizer"].get("updates", 0)
                settings |= {k: rule(updates) if callable(rule) else rule for k, rule in vars(self.optimizer).items()}
            compared["optimizer"], due = settings, True
            if self.own is None:
                # Accumulated gradients differ between ranks, and so do the optimizer's numbers for own leaves.
                compared["state"] = {"optimizer": state["optimizer"]}

        def compare() -> None:
            self._calls += 1
            if due:
                require_equal_replicas(used, call, compared, self.own)

        return _Checks(compare, batch, self.own is None or len(step.variables.shared) < len(step.variables.places))

    def _reduced(self, step: _Step, parts: list[Array], count: int, loss: Function | None = None) -> Updated:
        """Add gradients to the accumulated ones; if an update is due, sum them over the ranks, and make it."""
        state = step.state
        if self.accumulate > 1:
            # New arrays, because the caller may write the next gradient into the same ones.
            old = state["gradient"] or [spec.zeros() for spec in step.specs]
            parts = list(map(np.add, old, parts))
            state = {**state, "gradient": parts, "steps": state["steps"] + 1, "samples": state["samples"] + count}
            if state["steps"] < self.accumulate:
                return state, step.params
            count = state["samples"]
        evaluate = _evaluation(None, None, self.comm, self.bucket_bytes, step.call, self, (step.variables, count))
        with restoring_state(), suspended():
            _, parts, divisor = evaluate(step.params, *parts)
            return self._make_update(step, loss, (divisor, *parts))[:2]

    def _make_update(
        self, step: _Step, loss: Function | None, operands: Sequence[Tree], evaluate: Function | None = None
    ) -> tuple[State, Tree, float]:
        """Evaluate, make an update, and return the result of `step`; if `loss` is compiled, all of it is one program.

        `operands`: the batch for `evaluate`; without `evaluate`, the divisor of own gradients and the reduced gradients.
        """
        variables, parts = step.variables, step.update.parts
        inputs = variables.leaves, [[*part.columns[1:], part.factors] for part in parts]
        others = set(variables.places).difference(*[part.places for part in parts])
        run = self._update_of(step, sorted(others), evaluate)
        if isinstance(loss, Jitted):
            leaves, build = flatten(inputs)  # of programs, those of flat arguments are called faster

            key, count = (*self._key(step), evaluate is None), len(leaves)

            def of_flat_arguments(*arguments: Tree) -> tuple[Array, ...]:
                return run(*build(list(arguments[:count])), *arguments[count:])

            mean, *made = loss.derived(key, lambda: of_flat_arguments, True, True)(*leaves, *operands)
        else:
            mean, *made = run(*inputs, *operands)
        self._checks = _Checks()  # which may keep parameters and batch in memory
        found, new = iter(made), {"optimizer": step.state["optimizer"], **self._counters}
        columns = [[list(islice(found, len(part.places))) for _ in part.columns] for part in parts]
        gradients = [next(found) if k in others else None for k in range(len(variables.leaves))]
        factor, norm = found if self._has_norm else (1.0, 0.0)
        if self.skip_nonfinite:
            is_skipped = not (math.isfinite(mean) and math.isfinite(norm))
            new["skipped"] = step.state["skipped"] + is_skipped
            if is_skipped:
                return new, step.params, mean
        # An optimizer of the user may raise on one rank only, after the last message of this step.
        with raising_together(step.channel, Exception) if others else nullcontext():
            new["optimizer"], params = step.update.finish(columns, gradients, float(factor))
        return new, params, mean

    def _key(self, step: _Step) -> tuple:
        """Return what a step's program depends on, besides the arrays and numbers that it gets."""
        settings = self.bucket_bytes, self.reduction, self.accumulate, self.clip_norm, self.skip_nonfinite
        rules = [(replace(part.rule, learning_rate=1.0), tuple(part.places)) for part in step.update.parts]
        places = tuple(step.variables.places), tuple(step.variables.shared)
        return self, id(self.comm), step.samples, settings, places, form_of(step.params), *rules

    @property
    def _has_norm(self) -> bool:
        return self.clip_norm is not None or self.skip_nonfinite

    def _update_of(self, step: _Step, others: list[int], evaluate: Function | None) -> Function:
        """Return the function of arrays and numbers that `_make_update` runs or compiles, without the step's arrays."""
        _, places, build_params, shared = step.variables
        rules = [(part.rule, part.places) for part in step.update.parts]

        def run(leaves: list[Array], columns: list[list[Array]], *operands: Tree) -> tuple[Array, ...]:
            if evaluate is None:
                mean, divisor, *parts = 0.0, *operands
            else:
                mean, parts, divisor = evaluate(build_params(leaves), *operands)
            parts, *clipping = self._clipped(channel(self.comm, "parallel.value_and_grad"), shared, parts, divisor)
            gradients, new = {k: part[()] for k, part in zip(places, parts)}, list[Array]()
            # As in compiled loops there are no warnings about updates that are skipped.
            with np.errstate(all="ignore") if self.skip_nonfinite else nullcontext():
                for (rule, own), (*moments, factors) in zip(rules, columns):
                    part = Part(rule, own, [[leaves[k] for k in own], *moments], factors)
                    new += [leaf for column in part.updated(gradients, clipping[0]) for leaf in column]
            return mean, *new, *[gradients[k] for k in others], *(clipping if self._has_norm else [])

        return run

    def _clipped(
        self, channel: Channel, shared: Sequence[int], parts: list[Array], divisor: float
    ) -> tuple[list[Array], float, float]:
        """Divide own gradients; return the gradients, the factor by which they are clipped, and their norm, 0 if unused."""
        own = sorted({*range(len(parts))} - {*shared})
        if not own and not self._has_norm:
            return parts, 1.0, 0.0

        def clipped(divisor: float, *parts: Array) -> tuple[Array, ...]:
            divided, norm = [np.true_divide(parts[k], float(divisor)) for k in own], 0.0
            if self._has_norm:
                norm = norm_of([parts[k] for k in shared])
                norm = norm if self.own is None else math.hypot(norm, *channel.data.allgather(norm_of(divided)))
            return *divided, clipping(norm, self.clip_norm), norm, None

        specs = [*[untraced(spec_like(parts[k])) for k in own], _NUMBER, _NUMBER]
        *divided, factor, norm, _ = opaque_step(clipped, divisor, *parts, specs=specs)
        found = dict(zip(own, divided))
        return [found.get(k, part) for k, part in enumerate(parts)], factor, norm


def clipping(norm: float, max_norm: float | None) -> float:
    """Return the factor by which a gradient is clipped to a norm (Pascanu et al., 2013); 1 for a norm that isn't finite."""
    # With a number of NumPy, an update in single precision would have its dtype.
    return float(max_norm / norm) if max_norm is not None and max_norm < norm < math.inf else 1.0


def norm_of(arrays: list[Array]) -> float:
    """Return the joint 2-norm of arrays, by one copy per device unless squares overflow; not finite if an entry isn't."""

    def on_host(numbers: list[Array]) -> list[float]:
        return list(map(float, fetched([number.astype(float) for number in numbers])))

    arrays = [array for array in arrays if array.size]
    with np.errstate(over="ignore", invalid="ignore"):
        square = sum(on_host([vdot(array, array).real for array in arrays]))
        if math.isfinite(square):
            return math.sqrt(square)
        scale = math.hypot(*on_host([np.max(np.abs(array)) for array in arrays]))
        if not math.isfinite(scale):
            return scale
        # The arrays are scaled, since squares overflow.
        return scale * math.sqrt(sum(on_host([np.sum((np.abs(array).astype(float) / scale) ** 2) for array in arrays])))


def totals(
    channel: Channel, plan: Plan, variables: Variables, call: str, count: int, loss: Array = 0.0,
    problem: PendingError | None = None, depends: bool = True, optimizer: DistributedOptimizer | None = None,
    leaves: Sequence[Array] = (),
) -> tuple[float, float]:  # fmt: skip
    """Return the number of all ranks' samples and the mean loss; raise a `problem`, or if parameters don't match.

    `depends`: whether this rank's loss depends on the parameters; `optimizer`: has further checks; `leaves`: of the
    parameters, compared in debug mode if there is no optimizer.
    """

    def summed(loss: Array, *leaves: Array) -> tuple[float, float, None]:
        channel.separate()  # is created by all ranks here, in compiled programs, too
        compare, batch, owns = _Checks() if optimizer is None else optimizer._checks
        mine = problem or problem_with(loss, 1.0, call, "loss must return one real number")
        value = 0.0 if mine else float(np.reshape(to_host(loss), ()))
        if batch is not None and not math.isfinite(value):
            mine = PendingError(
                NotFiniteError,
                f"{call}: the loss is {value} for {described_batch(batch, count)}. Nothing was updated. "
                "Check the samples, reduce the learning rate, or pass skip_nonfinite=True to skip such batches.",
            )
        if are_active(channel):
            text = f"{call}: an exception {ENDED} Call mpiad.reset on all ranks."
            mine = PendingError(UnfinishedMessagesError, text)
        # All entries except the loss are integers; their sums are below 2⁵³, so they are exact.
        counts = [count, plan.digest, plan.digest**2, mine is not None, depends, owns]
        found = allreduce(channel, np.array([*counts, 0.0 if mine else value * count], float), SUM, call)
        total, digests, squares, problems, dependent, owners, sum_of_losses = found.tolist()
        if problems:
            raise_everywhere(channel, mine)
        # By the Cauchy-Schwarz inequality, size · Σ d² = (Σ d)² only if all digests d are equal. The products may be too
        # large for exact floats.
        if channel.size * int(squares) != int(digests) ** 2:
            paths = _paths(variables)
            local = [f"{paths[k]} has {described(spec)}" for k, spec in zip(variables.shared, plan.specs)]
            require_same_leaves(channel, [f"bucket_bytes is {plan.limit}", *local], call)
        if total < 1:
            raise agreed(channel, ValueError(f"{call}: none of the {channel.size} rank(s) has a sample."))
        if not dependent:
            text = (
                "the loss doesn't depend on the parameters on any rank. Compute it by functions of autograd.numpy. If "
                "ranks outside of comm compute it, as a model's last stage, call mpiad.value_and_grad(loss, comm=stages) "
                "and then optimizer.update."
            )
            raise agreed(channel, ValueError(f"{call}: {text}"))
        if not owners:
            paths = ", ".join(_paths(variables))
            raise agreed(channel, ValueError(f"{call}: own(path) is true for no leaf of the parameters {paths:.200}."))
        if compare is not None:
            compare()
        elif optimizer is None and leaves and watch_settings.debug():
            require_equal_replicas(channel, call, {"params": variables.build(list(leaves))})
        return total, sum_of_losses, None

    total, sum_of_losses, _ = opaque_step(summed, loss, *leaves, specs=[_NUMBER, _NUMBER])
    return total, sum_of_losses / total


def _paths(variables: Variables) -> list[str]:
    paths = leaf_paths(variables.build(variables.leaves), "params")
    return [paths[k] for k in variables.places]
