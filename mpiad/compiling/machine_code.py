"""Machine code of kernels: compilation by LLVM to object files, which are loaded without a compiler.

A kernel takes numbers and contiguous arrays, allocates nothing and raises nothing, so its object file refers only to the C
library. A number is passed by value, an array as the address of its first entry and its lengths.

A linked kernel takes one argument: the address of a block of 8-byte words in memory. The first two words are the addresses
of the next kernel's function and block (0 if there is none), and the other words are the arguments of this kernel. One call
from Python thus runs a chain of kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from mpiad.compiling.arguments import Argument, arguments_of, is_linked

# llvmlite is imported only when it is needed, since the import takes 50 ms.

# The first bytes of object files on Linux, macOS and Windows. LLVM would end the process if it read another file.
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"d\x86")


def description() -> str:
    """Return a text of LLVM's version and the processor, which determine the machine code of a module."""
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
    """Compile a module in LLVM's intermediate representation; return the object file, and the external functions."""
    import llvmlite.binding as llvm

    machine = _target()
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = llvm.get_process_triple(), str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    # Loops over lanes are vectorized already; SLP vectorization would take more compile time than it saves.
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    outside = (f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm."))
    return machine.emit_object(module), tuple(outside)


def symbol_in(file: bytes, symbol: str, outside: Sequence[str]) -> tuple[int, Any]:
    """Load an object file; return a function's address, and the owner of its memory.

    Raises an OSError if the file can't be loaded on this machine.
    """
    import llvmlite.binding as llvm

    if not file.startswith(_OBJECT_FILES) or not are_in_c_library(outside):
        raise OSError("the file isn't machine code, or calls functions that the C library doesn't have")
    _target()
    # Each engine gets a new target, since the target is destroyed together with the engine.
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


def are_in_c_library(names: Sequence[str]) -> bool:
    """Return whether the C library has all these functions; LLVM would end the process if one were missing."""
    process = ctypes.CDLL(None)
    return all(hasattr(process, name) for name in names)


_SCALARS = {"int64": ctypes.c_int64, "float64": ctypes.c_double}


class Code(NamedTuple):
    """A compiled function."""

    symbol: str  # its name in the object file
    file: bytes  # the object file
    outside: tuple[str, ...] = ()  # names of the functions of the C library that it calls


def code_of(text: str, name: str, signature: str, fast: str = "") -> Code:
    """Compile the kernel `name` of a source text; raise a NotImplementedError if it isn't in the kernel language.

    Examples of signatures: ``void(int64, float64[:, ::1])``, and ``linked(float64[:, ::1])`` for a linked kernel. An array
    that a linked kernel writes mustn't overlap other arrays. `fast`: LLVM's fast-math flags.
    """
    # Imported late: a process that finds its kernels on disk doesn't need this module.
    from mpiad.compiling.translation import translated

    return Code(name, *object_file(translated(text, name, arguments_of(signature), fast, is_linked(signature))))


def function_of(code: Code, signature: str) -> Callable[..., None]:
    """Return a compiled function that checks its arguments and releases the GIL; raise an OSError if it can't be loaded.

    The function of a linked kernel takes the address of a block, and doesn't check it. The attribute `address` of this
    function is the address of its machine code.
    """
    address, owner = symbol_in(code.file, code.symbol, code.outside)
    if not is_linked(signature):
        return _native(address, owner, arguments_of(signature))
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    function.address, function.owner = address, owner
    return function


def _native(address: int, owner: object, arguments: Sequence[Argument]) -> Callable[..., None]:
    """Return the function at an address, which is valid as long as the owner exists."""
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
    """Return the address and lengths of an array; raise a TypeError if the kernel would misread its memory."""
    if type(value) is not np.ndarray or (value.dtype, value.ndim) != argument or not value.flags.carray:
        got = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
        raise TypeError(
            f"argument {place} of a kernel must be a contiguous, writable array of {argument.dtype} with {argument.ndim} "
            f"axes, but is {got}."
        )
    return [value.ctypes.data, *value.shape]
