"""`diagnose`: find the operations of a program whose adjoints are wrong.

Every operation a = φ(b) of a program must satisfy ⟨ā, ȧ⟩ = ⟨b̄, ḃ⟩, where ȧ and ḃ are tangents, ā is any cotangent, and
b̄ is what the adjoint of φ makes of it. The tangents come from differences of runs at x ± h v, so nothing but the values of
the program enters; both sides change by the error of this one adjoint, whatever happens before and after it.

1. `record`: a run on a tape (`runs`), whose nodes keep values, names and lines, and one reverse pass, which keeps the
   cotangents: the *weights* of a value are its own cotangent, and what each operation that reads it contributes.
2. `search`: runs at x ± h v and x ± h v / 2 for two directions v. They compute the inner products of each value with its
   weights, and keep no value. The balance of an operation is the difference of the two sides; errors of order h² are
   extrapolated away. For a communication the sides are summed over the ranks. A message and a request have a balance that
   both ends share.
3. `execution`: only operations out of balance are executed again, alone, with their arguments moved: this separates wrong
   adjoints from kinks, noise and steep functions, and tells the argument, for an operator that communicates also the rank.

At a kink, a derivative is right if it is between the derivatives in the neighborhood. So a maximum must divide a cotangent
among equal arguments or choose one of them, and the derivative of max(x, 0) at zero may be any number from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mpiad._typing import Argnum, Array, Comm, Function, Rng, Shared, Tree
from mpiad.differentiation.objective import PendingError, problem_with, raise_everywhere
from mpiad.differentiation.trace import Traced, variables_of
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten
from mpiad.testing.diagnosis.record import Record, WrongAdjoint
from mpiad.testing.diagnosis.runs import Program
from mpiad.testing.diagnosis.search import Search
from mpiad.transport import channel
from mpiad.transport.core.random_keys import shared_key

_CALL = "diagnose"


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `diagnose`, the same on all ranks.

    Attributes
    ----------
    findings : tuple of WrongAdjoint
        The wrong adjoints, by rank and in the order of the program; one for each rank, line and operation.
    branches : tuple of str
        Lines from which a rank made other operations at a point next to x than at x. The operations after such a line are
        checked only along the directions in which the program didn't change.
    unrepeatable : tuple of str
        Lines from which a rank computed other values in a second run with the same arguments.
    checked, unchecked : int
        The number of operations on all ranks that were checked, and of those that couldn't be: nothing depends on their
        results, differences aren't finite, or it can't be executed accurately enough, such as an ill-conditioned solve.

    Examples
    --------
    >>> print(mpiad.testing.diagnose(lambda x: mpiad.mpi_allreduce(np.sum(np.sin(x))), np.ones(2)).findings)
    ()
    """

    findings: tuple[WrongAdjoint, ...]
    branches: tuple[str, ...]
    unrepeatable: tuple[str, ...]
    checked: int
    unchecked: int

    def __repr__(self) -> str:
        lines = [each.text for each in self.findings] or ["no wrong adjoint"]
        lines += [f"not repeatable: {text}" for text in self.unrepeatable]
        lines += [f"branch: {text}" for text in self.branches]
        return "\n".join([*lines, f"{self.checked} operations checked, {self.unchecked} not"])


def diagnose(
    fun: Function,
    *args: object,
    cotangents: Tree = None,
    argnum: Argnum = 0,
    shared: Shared = False,
    comm: Comm = None,
    rng: Rng = 0,
) -> Diagnosis:
    """Find the operations of a function whose adjoints are wrong, by rank and line; not differentiable.

    The function runs at most ten times, at `args` and at points nearby, and is differentiated once. Each operation on
    traced values is checked by itself: operations of NumPy, communications, custom operators, functions of other libraries.
    The steps of `scan` and the operations in functions that are compiled by `jit` are checked one by one. Operations out of
    balance are executed again, alone. The reverse pass keeps all cotangents, so the memory for each value is that of three.

    Parameters
    ----------
    fun : callable
        The function, as for `value_and_grad`.
    *args : object
        This rank's arguments.
    cotangents : pytree, optional
        Cotangents of the results, in their structure, for a function that doesn't return one real number or None. By
        default 1.0 on each rank that returns a number. The check doesn't depend on the objective.
    argnum, shared, comm
        As for `value_and_grad`.
    rng : Generator, SeedSequence or int, optional
        The source of the directions, the same on all ranks; None: other ones in each call.

    Returns
    -------
    Diagnosis
        The wrong adjoints, branches and operations that aren't repeatable; the same on all ranks.

    Raises
    ------
    TypeError
        On all ranks, if a result isn't a real number or None, and there are no `cotangents`. Also if the argument has no
        real or complex floats.
    CommunicationMismatchError
        On all ranks, if a message isn't received, or a rank doesn't take part in a collective call.
    RequestError
        On all ranks, if a rank never waits for a request.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defvjp
    >>> wrong = custom_operator(lambda x: x**2)
    >>> defvjp(wrong, lambda ans, x: lambda g: 2.02 * x * g)  # it should be 2 x g
    >>> report = mpiad.testing.diagnose(lambda x: mpiad.mpi_allreduce(np.sum(wrong(x))), np.ones(3))
    >>> print(len(report.findings) == mpiad.mpi_size(), report.findings[0].rank)
    True 0
    """
    group = channel(comm, _CALL)
    key = shared_key(rng, group, _CALL)
    program, record = Program(fun, args, argnum, variables_of(args, argnum, _CALL, shared)), Record(group.rank)
    run = program.run(program.x, record.visit, keeps_adjoints=True)
    problem = run.problem or _problem_with(run, cotangents)
    if any(group.data.allgather(problem is not None)):
        raise_everywhere(group, problem)
    record.match(group, _CALL)
    record.run_backward(run.recording, _seeds(run, cotangents), len(program.x))
    del run
    search = Search(program, record, group, key)
    search.run()
    findings, branches, unrepeatable = (
        tuple(chain.from_iterable(group.data.allgather(each)))
        for each in (record.largest_errors(), list(search.branches), search.unrepeatable)
    )
    return Diagnosis(findings, branches, unrepeatable, search.checked, search.unchecked)


def _problem_with(run: Traced, cotangents: Tree) -> PendingError | None:
    """Return the problem of a run's result that doesn't match its cotangents; None if there is no problem."""
    if cotangents is None:
        wanted = "without cotangents= the function must return one real number or None on each rank"
        return problem_with(run.build(run.values), 0.0, _CALL, wanted)
    expected, shapes = [np.shape(y) for y in run.values], [np.shape(g) for g in flatten(cotangents)[0]]
    if shapes == expected:
        return None
    return PendingError(
        ValueError, f"{_CALL}: cotangents= must have the shapes of the results, {expected}, but got {shapes}."
    )


def _seeds(run: Traced, cotangents: Tree) -> Iterable[tuple[int, Array]]:
    """Return the cotangents of the results with their positions."""
    if cotangents is None:
        return [(place, spec_like(y).zeros() + 1) for place, y in zip(run.places, run.values) if place >= 0]
    return [(place, np.asarray(g)[()]) for place, g in zip(run.places, flatten(cotangents)[0])]
