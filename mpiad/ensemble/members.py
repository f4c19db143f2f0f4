"""Conversion of a problem, or an ensemble of problems, to a `Batch`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Function, Scalar, Tree
from mpiad.device.assembly import stack
from mpiad.ensemble.batch import Batch, Parameters, repeated
from mpiad.ensemble.problem import EnsembleProblem, ODEProblem
from mpiad.programs.traced_array import hides_traced
from mpiad.pytrees import flatten, leaf_paths
from mpiad.transport import Channel
from mpiad.transport.core.buffers import conversion
from mpiad.transport.core.random_keys import generator_of, shared_key, text_of_rng
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import arrays_of, is_device_array


def refuse_in_trace(problem: object, call: str) -> None:
    """End the trace of a compiled function that solves a problem with traced arrays."""
    if tracing.recorder is not None and hides_traced(problem):
        text = "whose model is compiled, but not its call: leave out jit, or compile what precedes and follows the call"
        tracing.recorder.refuse(f"it calls {call}, {text}")


def key_of(problem: object, channel: Channel | None, call: str) -> int:
    """Return the key that a solve draws for the generators of its trajectories; 0 if it draws no random numbers.

    The ranks of a channel have compared `rng_of`.
    """
    draws = isinstance(problem, EnsembleProblem) and _takes_generator(problem.prob_func)
    return shared_key(problem.rng, channel, call, compare=False) if draws else 0  # type: ignore[attr-defined]


def rng_of(problem: object, call: str) -> str:
    """Return the text by which ranks compare the `rng` of a problem; raise an error if it is invalid."""
    draws = isinstance(problem, EnsembleProblem) and _takes_generator(problem.prob_func)
    return text_of_rng(getattr(problem, "rng", None), call, draws)


def _takes_generator(fun: Function | None) -> bool:
    try:
        return fun is not None and "rng" in inspect.signature(fun).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False


def members(ensemble: EnsembleProblem, numbers: range, repeat: int, key: int, count: int) -> Batch:
    """Return a batch of the trajectories `numbers` of an ensemble of `count`; trajectories and `repeat` count from 1."""
    if ensemble.prob_func is None or not len(numbers):
        return _from_arrays(ensemble, numbers)
    fun, takes_generator = ensemble.prob_func, _takes_generator(ensemble.prob_func)

    def problem_of(i: int) -> ODEProblem:
        keywords = {"rng": generator_of(key, i, repeat)} if takes_generator else {}
        return _checked(fun(ensemble.problem, i, repeat, **keywords), ensemble.problem, i)

    def others() -> list[list[Any]]:
        # Leaves shared with the first and the last trajectory are assumed to be shared by all. If the ensemble has only
        # one trajectory, it is created a second time for this comparison.
        outside = [i for i in (1, count) if i not in numbers] or ([1] if count == 1 else [])
        return [flatten(problem_of(i).p)[0] for i in outside]

    return columns_of([problem_of(i) for i in numbers], numbers, flatten(ensemble.problem.p)[0], others)


def own_members(ensemble: EnsembleProblem, numbers: range, repeat: int, key: int, count: int) -> tuple[Batch, Batch]:
    """Return a rank's batch, and a batch for shapes and times: the same one, or trajectory 1 if the rank has none."""
    empty = not len(numbers) and count > 0
    template = members(ensemble, range(1, 2) if empty else numbers, repeat, key, count)
    return template.share(slice(0, 0)) if empty else template, template


def columns_of(
    problems: Sequence[ODEProblem], numbers: Sequence[int], common: Sequence[Any] = (), others: Callable[[], list] = list
) -> Batch:
    """Return a batch of problems with the same f and shapes; `numbers` are their numbers in the ensemble."""
    # `common`: the leaves of the parameters of the ensemble's problem; ``others()``: those of a few other trajectories.
    first = problems[0]
    states = [as_state(problem.u0) for problem in problems]
    for i, state in zip(numbers, states):
        if state.shape != states[0].shape:
            shapes = f"{states[0].shape} for trajectory {numbers[0]}, but {state.shape} for trajectory {i}"
            raise ValueError(f"solve: u0 must have the same shape in all trajectories, but has {shapes}.")
    dtype = np.result_type(*{state.dtype for state in states})
    u0 = _stack([state.reshape(-1) for state in states], axis=1)
    spans = [_span(problem) for problem in problems]
    start, end = (_stack([span[k] for span in spans]) for k in (0, 1))
    u0 = u0 if u0.dtype == dtype else u0.astype(dtype)
    p = _stacked([problem.p for problem in problems], numbers, common, others)
    return Batch(first.f, states[0].shape, u0, p.promoted(u0), start, end, first.jac_sparsity)


def _stack(arrays: list[Array], axis: int = 0) -> Array:
    return (stack if any(map(isbox, arrays)) else np.stack)(arrays, axis=axis)


def as_state(u0: Array) -> Array:
    """Return an initial state as an array of real or complex floats; raise a TypeError for unsupported dtypes."""
    traced = isbox(u0) or (isinstance(u0, (list, tuple)) and any(map(isbox, u0)))
    state = anp.array(u0) if traced and not is_device_array(getval(u0)) else as_array(u0)
    if state.dtype.kind in "biu":
        return state.astype(float)
    if state.dtype.char not in "fdFD" or not state.dtype.isnative:
        raise TypeError(
            f"solve: u0 must be numbers: float32, float64, complex64, complex128, or integers, which become float64; but "
            f"got {type(u0).__name__} of dtype {state.dtype}. {conversion(state.dtype, 'u0')}".rstrip()
        )
    return state


def _from_arrays(ensemble: EnsembleProblem, numbers: Sequence[int]) -> Batch:
    problem = ensemble.problem
    leaves, build = flatten(problem.p)
    p = Parameters(leaves, [False] * len(leaves), build)
    if ensemble.p is not None:
        leaves, build = flatten(ensemble.p)
        p = Parameters([_trajectories_last(_rows(as_array(leaf), numbers)) for leaf in leaves], [True] * len(leaves), build)
    start, end = _spans(ensemble, numbers)
    first = as_state(problem.u0)
    states = initial_states(ensemble, numbers, first)
    return Batch(problem.f, first.shape, states, p.promoted(states), start, end, problem.jac_sparsity)


def _rows(x: Array, numbers: Sequence[int]) -> Array:
    """Return the rows of some trajectories."""
    if len(numbers) == len(x):
        return x  # a slice would be differentiated
    return x[numbers[0] - 1 : numbers[-1]] if len(numbers) else x[:0]


def initial_states(ensemble: EnsembleProblem, numbers: Sequence[int], first: Array = None) -> Array:
    """Return the initial states, (d, N), of an ensemble without `prob_func`; `first`: that of its problem, if known."""
    first = as_state(ensemble.problem.u0) if first is None else first
    if ensemble.u0 is None:
        column, count, arrays = first.reshape(-1, 1), len(numbers), arrays_of(getval(first))
        if isbox(column):
            return column * (np if arrays is None else arrays).full((1, count), 1, first.dtype)
        # Copies, since the user may change u0 before the solve reads it.
        if arrays is None:
            return repeated(column, count)
        return arrays.copy(np.broadcast_to(column, (len(column), count)))
    states = as_state(ensemble.u0)
    if states.shape[1:] != first.shape:
        raise ValueError(f"solve: u0= of the ensemble must have shape (N, *{first.shape}), but has shape {states.shape}.")
    rows = _rows(states, numbers)
    return _trajectories_last(rows if rows.ndim == 2 else rows.reshape(len(numbers), first.size))


def _trajectories_last(leaf: Array) -> Array:
    moved = leaf.transpose((*range(1, leaf.ndim), 0))
    if isbox(leaf):
        return moved
    arrays = arrays_of(leaf)
    # A copy, since the user may change the array before the solve, or later `sol.u`, reads it.
    return np.array(moved, order="C") if arrays is None else arrays.copy(moved)


def as_array(leaf: Array) -> Array:
    """Return traced values and device arrays unchanged, others as arrays of the host."""
    return leaf if isbox(leaf) or is_device_array(leaf) else np.asarray(leaf)


def _stacked(
    trees: list[Tree], numbers: Sequence[int], common: Sequence[Any], others: Callable[[], list[list[Any]]]
) -> Parameters:
    paths, build = leaf_paths(trees[0], "p"), flatten(trees[0])[1]
    for i, tree in zip(numbers, trees):
        if (other := leaf_paths(tree, "p")) != paths:
            different = f"{paths} in trajectory {numbers[0]}, but {other} in trajectory {i}"
            raise ValueError(f"solve: p must have the same leaves in all trajectories, but has {different}.")
    columns, varies, other_leaves = [], [], None
    for place, leaves in enumerate(zip(*(flatten(tree)[0] for tree in trees))):
        shapes = {np.shape(leaf) for leaf in leaves}
        if len(shapes) > 1:
            raise ValueError(f"solve: each array in p must have one shape in all trajectories, but has {sorted(shapes)}.")
        shared = all(leaf is leaves[0] for leaf in leaves)
        if shared and np.ndim(leaves[0]) and not any(leaf is leaves[0] for leaf in common):
            # A single trajectory shares all leaves with itself, but the shapes of f's arguments mustn't depend on the
            # number of trajectories.
            other_leaves = others() if other_leaves is None else other_leaves
            shared = all(len(other) <= place or other[place] is leaves[0] for other in other_leaves)
        varies.append(not shared)
        columns.append(leaves[0] if shared else _stack([as_array(leaf) for leaf in leaves], axis=-1))
    return Parameters(columns, varies, build)


def _span(problem: ODEProblem) -> tuple[Scalar, Scalar]:
    try:
        start, end = problem.tspan
        finite = math.isfinite(getval(start)) and math.isfinite(getval(end))
        span = start if isbox(start) else float(start), end if isbox(end) else float(end)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"solve: tspan must be two real numbers (t0, t1), but got {problem.tspan!r}.") from None
    if not finite:
        raise ValueError(f"solve: tspan must be two finite numbers, but got {problem.tspan!r}.")
    return span


def _spans(ensemble: EnsembleProblem, numbers: Sequence[int]) -> tuple[Array, Array]:
    """Return the start and end times of some trajectories of an ensemble without `prob_func`, each of shape (n,)."""
    if ensemble.tspan is None:
        count = len(numbers)
        spans = (t * np.ones(count) if isbox(t) else repeated(np.array([t]), count)[0] for t in _span(ensemble.problem))
    else:
        columns = _rows(as_array(ensemble.tspan), numbers).T
        spans = (t if isbox(t) else np.array(t, float) for t in (columns[0], columns[1]))
    start, end = spans
    return start, end


def check_spans(ensemble: EnsembleProblem) -> None:
    """Raise an error if the rows of tspan of an ensemble aren't pairs of finite times on the host."""
    spans = getval(ensemble.tspan)
    if is_device_array(spans):
        raise TypeError(
            "solve: tspan= of the ensemble must be an array on the host, but is on a device. Apply mpiad.device.to_host."
        )
    if spans.ndim != 2 or spans.shape[1] != 2 or spans.dtype.kind not in "iuf":
        raise ValueError(
            "solve: tspan= of the ensemble must have shape (N, 2), with the start and the end of each trajectory, but has "
            f"shape {spans.shape} and dtype {spans.dtype}."
        )
    if not (finite := np.isfinite(spans).all(axis=1)).all():
        i = int(finite.argmin())
        times = tuple(spans[i].tolist())
        raise ValueError(f"solve: tspan= of the ensemble must be finite, but is {times} for trajectory {i + 1}.")


def _checked(problem: object, original: ODEProblem, i: int) -> ODEProblem:
    if not isinstance(problem, ODEProblem):
        got = f"{type(problem).__name__} for trajectory {i}"
        raise TypeError(f"solve: prob_func must return an ODEProblem, created by remake, but returned {got}.")
    if problem.f is not original.f:
        raise ValueError(
            f"solve: prob_func returned a problem with another f for trajectory {i}. All trajectories share one f; give "
            "differences between trajectories as parameters p."
        )
    if problem.mass_matrix is not original.mass_matrix:
        raise ValueError(
            f"solve: prob_func returned a problem with another mass_matrix for trajectory {i}. All trajectories share the "
            "mass_matrix of the ensemble's problem."
        )
    return problem
