"""Object files from LLVM's intermediate representation, compiled in this process or in a second one.

llvmlite loses some 80 kB whenever it builds and runs LLVM's passes, and nothing gives this memory back; translating,
linking and loading lose none. So the kernels of a part of a program are one module, and after `MOST_HERE` modules a second
process compiles for this one, which replaces it by a new one after `_MOST_THERE` modules.

There is one such process per rank that needs it, not one per node: it reads from a pipe that is closed with its rank, even
if the rank is killed; no address exists at which others could ask it or answer for it; and no rank waits for another's
kernels. It is this file, run as a script by `exec`: it imports nothing of the library, and so neither MPI nor NumPy. The
rank compiles itself if the other process can't be started, or ends before it answers.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

# llvmlite is imported only when it is needed, since the import takes 50 ms.

MOST_HERE, _MOST_THERE = 128, 256  # numbers of modules that a process compiles
# The attribute of functions in which LLVM doesn't replace indices by pointers (loop strength reduction). With many short
# loops this would take nearly half of the time from optimized code to machine code, which wouldn't be faster.
INDEXED = '"indexed-loops"'
_LAST_LLVM = 22  # the last version that is known to have the option: LLVM ends the process if it doesn't know one
_log = logging.getLogger("mpiad")


@cache
def target(level: int) -> Any:
    """Return LLVM's description of this machine; `level`: of optimization."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features, opt = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), 3 if level else 0
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    return triple.create_target_machine(cpu, features, opt=opt, reloc="pic", codemodel="jitdefault")


def symbol(k: int) -> str:
    """Return the symbol of kernel k in an object file; no function of a kernel's text has such a name."""
    return f"kernel-{k}"


def _compiled(texts: Sequence[tuple[str, str]], level: int) -> tuple[bytes, list[str]]:
    """Return the object file of kernels, and the functions of the C library that it calls; see `object_file`."""
    import llvmlite.binding as llvm

    machine, modules = target(level), []
    for k, (text, name) in enumerate(texts):
        modules.append(llvm.parse_assembly(text))
        modules[-1].get_function(name).name = symbol(k)
    module = modules[0]
    for other in modules[1:]:
        module.link_in(other)
    module.triple, module.data_layout = llvm.get_process_triple(), str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=level)
    options.loop_vectorization = True
    # SLP vectorization, of straight-line code, would take more compile time than it saves: loops are vectorized already.
    options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    outside = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if llvm.llvm_version_info[0] > _LAST_LLVM or not any(INDEXED in text for text, _ in texts):
        return machine.emit_object(module), outside
    llvm.set_option("", "-disable-lsr")
    try:
        return machine.emit_object(module), outside
    finally:
        llvm.set_option("", "-disable-lsr=false")  # other packages compile by the same LLVM


class _Compiler:
    """A second process that compiles for this one."""

    def __init__(self) -> None:
        import llvmlite

        packages = str(Path(llvmlite.__file__).parents[1])
        # Isolated, since the modules of this file's folder and of the working directory may have names of Python's own.
        command = [sys.executable, "-IS", __file__, packages]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none)
        self.modules = 0

    def compiled(self, texts: Sequence[tuple[str, str]], level: int) -> tuple[bytes, list[str]]:
        """Return the result of `_compiled` there; raise an OSError if the process has ended."""
        self.process.stdin.write(json.dumps([texts, level]).encode() + b"\n")
        self.process.stdin.flush()
        header = self.process.stdout.readline()
        size, outside = json.loads(header) if header.endswith(b"\n") else (0, [])
        file = self.process.stdout.read(size)
        if not size or len(file) < size:
            raise ChildProcessError("the process ended before it answered")
        self.modules += 1
        return file, outside

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


_here = 0  # the number of modules that this process has compiled
_compiler: _Compiler | None = None
_can_start = bool(sys.executable) and not hasattr(sys, "frozen")  # by a Python interpreter


def object_file(texts: Sequence[tuple[str, str]], level: int) -> tuple[bytes, list[str]]:
    """Return the object file of kernels, and the functions of the C library that it calls.

    `texts`: of LLVM modules, each with the name of its kernel; see `symbol`. One thread at a time may call this.
    """
    global _here, _compiler, _can_start
    if _here >= MOST_HERE and _can_start:
        try:
            if _compiler is None:
                _compiler = _Compiler()
            made = _compiler.compiled(texts, level)
            if _compiler.modules >= _MOST_THERE:
                _end_compiler()
            return made
        except (OSError, ValueError) as error:  # a ValueError if another program answers
            # A process that never answered, such as one without access to llvmlite, would fail again.
            _can_start = _compiler is not None and _compiler.modules > 0
            _end_compiler()
            _log.info("kernels are compiled in this process: %s", error)
        except BaseException:  # an interrupt, after which the next answer would be that of this request
            _end_compiler()
            raise
    _here += 1
    return _compiled(texts, level)


def _end_compiler() -> None:
    global _compiler
    ended, _compiler = _compiler, None
    if ended is not None:
        ended.end()


def _forget_compiler() -> None:
    """Leave the process to the rank from which this process was forked."""
    global _compiler
    if _compiler is not None:
        _compiler.process.stdin.close()
        _compiler.process.stdout.close()
        _compiler.process.returncode = 0  # nothing is left to do for Popen
        _compiler = None


def _serve() -> None:
    """Compile the modules of each line of standard input, as long as the other process exists."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all processes of a job
    sys.path.append(sys.argv[1])
    for line in sys.stdin.buffer:
        file, outside = _compiled(*json.loads(line))
        sys.stdout.buffer.write(json.dumps([len(file), outside]).encode() + b"\n" + file)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
else:
    atexit.register(_end_compiler)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_compiler)
