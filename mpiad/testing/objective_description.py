"""`describe_objective`: determine the `objective` that matches the results of a program on all ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpiad._typing import Comm, Function, Rank
from mpiad.device import to_host
from mpiad.differentiation.gradient import cotangents_of_variables, seeds_of_term
from mpiad.differentiation.objective import raise_everywhere, weight_of
from mpiad.differentiation.trace import Traced, Variables, arguments_with, trace_backwards, variables_of
from mpiad.primitives.checks import root_of
from mpiad.transport import Channel, channel

_CALL = "describe_objective"


class ObjectiveReport(NamedTuple):
    """The distribution of a program's results over the ranks, and the matching objective.

    Attributes
    ----------
    kind : {"same", "root", "share"}
        "root" if all ranks except the root return None or zero; otherwise "same" if all ranks return equal values;
        otherwise "share", a share per rank. A single rank is "same".
    objective : str
        The matching value of the argument `objective`, "root" or "sum".
    values : list
        The value that each rank returned.
    factors : dict
        The ratio of each objective's gradient to the gradient of the matching objective; NaN if the two gradients aren't
        proportional.
    largest : list
        Each rank's largest absolute entry of the gradient of the matching objective with respect to the first argument;
        None if the argument contains no real or complex floating-point values.
    text : str
        A description of the results, with a remark if the gradient is zero on all ranks, or on all except one.

    Examples
    --------
    >>> x = np.arange(3.0)
    >>> found = mpiad.testing.describe_objective(lambda x: mpiad.mpi_allreduce(np.sum(x**2)), x)
    >>> print(found.kind, found.objective)
    same root
    """

    kind: str
    objective: str
    values: list
    factors: dict
    largest: list
    text: str

    def __str__(self) -> str:
        return self.text


def describe_objective(fun: Function, *args: object, root: Rank = 0, comm: Comm = None) -> ObjectiveReport:
    """Run a function once, forwards and backwards, and determine the objective that matches its values on all ranks.

    Parameters
    ----------
    fun, root, comm
        As for `value_and_grad`.
    *args : object
        This rank's arguments.

    Returns
    -------
    ObjectiveReport
        The same report on all ranks. Its `kind` depends only on the values: equal shares can't be distinguished from copies
        of one value.

    Raises
    ------
    TypeError, RequestError
        On all ranks, if a rank returns an object that is neither a real number nor None, or never waits for a request.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> mpiad.testing.describe_objective(lambda x: mpiad.mpi_allreduce(x**2), 3.0).objective
    'root'
    """
    group = channel(comm, _CALL)
    root = root_of(root, group, _CALL)
    try:
        variables = variables_of(args, 0, _CALL)
    except TypeError:
        variables = Variables([], [], lambda leaves: leaves)
    # Ranks without variables also run a reverse pass, since other ranks wait for the adjoints of their messages.
    traced = trace_backwards(lambda x: fun(*(arguments_with(args, 0, x) if variables.places else args)), variables)
    values = _values(traced, group)
    kind, objective, factors, text = _classify(values, root)
    gradients = cotangents_of_variables(traced, seeds_of_term(traced, weight_of(objective, group, root)), variables)
    largest = group.data.allgather(max((float(np.max(np.abs(to_host(g)), initial=0.0)) for g in gradients), default=None))
    return ObjectiveReport(kind, objective, values, factors, largest, text + _zero_gradient_remark(largest))


def _values(traced: Traced, group: Channel) -> list:
    """Gather the values of all ranks; raise an error on all ranks if a value isn't a real number or None."""
    result = traced.build(traced.values)
    scalar = result is None or (np.ndim(result) == 0 and np.isrealobj(result) and not isinstance(result, str))
    local_value = None if result is None else float(result) if scalar else repr(result)[:60]
    gathered = group.data.allgather((local_value, traced.problem is not None))
    if any(unfinished for _, unfinished in gathered):
        raise_everywhere(group, traced.problem)
    invalid = [f"rank {rank}: {value}" for rank, (value, _) in enumerate(gathered) if isinstance(value, str)]
    if invalid:
        raise TypeError(f"{_CALL}: every rank must return one real number or None, but got {'; '.join(invalid)}.")
    return [value for value, _ in gathered]


def _zero_gradient_remark(largest: list) -> str:
    """Return a remark if the gradient is zero on all ranks, or on all except one; otherwise an empty string."""
    ranks = [rank for rank, entry in enumerate(largest) if entry != 0.0]
    if not ranks:
        return (
            " The gradient with respect to the first argument is zero on all ranks: the function doesn't depend on it, or "
            "is flat at this point."
        )
    if len(ranks) > 1 or len(largest) == 1 or largest[ranks[0]] is None:
        return ""
    return (
        f" The gradient with respect to the first argument is zero on all ranks except rank {ranks[0]}, as if the function "
        "broadcast this rank's argument. If every rank passes a copy of one variable, pass shared=True to value_and_grad: "
        "all ranks then get the whole gradient."
    )


def _classify(values: list, root: int) -> tuple[str, str, dict, str]:
    size = len(values)
    others = [value for rank, value in enumerate(values) if rank != root]
    if all(value is None or value == 0.0 for value in others) and others:  # with a single rank, the kind is "same"
        factors = {"root": 1.0, "sum": 1.0, "mean": 1.0 / size}
        sentence = f"only the root (rank {root}) returns a result. objective='root' fits; 'mean' would divide the gradient"
        return "root", "root", factors, f"{sentence} by {size}."
    if all(value == values[root] for value in others):
        factors = {"root": 1.0, "sum": float(size), "mean": 1.0}
        sentence = f"all ranks return the same value. objective='root' fits; 'sum' would multiply the gradient by {size}."
        return "same", "root", factors, sentence
    factors = {"root": math.nan, "sum": 1.0, "mean": 1.0 / size}
    sentence = (
        "each rank returns a different share. objective='sum' fits (or 'mean' for a mean of losses, whose "
        f"gradient is 1/{size} of the sum's); 'root' would ignore all shares except that of rank {root}."
    )
    return "share", "sum", factors, sentence
