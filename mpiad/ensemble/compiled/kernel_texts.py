"""The complete source of a kernel for a CPU or a GPU: f and the other functions that it calls, and the kernel itself."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import fields, is_dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mpiad.compiling.cache import Source
from mpiad.compiling.derivatives import Wanted, jvp, vjp
from mpiad.compiling.folding import definitions, variable_named
from mpiad.compiling.kernel_language import call_function
from mpiad.compiling.program import Program, simplify
from mpiad.compiling.rerolling import Stored
from mpiad.compiling.source import are_simple, function_source, number
from mpiad.ensemble import controller, events, jumps, outcome, sparse_lu
from mpiad.ensemble.compiled import (
    event_kernel,
    forward_kernel,
    kernel_fields,
    kernel_spec,
    reverse_kernel,
    rosenbrock_kernel,
    step_kernel,
    tangent_kernel,
)
from mpiad.ensemble.compiled.cuda.cuda_kernels import cuda_forward_text, cuda_reverse_text, prelude
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.rosenbrock_kernel import unrolled_lines
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.field_jacobian import jacobian_program, second_adjoint_program

_MOST_TEXTS = 32
# The modules of the CPU kernels, by their names.
_MODULES: dict[str, Any] = {"forward": forward_kernel, "reverse": reverse_kernel, "tangent": tangent_kernel}


class KernelCode:
    """The code of a CPU kernel: the texts of the functions of the problem, and the folded function of the kernel."""

    def __init__(self, name: str, functions: str, spec: KernelSpec, is_wide: bool):
        module = _MODULES[name]
        arrays, function = getattr(module, f"{name.capitalize()}Arrays"), getattr(module, name)
        parameters = arrays._fields
        symbols = arrays(*map(variable_named, parameters))
        # The arguments of `function`.
        known = spec, call_function, module.layout_of(spec), symbols, is_wide
        self.functions, self._fold = functions, partial(definitions, name, parameters, function, *known)
        # Everything that determines the kernel. It is folded only to be compiled, or to be read.
        key = f"{functions}\n# {name} of {_sources()}, {is_wide}: {described(spec)}"
        signature = kernel_fields.signature_of(arrays, spec.dtype)
        self.source = Source(key, name, signature, lambda: self.definitions)

        # A bound on the number of statements that is known before the kernel is folded.
        self.least_length = functions.count("\n") + (unrolled_lines(spec) if spec.tableau.implicit else 0)

    @cached_property
    def definitions(self) -> list[ast.FunctionDef]:
        """The functions that aren't functions of the problem."""
        return self._fold()

    @property
    def length(self) -> int:
        """The number of statements."""
        statements = sum(isinstance(x, ast.stmt) for one in self.definitions for x in ast.walk(one))
        return self.functions.count("\n") + statements

    def __str__(self) -> str:
        return "\n\n".join([self.functions, *(ast.unparse(ast.fix_missing_locations(x)) for x in self.definitions)])

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@cache
def _sources() -> str:
    """Return a checksum of the files that contain kernels, and the constants that kernels use."""
    modules = [*_MODULES.values(), step_kernel, rosenbrock_kernel, event_kernel, kernel_fields, kernel_spec]
    modules += [controller, events, jumps, outcome, sparse_lu]
    texts = [Path(str(module.__file__)).read_bytes() for module in modules]
    return hashlib.sha256(b"".join(texts)).hexdigest()


def described(value: object) -> str:
    """Return a text of all values in a spec; numbers have all digits."""
    if isinstance(value, np.ndarray):
        return repr(value.tolist())
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(described(getattr(value, x.name)) for x in fields(value))})"
    return f"({', '.join(map(described, value))})" if isinstance(value, tuple) else repr(value)


# A training loop requests the same code in each step. `traced` has no numbers, since numbers change between solves.
@lru_cache(_MOST_TEXTS)
def kernel_code(kernel: str, traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...]) -> KernelCode:
    """Return the CPU kernel "forward", or "reverse" or "tangent" for derivatives with respect to parameters `wanted`."""
    programs = _programs(kernel, traced, spec, wanted)
    # Gradients of conditions aren't computed in loops over lanes.
    in_loops = [program for name, program in programs.items() if not name.startswith(("slopes", "dcondition", "rate"))]
    functions = [_function(one, name, spec, traced.names, "python") for name, one in programs.items()]
    return KernelCode(kernel, "\n\n".join(functions), spec, are_simple(in_loops))


@lru_cache(_MOST_TEXTS)
def cuda_text(kernel: str, traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...]) -> str:
    """Return the text of a kernel for GPUs."""
    # NVRTC and nvcc need no headers to compile it. Compiled as C++ for a CPU, it loops over the trajectories.
    spec = spec._replace(lanes=0)
    programs = _programs(kernel, traced, spec, wanted)
    functions = [_function(one, name, spec, traced.names, "c") for name, one in programs.items()]
    text = (cuda_forward_text if kernel == "forward" else cuda_reverse_text)(spec)
    return "\n\n".join([prelude(spec), *functions, text]) + "\n"


def _programs(kernel: str, traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...]) -> dict[str, Program]:
    """Return the functions of the problem that a kernel calls, by their names: f, conditions, affects, derivatives."""
    program, programs = traced.program, {"f": traced.program}
    if spec.jacobian or spec.slopes:
        programs["jacobian"] = jacobian_program(program).program
    wrt: Wanted = {"state": None, "parameter": wanted}
    wrt_time: Wanted = {**wrt, "time": None}
    wrt = wrt_time if spec.timed else wrt
    conditions = [*enumerate(traced.conditions if spec.events else ())]
    affects: list[tuple[int, Any]] = [(e, traced.affects[e]) for e in spec.jumps or spec.affects or ()]
    if kernel == "reverse":
        programs["g"] = simplify(vjp(program, wrt))
        if spec.tableau.implicit:
            programs["curvature"] = second_adjoint_program(program, wrt)
        programs |= {f"slopes{e}": vjp(g, wrt_time) for e, g in conditions}
        return programs | {f"back{e}": simplify(vjp(g, wrt)) for e, g in affects}
    if kernel == "tangent":
        programs |= _products(programs, wrt)
        programs |= {f"dcondition{e}": simplify(jvp(g, wrt_time)) for e, g in conditions}
        programs |= {f"rate{e}": simplify(jvp(g, {"state": None, "time": None})) for e, g in conditions}
        return programs | {f"daffect{e}": simplify(jvp(g, wrt_time)) for e, g in affects}
    for i, (kind, index) in enumerate(spec.directions):
        if kind == "seed":
            programs |= _products(programs, wrt)
            programs |= {f"daffect{e}": simplify(jvp(affect, wrt)) for e, affect in affects}
            programs |= {f"dcondition{e}": simplify(jvp(g, wrt)) for e, g in conditions}
            programs |= {f"rate{e}": simplify(jvp(g, {"state": None, "time": None})) for e, g in conditions}
            continue
        along = [] if kind == "u" else [traced.names.index(f"{kind}{index}")]
        for name, function in ((f"df{i}", program), *((f"df{i}_affect{e}", affect) for e, affect in affects)):
            tangent = jvp(function, {"state": None, "parameter": along})
            programs[name] = simplify(tangent, {("seed", spec.d): 1.0} if along else {})
    programs |= {f"condition{e}": g for e, g in conditions}
    return programs | {f"affect{e}": g for e, g in enumerate(traced.affects) if g is not None and spec.affects is not None}


def _products(programs: dict[str, Program], wrt: Wanted) -> dict[str, Program]:
    """Return the products of the derivatives of f, and of its Jacobian if it is among the programs, with tangents."""
    return {f"d{name}": simplify(jvp(programs[name], wrt)) for name in ("f", "jacobian") if name in programs}


def _function(program: Program, name: str, spec: KernelSpec, parameters: tuple[str, ...], language: str) -> str:
    """Return the text of ``name(*u, *p, *s, t, *w, *x)``; w: tangents or cotangents; x: second directions.

    In CPU kernels the shared parameters may be an array s, and the derivatives may add the cotangents of parameters to the
    fields p_bar and s_bar: then the arguments ``live, bars, l`` follow. Entries of tables are read from arrays. See
    `KernelSpec`.
    """
    fused = language == "python"
    shares = spec.shares_array and fused
    kinds = [kind for kind, is_array in (("p", spec.varying_array), ("s", shares)) if not is_array]
    loaded = dict.fromkeys(f"{kind}{i}" for kind in kinds for i in spec.loaded(kind))
    # For parameters that aren't passed as scalars.
    arrays = {"p": "p[{}]" if spec.varying_array else "p[{}, column]", "s": "s[{}]"}
    rolled = spec.rolled and fused

    def state(name: str, count: int) -> list[str]:
        """Return the entries of an array, or scalars, and further scalars."""
        return [f"{name}[{i}]" if rolled and i < spec.d <= count else f"{name}{i}" for i in range(count)]

    names = {"state": state("u", spec.d), "time": ["t"]}
    names["parameter"] = [x if x in loaded else arrays[x[0]].format(x[1:]) for x in parameters]
    names["table of parameter"] = [arrays[x[0]].format(f"{x[1:]} + np.int64({{}})") for x in parameters]
    # The functions df0, df1, …, and df0_affect0, … have a constant 1 as the tangent of a parameter.
    seeds = program.groups.get("seed", 0)
    names["seed"] = state("w", min(spec.d, seeds) if name[:2] == "df" and name != "df" else seeds)
    from_array = spec.seeds_array and fused and name.startswith(("df", "djacobian", "dcondition", "daffect"))
    if from_array:
        first = spec.d + spec.wanted_varying
        names["seed"][first : first + spec.wanted_shared] = [f"e[{k} + l]" for k in range(spec.wanted_shared)]
    names["cotangent"] = state("w", program.groups.get("cotangent", 0))
    names["direction"] = state("x", program.groups.get("direction", 0))
    tables = ["p", "s", "column"] if spec.tables else ["s"] if shares else []
    if tables and not fused:
        tables = ["const real* p", "const real* s", "const long long column", "const long long n"]
    constants = [*["p"] * spec.varying_array, *loaded, *tables, "t"]
    inputs = [*names["state"], *constants, *names["seed"], *names["cotangent"], *names["direction"]]
    arguments, stored = list(dict.fromkeys(x.partition("[")[0] for x in inputs)), dict[int, Stored]()
    if rolled and not name.startswith(("condition", "dcondition", "rate")):
        # The results that are states, or all entries of a Jacobian, are stored in an array.
        arguments.insert(0, "out")
        count = len(program.outputs) if name in ("jacobian", "djacobian") else spec.d
        stored |= {k: Stored("out[{0}] = {1}", k) for k in range(count)}
    if from_array:
        arguments.append("l")
    if spec.accumulates and fused and name in ("g", "curvature"):
        arguments += ["live", "bars", "l"]
        zero = number(0.0, spec.single)
        for k in range(spec.wanted_varying + spec.wanted_shared):
            added = "{1}" if k < spec.wanted_varying else f"where(live > 0.0, {{1}}, {zero})"
            stored[spec.d + k] = Stored(f"bars[{{0}} + l] += {added}", spec.lanes * k)
    return function_source(program, name, names, arguments, spec.dtype, language, stored)
