"""`DistributedOptimizer`: an optimizer that combines the ranks' gradients and makes the same update on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, Tree
from mpiad.device import to_host
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.gradient import seeds_of_term
from mpiad.differentiation.objective import PendingError, problem_with, raise_everywhere
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.errors import UnfinishedMessagesError
from mpiad.parallel.adam import SGD, Adam
from mpiad.parallel.buckets import BUCKET_BYTES, ENDED, Plan, Sums, are_active, plan_of
from mpiad.parallel.data import count_samples, require_equal_replicas
from mpiad.parallel.parameters import described, matching_leaves, require_state, variables_of
from mpiad.primitives.checks import positive_count
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import suspended
from mpiad.programs.function import Jitted
from mpiad.programs.traced_array import on_host
from mpiad.pytrees import fetched, flatten, is_variable, named_leaves
from mpiad.transport import SUM, Channel, Spec, channel
from mpiad.transport.core.agreement import agreed
from mpiad.transport.core.collectives import allreduce
from mpiad.transport.core.tracing import opaque_step, restoring_state, tracing
from mpiad.transport.exits.recovery import recoverable
from mpiad.transport.resources import vdot
from mpiad.transport.watch import watch_settings


def value_and_grad(
    loss: Function,
    *,
    samples: Callable[..., int] | None = None,
    comm: Comm = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Callable[..., tuple[float, Tree]]:
    """Make the function that evaluates the mean loss over all samples and its gradient with respect to the parameters.

    The gradients of all ranks are summed in a few messages, which start while the reverse pass is still running. A rank
    without samples contributes zeros.

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
    bucket_bytes : int
        Maximum size of a message in bytes. Gradients of one dtype are concatenated to messages of at most this size; a
        larger array has its own message.

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
        On all ranks, if no rank has a sample, or the ranks' parameters differ in number, shape or dtype.

    Ranks
    -----
    All ranks of `comm` call the result, with parameters of the same structure, shapes and dtypes.

    Adjoint
    -------
    None: for derivatives of the gradient, use `mpiad.value_and_grad` with ``shared=True``.

    Notes
    -----
    The mean is over samples, not over ranks: each rank's loss and gradient are multiplied by its number of samples, and
    the sums are divided by the total number of samples. Therefore the result depends on the division of the samples among
    the ranks only through rounding.

    Examples
    --------
    >>> loss, gradient = mpiad.parallel.value_and_grad(lambda w, x: np.mean((w - x) ** 2))(1.0, np.zeros(3))
    >>> print(loss, gradient)
    1.0 2.0
    """
    return _evaluation(loss, samples, comm, bucket_bytes)


def _evaluation(
    loss: Function, samples: Any, comm: Comm, bucket_bytes: int, call: str = "parallel.value_and_grad", mean: bool = True
) -> Callable[..., tuple[float, Tree]]:
    """Return the result of `value_and_grad`, compiled if `loss` is; `mean`: whether the gradient is that of the mean."""
    plan: Plan | None = None

    def evaluate(params: Tree, *batch: Any) -> tuple[float, Tree]:
        used = channel(comm, "parallel.value_and_grad")
        variables = variables_of(params, call)
        leaves, places, build = variables

        def compare(*new: Any) -> tuple[None]:
            if watch_settings.debug() and call == "parallel.value_and_grad":  # a step has compared more
                require_equal_replicas(used, call, {"params": build(list(new))})
            return (None,)

        opaque_step(compare, *leaves, specs=())
        count = count_samples(samples, params, batch)
        specs = [spec_like(leaves[k]) for k in places]
        if tracing.recorder is not None:
            specs = list(map(on_host, specs))
            params = build([0.0 if k in places else None for k in range(len(leaves))])  # `totals` needs the structure only
        nonlocal plan
        plan = plan_of(specs, bucket_bytes, plan)
        sum_up = partial(totals, used, plan, params, call, count)
        with restoring_state(), suspended(body=False), Sums(used, plan) as sums:
            total = gradient_of_sum(lambda x: loss(x, *batch), variables, count, sum_up, sums.add, sums)
            # Not the mean of the ranks' means, in which samples of small batches would have a larger weight.
            found = dict(zip(places, sums.wait(total.batch if mean else 1)))
        return total.loss / total.batch, build([found[k][()] if k in found else None for k in range(len(leaves))])

    if isinstance(loss, Jitted):
        # The evaluation, with the sums between parts of the reverse pass, is one program. It keeps `comm` and its id.
        key = id(comm), samples, bucket_bytes, call, mean
        return recoverable(call, comm)(loss.derived(key, lambda: evaluate, optional=True))
    return recoverable(call, comm)(evaluate)


def gradient_of_sum(
    loss: Function, variables: Variables, count: int, sum_up: Callable[..., Totals], ready: Function, sums: Sums | None
) -> Totals:
    """Return the totals of `sum_up`; call ``ready(k, gradient)`` with the gradients of the sum of this rank's losses."""
    places = variables.places
    leaves = [np.float64(leaf) if type(leaf) is float else leaf for leaf in variables.leaves]

    def deliver(variable: int, g: Array) -> None:
        leaf = leaves[places[variable]]
        if type(g) is np.ndarray and type(leaf) is np.ndarray and g.dtype == leaf.dtype and g.shape == leaf.shape:
            ready(variable, g)  # the most common case
        else:
            spec = spec_like(leaf)
            ready(variable, spec.zeros() if g is None else conform(g, *spec))

    # The sums are collective, so a rank without samples contributes zeros.
    if not count:
        found = sum_up()
        for variable in range(len(places)):
            deliver(variable, None)
        return found
    traced = trace_backwards(loss, variables._replace(leaves=leaves))
    value = traced.build(traced.values)
    # If any rank's loss is invalid, `sum_up` raises on all ranks, before any of them starts sums in the reverse pass.
    requirement = "loss must return one real number"
    problem = traced.problem or problem_with(getval(value), 1.0, "parallel.value_and_grad", requirement)
    found = sum_up(problem=problem) if problem else sum_up(loss=to_host(getval(value)))
    # With the number of samples as the seed, the gradient is that of the sum of the losses instead of their mean.
    seeds = seeds_of_term(traced, count)
    if sums is not None and sums.begin():  # other buckets are summed during the reverse pass
        run_backward(traced.recording, seeds, len(places), ready=deliver)
    else:
        for variable, g in enumerate(run_backward(traced.recording, seeds, len(places))):
            deliver(variable, g)
    return found


class DistributedOptimizer:
    """An optimizer that sums the gradients of all ranks before each update.

    Parameters
    ----------
    optimizer : object
        `Adam`, `AdamW`, `SGD`, or any object with ``setup(params) -> state`` and ``update(state, params, gradient) ->
        (state, params)``.
    reduction : {"mean", "sum"}
        "mean": divide the sum of the gradients by the total number of samples or, in `update` without `samples`, of
        gradients. "sum": don't divide.
    accumulate : int
        The number of gradients that are added up on each rank before an update.
    clip_norm : float, optional
        Maximum 2-norm of the reduced gradient over all parameters; gradients with a larger norm are scaled down.
    bucket_bytes : int
        Maximum size of a message in bytes, as in `value_and_grad`.
    comm : mpi4py intracommunicator, optional

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid.

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
        optimizer: Any,
        *,
        reduction: str = "mean",
        accumulate: int = 1,
        clip_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        comm: Comm = None,
    ):
        if not callable(getattr(optimizer, "setup", None)) or not callable(getattr(optimizer, "update", None)):
            raise TypeError(
                "DistributedOptimizer: the optimizer must have setup(params) and update(state, params, gradient), but got "
                f"{type(optimizer).__name__} {optimizer!r:.60}."
            )
        if reduction not in ("mean", "sum"):
            raise ValueError(f"DistributedOptimizer: reduction must be 'mean' or 'sum', but got {reduction!r}.")
        positive_count(accumulate, "DistributedOptimizer: accumulate")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"DistributedOptimizer: clip_norm must be above zero, but got {clip_norm!r}.")
        self.optimizer, self.reduction, self.accumulate = optimizer, reduction, accumulate
        self.clip_norm, self.bucket_bytes, self.comm = clip_norm, bucket_bytes, comm
        self._empty_accumulation: dict[str, Any] = {} if accumulate == 1 else {"gradient": None, "steps": 0, "samples": 0}
        self._plan: Plan | None = None

    def setup(self, params: Tree) -> dict[str, Any]:
        """Return the initial state.

        Parameters
        ----------
        params : pytree of arrays

        Returns
        -------
        dict
            `optimizer`, the inner optimizer's state; if `accumulate` exceeds 1, also this rank's accumulated gradient
            (`gradient`), and its numbers of accumulated steps (`steps`) and samples (`samples`).
        """
        return {"optimizer": self.optimizer.setup(params), **self._empty_accumulation}

    def update(
        self, state: dict[str, Any], params: Tree, gradient: Tree, samples: int | None = None
    ) -> tuple[dict[str, Any], Tree]:
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
            On all ranks, if a rank's gradient or accumulated gradient doesn't match the parameters; if no rank has a
            sample; if the ranks' parameters differ in number, shape or dtype. On this rank only, if its gradient doesn't
            match and no update is due yet; if its state is that of another optimizer or of other parameters.

        Ranks
        -----
        All ranks of `comm` call it.
        """
        call = "DistributedOptimizer.update"
        variables = variables_of(params, call)
        param_leaves, places, _ = variables
        specs = [spec_like(param_leaves[k]) for k in places]
        require_state(state, ("optimizer", *self._empty_accumulation), call)
        problem, parts, accumulated, count = None, None, None, 1 if samples is None else samples
        last = state.get("steps", 0) + 1 >= self.accumulate
        try:
            accumulated = _accumulated(state, specs, call)
            if samples != 0:
                leaves = matching_leaves(gradient, params, param_leaves, call)
                # The factor gets the dtype of the gradient, since a NumPy integer would convert float32 to float64.
                parts = [g if count == 1 else g * s.dtype.type(count) for g, s in zip((leaves[k] for k in places), specs)]
        except (TypeError, ValueError) as error:
            if not last:
                raise  # other ranks don't wait before the last accumulated step
            problem = PendingError(type(error), str(error))
        if parts is None:
            parts = [spec.zeros() for spec in specs]
        if self.accumulate > 1:
            # Copies, because the caller may write the next gradient into the same arrays.
            parts = list(map(_copied, parts)) if accumulated is None else list(map(np.add, accumulated, parts))
            if not last:
                return self._accumulate(state, parts, count), params
            count += state["samples"]
        with restoring_state(), suspended():
            self._plan = plan_of(specs, self.bucket_bytes, self._plan)
            used = channel(self.comm, call)
            self._compare(used, state, params, call)
            total = totals(used, self._plan, params, call, count, problem=problem)
            with Sums(used, self._plan) as sums:
                sums.add_all(parts)
                return self._apply(state, params, variables, self._wait(sums, total))

    def step(
        self,
        state: dict[str, Any],
        params: Tree,
        loss: Function,
        *batch: Any,
        samples: Callable[..., int] | None = None,
    ) -> tuple[dict[str, Any], Tree, float]:
        """Evaluate the mean loss and its gradient, and make one update; sums overlap with the reverse pass.

        Parameters
        ----------
        state : dict
        params : pytree of arrays
        loss : callable
            ``loss(params, *batch)``: the mean over this rank's samples, as in `value_and_grad`. If it is a result of `jit`,
            loss, reverse pass and sums are one compiled program, unless gradients are accumulated.
        *batch : object
        samples : callable, optional
            As in `value_and_grad`.

        Returns
        -------
        (dict, pytree of arrays, float)
            State and parameters as returned by `update`, and the mean loss of all samples before the update.

        Raises
        ------
        TypeError, ValueError
            As in `value_and_grad` and `update`.

        Ranks
        -----
        All ranks of `comm` call it.
        """
        return recoverable("DistributedOptimizer.step", self.comm)(self._step)(state, params, loss, batch, samples)

    def _step(
        self, state: dict[str, Any], params: Tree, loss: Function, batch: tuple, samples: Callable[..., int] | None
    ) -> tuple[dict[str, Any], Tree, float]:
        call = "DistributedOptimizer.step"
        used = channel(self.comm, call)
        variables = variables_of(params, call)
        specs, count = [spec_like(variables.leaves[k]) for k in variables.places], count_samples(samples, params, batch)
        require_state(state, ("optimizer", *self._empty_accumulation), call)
        self._compare(used, state, params, call)
        if isinstance(loss, Jitted) and self.accumulate == 1:
            evaluate = _evaluation(loss, samples, self.comm, self.bucket_bytes, call, self.reduction == "mean")
            mean, gradient = evaluate(params, *batch)
            leaves = flatten(gradient)[0]
            return *self._apply(state, params, variables, [leaves[k] for k in variables.places]), mean
        # Gradients are summed only in the last step before an update.
        last = state.get("steps", 0) + 1 >= self.accumulate
        parts: list[Any] = [None] * len(specs)
        self._plan = plan_of(specs, self.bucket_bytes, self._plan)
        sum_up = partial(totals, used, self._plan, params, call, count, state.get("samples", 0))
        try:
            accumulated = _accumulated(state, specs, call) or [None] * len(specs)
        except ValueError as error:
            sum_up(problem=PendingError(type(error), str(error)))
            raise
        with restoring_state(), suspended(), Sums(used, self._plan) as sums:

            def ready(k: int, g: Array) -> None:
                if accumulated[k] is not None:
                    g = accumulated[k] + g
                elif not last:
                    g = _copied(g)  # an operator may reuse the memory of its result before the update
                parts[k] = g
                if last:
                    sums.add(k, g)

            total = gradient_of_sum(lambda x: loss(x, *batch), variables, count, sum_up, ready, sums if last else None)
            mean = total.loss / total.batch
            if not last:
                return self._accumulate(state, parts, count), params, mean
            return *self._apply(state, params, variables, self._wait(sums, total)), mean

    def _compare(self, used: Channel, state: dict[str, Any], params: Tree, call: str) -> None:
        if watch_settings.debug():
            settings = {"reduction": self.reduction, "clip_norm": self.clip_norm, "steps": state.get("steps")}
            if isinstance(self.optimizer, (Adam, SGD)):
                updates = settings["updates"] = state["optimizer"]["updates"]
                settings |= {k: rule(updates) if callable(rule) else rule for k, rule in vars(self.optimizer).items()}
            # Accumulated gradients differ between ranks.
            compared = {"params": params, "state": {"optimizer": state["optimizer"]}, "optimizer": settings}
            require_equal_replicas(used, call, compared)

    def _accumulate(self, state: dict[str, Any], parts: list[Any], count: int) -> dict[str, Any]:
        return {**state, "gradient": parts, "steps": state["steps"] + 1, "samples": state["samples"] + count}

    def _wait(self, sums: Sums, total: Totals) -> list[Array]:
        return sums.wait(total.all if self.reduction == "mean" else 1)

    def _apply(
        self, state: dict[str, Any], params: Tree, variables: Variables, found: list[Array]
    ) -> tuple[dict[str, Any], Tree]:
        leaves: list[Any] = [None] * len(variables.leaves)
        for k, array in zip(variables.places, clipped(found, self.clip_norm)):
            leaves[k] = array[()]
        inner, params = self.optimizer.update(state["optimizer"], params, variables.build(leaves))
        return {**state, **self._empty_accumulation, "optimizer": inner}, params


def _accumulated(state: dict[str, Any], specs: list[Spec], call: str) -> list[Any] | None:
    """Return the accumulated gradients; raise a ValueError if their shapes or dtypes don't match `specs`."""
    gradients = state.get("gradient")
    if gradients is not None and [spec_like(g) for g in gradients] != specs:
        got, expected = (", ".join(map(described, found)) for found in (map(spec_like, gradients), specs))
        raise ValueError(
            f"{call}: the accumulated gradients must match the parameters, {expected:.200}, but the state has {got:.200}."
        )
    return gradients


def _copied(part: Array) -> Array:
    return part.copy() if hasattr(part, "copy") else np.array(part)


def clipped(arrays: list[Array], max_norm: float | None) -> list[Array]:
    """Scale arrays in place to a joint 2-norm of at most `max_norm` (Pascanu et al., 2013), unless it isn't finite."""
    if max_norm is None:
        return arrays
    norm = math.hypot(*_norms([array for array in arrays if array.size]))  # hypot avoids the overflow of a sum of squares
    if max_norm < norm < math.inf:
        for k in range(len(arrays)):
            arrays[k] *= max_norm / norm  # a new scalar, or in place
    return arrays


def _norms(arrays: list[Array]) -> list[float]:
    """Return the arrays' norms, one copy per device unless squares overflow; largest entries if any isn't finite."""

    def on_host(numbers: list[Array]) -> np.ndarray:
        return np.array(fetched([number.astype(float) for number in numbers]))

    with np.errstate(over="ignore", invalid="ignore"):
        squares = on_host([vdot(array, array).real for array in arrays])
        if np.isfinite(squares).all():
            return np.sqrt(squares).tolist()
        largest = on_host([np.max(np.abs(array)) for array in arrays])
        if not np.isfinite(largest).all():
            return largest.tolist()
        # The arrays are scaled, since squares overflow. The lower bound of the divisor is for arrays of zeros.
        scaled = [np.abs(array).astype(float) / size for array, size in zip(arrays, np.maximum(largest, 1e-300).tolist())]
        return (largest * np.sqrt(on_host([np.sum(array * array) for array in scaled]))).tolist()


class Totals(NamedTuple):
    """Sums over all ranks: samples in this batch, samples in all accumulated batches, and losses."""

    batch: float
    all: float
    loss: float


def totals(
    used: Channel, plan: Plan, params: Tree, call: str, count: int, accumulated_before: int = 0, loss: Array = 0.0,
    problem: PendingError | None = None,
) -> Totals:  # fmt: skip
    """Sum samples and losses over the ranks; raise on all ranks a `problem`, or if their parameters don't match."""
    args = used, plan, params, call, count, accumulated_before, loss, problem
    *found, _ = opaque_step(_totals, *args, specs=[Spec((), np.dtype(float))] * len(Totals._fields))
    return Totals(*found)


def _totals(
    used: Channel, plan: Plan, params: Tree, call: str, count: int, accumulated_before: int, loss: Array,
    problem: PendingError | None,
) -> tuple[Any, ...]:  # fmt: skip
    used.separate()  # is created by all ranks here, in compiled programs, too
    if are_active(used):
        problem = PendingError(UnfinishedMessagesError, f"{call}: an exception {ENDED} Call mpiad.reset on all ranks.")
    # All entries except the loss are integers; their sums are below 2⁵³, so they are exact.
    weighted = float(np.reshape(loss, ())) * count
    local = [count, count + accumulated_before, plan.digest, plan.digest**2, problem is not None, weighted]
    found = allreduce(used, np.array(local, float), SUM, call)
    total, accumulated, digests, squares, problems, sum_of_losses = found.tolist()
    # By the Cauchy-Schwarz inequality, size · Σ d² = (Σ d)² only if all digests d are equal. The products may be too large
    # for exact floats.
    if used.size * int(squares) != int(digests) ** 2:
        raise agreed(used, _difference(used, plan, params, call))
    if total < 1:
        raise agreed(used, ValueError(f"{call}: none of the {used.size} rank(s) has a sample."))
    if problems:
        raise_everywhere(used, problem)
    return total, accumulated, sum_of_losses, None


def _difference(used: Channel, plan: Plan, params: Tree, call: str) -> ValueError:
    paths = (path for path, leaf in named_leaves(params, "params") if is_variable(leaf))
    local = [f"{path} has {described(spec)}" for path, spec in zip(paths, plan.specs)]
    every = used.data.allgather((local, plan.limit))
    for rank, (others, limit) in enumerate(every):
        first, first_limit = every[0]
        for one, other in zip(first, others):
            if one != other:
                return ValueError(
                    f"{call}: the parameters must have the same form, shapes and dtypes on all ranks, but {one} on rank 0, "
                    f"and {other} on rank {rank}."
                )
        if (len(others), limit) != (len(first), first_limit):
            return ValueError(
                f"{call}: all ranks must train the same number of arrays with the same bucket_bytes, but rank 0 has "
                f"{len(first)} and {first_limit}, and rank {rank} has {len(others)} and {limit}."
            )
    return ValueError(f"{call}: the parameters differ between ranks.")
