"""Derivatives of f's program that Rosenbrock methods use: its Jacobian, and the derivatives of this along directions."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mpiad.compiling.builder import Builder, simplify
from mpiad.compiling.derivatives import Wanted, derivatives_by_inputs, jvp, vjp
from mpiad.compiling.program import Program

_MOST_PROGRAMS = 32


class JacobianProgram(NamedTuple):
    """The entries of the Jacobian that aren't structurally zero."""

    program: Program  # its outputs are the entries, and then derivatives with respect to time
    places: tuple[tuple[int, int], ...]  # of the entries: row and column
    slopes: tuple[int, ...]  # the components that have derivatives with respect to time


@lru_cache(_MOST_PROGRAMS)
def jacobian_program(program: Program) -> JacobianProgram:
    """Return the derivatives of f with respect to state and time."""
    d, builder = program.groups["state"], Builder()
    outputs = derivatives_by_inputs(builder, program, {"state": None, "time": None})
    kept = {place: number for place, number in outputs.items() if builder.value(number) != 0}
    places, slopes = ([place for place in kept if (place[1] == d) is timed] for timed in (False, True))
    made = builder.program(program.groups, [kept[place] for place in places + slopes])
    return JacobianProgram(made, tuple(places), tuple(i for i, _ in slopes))


def bend_program(program: Program) -> Program:
    """Return the program of the tangents of the derivative of f along a direction of state and time.

    It has two more groups, "direction" (per component of the state, then of time), and "tangent" (of the state, then of the
    parameters), and one output per component of f.
    """
    along = simplify(jvp(program, {"state": None, "time": None}, seeds="direction"))
    return simplify(jvp(along, {"state": None, "parameter": None}, seeds="tangent"))


def curvature_program(program: Program, wanted: Wanted | None = None) -> Program:
    """Return the program of the gradient of f, times cotangents, along directions of state and time.

    It has two more groups, "cotangent" and "direction" (per component of the state, then of time), and one output per
    wanted input, by default per component of the state, per parameter, and for time.
    """
    gradient = vjp(program, wanted, seeds="cotangent")
    return simplify(jvp(gradient, {"state": None, "time": None}, seeds="direction"))
