"""Kernels of one f: their texts, as modules, and the functions that they are compiled to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from mpiad.compiling.cache import Kernel, kernel_of
from mpiad.compiling.derivatives import jvp, vjp
from mpiad.compiling.lowering import lowered
from mpiad.compiling.operations import OPERATIONS
from mpiad.compiling.program import Program
from mpiad.compiling.simplify import simplify
from mpiad.compiling.source import function_source
from mpiad.ensemble.compiled.form import Form
from mpiad.ensemble.compiled.forward import forward_source
from mpiad.ensemble.compiled.reverse import reverse_source
from mpiad.ensemble.compiled.signatures import signature_of

__all__ = ["compiled", "forward_text", "parameter_names", "reverse_text"]

_MOST_TEXTS = 32


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
    parts, programs = [function_source(program, "f", names, dtype=form.dtype)], [program, *conditions]
    for i, (kind, place) in enumerate(form.directions):
        along = [] if kind == "u" else [names.index(f"{kind}{place}")]
        tangent = jvp(program, 1, along, time=False)
        d = program.states
        tangent = simplify(tangent, {d: 1.0} if along else {}, range(d, 2 * d))
        parts.append(function_source(tangent, f"df{i}", names, [f"w{c}" for c in range(d)], True, form.dtype))
        programs.append(tangent)
    parts += [function_source(g, f"condition{e}", names, dtype=form.dtype) for e, g in enumerate(conditions)]
    return _module(parts, forward_source(form, _is_simple(programs)))


@lru_cache(_MOST_TEXTS)
def reverse_text(program: Program, form: Form, names: tuple[str, ...], wanted: tuple[int, ...]) -> str:
    """Return the text of a reverse kernel, and of f and its adjoint before it."""
    d = program.states
    adjoint = simplify(vjp(program, wanted, time=form.timed))
    seeds = [f"w{c}" for c in range(d)]
    # The stages are computed again for their derivatives only, so here they may be rounded otherwise.
    f = function_source(program, "f", names, (), True, form.dtype)
    parts = [f, function_source(adjoint, "g", names, seeds, True, form.dtype)]
    return _module(parts, reverse_source(form, _is_simple([program, adjoint])))


def _is_simple(programs: Sequence[Program]) -> bool:
    """Return whether programs call nothing: around calls, the wider a vector is, the more there is to put away."""
    operations = {made.operation for program in programs for made in lowered(program).instructions}
    return all(OPERATIONS[operation].simple for operation in operations & OPERATIONS.keys())


def _module(functions: list[str], kernel: str) -> str:
    return "\n\n".join([*functions, kernel])


def compiled(text: str, name: str, form: Form) -> Kernel:
    """Return a kernel's function, compiled; `name` says which one."""
    return kernel_of(text, name, signature_of(name, form.dtype, name == "forward" and bool(form.events)))
