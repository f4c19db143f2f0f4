"""What the kernels need and numba doesn't offer: single machine instructions, without a branch or a call.

This is the only file that imports numba.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["aligned_stack", "bits_of", "claimed", "fetched", "fma", "number_of", "where", "wide_vectors"]

# Without the instruction, `fma` would be a slow call of a library.
_FUSES = bool(llvm.get_host_cpu_features().get("fma", False)) or not llvm.get_default_triple().startswith("x86_64")
# Of Intel's widest registers LLVM uses half, since older chips lower their clock for the rest. Those of 2023, the first
# that compute with numbers of 16 bits, and later ones hardly do.
_WIDE = bool(llvm.get_host_cpu_features().get("avx512fp16", False))


def _common(*kinds: Any) -> Any:
    """Return the type that all arguments become: single precision only where none is double."""
    return kinds[0] if set(kinds) in ({types.boolean}, {types.float32}) else types.float64


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _FUSES:
            return builder.fma(*arguments)
        return builder.fadd(builder.fmul(*arguments[:2]), arguments[2])

    kind = _common(a, b, c)
    return kind(kind, kind, kind), made


@intrinsic
def where(typing: Any, condition: Any, a: Any, b: Any) -> Any:
    """Return a or b; both have been computed."""
    kind = _common(a, b)

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return kind(types.boolean, kind, kind), made


@intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """Return the bits of a double as an integer."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), made


@intrinsic
def number_of(typing: Any, i: Any) -> Any:
    """Return the double of these bits."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), made


@intrinsic
def aligned_stack(typing: Any) -> Any:
    """Begin the memory in which a function keeps what it has no registers for with a cache line, however it is called."""
    # The system promises 16 bytes only, a third of what a vector needs; the compiler counts on no more unless it is told so
    # before it chooses registers. From other places each other vector lies in two lines: up to 1.3 times as slow.

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        attributes = builder.function.attributes
        attributes.alignstack = 64
        attributes.add("noinline")  # nobody would, but llvmlite writes down no alignment that stands alone
        return context.get_dummy_value()

    return types.void(), made


@intrinsic
def wide_vectors(typing: Any) -> Any:
    """Let a function use vectors of 64 bytes, where the chip has them and runs no slower for it."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _WIDE:
            # llvmlite's own `add` knows attributes without a value only.
            set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), made


@intrinsic
def claimed(typing: Any, array: Any, n: Any) -> Any:
    """Add n to the first entry of a row, and return what it was: no other thread gets the same."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        row = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", row.data, arguments[1], "monotonic")

    return types.int64(array, types.int64), made


@intrinsic
def fetched(typing: Any, array: Any, i: Any) -> Any:
    """Begin to bring an entry of a row, or the row of a table, into the cache; where there is none, nothing happens."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = cgutils.unpack_tuple(builder, rows.strides)[0]
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        place = builder.gep(builder.bitcast(rows.data, byte), [builder.mul(arguments[1], stride)])
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # To be read, to stay in all caches, and data.
        builder.call(prefetch, [place, *(ir.Constant(number, x) for x in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), made
