"""`scan`: a loop whose gradient keeps a few states and computes the others again."""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any

import numpy as np

from mpiad._typing import Function, Tree
from mpiad.device.assembly import stack
from mpiad.pytrees import is_variable, named_leaves
from mpiad.timestepping.checkpoints import CheckpointSchedule, checkpoints_of
from mpiad.timestepping.differentiable import LoopOperator
from mpiad.timestepping.snapshots import own
from mpiad.timestepping.stepping import UserStepping, spans
from mpiad.transport.tracing import opaque, tracing

_MOST_UNROLLED = 50  # steps, in a function that is being compiled


def scan(
    step: Function,
    u0: Tree,
    n_steps: int,
    *params: Tree,
    inputs: Tree = None,
    observe: Function | None = None,
    checkpoints: int | CheckpointSchedule | None = None,
) -> Any:
    """Step a state forward in time; its gradient keeps as many states as allowed and computes the others again.

    Parameters
    ----------
    step : callable
        ``step(u, k, *params)`` returns the state after step k, counted from 0, in the form of `u`; with `inputs`,
        ``step(u, k, x, *params)``. It may communicate. The same arguments must always give the same state, because it is
        called again in the gradient; what is to be differentiated by must be among its arguments, not taken from around it.
    u0 : nest of arrays of floats
        The first state: shapes and dtypes stay.
    n_steps : int
    *params : pytree of arrays
        What is the same in all steps; derivatives flow to all of them.
    inputs : pytree of arrays of shape (n_steps, ...), optional
        Step k gets their entries k. Derivatives flow to them at the cost of one entry in each step, where an array among
        the params costs as much as it is long.
    observe : callable, optional
        ``observe(u, k, *params)`` is called with the state that step k returned, and returns a nest of arrays of floats.
    checkpoints : int or CheckpointSchedule, optional
        How many states are kept for the gradient, the first one counted; `CheckpointSchedule` also allows files. Between
        them the steps are run again, as few as can be. By default everything that the steps compute is kept, and nothing
        run again. With `n_steps` or more, each state is kept, and each step run twice.

    Returns
    -------
    nest of arrays, or (nest of arrays, nest of arrays)
        The last state; with `observe`, also what it returned, stacked along a new first axis.

    Raises
    ------
    TypeError, ValueError
        Where an argument can't be used, `step` doesn't return a state like `u0`, or uses a traced value from around it.
    OSError
        Where a state can't be written into a file.

    Ranks
    -----
    Those that communicate in `step` and `observe` call it, with the same `n_steps` and checkpoints. The loop itself sends
    nothing: an exception of `step` is raised on its own rank alone.

    Adjoint
    -------
    Of the steps as they were taken, back to `u0`, `inputs` and `params`, at any order and in forward mode, all with as few
    states kept: binomial checkpointing (Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26, 2000).

    Examples
    --------
    >>> print(mpiad.timestepping.scan(lambda u, k, a: a * u, 1.0, 10, 2.0))
    1024.0
    """
    if tracing.recorder is not None and not tracing.recorder.ended:
        return _in_a_trace(step, u0, n_steps, params, inputs, observe, checkpoints)
    return _scan(step, u0, n_steps, params, inputs, observe, checkpoints)


def _scan(
    step: Function, u0: Tree, n_steps: object, params: tuple, inputs: Tree, observe: Function | None, checkpoints: Any
) -> Any:
    steps, kept = _checked_count(n_steps), checkpoints_of(checkpoints, "timestepping.scan")
    _check_functions(step, observe)
    _check_state(u0)
    _check_inputs(inputs, steps)
    length = kept.recorded if kept is not None and kept.recorded > 1 else steps
    stepping = UserStepping(step, observe, u0, inputs, params, length)
    if steps == 0:
        if observe is not None:
            raise ValueError("timestepping.scan: there is nothing to observe in n_steps=0 steps. Leave observe out.")
        return u0
    if kept is None:
        state, observed = _on_the_tape(stepping, steps)
    else:
        state, observed = LoopOperator(stepping, steps, kept, stepping.args)(stepping.args)
    last = stepping.build_state(state)
    return last if stepping.build_seen is None else (last, stepping.build_seen(observed))


_opaque_scan = opaque(_scan)


def _in_a_trace(step: Any, u0: Tree, n_steps: int, params: tuple, inputs: Tree, observe: Any, checkpoints: Any) -> Any:
    """Run the loop as one call of a compiled program, its steps compiled; a short one without checkpoints is unrolled."""
    # Loaded by whoever traces; a program that compiles nothing needn't wait for it.
    from mpiad.programs import Jitted, jit
    from mpiad.programs.steps import Traced

    n_steps = operator.index(n_steps) if isinstance(n_steps, Traced) else n_steps
    if checkpoints is None and not (isinstance(n_steps, Integral) and n_steps > _MOST_UNROLLED):
        return _scan(step, u0, n_steps, params, inputs, observe, checkpoints)
    compiled = [jit(fun) if callable(fun) and not isinstance(fun, Jitted) else fun for fun in (step, observe)]
    return _opaque_scan(compiled[0], u0, n_steps, params, inputs, compiled[1], checkpoints)


def _on_the_tape(stepping: UserStepping, steps: int) -> tuple[list[Any], list[Any]]:
    """Run the loop so that the tape around it records every step."""
    args, rows = stepping.args, []
    # A step may write into its state where nothing is traced; the caller's isn't its own.
    state = list(map(own, args.state))
    for span in spans(stepping, 0, steps):
        state, seen = stepping.run(span, args.at(span, state))
        # Copies, since a step may write into the state that was observed.
        rows += [list(map(own, each)) for each in seen]
    return state, [stack(column) for column in zip(*rows)]


def _checked_count(n_steps: object) -> int:
    if not isinstance(n_steps, Integral) or isinstance(n_steps, bool):
        raise TypeError(f"timestepping.scan: n_steps must be an integer, but got {type(n_steps).__name__} {n_steps!r:.60}.")
    if n_steps < 0:
        raise ValueError(f"timestepping.scan: n_steps must not be negative, but got {n_steps}.")
    return int(n_steps)


def _check_functions(step: object, observe: object) -> None:
    for name, value in (("step", step), ("observe", observe)):
        if not callable(value) and (name == "step" or value is not None):
            raise TypeError(f"timestepping.scan: {name} must be a function, but got {type(value).__name__} {value!r:.60}.")


def _check_state(u0: Tree) -> None:
    found = named_leaves(u0, "u0")
    for name, leaf in found:
        if not is_variable(leaf):
            kind = f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else f"{type(leaf).__name__} {leaf!r:.40}"
            raise TypeError(
                f"timestepping.scan: the state must be made of real or complex floats, but {name} is of {kind}. Convert "
                "it; step is given its number, so that it need not count."
            )


def _check_inputs(inputs: Tree, steps: int) -> None:
    for name, leaf in [] if inputs is None else named_leaves(inputs, "inputs"):
        if np.ndim(leaf) == 0 or len(leaf) != steps:
            raise ValueError(
                f"timestepping.scan: inputs need one entry for each of n_steps={steps} steps along their first axis, but "
                f"{name} has shape {np.shape(leaf)}."
            )
