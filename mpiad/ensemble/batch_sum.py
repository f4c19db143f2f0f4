"""`BatchSum`: the sum over an ensemble of a function of its solutions, batch by batch, without the solutions.

A batch is a function of its rows of the ensemble's arrays and of what all trajectories share. It returns arrays that are
summed over batches, or rows of larger arrays (`_BatchMap`). The adjoint and the tangent of such a map are again maps of
this kind. A map solves one batch after the other, and releases the solution and its record before
the next one. Reverse mode solves the batches again, unless the sum is one number: then the gradients of the batches are
computed with the values, and summed, too.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from autograd.core import JVPNode
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, Tree
from mpiad.device import to_host
from mpiad.differentiation.concatenation import Concatenation
from mpiad.differentiation.gradient import cotangents_of_variables
from mpiad.differentiation.trace import Variables, trace_backwards, trace_forwards
from mpiad.ensemble.members import as_array, as_state
from mpiad.ensemble.problem import EnsembleProblem
from mpiad.ensemble.solution import EnsembleSolution
from mpiad.ensemble.tableaus import Algorithm
from mpiad.primitives import mpi_allreduce
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.pytrees import flatten, is_variable, map_leaves
from mpiad.transport import Channel
from mpiad.transport.devices.device_arrays import is_device_array

_OfBatch: TypeAlias = Callable[[range, Sequence[Array]], list[Array]]


class BatchSum:
    """A `reduction` that sums a function of the solutions of batches, and keeps the sum only.

    With it, neither a solve nor its gradient takes memory for more than one batch of solutions: give `batch_size`.

    Parameters
    ----------
    fun : callable
        ``fun(sol, I, *params)`` returns a float, an array of floats, or a pytree of these; `sol` is the `EnsembleSolution`
        of a batch, and the range I has the numbers of its trajectories, counted from 1. The results of all batches have
        the same structure. `fun` doesn't communicate.
    *params : pytrees
        Other arguments with respect to which the sum is differentiated.

    Adjoint
    -------
    Derivatives of any order, in both modes. If the sum is one number, its gradient is computed with its value, batch by
    batch. Otherwise reverse mode solves each batch once more, and calls `fun` and any `prob_func` again.

    Examples
    --------
    >>> import autograd.numpy as np
    >>> from mpiad.ensemble import BatchSum, EnsembleProblem, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> squares = BatchSum(lambda sol, I: np.sum(sol.u_end**2))
    >>> loss = lambda p: solve(EnsembleProblem(decay, p=p, reduction=squares), batch_size=2, rtol=1e-8).u
    >>> J, gradient = mpiad.value_and_grad(loss)(np.array([[1.0], [2.0], [3.0]]))
    >>> print(J.round(4), gradient.ravel().round(4))
    0.1561 [-0.2707 -0.0366 -0.005 ]
    """

    def __init__(self, fun: Function, *params: Tree):
        if not callable(fun):
            raise TypeError(f"BatchSum: fun must be a function fun(sol, I), but got {type(fun).__name__} {fun!r:.60}.")
        self.fun, self.params = fun, params

    def __call__(self, sol: EnsembleSolution, numbers: range) -> Tree:
        """Return the function's value for a batch."""
        return self.fun(sol, numbers, *self.params)


@dataclass
class SummedSolution:
    """The result of a solve with `BatchSum`.

    Attributes
    ----------
    u : pytree
        The sum over all trajectories; with ``EnsembleMPI(gather=False)`` over those of this rank.
    failed : int
        The number of trajectories that failed, over all ranks.
    problem : EnsembleProblem
        The problem; its ``kernel_source()`` is the source of the compiled kernel, if there is one.
    alg : Algorithm
        The method.
    execution : str
        How the ensemble was solved: see `ODESolution`.

    Examples
    --------
    >>> from mpiad.ensemble import BatchSum, EnsembleProblem, ODEProblem, solve
    >>> decay = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0), p=[1.0])
    >>> ends = BatchSum(lambda sol, I: {"sum": np.sum(sol.u_end), "last": (50 in I) * sol.u_end[-1]})
    >>> sol = solve(EnsembleProblem(decay, reduction=ends), trajectories=50, batch_size=20)
    >>> print(sol.u["sum"].round(2), sol.u["last"].round(4), sol.failed)
    18.4 [0.3681] 0
    """

    u: Tree
    failed: int
    problem: EnsembleProblem | None = field(default=None, repr=False)
    alg: Algorithm | None = field(default=None, repr=False)
    execution: str = field(default="", repr=False, compare=False)


class BatchFailures:
    """The numbers of failed trajectories by return code, and a text about the first of them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: tuple[int, str] | None = None

    def add(self, sol: EnsembleSolution, numbers: range) -> None:
        """Add the failures of a batch."""
        if sol._all_survived:
            return
        failed = np.flatnonzero(~sol.survivors)
        k = failed[0]
        self.counts.update(sol.retcode[failed].tolist())
        end = f"{sol.retcode[k]} at t = {getval(sol.t_reached[k]):.6g} after {sol.naccept[k]} steps."
        self._note(numbers[k], end)

    @classmethod
    def of_all(cls, ranks: Sequence[BatchFailures]) -> BatchFailures:
        """Return the failures of all ranks."""
        total = cls()
        for one in ranks:
            total.counts.update(one.counts)
            if one.first is not None:
                total._note(*one.first)
        return total

    def _note(self, number: int, end: str) -> None:
        self.first = (number, end) if self.first is None else min(self.first, (number, end))

    def text(self, count: int) -> str:
        """Return a text about all failures among `count` trajectories; "" without any."""
        if self.first is None:
            return ""
        codes = ", ".join(f"{number} {code}" for code, number in sorted(self.counts.items()))
        failed = f"{self.counts.total()} of {count} trajectories failed ({codes})"
        return f"solve: {failed}; the first is number {self.first[0]}: {self.first[1]}"


def batch_sum(
    ensemble: EnsembleProblem, batches: Sequence[range], solved: Callable[[EnsembleProblem, range], EnsembleSolution]
) -> Tree:
    """Return the sum over batches; ``solved(ensemble, numbers)`` solves a batch, given an ensemble with its rows only."""
    total: BatchSum = ensemble.reduction  # type: ignore[assignment]
    makes = ("u0", as_state), ("p", lambda p: map_leaves(as_array, p)), ("tspan", as_array)
    rows = [None if getattr(ensemble, name) is None else make(getattr(ensemble, name)) for name, make in makes]
    by_row, build_rows = flatten(rows)
    share = slice(batches[0].start - 1, batches[-1].stop - 1)
    # A slice would be differentiated.
    by_row = [x if x is None or len(x) == share.stop - share.start else x[share] for x in by_row]
    shared, build_shared = flatten((ensemble.problem.u0, ensemble.problem.p, ensemble.problem.tspan, total.params))
    leaves, builds = [*by_row, *shared], list[Any]()
    # Other leaves aren't differentiated, and don't depend on the batch.
    places = [k for k, leaf in enumerate(leaves) if isbox(leaf) or (k < len(by_row) and leaf is not None)]

    def of_batch(numbers: range, args: Sequence[Array]) -> list[Array]:
        new = list(leaves)
        for k, x in zip(places, args):
            new[k] = x
        (u0, p, tspan), (*changes, params) = build_rows(new[: len(by_row)]), build_shared(new[len(by_row) :])
        ode = ensemble.problem.changed(dict(zip(("u0", "p", "tspan"), changes)))
        sol = solved(dataclasses.replace(ensemble, problem=ode, u0=u0, p=p, tspan=tspan), numbers)
        found, build = flatten(total.fun(sol, numbers, *params))
        if not all(map(is_variable, found)):
            wrong = next(leaf for leaf in found if not is_variable(leaf))
            kind = f"{type(wrong).__name__} {wrong!r:.40}"
            raise TypeError(f"BatchSum: fun must return floats, arrays of floats or pytrees of these, but returned {kind}.")
        builds[:] = [build]
        return found

    results = _BatchMap(of_batch, batches, [k < len(by_row) for k in places])([leaves[k] for k in places])
    return builds[0](results)


def summed_over_ranks(tree: Tree, channel: Channel) -> Tree:
    """Return the sum of the pytrees of all ranks, which have one structure; collective."""
    leaves, build = flatten(tree)
    layout = Concatenation([spec_like(leaf) for leaf in leaves])
    return build(layout.parts(mpi_allreduce(layout.vector(leaves), comm=channel.user)))


class _BatchMap:
    """The function ``fun(numbers, args)`` of each batch, which returns a list of arrays.

    `rows`, `result_rows`: whether each argument or result has one row per trajectory; otherwise the results are summed.
    """

    def __init__(self, fun: _OfBatch, batches: Sequence[range], rows: Sequence[bool], result_rows: Sequence[bool] = ()):
        self._fun, self._batches, self._rows, self._result_rows = fun, batches, rows, result_rows
        self.results = Concatenation([])  # known after the first run
        # The arguments with respect to which the gradient of a single number is computed in the first run; this gradient.
        self._wanted: tuple[int, ...] = ()
        self.gradient: dict[int, Array] = {}

    def __call__(self, args: Sequence[Array]) -> list[Array]:
        """Return the results of all batches."""
        traced = tuple([k for k, x in enumerate(args) if isbox(x)])
        if not traced:
            return self.run(args)
        # Values in several traces have further derivatives, for which the batches are solved again in any case.
        first = not any(isbox(args[k]._value) or isinstance(args[k]._node, JVPNode) for k in traced)
        one_trace = len({args[k]._trace for k in traced}) == 1
        self._wanted = traced if first and one_trace and not self._result_rows else ()
        vector = _mapped(*args, batch_map=self)
        return self.results.parts(vector)

    def run(self, args: Sequence[Array]) -> list[Array]:
        """Return the results for plain arguments."""
        sums, slopes = list[Array](), list[Array]()
        for numbers in self._batches:
            mine = [x[self._span(numbers)] if by_row else x for x, by_row in zip(args, self._rows)]
            if self._wanted:
                found, pull = self._traced(numbers, mine, self._wanted)
                if len(found) == 1 and np.size(found[0]) == 1 and spec_like(found[0]).dtype.kind == "f":
                    self._add(slopes, pull([1.0]), [self._rows[k] for k in self._wanted], numbers)
                else:
                    self._wanted = ()
                del pull  # the record
            else:
                found = self._fun(numbers, mine)
            if any(map(isbox, found)):
                raise TypeError(
                    "BatchSum: fun or prob_func uses a traced variable from outside, with respect to which the sum over "
                    "batches can't be differentiated. Pass it in u0 or p of the problem, or as a parameter: "
                    "BatchSum(fun, x). Or, if no derivative is needed, use its plain value, mpiad.stop_gradient(x)."
                )
            self._add(sums, found, self._result_rows or [False] * len(found), numbers)
        self.gradient = dict(zip(self._wanted, slopes))
        self.results = Concatenation([spec_like(x) for x in sums])
        return sums

    def _span(self, numbers: range) -> slice:
        start = self._batches[0].start
        return slice(numbers.start - start, numbers.stop - start)

    def _add(self, sums: list[Array], parts: Sequence[Array], rows: Sequence[bool], numbers: range) -> None:
        """Add the results of a batch to sums, or store them as its rows."""
        if not sums:
            count = self._span(self._batches[-1]).stop
            specs = [spec_like(part) for part in parts]
            sums[:] = [
                spec._replace(shape=(count, *spec.shape[1:])).empty() if by_row else part
                for part, spec, by_row in zip(parts, specs, rows)
            ]
        elif (got := [np.shape(part)[by_row:] for part, by_row in zip(parts, rows)]) != (
            expected := [np.shape(part)[by_row:] for part, by_row in zip(sums, rows)]
        ):
            raise ValueError(
                f"BatchSum: fun must return arrays of the same shapes for all batches, but returned {expected}, then {got}."
            )
        else:
            sums[:] = [x if by_row else x + part for x, part, by_row in zip(sums, parts, rows)]
        for x, part, by_row in zip(sums, parts, rows):
            if by_row:
                x[self._span(numbers)] = part

    def _traced(
        self, numbers: range, args: Sequence[Array], active: Sequence[int]
    ) -> tuple[list[Array], Callable[[Sequence[Array]], list[Array]]]:
        """Return the results of a batch, and its reverse pass to the `active` arguments."""
        variables = Variables(list(args), list(active), list)
        traced = trace_backwards(lambda new: self._fun(numbers, new), variables)
        if traced.problem is not None:
            raise traced.problem.kind(traced.problem.text)

        def pull(gs: Sequence[Array]) -> list[Array]:
            places = zip(gs, traced.values, traced.places)
            seeds = [(place, conform(g, *spec_like(value))) for g, value, place in places if place >= 0]
            return cotangents_of_variables(traced, seeds, variables)

        return traced.values, pull

    def adjoint(self, active: Sequence[int]) -> _BatchMap:
        """Return the map from the arguments and the cotangents of the results to the cotangents of `active` arguments."""
        count, rows = len(self._rows), self._result_rows or [False] * len(self.results.specs)

        def pulled(numbers: range, args: Sequence[Array]) -> list[Array]:
            return self._traced(numbers, args[:count], active)[1](args[count:])

        return _BatchMap(pulled, self._batches, [*self._rows, *rows], [self._rows[k] for k in active])

    def tangent(self, active: Sequence[int]) -> _BatchMap:
        """Return the map from the arguments and the tangents of the `active` ones to the tangents of the results."""
        count, rows = len(self._rows), self._result_rows or [False] * len(self.results.specs)

        def pushed(numbers: range, args: Sequence[Array]) -> list[Array]:
            variables = Variables(list(args[:count]), list(active), list)
            return trace_forwards(lambda new: self._fun(numbers, new), variables, args[count:])[1]

        return _BatchMap(pushed, self._batches, [*self._rows, *[self._rows[k] for k in active]], rows)


@primitive
def _mapped(*args: Array, batch_map: _BatchMap) -> Array:
    """Return the results of a map as one vector."""
    results = batch_map.run(args)
    return batch_map.results.vector(results)


def _vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    batch_map: _BatchMap = kwargs["batch_map"]

    def vjp(g: Array) -> Sequence[Array]:
        g = conform(g, *spec_like(ans))
        known = batch_map.gradient
        if not known.keys() >= set(argnums) or any(map(isbox, (g, *args))):
            return batch_map.adjoint(argnums)([*args, *batch_map.results.parts(g)])
        return [_times(known[k], g) for k in argnums]

    return vjp


def _times(gradient: Array, g: Array) -> Array:
    """Return a gradient times a cotangent of one entry; either may be on a device."""
    factor = g if is_device_array(gradient) == is_device_array(g) else to_host(g)
    return gradient * factor.astype(gradient.dtype)[0]


def _jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    batch_map: _BatchMap = kwargs["batch_map"]
    tangents = [conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)]
    return batch_map.results.vector(batch_map.tangent(argnums)([*args, *tangents]))


defvjp_argnums(_mapped, _vjp)
defjvp_argnums(_mapped, _jvp)
