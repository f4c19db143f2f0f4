"""NVIDIA's run-time compiler, which needs no GPU: by the loader's names for it, or in the folder of its wheel."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Of the wheels nvidia-cuda-nvrtc-cu12 and nvidia-cuda-nvrtc.
_FOLDERS = ("cuda_nvrtc/lib", "cu13/lib")


@cache
def library():
    """Return the library, None where there is none."""
    usual = [f"libnvrtc.so{version}" for version in ("", ".13", ".12", ".11.2")]
    for name in (ctypes.util.find_library("nvrtc"), *usual, *_of_wheels()):
        try:
            if name:
                return ctypes.CDLL(str(name))
        except OSError:
            continue
    return None


def _of_wheels():
    spec = find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [path for root in roots for folder in _FOLDERS for path in sorted(Path(root, folder).glob("libnvrtc.so.*[0-9]"))]


def ptx_of(text, options):
    """Return PTX and what the compiler said; PTX is None where it failed."""
    lib = library()
    return _compiled(text, options, lib.nvrtcGetPTXSize, lib.nvrtcGetPTX)


def machine_code_of(text, options):
    """Return machine code for one architecture, and what compiler and assembler said; None for the code where it failed."""
    lib = library()
    return _compiled(text, options, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN)


def _compiled(text, options, size_of, write):
    lib, program = library(), ctypes.c_void_p()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = lib.nvrtcCompileProgram(program, len(options), given)
    log = _text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
    made = None if failed else _bytes(size_of, write, program)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return made.decode(errors="replace") if made and size_of is lib.nvrtcGetPTXSize else made, log


def _text(size_of, write, program):
    return _bytes(size_of, write, program).rstrip(b"\0").decode()


def _bytes(size_of, write, program):
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    write(program, room)
    return room.raw
