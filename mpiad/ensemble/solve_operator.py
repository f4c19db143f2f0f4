"""A solve as one differentiable function: from initial states, tspan and parameters to final and saved states.

All results form one vector, so that its cotangent arrives as a whole: reverse mode is one sweep over the steps. The solve
itself has run before, on plain arrays; a trace records this function of its inputs, whose value is known. Its derivatives
depend on how it ran: by columns or a CPU kernel (`differentiable`), or by a kernel on a GPU
(`compiled.cuda.gpu_derivatives`). A search for steady states is such a function of the parameters (`steady_state`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array
from mpiad.primitives.cotangents import conform, spec_like

# The first arguments of a solve, including the given times at which events act; the leaves of the parameters follow.
U0, START, END, DUE, LEAVES = range(5)
NO_TIMES = np.empty((0, 0))


class DifferentiableSolve(Protocol):
    """A solve that has run, and its derivatives; arguments are identified by their numbers."""

    @property
    def vector(self) -> Array:
        """All results."""
        ...

    def pull(self, argnums: Sequence[int], args: Sequence[Any], g: Array) -> Mapping[int, Any]:
        """Return the cotangents of arguments, given that of the vector; all of them are plain."""
        ...

    def push(self, args: Sequence[Any], tangents: Mapping[int, Any]) -> Array:
        """Return the tangent of the vector, given those of arguments; all of them are plain."""
        ...

    def pull_traced(self, argnums: Sequence[int], args: Sequence[Any], g: Array) -> list[Array]:
        """Return the same as `pull` as a function that outer traces see."""
        ...

    def push_traced(self, argnums: Sequence[int], args: Sequence[Any], gs: Sequence[Any]) -> Array:
        """Return the same as `push` as a function that outer traces see."""
        ...


@primitive
def solve_operator(*args: Any, solved: DifferentiableSolve) -> Array:
    """Return the results of a solve, or of a search for steady states, which has run before."""
    return solved.vector


def _vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    solved: DifferentiableSolve = kwargs["solved"]
    traced = any(map(isbox, args))

    def vjp(g: Array) -> list[Array]:
        if traced or isbox(g):
            return solved.pull_traced(argnums, args, g)
        found = solved.pull(argnums, args, conform(g, *spec_like(ans)))
        return [conform(found[k], *spec_like(args[k])) for k in argnums]

    return vjp


def _jvp(argnums: tuple[int, ...], gs: Sequence[Any], ans: Array, args: tuple, kwargs: dict) -> Array:
    solved: DifferentiableSolve = kwargs["solved"]
    if any(map(isbox, (*args, *gs))):
        return solved.push_traced(argnums, args, gs)
    return solved.push(args, {k: conform(g, *spec_like(args[k])) for k, g in zip(argnums, gs)})


defvjp_argnums(solve_operator, _vjp)
defjvp_argnums(solve_operator, _jvp)
