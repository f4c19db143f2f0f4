"""Kernels as machine code: compiled by LLVM once, and then called without a compiler.

A kernel takes numbers and contiguous arrays, allocates nothing and raises nothing, so it is an object file that refers to
the C library alone. A number is passed as itself, an array as the address of its first entry and its lengths.

A linked kernel takes all that from a block of memory, in words of 8 bytes: first the address and the block of the kernel
that runs next, 0 after the last one, then its arguments. So one call of Python's, with one argument, runs a chain of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad.compiling import llvm
from mpiad.compiling.arguments import Argument, arguments_of, is_linked

_SCALARS = {"int64": ctypes.c_int64, "float64": ctypes.c_double}


class Code(NamedTuple):
    """A compiled function."""

    symbol: str  # its name in the object file
    file: bytes  # the object file
    outside: tuple[str, ...] = ()  # names of the functions that it calls, all of the C library


def code_of(text: str, name: str, signature: str, fast: str = "") -> Code:
    """Compile the kernel `name` of a text in the language of `translation`; a NotImplementedError if it is in another.

    The signature is ``void(int64, float64[:, ::1])`` or the like; of a linked kernel, no two of whose arrays share memory
    that it writes, ``linked(float64[:, ::1])``. `fast` says how floating-point operations may be changed, as LLVM writes
    it; not at all by default.
    """
    # A process that finds its kernels on disk never needs it.
    from mpiad.compiling.translation import translated

    return Code(name, *llvm.object_file(translated(text, name, arguments_of(signature), fast, is_linked(signature))))


def function_of(code: Code, signature: str) -> Callable[..., None]:
    """Return a compiled function, which checks its arguments and lets other threads run; an OSError for another machine's.

    That of a linked kernel takes the address of its block, and checks nothing; its own address is the attribute `address`.
    """
    address, owner = llvm.symbol_in(code.file, code.symbol, code.outside)
    if not is_linked(signature):
        return _native(address, owner, arguments_of(signature))
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    function.address, function.owner = address, owner
    return function


def _native(address: int, owner: object, arguments: Sequence[Argument]) -> Callable[..., None]:
    """Return the function at an address, which stays there as long as its owner lives."""
    kinds: list[Any] = []
    for dtype, ndim in arguments:
        kinds += [_SCALARS[dtype.name]] if ndim is None else [ctypes.c_void_p, *[ctypes.c_int64] * ndim]
    function = ctypes.CFUNCTYPE(None, *kinds)(address)

    def called(*given: Any) -> None:
        if len(given) != len(arguments):
            raise TypeError(f"a kernel takes {len(arguments)} arguments, but got {len(given)}.")
        passed: list[Any] = []
        for place, (argument, value) in enumerate(zip(arguments, given)):
            passed += [value] if argument.ndim is None else _array(argument, value, place)
        function(*passed)

    called.owner = owner  # type: ignore[attr-defined]
    return called


def _array(argument: Argument, value: object, place: int) -> list[Any]:
    """Return an array as kernels take it; of another kind, its memory would be misread."""
    if (
        type(value) is not np.ndarray or value.dtype != argument.dtype or value.ndim != argument.ndim
        or not value.flags.carray
    ):  # fmt: skip
        got = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
        raise TypeError(
            f"argument {place} of a kernel must be a contiguous, writable array of {argument.dtype} with {argument.ndim} "
            f"axes, but is {got}."
        )
    return [value.ctypes.data, *value.shape]
