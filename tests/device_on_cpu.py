"""Kernels on the stand-in for a device: a generated CUDA text as it is, compiled by a compiler of C++.

A few lines before it say what `threadIdx` and its kin are, and each thread of each block is one call. The arguments are
checked against the kernel's own declaration, as CuPy can't: dtypes, numbers of the right kind, arrays that are contiguous.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from device_double import NOT_AN_ADDRESS, DeviceArray, double
from kernels_on_cpu import COMPILER

_SHIM = """\
#include <math.h>
struct Place { int x, y, z; };
extern "C" { Place threadIdx, blockIdx, blockDim, gridDim; }
#define __global__
#define __device__
#define __forceinline__ inline
#define __CUDACC_RTC__
inline unsigned long long atomicMax(unsigned long long* x, unsigned long long y) { return *x = *x > y ? *x : y; }
inline unsigned long long atomicAdd(unsigned long long* x, unsigned long long y) { *x += y; return *x - y; }
"""
_NUMBERS = {"long long": int, "double": float}
_ELEMENTS = {"double": np.float64, "int": np.int32, "long long": np.int64}


class Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "xyz"]


class LoopOnCPU:
    """A kernel of a program, which reads its addresses from words: one call computes all entries, without `threadIdx`."""

    local_bytes, registers = 0, 32

    def __init__(self, library, text, name):
        self.function, self.name = getattr(library, name), name

    def __call__(self, words):
        assert words.dtype == np.int64 and words.flags.c_contiguous
        self.function(DeviceArray._raw(words).ctypes.data_as(ctypes.c_void_p))


class KernelOnCPU:
    """A kernel, and what its declaration says of its parameters."""

    registers = 100

    def __init__(self, library, text, name, local_bytes):
        self.function, self.local_bytes, self.name = getattr(library, name), local_bytes, name
        self.places = [Place.in_dll(library, place) for place in ("threadIdx", "blockIdx", "blockDim", "gridDim")]
        self.real = np.float32 if "typedef float real;" in text else np.float64
        declared = re.search(rf"KERNEL {name}\((.*?)\) {{", text, re.DOTALL).group(1)
        self.parameters = [part.strip().removeprefix("const ") for part in declared.split(",")]

    def as_c(self, x, parameter):
        kind = parameter.rpartition(" ")[0]
        if kind.endswith("*"):
            if x is None:
                return ctypes.c_void_p(None)
            expected = _ELEMENTS.get(kind[:-1], self.real)
            assert isinstance(x, DeviceArray) and x.dtype == expected and x.flags.c_contiguous, (parameter, x)
            return DeviceArray._values(x).ctypes.data_as(ctypes.c_void_p)
        assert type(x) is _NUMBERS.get(kind, self.real), (parameter, x)
        if kind == "long long":
            return ctypes.c_longlong(x)
        return ctypes.c_float(x) if self.real is np.float32 and kind == "real" else ctypes.c_double(x)


class LauncherOnCPU:
    """What `device_kernels` asks for; it keeps what was compiled and launched."""

    def __init__(self):
        self.multiprocessors, self.free = 3, 1 << 30
        self.local_bytes = lambda text: 0
        self.launches, self.options = [], []
        self._folder = tempfile.TemporaryDirectory(prefix="mpiad-kernels-")
        self._libraries = {}

    def compiled(self, text, name, options):
        self.options.append(options)
        is_loop = "long long* words" in text
        if text not in self._libraries:
            base = Path(self._folder.name) / f"kernel{len(self._libraries)}"
            source = re.sub(r"words\[(\d+)\]", rf"(words[\1] - {NOT_AN_ADDRESS}LL)", text) if is_loop else _SHIM + text
            if len(self._libraries) % 2:  # threads have no order
                source = source.replace("#define ONE(i, n) EACH(i, n)", "#define ONE(i, n) for (long long i = n; i-- > 0;)")
            base.with_suffix(".cpp").write_text(source)
            flags = ["-O0", "-std=c++14", "-ffp-contract=off", "-shared", "-fPIC"]
            made = subprocess.run([COMPILER, *flags, f"{base}.cpp", "-o", f"{base}.so"], capture_output=True, text=True)
            assert made.returncode == 0, made.stderr
            self._libraries[text] = ctypes.CDLL(f"{base}.so")
        if is_loop:
            return LoopOnCPU(self._libraries[text], text, name)
        return KernelOnCPU(self._libraries[text], text, name, self.local_bytes(text))

    def sequence(self, launches):
        def run():
            for kernel, blocks, threads, (words,) in launches:
                assert blocks > 0 and threads == 256
                self.launches.append((kernel.name, blocks, threads, ()))
                double._synchronized = False
                double._put(partial(kernel, words))

        return run

    def launch(self, kernel, blocks, threads, arguments):
        assert blocks > 0 and threads % 32 == 0 and len(arguments) == len(kernel.parameters)
        self.launches.append((kernel.name, blocks, threads, tuple(arguments[:3])))
        given = [kernel.as_c(x, parameter) for x, parameter in zip(arguments, kernel.parameters)]
        thread, block, of_block, of_grid = kernel.places
        of_block.x, of_grid.x = threads, blocks
        for block.x in range(blocks):
            for thread.x in range(threads):
                kernel.function(*given)

    def free_bytes(self):
        return self.free


double.launcher = launcher = LauncherOnCPU()

__all__ = ["COMPILER", "double", "launcher"]
