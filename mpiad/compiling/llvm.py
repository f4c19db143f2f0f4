"""LLVM on this machine, through llvmlite: processor features, modules made object files, object files in memory.

This is the only file that imports llvmlite, when it is first needed: it takes a twentieth of a second to load.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

# The first bytes of object files on Linux, macOS and Windows. LLVM ends the process if there is something else.
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"d\x86")


def description() -> str:
    """Return all that determines a module's machine code, besides the module: LLVM's version and the processor."""
    import llvmlite
    import llvmlite.binding as llvm

    return "\n".join([llvmlite.__version__, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()])


@cache
def fuses() -> bool:
    """Return whether a b + c is one instruction; if it isn't, it would be a slow call of a library."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("fma", False)) or not llvm.get_process_triple().startswith("x86_64")


@cache
def prefers_wide() -> bool:
    """Return whether vectors of 64 bytes are available without a lower clock frequency.

    LLVM uses half of Intel's widest registers, since older chips lower their clock for the rest. Those of 2023, the first
    that compute with numbers of 16 bits, and later ones hardly do.
    """
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512fp16", False))


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
        raise OSError("this is no machine code, or calls functions that aren't there")
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
