"""Functions as machine code: made by numba once, and called without it ever after.

To load numba and what it keeps takes half a second, of which nothing is needed to run a kernel: a kernel takes numbers
and contiguous arrays, allocates nothing and raises nothing, so it is an object file that refers to the C library alone.
llvmlite, which numba is built on, puts it into memory.

numba's calling convention: a place for the result, one for an exception, then the arguments, an array as its owner (none),
its Python object (none), the numbers of its entries and of the bytes of one, its address, its shape and its strides.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Argument", "Code", "arguments_of", "code_of", "function_of"]

# What numba returns: all is well, with a result or without one.
_FINE = (0, -2)
# What object files begin with, on Linux, macOS and Windows. LLVM ends the process where there is something else.
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"d\x86")
# What frees an array when its last owner is gone; those that are given here have none.
_NEVER_CALLED = "NRT_MemInfo_call_dtor"
_SCALARS = {"int64": ctypes.c_int64, "float64": ctypes.c_double}


class Code(NamedTuple):
    """A compiled function.

    Parameters
    ----------
    symbol : str
        Its name in the object file.
    file : bytes
        The object file.
    outside : tuple of str
        Names of the functions that it calls, all of the C library.
    """

    symbol: str
    file: bytes
    outside: tuple[str, ...] = ()


class Argument(NamedTuple):
    """The type of an argument.

    Parameters
    ----------
    dtype : dtype
    ndim : int or None
        Of a contiguous array; None is a number.
    """

    dtype: np.dtype
    ndim: int | None


def arguments_of(signature: str) -> list[Argument]:
    """Return the types of a signature such as ``void(int64, float64[:, ::1])``."""
    found = re.findall(r"(\w+)(\[[^\]]*\])?(?:, |\)$)", signature.removeprefix("void("))
    return [
        Argument(np.dtype(name.replace("boolean", "bool")), axes.count(":") - 1 if axes else None) for name, axes in found
    ]


def code_of(dispatcher: Any, signature: str) -> tuple[Code | None, Callable[..., None]]:
    """Compile one of numba's functions.

    Parameters
    ----------
    dispatcher : numba's dispatcher
    signature : str

    Returns
    -------
    Code or None
        None where it refers to more than the C library.
    callable
        The function itself, in numba's memory.
    """
    dispatcher.compile(signature)
    (made,) = dispatcher.overloads.values()  # one signature was asked for
    library, symbol = made.library, made.fndesc.llvm_func_name
    address = library.get_pointer_to_function(symbol)
    declared = (f.name for f in library._final_module.functions if f.is_declaration)
    outside = tuple(name for name in declared if not name.startswith("llvm.") and name != _NEVER_CALLED)
    native = _native(address, arguments_of(signature), dispatcher)
    # Of numba's own runtime, of Python, and of Intel's library of vectors, which numba brings.
    if any(re.match("NRT_|numba_|_?Py|__svml", name) for name in outside) or not _are_there(outside):
        return None, native
    _, kind, (file, *_) = library.serialize_using_object_code()
    return (Code(symbol, file, outside) if kind == "object" else None), native


def function_of(code: Code, signature: str) -> Callable[..., None]:
    """Return a compiled function from its machine code.

    Raises
    ------
    OSError
        Where it isn't this machine's.
    """
    import llvmlite.binding as llvm

    if not code.file.startswith(_OBJECT_FILES) or not _are_there(code.outside):
        raise OSError("this is no machine code, or calls functions that aren't there")
    engine = _engine()
    try:
        engine.add_object_file(llvm.ObjectFileRef.from_data(code.file))
        engine.finalize_object()
        address = engine.get_function_address(code.symbol)
    except RuntimeError as error:
        raise OSError(f"the machine code can't be loaded: {error}") from error
    if not address:
        raise OSError(f"there is no {code.symbol!r} in the machine code")
    return _native(address, arguments_of(signature), engine)


def _are_there(names: Sequence[str]) -> bool:
    """Tell whether all functions are among those of the C library; LLVM ends the process where one is missing."""
    process = ctypes.CDLL(None)
    return all(hasattr(process, name) for name in names)


def _engine() -> Any:
    """Return a new place for machine code."""
    import llvmlite.binding as llvm

    _prepare()
    target = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)


@cache
def _prepare() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if llvm.address_of_symbol(_NEVER_CALLED) is None:
        # numba puts its own there, should it be loaded.
        llvm.add_symbol(_NEVER_CALLED, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)


def _native(address: int, arguments: Sequence[Argument], owner: Any) -> Callable[..., None]:
    """Return the function at an address, which stays there as long as its owner lives."""
    kinds: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for dtype, ndim in arguments:
        if ndim is None:
            kinds.append(_SCALARS[dtype.name])
        else:
            kinds += [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
            kinds += [ctypes.c_int64] * (2 * ndim)
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(address)

    def called(*given: Any) -> None:
        if len(given) != len(arguments):
            raise TypeError(f"a kernel takes {len(arguments)} arguments, but got {len(given)}.")
        result, raised = ctypes.c_void_p(), ctypes.c_void_p()
        passed: list[Any] = [ctypes.addressof(result), ctypes.addressof(raised)]
        for place, (argument, value) in enumerate(zip(arguments, given)):
            passed += [value] if argument.ndim is None else _array(argument, value, place)
        status = function(*passed)
        if status not in _FINE:
            raise RuntimeError(f"a kernel ended with status {status}.")

    called.owner = owner  # type: ignore[attr-defined]
    return called


def _array(argument: Argument, value: Any, place: int) -> list[Any]:
    """Return an array as numba passes it; of another kind, its memory would be misread."""
    if (
        type(value) is not np.ndarray or value.dtype != argument.dtype or value.ndim != argument.ndim
        or not value.flags.carray
    ):  # fmt: skip
        got = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
        raise TypeError(
            f"argument {place} of a kernel must be a contiguous, writable array of {argument.dtype} with {argument.ndim} "
            f"axes, but is {got}."
        )
    return [None, None, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides]
