"""The complete source of a kernel for a CPU or a GPU: f and the other functions that it calls, and the kernel itself."""

from __future__ import annotations

from functools import lru_cache

from mpiad.compiling.derivatives import Wanted, jvp, vjp
from mpiad.compiling.program import Program, simplify
from mpiad.compiling.source import are_simple, function_source, numbered
from mpiad.ensemble.compiled.cuda.cuda_kernels import cuda_forward_text, cuda_reverse_text, prelude
from mpiad.ensemble.compiled.forward_kernel import forward_source
from mpiad.ensemble.compiled.kernel_spec import KernelSpec
from mpiad.ensemble.compiled.reverse_kernel import reverse_source
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.field_jacobian import jacobian_program, second_adjoint_program

_MOST_TEXTS = 32


# A training loop requests the same texts in each step. `traced.numbers` must be empty, since numbers change between solves.
@lru_cache(_MOST_TEXTS)
def forward_text(traced: TracedProblem, spec: KernelSpec) -> str:
    """Return the text of f and its derivatives, of the conditions and affects of events, and of the forward kernel."""
    programs = _forward_programs(traced, spec)
    if spec.affects is not None:
        programs |= {f"affect{e}": g for e, g in enumerate(traced.affects) if g is not None}
    parts = [_function(one, name, spec, traced.names) for name, one in programs.items()]
    return "\n\n".join([*parts, forward_source(spec, are_simple(list(programs.values())))])


@lru_cache(_MOST_TEXTS)
def reverse_text(traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...]) -> str:
    """Return the text of f and its derivatives, of the adjoints of affects, and of the reverse kernel."""
    programs = _reverse_programs(traced.program, spec, wanted)
    wrt: Wanted = {"state": None, "parameter": wanted} | ({"time": None} if spec.timed else {})
    programs |= {f"back{e}": simplify(vjp(traced.affects[e], wrt)) for e, _ in spec.jumps or ()}  # type: ignore[arg-type]
    parts = [_function(one, name, spec, traced.names) for name, one in programs.items()]
    return "\n\n".join([*parts, reverse_source(spec, are_simple(list(programs.values())))])


@lru_cache(_MOST_TEXTS)
def cuda_text(kernel: str, traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...] = ()) -> str:
    """Return the CUDA C source of the kernel "forward", or of "reverse" for cotangents of the parameters `wanted`.

    NVRTC and nvcc need no headers to compile it. Compiled as C++ for a CPU, the kernels loop over the trajectories.
    """
    if kernel == "forward":
        programs, text = _forward_programs(traced, spec), cuda_forward_text(spec)
    else:
        programs, text = _reverse_programs(traced.program, spec, wanted, traced.conditions), cuda_reverse_text(spec)
    functions = [_function(one, name, spec, traced.names, language="c") for name, one in programs.items()]
    return "\n\n".join([prelude(spec), *functions, text]) + "\n"


def _forward_programs(traced: TracedProblem, spec: KernelSpec) -> dict[str, Program]:
    """Return f, its tangents and Jacobian, and the conditions of events, by the names that kernels use."""
    program, programs = traced.program, {"f": traced.program}
    if spec.jacobian or spec.slopes:
        programs["jacobian"] = jacobian_program(program).program
    for i, (kind, index) in enumerate(spec.directions):
        along = [] if kind == "u" else [traced.names.index(f"{kind}{index}")]
        tangent = jvp(program, {"state": None, "parameter": along})
        programs[f"df{i}"] = simplify(tangent, {("seed", spec.d): 1.0} if along else {})
    return programs | {f"condition{e}": g for e, g in enumerate(traced.conditions)}


def _reverse_programs(
    program: Program, spec: KernelSpec, wanted: tuple[int, ...], conditions: tuple[Program, ...] = ()
) -> dict[str, Program]:
    """Return f, its first and second derivatives, and the gradients of conditions, by the names that kernels use."""
    wrt: Wanted = {"state": None, "parameter": wanted}
    wrt_time: Wanted = {**wrt, "time": None}
    programs = {"f": program, "g": simplify(vjp(program, wrt_time if spec.timed else wrt))}
    if spec.tableau.implicit:
        programs["jacobian"] = jacobian_program(program).program
        programs["curvature"] = second_adjoint_program(program, wrt_time if spec.timed else wrt)
    return programs | {f"slopes{e}": vjp(g, wrt_time) for e, g in enumerate(conditions)}


def _function(program: Program, name: str, spec: KernelSpec, parameters: tuple[str, ...], language: str = "python") -> str:
    """Return the text of ``name(*u, *p, *s, t, *w, *x)``; w: tangents or cotangents; x: second directions."""
    names = {"state": numbered("u", spec.d), "parameter": parameters, "time": ["t"]}
    names["seed"] = numbered("w", min(spec.d, program.groups.get("seed", 0)))  # the seed of a parameter is the constant 1
    names["cotangent"] = numbered("w", program.groups.get("cotangent", 0))
    names["direction"] = numbered("x", program.groups.get("direction", 0))
    # Kernels pass first the parameters per trajectory, then the shared ones.
    order = sorted(parameters, key=lambda text: (text[0], int(text[1:])))
    arguments = [*names["state"], *order, "t", *names["seed"], *names["cotangent"], *names["direction"]]
    return function_source(program, name, names, arguments, spec.dtype, language)
