"""What a rank was given to evaluate."""

from __future__ import annotations

from typing import NamedTuple

from mpiad._typing import Function, Rank
from mpiad.differentiation.objective import check_objective
from mpiad.primitives.checks import root_of
from mpiad.transport import Channel

__all__ = ["Program", "check_program"]


class Program(NamedTuple):
    """What a rank was given to evaluate.

    Attributes
    ----------
    fun : callable
    jac : callable or bool or None
        The gradient, True where `fun` returns it beside its value, None where it is found by differentiation.
    hessp : callable or None
    args : tuple
    objective : {"root", "sum", "mean"}
        How the ranks' values make the objective; the values of `jac` and `hessp` are put together alike.
    root : int
    """

    fun: Function
    jac: Function | bool | None
    hessp: Function | None
    args: tuple
    objective: str
    root: Rank


def check_program(program: Program, used: Channel, call: str) -> None:
    """Raise where what this rank was given to evaluate can't be."""
    root_of(program.root, used, call)
    check_objective(program.objective, call)
    for name, value, allowed in (
        ("fun", program.fun, callable(program.fun)),
        ("jac", program.jac, callable(program.jac) or program.jac is None or program.jac is True),
        ("hessp", program.hessp, program.hessp is None or callable(program.hessp)),
    ):
        if not allowed:
            raise TypeError(f"{call}: {name} must be callable, but got {type(value).__name__} {value!r:.60}.")
