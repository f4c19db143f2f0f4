"""Kernels as machine code: compiled by LLVM once, and then called without a compiler.

A kernel takes numbers and contiguous arrays, allocates nothing and raises nothing, so it is an object file that refers to
the C library alone. A number is passed as itself, an array as the address of its first entry and its lengths.

A linked kernel takes all that from a block of memory, in words of 8 bytes: first the address and the block of the kernel
that runs next, 0 after the last one, then its arguments. So one call of Python's, with one argument, runs a chain of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mpiad.compiling.arguments import Argument, arguments_of, is_linked

# llvmlite is imported when it is first needed: it takes a twentieth of a second to load.


# The first bytes of object files on Linux, macOS and Windows. LLVM ends the process if there is something else.
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"d\x86")


def description() -> str:
    """Return all that determines a module's machine code, besides the module: LLVM's version and the processor."""
    import llvmlite
    import llvmlite.binding as llvm

    return "\n".join([llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()])


@cache
def _target() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic", codemodel="jitdefault"
    )


def object_file(text: str) -> tuple[bytes, tuple[str, ...]]:
    """Compile a module in LLVM's intermediate representation; return the object file, and the functions outside of it."""
    import llvmlite.binding as llvm

    machine = _target()
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = llvm.get_process_triple(), str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    # Lanes are already vectors; vectorization within one costs more compile time than it saves.
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    outside = (f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm."))
    return machine.emit_object(module), tuple(outside)


def symbol_in(file: bytes, symbol: str, outside: Sequence[str]) -> tuple[int, Any]:
    """Load an object file; return a function's address in it, and the owner of the memory.

    An OSError if it isn't this machine's.
    """
    import llvmlite.binding as llvm

    if not file.startswith(_OBJECT_FILES) or not are_there(outside):
        raise OSError("this is no machine code, or it calls functions that the C library doesn't have")
    _target()
    # The engine destroys its target together with itself.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine())
    try:
        engine.add_object_file(llvm.ObjectFileRef.from_data(file))
        engine.finalize_object()
        address = engine.get_function_address(symbol)
    except RuntimeError as error:
        raise OSError(f"the machine code can't be loaded: {error}") from error
    if not address:
        raise OSError(f"there is no {symbol!r} in the machine code")
    return address, engine


def are_there(names: Sequence[str]) -> bool:
    """Return whether all functions are among those of the C library; LLVM ends the process if one is missing."""
    process = ctypes.CDLL(None)
    return all(hasattr(process, name) for name in names)


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

    return Code(name, *object_file(translated(text, name, arguments_of(signature), fast, is_linked(signature))))


def function_of(code: Code, signature: str) -> Callable[..., None]:
    """Return a compiled function, which checks its arguments and lets other threads run; an OSError for another machine's.

    That of a linked kernel takes the address of its block, and checks nothing; its own address is the attribute `address`.
    """
    address, owner = symbol_in(code.file, code.symbol, code.outside)
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
    if type(value) is not np.ndarray or (value.dtype, value.ndim) != argument or not value.flags.carray:
        got = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
        raise TypeError(
            f"argument {place} of a kernel must be a contiguous, writable array of {argument.dtype} with {argument.ndim} "
            f"axes, but is {got}."
        )
    return [value.ctypes.data, *value.shape]
