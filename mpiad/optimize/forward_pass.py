"""A forward pass that is kept, so that the backward pass runs only when the method asks for the gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

from mpiad._typing import Function, Tree
from mpiad.differentiation.gradient import gradients_of_term
from mpiad.differentiation.objective import Problem
from mpiad.differentiation.trace import Traced, Variables, trace_backwards, variables_of

__all__ = ["ForwardPass", "forward_pass"]


class ForwardPass(NamedTuple):
    """One rank's part of an evaluation, ready to be run backwards once."""

    traced: Traced
    variables: Variables

    @property
    def value(self) -> Any:
        """Return this rank's L_r."""
        return self.traced.build(self.traced.values)

    @property
    def problem(self) -> Problem | None:
        """Return what is wrong with this rank's pass: requests that were never waited for."""
        return self.traced.problem

    def backward(self, weight: float) -> Tree:
        """Return `weight` times the gradient by this rank's copy of the variables.

        Ranks
        -----
        All ranks call it, also those whose weight is zero: the cotangents of the others pass through them.
        """
        found = gradients_of_term(self.traced, weight, self.variables)
        return self.variables.filled(found, lambda leaf: None)


def forward_pass(fun: Function, x: Tree) -> ForwardPass:
    """Run a function of x, recorded."""
    variables = variables_of((x,), 0, "minimize")
    return ForwardPass(trace_backwards(fun, variables), variables)
