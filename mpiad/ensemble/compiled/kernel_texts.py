"""Kernels of one f: their texts, as modules, the types of their arguments, and the functions that they are compiled to."""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np

from mpiad.compiling.builder import simplify
from mpiad.compiling.cache import Kernel, kernel_of
from mpiad.compiling.derivatives import Wanted, jvp, vjp
from mpiad.compiling.lowering import are_simple
from mpiad.compiling.program import Program
from mpiad.compiling.source import function_source, numbered
from mpiad.ensemble.compiled.forward_kernel import forward_source
from mpiad.ensemble.compiled.kernel_form import Form
from mpiad.ensemble.compiled.reverse_kernel import reverse_source

__all__ = ["compiled", "forward_text", "parameter_names", "reverse_text"]

_MOST_TEXTS = 32
# Types of arguments: of times, counts and sums; arrays of states have the states' precision.
_ROW, _TABLE = "float64[::1]", "float64[:, ::1]"
_NUMBERS = "int64[::1]"


@lru_cache(_MOST_TEXTS)
def parameter_names(varying: tuple[int, ...], shared: tuple[int, ...]) -> tuple[str, ...]:
    """Return what a program's parameters are called: p0, p1, ... those of each trajectory, s0, s1, ... those of all."""
    names = {number: f"p{i}" for i, number in enumerate(varying)}
    names.update({number: f"s{i}" for i, number in enumerate(shared)})
    return tuple(names[number] for number in range(len(names)))


# A training loop asks for the same texts in each step.
@lru_cache(_MOST_TEXTS)
def forward_text(program: Program, form: Form, names: tuple[str, ...], conditions: tuple[Program, ...] = ()) -> str:
    """Return the text of a forward kernel, and of f, its tangents and the events' conditions before it."""
    parts, programs = [_function(program, "f", form, names)], [program, *conditions]
    for i, (kind, place) in enumerate(form.directions):
        along = [] if kind == "u" else [names.index(f"{kind}{place}")]
        tangent = jvp(program, 1, {"state": None, "parameter": along})
        tangent = simplify(tangent, {("seed", form.d): 1.0} if along else {}, range(form.d, 2 * form.d))
        parts.append(_function(tangent, f"df{i}", form, names, fused=True))
        programs.append(tangent)
    parts += [_function(g, f"condition{e}", form, names) for e, g in enumerate(conditions)]
    return _module(parts, forward_source(form, are_simple(programs)))


@lru_cache(_MOST_TEXTS)
def reverse_text(program: Program, form: Form, names: tuple[str, ...], wanted: tuple[int, ...]) -> str:
    """Return the text of a reverse kernel, and of f and its adjoint before it."""
    by: Wanted = {"state": None, "parameter": wanted}
    adjoint = simplify(vjp(program, {**by, "time": None} if form.timed else by))
    # The stages are computed again for their derivatives only, so here they may be rounded otherwise.
    parts = [_function(program, "f", form, names, fused=True), _function(adjoint, "g", form, names, fused=True)]
    return _module(parts, reverse_source(form, are_simple([program, adjoint])))


def _function(program: Program, name: str, form: Form, parameters: tuple[str, ...], fused: bool = False) -> str:
    """Return the text of ``name(*u, *p, *s, t, *w)``; w are the seeds of each component, where there are any."""
    names = {"state": numbered("u", form.d), "parameter": parameters, "time": ["t"]}
    names["seed"] = numbered("w", form.d if "seed" in program.groups else 0)
    # As kernels pass them: first those of each trajectory, then those of all.
    order = sorted(parameters, key=lambda text: (text[0], int(text[1:])))
    return function_source(program, name, names, [*names["state"], *order, "t", *names["seed"]], fused, form.dtype)


def _module(functions: list[str], kernel: str) -> str:
    return "\n\n".join([*functions, kernel])


def compiled(text: str, name: str, form: Form) -> Kernel:
    """Return a kernel's function, compiled; `name` says which one."""
    return kernel_of(text, name, _signature_of(name, form.dtype, name == "forward" and bool(form.events)))


@cache
def _signature_of(name: str, dtype: np.dtype, events: bool = False) -> str:
    """Return the types of a kernel's arguments.

    Parameters
    ----------
    name : {"forward", "reverse"}
    dtype : dtype
        Of the states.
    events : bool
        Whether the kernel looks for events.
    """
    row, table, cube, cubes = (f"{dtype.name}[{':, ' * axes}::1]" for axes in range(4))
    kinds = (_forward if name == "forward" else _reverse)(row, table, cube, cubes)
    more = [_ROW, _TABLE] if events else []  # end_part, crossings
    return f"void({', '.join(kinds + more)})"


def _forward(row: str, table: str, cube: str, cubes: str) -> list[str]:
    return [
        row, _ROW, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS,  # b, exact, ids, place, state, taken
        table, table, row, _ROW, _ROW, _TABLE,  # u0, p, s, start, end, times
        "float64", row, "float64", "float64", "float64",  # rtol, atol, dt, dtmax, max_steps
        table, _ROW, "int8[::1]", _NUMBERS, _NUMBERS,  # u_end, t_reached, codes, naccept, nreject
        cube, "int32[:, ::1]", cube, cubes,  # saved, save_step, du_end, dsaved
        _NUMBERS, _TABLE, _NUMBERS,  # last, rows, before_rows
    ]  # fmt: skip


def _reverse(row: str, table: str, cube: str, cubes: str) -> list[str]:
    return [
        row, _ROW, _NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS,  # b, exact, ids, row, step, place
        _NUMBERS, table, row, _TABLE,  # state, p, s, times
        _TABLE, _NUMBERS, _NUMBERS, _NUMBERS, _ROW,  # rows, before_rows, last, naccept, t_reached
        "boolean[::1]", table, cube, "int32[:, ::1]",  # alive, end_bar, saved_bar, save_step
        table, _TABLE, _ROW, _ROW, _ROW,  # u0_bar, p_bar, s_bar, start_bar, stop_bar
    ]  # fmt: skip
