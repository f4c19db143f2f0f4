"""`value_and_grad` of a training: the mean over all ranks' samples, whose gradient travels while it is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, Tree
from mpiad.device import to_host
from mpiad.differentiation.backward import run_backward
from mpiad.differentiation.objective import problem_with
from mpiad.differentiation.trace import Variables, trace_backwards
from mpiad.parallel.buckets import BUCKET_BYTES, Plan, Sums, plan_of
from mpiad.parallel.parameters import variables_of
from mpiad.parallel.samples import Totals, counted, require_equal_replicas, totals
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.primitives.operation import suspended
from mpiad.transport import channel
from mpiad.transport.recovery import recoverable
from mpiad.transport.tracing import restoring_state


def value_and_grad(
    loss: Function,
    *,
    samples: Callable[..., int] | None = None,
    comm: Comm = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Callable[..., tuple[float, Tree]]:
    """Make the function that evaluates the mean loss over all samples and its gradient with respect to the parameters.

    The gradients of all ranks are added up in few messages, which start while the reverse pass is still running. A rank
    without samples takes part with zeros.

    Parameters
    ----------
    loss : callable
        ``loss(params, *batch)`` returns the mean over this rank's samples, one real number. It isn't called on a rank
        without samples; so where it communicates, every rank needs some.
    samples : callable, optional
        ``samples(params, *batch)`` returns the number of this rank's samples. By default it is the length of the first
        array of the batch, and 1 where there is no batch.
    comm : mpi4py intracommunicator, optional
    bucket_bytes : int
        How much is added up in one message, for each dtype.

    Returns
    -------
    callable
        ``(params, *batch) -> (mean, gradient)``, the same on all ranks, in the form of the parameters; None for leaves that
        aren't floats.

    Raises
    ------
    TypeError
        On all ranks, where `loss` returns anything but a real number; where there is nothing to differentiate by.
    ValueError
        On all ranks, where none of them has a sample; where their parameters differ in number, shape or dtype.

    Ranks
    -----
    All ranks of `comm` call the result, with parameters of the same form.

    Adjoint
    -------
    None: where derivatives of the gradient are needed, use `mpiad.value_and_grad` with ``shared=True``.

    Notes
    -----
    The mean is over samples, not over ranks: each rank's number and gradient count as many times as it has samples, and
    are divided by the number of all at the end. So gradients that are whole numbers of samples' contributions (integer
    data) are the same bits on any number of ranks and for any division of the samples.

    Examples
    --------
    >>> loss, gradient = mpiad.parallel.value_and_grad(lambda w, x: np.mean((w - x) ** 2))(1.0, np.zeros(3))
    >>> print(loss, gradient)
    1.0 2.0
    """
    plan: Plan | None = None

    @recoverable("parallel.value_and_grad", comm)
    def evaluate(params: Tree, *batch: Any) -> tuple[float, Tree]:
        used = channel(comm, "parallel.value_and_grad")
        variables = variables_of(params, "parallel.value_and_grad")
        leaves, places, build = variables
        count = counted(samples, params, batch)
        require_equal_replicas(used, "parallel.value_and_grad", {"params": params})
        # Kept from step to step: a training reduces the same arrays each time.
        nonlocal plan
        plan = plan_of([spec_like(leaves[k]) for k in places], bucket_bytes, plan)
        agree = partial(totals, used, plan, params, "parallel.value_and_grad", count)
        with restoring_state(), suspended(), Sums(used, plan) as sums:
            total = gradient_of_sum(loss, variables, batch, count, agree, sums.add, sums.begin if plan.several else None)
            # Divided once, at the end, by the samples of all ranks: a mean of means would weigh small batches more.
            found = dict(zip(places, sums.wait(total.batch)))
        return total.loss / total.batch, build([found[k][()] if k in found else None for k in range(len(leaves))])

    return evaluate


def gradient_of_sum(
    loss: Function, variables: Variables, batch: Sequence[Any], count: int, agree: Callable[..., Totals],
    ready: Callable[[int, Any], None], early: Callable[[], None] | None,
) -> Totals:  # fmt: skip
    """Return all ranks' samples and losses; hand on this rank's gradient as it is found.

    ``agree(loss=, problem=)`` returns `totals` of what is known before. ``ready(k, gradient)`` is called once for each
    trained leaf, with the gradient of the sum of this rank's samples' losses; `early` is called before the reverse pass,
    where `ready` is to be called within, at the cost of a look through the record.
    """
    places = variables.places
    leaves = [np.float64(leaf) if type(leaf) is float else leaf for leaf in variables.leaves]

    def handed(variable: int, g: Array) -> None:
        leaf = leaves[places[variable]]
        if type(g) is np.ndarray and type(leaf) is np.ndarray and g.dtype == leaf.dtype and g.shape == leaf.shape:
            ready(variable, g)  # as most are
        else:
            spec = spec_like(leaf)
            ready(variable, spec.zeros() if g is None else conform(g, *spec))

    # Its zeros are handed in as any gradient: every sum is a collective of all ranks.
    if not count:
        found = agree()
        for variable in range(len(places)):
            handed(variable, None)
        return found
    traced = trace_backwards(lambda x: loss(x, *batch), variables._replace(leaves=leaves))
    value = traced.build(traced.values)
    # Before the reverse pass, in which sums may start: whoever has no loss to differentiate can't leave the others in them.
    wanted = "loss must return one real number"
    problem = traced.problem or problem_with(getval(value), 1.0, "parallel.value_and_grad", wanted)
    found = agree(problem=problem) if problem else agree(loss=float(np.reshape(to_host(getval(value)), ())) * count)
    # By the number of samples: what a mean divides by it is whole again.
    spec = spec_like(value)
    # Where the loss doesn't depend on the parameters there is no place to start from, and all gradients are zero.
    seeds = [(traced.places[0], spec.zeros() + spec.dtype.type(count))] if traced.places[0] >= 0 else []
    if early is not None:
        early()
        run_backward(traced.recording, seeds, len(places), ready=handed)
    else:
        for variable, g in enumerate(run_backward(traced.recording, seeds, len(places))):
            handed(variable, g)
    return found
