"""Several steps of a loop as one compiled program, where the step is compiled.

A program writes its results into arrays of their own, which the next one copies into the halos that it exchanges. Within
one program a field is computed where the next step reads it, cotangents of parameters are added up in loops, and the Python
of a call is spent once for all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from mpiad._typing import Function, Tree
from mpiad.differentiation.trees import flatten
from mpiad.transport.tracing import tracing

__all__ = ["CompiledFunction", "can_run_together", "number_together", "several"]

# More bring little, and take long to compile.
_MOST, _MOST_OPERATIONS = 32, 600


@runtime_checkable
class CompiledFunction(Protocol):
    """What `mpiad.jit` makes."""

    fun: Function

    @property
    def operations(self) -> int:
        """How many operations its largest program has; 0 where there is none yet, or some call can't be compiled."""
        ...

    def derived(self, key: Any, make: Callable[[], Function], optional: bool = False) -> Any:
        """Return a compiled function that was made of this one, the same for equal keys; `optional`: without a warning."""
        ...


def can_run_together(step: Function, observe: Function | None) -> bool:
    """Tell whether steps may become one program, now or once one of them is compiled."""
    return isinstance(step, CompiledFunction) and (observe is None or isinstance(observe, CompiledFunction))


def number_together(step: Any, observe: Any, fed: bool, length: int) -> int:
    """Return how many of a number of compiled steps to run as one program; 1 where there is none, or not yet."""
    if tracing.recorder is not None or not step.operations:
        return 1
    most = min(_MOST, length, max(_MOST_OPERATIONS // step.operations, 1))
    # As many as leave few over, which are run one by one.
    count = min(range(most, most // 2, -1), key=lambda count: length % count)
    return count if count > 1 and not several(step, observe, fed, count).refused else 1


def several(step: Any, observe: Any, fed: bool, count: int) -> Any:
    """Return a compiled function that runs `count` steps of a loop; `observe` may be None, `fed` says whether it has input.

    It takes the state, the first step's number, a nest of inputs with `count` entries (or None) and all params to the last
    state and a list of what is observed after each step.
    """
    return step.derived((observe, fed, count), lambda: _steps(step.fun, observe and observe.fun, fed, count), True)


def _steps(advance: Function, look: Function | None, fed: bool, count: int) -> Function:
    def steps(state: Tree, first: int, inputs: Tree, params: tuple) -> tuple[Tree, list[Tree]]:
        leaves, build = flatten(inputs) if fed else ([], list)
        seen = []
        for k in range(count):
            entry = (build([leaf[k] for leaf in leaves]),) if fed else ()
            state = advance(state, first + k, *entry, *params)
            if look is not None:
                seen.append(look(state, first + k, *params))
        return state, seen

    steps.__name__ = getattr(advance, "__name__", "step")
    return steps
