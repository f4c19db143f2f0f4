"""The complete source of a kernel for a CPU or a GPU: f and the other functions that it calls, and the kernel itself."""

from __future__ import annotations

from functools import lru_cache

from mpiad.compiling.derivatives import Wanted, jvp, vjp
from mpiad.compiling.program import Program, simplify
from mpiad.compiling.rerolling import Stored
from mpiad.compiling.source import function_source, number
from mpiad.ensemble.compiled.cuda.cuda_kernels import PRELUDE, cuda_forward_text, cuda_reverse_text
from mpiad.ensemble.compiled.forward_kernel import forward_source
from mpiad.ensemble.compiled.kernel_spec import KernelSpec, filled
from mpiad.ensemble.compiled.reverse_kernel import reverse_source
from mpiad.ensemble.compiled.traced_problem import TracedProblem
from mpiad.ensemble.field_jacobian import jacobian_program, second_adjoint_program

_MOST_TEXTS = 32


# A training loop requests the same texts in each step. `traced` has no numbers, since numbers change between solves.
@lru_cache(_MOST_TEXTS)
def kernel_text(
    kernel: str, traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...], language: str = "python"
) -> str:
    """Return the text of the kernel "forward", or of "reverse" for cotangents of the parameters `wanted`."""
    # NVRTC and nvcc need no headers to compile the text in "c". Compiled as C++ for a CPU, it loops over the trajectories.
    on_gpu, forward = language == "c", kernel == "forward"
    programs = _forward_programs(traced, spec) if forward else _reverse_programs(traced, spec, wanted)
    if on_gpu:
        text = cuda_forward_text(spec) if forward else cuda_reverse_text(spec)
    else:
        # Gradients of conditions aren't computed in loops over lanes.
        in_loops = [program for name, program in programs.items() if not name.startswith("slopes")]
        text = (forward_source if forward else reverse_source)(spec, in_loops)
    functions = [_function(one, name, spec, traced.names, language) for name, one in programs.items()]
    if on_gpu:
        functions.insert(0, "\n".join(filled(PRELUDE, {"real": "float" if spec.single else "double"})))
    return "\n\n".join([*functions, text]) + "\n" * on_gpu


def _forward_programs(traced: TracedProblem, spec: KernelSpec) -> dict[str, Program]:
    """Return f, its tangents and Jacobian, and the conditions and affects of events, by the names that kernels use."""
    program, programs = traced.program, {"f": traced.program}
    if spec.jacobian or spec.slopes:
        programs["jacobian"] = jacobian_program(program).program
    for i, (kind, index) in enumerate(spec.directions):
        along = [] if kind == "u" else [traced.names.index(f"{kind}{index}")]
        tangent = jvp(program, {"state": None, "parameter": along})
        programs[f"df{i}"] = simplify(tangent, {("seed", spec.d): 1.0} if along else {})
    programs |= {f"condition{e}": g for e, g in enumerate(traced.conditions)}
    return programs | {f"affect{e}": g for e, g in enumerate(traced.affects) if g is not None and spec.affects is not None}


def _reverse_programs(traced: TracedProblem, spec: KernelSpec, wanted: tuple[int, ...]) -> dict[str, Program]:
    """Return f, its first and second derivatives, and those of conditions and affects, by the names that kernels use."""
    program = traced.program
    wrt_time: Wanted = {"state": None, "parameter": wanted, "time": None}
    wrt: Wanted = wrt_time if spec.timed else {"state": None, "parameter": wanted}
    programs = {"f": program, "g": simplify(vjp(program, wrt))}
    if spec.tableau.implicit:
        programs["jacobian"] = jacobian_program(program).program
        programs["curvature"] = second_adjoint_program(program, wrt)
    programs |= {f"slopes{e}": vjp(g, wrt_time) for e, g in enumerate(traced.conditions) if spec.events}
    return programs | {f"back{e}": simplify(vjp(traced.affects[e], wrt)) for e, _ in spec.jumps or ()}  # type: ignore[arg-type]


def _function(program: Program, name: str, spec: KernelSpec, parameters: tuple[str, ...], language: str) -> str:
    """Return the text of ``name(*u, *p, *s, t, *w, *x)``; w: tangents or cotangents; x: second directions.

    In CPU kernels the shared parameters may be an array s, and the derivatives may add the cotangents of parameters to the
    fields p_bar and s_bar: then the arguments ``live, bars, l`` follow. Entries of tables are read from arrays. See
    `KernelSpec`.
    """
    fused = language == "python"
    shares = spec.shares_array and fused
    loaded = dict.fromkeys(f"{kind}{i}" for kind in ("p" if shares else "ps") for i in spec.loaded(kind))
    arrays = {"p": "p[{}, column]", "s": "s[{}]"}  # for parameters that aren't passed as scalars
    rolled = spec.rolled and fused

    def state(name: str, count: int) -> list[str]:
        """Return the entries of an array, or scalars, and further scalars."""
        return [f"{name}[{i}]" if rolled and i < spec.d <= count else f"{name}{i}" for i in range(count)]

    names = {"state": state("u", spec.d), "time": ["t"]}
    names["parameter"] = [x if x in loaded else arrays[x[0]].format(x[1:]) for x in parameters]
    names["table of parameter"] = [arrays[x[0]].format(f"{x[1:]} + np.int64({{}})") for x in parameters]
    names["seed"] = state("w", min(spec.d, program.groups.get("seed", 0)))  # the seed of a parameter is the constant 1
    names["cotangent"] = state("w", program.groups.get("cotangent", 0))
    names["direction"] = state("x", program.groups.get("direction", 0))
    tables = ["p", "s", "column"] if spec.tables else ["s"] if shares else []
    if tables and not fused:
        tables = ["const real* p", "const real* s", "const long long column", "const long long n"]
    given = [*loaded, *tables, "t"]
    inputs = [*names["state"], *given, *names["seed"], *names["cotangent"], *names["direction"]]
    arguments, stored = list(dict.fromkeys(x.partition("[")[0] for x in inputs)), dict[int, Stored]()
    if rolled and not name.startswith("condition"):
        # The results that are states, or all entries of a Jacobian, are stored in an array.
        arguments.insert(0, "out")
        count = len(program.outputs) if name == "jacobian" else spec.d
        stored |= {k: Stored("out[{0}] = {1}", k) for k in range(count)}
    if spec.accumulates and fused and name in ("g", "curvature"):
        arguments += ["live", "bars", "l"]
        zero = number(0.0, spec.single)
        for k in range(spec.wanted_varying + spec.wanted_shared):
            added = "{1}" if k < spec.wanted_varying else f"where(live > 0.0, {{1}}, {zero})"
            stored[spec.d + k] = Stored(f"bars[{{0}} + l] += {added}", spec.lanes * k)
    return function_source(program, name, names, arguments, spec.dtype, language, stored)
