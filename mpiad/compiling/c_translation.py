"""Translation of statements of the kernel language to C++ and CUDA, so that CPU and GPU kernels share one source.

The language is that of `translation`. Kernels declare their arrays in C, and macros for the elements of arrays with several
axes. A variable is declared at its first assignment, with the type of the value (`auto`), in the block of this assignment.
Functions of `math` and NumPy are called by their names in C++, which overloads them by precision. ``fma(a, b, c)`` becomes
``a * b + c``, which compilers for GPUs may turn into one instruction.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

# Definitions for all kernels. NVRTC has no standard headers. For CPUs, on which tests run, `EACH` is a plain loop.
PRELUDE = """
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KERNEL extern "C" __global__ void
#define INLINE static __device__ __forceinline__
#define EACH(i, n) \\
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
#ifndef INFINITY
#define INFINITY __longlong_as_double(0x7ff0000000000000LL)
#endif
#ifndef NAN
#define NAN __longlong_as_double(0x7ff8000000000000LL)
#endif
#else
#include <math.h>
#define KERNEL extern "C" void
#define INLINE static inline
#define EACH(i, n) for (long long i = 0; i < n; ++i)
#endif
"""
# Functions with other names in C. Kernels define `larger` and `smaller`, whose result is NaN if an argument is NaN.
_CALLS = {
    "abs": "fabs({0})", "fma": "({0} * {1} + {2})", "max": "larger({0}, {1})", "min": "smaller({0}, {1})",
    "np.float64": "(double)({0})", "np.int64": "(long long)({0})",
    "np.isfinite": "finite_number({0})", "where": "({0} ? {1} : {2})",
}  # fmt: skip
_ATTRIBUTES = {"inf": "INFINITY", "nan": "NAN"}


def c_statements(nodes: Iterable[ast.stmt], declared: Iterable[str] = ()) -> list[str]:
    """Return statements of the kernel language as C++."""
    known = set(declared)
    return [line for node in nodes for line in _statement(node, known)]


def c_lines(lines: Sequence[str], declared: Iterable[str] = (), renamed: Mapping[str, str] | None = None) -> list[str]:
    """Return the text of statements of the kernel language as C++; `renamed`: new names of variables."""
    parsed = ast.parse("\n".join(lines))
    for node in ast.walk(parsed) if renamed else ():
        if isinstance(node, ast.Name):
            node.id = renamed.get(node.id, node.id)  # type: ignore[union-attr]
    return c_statements(parsed.body, declared)


def _block(body: Sequence[ast.stmt], known: set[str]) -> list[str]:
    return [f"    {line}" for node in body for line in _statement(node, known)]


def _statement(node: ast.stmt, known: set[str]) -> list[str]:
    if isinstance(node, (ast.If, ast.While)):
        lines = [f"{type(node).__name__.lower()} ({_text(node.test)}) {{", *_block(node.body, set(known))]
        return [*lines, *(["} else {", *_block(node.orelse, set(known))] if node.orelse else []), "}"]
    if isinstance(node, ast.For):
        i = ast.unparse(node.target)
        return [f"for ({_counted(i, node.iter)}) {{", *_block(node.body, known | {i}), "}"]
    if isinstance(node, ast.AugAssign):
        return [f"{_text(node.target)} {'-' if isinstance(node.op, ast.Sub) else '+'}= {_text(node.value)};"]
    if isinstance(node, ast.Break):
        return ["break;"]
    if isinstance(node, ast.Pass):
        return [";"]
    assert isinstance(node, ast.Assign), ast.unparse(node)  # noqa: S101 the texts are ours
    target = node.targets[0]
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    names = [_text(part) for part in parts]
    new = [name for name, part in zip(names, parts) if isinstance(part, ast.Name) and name not in known]
    known.update(names)
    if not isinstance(target, ast.Tuple):
        return [f"{'auto ' if new else ''}{names[0]} = {_text(node.value)};"]
    call: ast.Call = node.value  # type: ignore[assignment] in C++, its results are reference parameters
    given = ", ".join([*map(_text, call.args), *names])
    return [*([f"real {', '.join(new)};"] if new else []), f"{ast.unparse(call.func)}({given});"]


def _counted(i: str, span: ast.expr) -> str:
    """Return the head of a `for` loop over a range; a range with a step counts down."""
    given = [_text(argument) for argument in span.args]  # type: ignore[attr-defined]
    start, stop = given[:2] if len(given) > 1 else ("0", given[0])
    before, step = (">", "--") if len(given) > 2 else ("<", "++")
    return f"int {i} = {start}; {i} {before} {stop}; {step}{i}"


def _text(node: ast.expr) -> str:
    return ast.unparse(_Expression().visit(node))


class _Expression(ast.NodeTransformer):
    """Replaces parts of an expression that differ in C++; each becomes a name whose identifier is the C++ text."""

    def visit_Call(self, node: ast.Call) -> ast.expr:  # noqa: N802
        """Return a call of a function of C++, or an expression with operators such as `?:` or a cast."""
        name, given = ast.unparse(node.func), [_text(argument) for argument in node.args]
        if name == "np.float32":
            return ast.Name(f"{given[0]}f" if isinstance(node.args[0], ast.Constant) else f"(real)({given[0]})")
        if name in _CALLS:
            return ast.Name(_CALLS[name].format(*given))
        return ast.Name(f"{name.removeprefix('math.').removeprefix('np.')}({', '.join(given)})")

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:  # noqa: N802
        return ast.Name(f"({_text(node.test)} ? {_text(node.body)} : {_text(node.orelse)})")

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:  # noqa: N802
        """Return an `and` or `or` of several conditions."""
        sign = " && " if isinstance(node.op, ast.And) else " || "
        return ast.Name(f"({sign.join(f'({_text(value)})' for value in node.values)})")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:  # noqa: N802
        if isinstance(node.op, ast.Not):
            return ast.Name(f"!({_text(node.operand)})")
        text = _text(node.operand)
        return ast.Name(f"(-({text}))" if isinstance(node.operand, ast.BinOp) else f"(-{text})")

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:  # noqa: N802
        if isinstance(node.op, ast.Pow):
            return ast.Name(f"pow({_text(node.left)}, {_text(node.right)})")
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:  # noqa: N802
        """Return an element of an array; if this has several axes, by a macro with the name of the array."""
        if isinstance(node.slice, ast.Tuple):
            return ast.Name(f"{ast.unparse(node.value)}({', '.join(map(_text, node.slice.elts))})")
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:  # noqa: N802
        return ast.Name(_ATTRIBUTES[node.attr])

    def visit_Constant(self, node: ast.Constant) -> ast.expr:  # noqa: N802
        """Return a number or a boolean as C text."""
        return ast.Name(str(node.value).lower()) if isinstance(node.value, bool) else node
