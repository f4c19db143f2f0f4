"""The functions that a kernel may call: Python's, those of `math` and NumPy, and single machine instructions.

Elementary functions are LLVM's intrinsics if available, which become instructions or calls of the C library; the
rest are calls of the C library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from mpiad.compiling import llvm
from mpiad.compiling.block_builder import BlockBuilder
from mpiad.compiling.values import BOOLEAN, DOUBLE, INTEGER, SINGLE, Value, common_kind

# Of `math` and NumPy, by their names, which are C's: the functions with an LLVM intrinsic, and those of the C library.
_INTRINSIC = frozenset("sqrt exp log log2 log10 sin cos pow copysign floor ceil trunc rint fabs".split())
_LIBRARY = frozenset(
    "expm1 log1p cbrt tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc hypot".split()
)  # fmt: skip
_CONVERSIONS = {
    "np.float64": DOUBLE, "float": DOUBLE, "np.float32": SINGLE, "np.int64": INTEGER, "np.int32": INTEGER, "int": INTEGER,
    "bool": BOOLEAN,
}  # fmt: skip


def called_function(build: BlockBuilder, name: str, given: list[Value]) -> Value:
    """Return the value of a function of numbers; a KeyError if there is none of this name."""
    if name in _CONVERSIONS:
        return build.converted(given[0], _CONVERSIONS[name])
    if name in _FUNCTIONS:
        return _FUNCTIONS[name](build, *given)
    module, _, function = name.partition(".")
    if module not in ("math", "np") or function not in _INTRINSIC | _LIBRARY:
        raise KeyError(name)
    kind = _float_kind(given)
    operands = [build.converted(x, kind) for x in given]
    if function in _INTRINSIC:
        return build.call(f"llvm.{function}.{'f32' if kind == SINGLE else 'f64'}", kind, *operands)
    return build.call(function + ("f" if kind == SINGLE else ""), kind, *operands)


def _float_kind(given: Sequence[Value]) -> str:
    """Return single precision if all are single, else double."""
    return SINGLE if all(x.kind == SINGLE for x in given) else DOUBLE


def _together(build: BlockBuilder, *given: Value) -> list[Value]:
    kind = reduce(common_kind, (x.kind for x in given))
    return [build.converted(x, kind) for x in given]


def compared(build: BlockBuilder, sign: str, a: Value, b: Value) -> Value:
    """Return whether a < b, or another comparison by `sign`; NaN is unequal to all."""
    a, b = _together(build, a, b)
    if a.kind in (SINGLE, DOUBLE):
        condition = {"<": "olt", "<=": "ole", ">": "ogt", ">=": "oge", "==": "oeq", "!=": "une"}[sign]
        return build.value(BOOLEAN, f"fcmp {condition} {a.kind} {a.text}, {b.text}")
    prefix = "u" if a.kind == BOOLEAN else "s"
    condition = {"==": "eq", "!=": "ne"}.get(sign) or prefix + {"<": "lt", "<=": "le", ">": "gt", ">=": "ge"}[sign]
    return build.value(BOOLEAN, f"icmp {condition} {a.kind} {a.text}, {b.text}")


def _extreme(sign: str) -> Callable[..., Value]:
    def extreme(build: BlockBuilder, *given: Value) -> Value:
        # As in Python: a later one counts if it is strictly beyond.
        first, *others = _together(build, *given)
        for x in others:
            first = build.selected(compared(build, sign, x, first), x, first)
        return first

    return extreme


def _absolute(build: BlockBuilder, x: Value) -> Value:
    if x.kind == INTEGER:
        negative = compared(build, "<", x, Value(INTEGER, "0"))
        return build.selected(negative, build.value(INTEGER, f"sub i64 0, {x.text}"), x)
    return build.call(f"llvm.fabs.{'f32' if x.kind == SINGLE else 'f64'}", x.kind, x)


def _is_finite(build: BlockBuilder, x: Value) -> Value:
    size = _absolute(build, x)
    return build.value(BOOLEAN, f"fcmp olt {x.kind} {size.text}, 0x7FF0000000000000")


def _fma(build: BlockBuilder, a: Value, b: Value, c: Value) -> Value:
    """Return a b + c, rounded once."""
    kind = _float_kind([a, b, c])
    operands = [build.converted(x, kind) for x in (a, b, c)]
    if not llvm.fuses():
        return build.floating("fadd", build.floating("fmul", *operands[:2]), operands[2])
    return build.call(f"llvm.fma.{'f32' if kind == SINGLE else 'f64'}", kind, *operands, fast=False)


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "max": _extreme(">"), "min": _extreme("<"), "abs": _absolute, "np.isfinite": _is_finite, "fma": _fma,
    "np.fmod": lambda build, *given: build.floating("frem", *(build.converted(x, _float_kind(given)) for x in given)),
    # Both values have been computed, so that a loop can become vector instructions.
    "where": lambda build, condition, *given: build.selected(condition, *_together(build, *given)),
    # The bits of a double as an integer, and the double of such bits.
    "bits_of": lambda build, x: build.value(INTEGER, f"bitcast double {x.text} to i64"),
    "number_of": lambda build, i: build.value(DOUBLE, f"bitcast i64 {i.text} to double"),
    # Adds n to the first entry of a row, and returns the previous value: no other thread gets the same.
    "claimed": lambda build, row, n: build.value(INTEGER, f"atomicrmw add ptr {row.data}, i64 {n.text} monotonic"),
}  # fmt: skip
