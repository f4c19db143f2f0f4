"""Kernels: compilation by LLVM, and a cache of the compiled kernels by source text, in memory and on disk.

A kernel takes numbers and contiguous arrays, allocates nothing and raises nothing, so its object file refers only to the C
library, and is loaded without a compiler. A number is passed by value, an array as the address of its first entry and its
lengths.

A linked kernel takes one argument: the address of a block of 8-byte words in memory. The first two words are the addresses
of the next kernel's function and block (0 if there is none), and the other words are the arguments of this kernel. One call
from Python thus runs a chain of kernels.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import fcntl
import hashlib
import inspect
import json
import logging
import math
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpiad.cache_folder import cache_folder, is_private
from mpiad.compiling.arguments import Argument, arguments_of, is_linked
from mpiad.compiling.machine_code import object_file, symbol, target

# llvmlite is imported only when it is needed, since the import takes 50 ms.

# The first bytes of object files on Linux, macOS and Windows. LLVM would end the process if it read another file.
_OBJECT_FILES = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"d\x86")


# LLVM's level of optimization. At level 3 the passes take 1.4 times as long, and the code isn't faster. At level 0, for
# tests, compiling takes a seventh of the time.
optimization_level = 2

_SCALARS = {"int64": ctypes.c_int64, "float64": ctypes.c_double}


class Source(NamedTuple):
    """The kernel `name` of a text, and its signature; `definitions`: functions that aren't in the text (see `folding`)."""

    # The text is in the kernel language, or an LLVM function, which begins with "define".
    # Signatures are, for example, ``void(int64, float64[:, ::1])``, or ``linked(float64[:, ::1])`` for a linked kernel. An
    # array that a linked kernel writes mustn't overlap other arrays.
    # The text and the signature determine the definitions, which are made only to compile the kernel.
    text: str
    name: str
    signature: str
    definitions: Callable[[], Sequence[ast.FunctionDef]] = tuple

    @property
    def key(self) -> tuple[str, str, str]:
        """What determines the kernel."""
        return self[:3]


def code_of(sources: Sequence[Source], fast: str = "") -> tuple[bytes, list[str]]:
    """Compile kernels; return their object file, and the functions of the C library that it calls.

    A NotImplementedError for a text outside the kernel language has its source as the second argument.
    """
    # Imported late: a process that finds its kernels on disk doesn't need this module.
    from mpiad.compiling.translation import translated

    texts = []
    for source in sources:
        text, name, signature, definitions = source
        linked = is_linked(signature)
        if text.startswith("define "):
            texts.append((text, name))
            continue
        try:
            texts.append((translated(text, name, arguments_of(signature), fast, linked, definitions()), name))
        except NotImplementedError as error:
            raise NotImplementedError(*error.args, source) from error
    return object_file(texts, optimization_level)


def loaded(file: bytes, outside: Sequence[str], signatures: Sequence[str]) -> list[Callable[..., None]]:
    """Return the functions of an object file; raise an OSError if it can't be loaded on this machine."""
    # Each checks its arguments and releases the GIL. The function of a linked kernel takes the address of a block,
    # unchecked; its attribute `address` is that of its machine code.
    import llvmlite.binding as llvm

    c_library = ctypes.CDLL(None)
    # LLVM would end the process if a function were missing.
    if not file.startswith(_OBJECT_FILES) or not all(hasattr(c_library, called) for called in outside):
        raise OSError("the file isn't machine code, or calls functions that the C library doesn't have")
    target(optimization_level)
    # Each engine gets a new target, since the target is destroyed together with the engine. The addresses of the functions
    # are valid as long as the engine exists.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine())
    try:
        engine.add_object_file(llvm.ObjectFileRef.from_data(file))
        engine.finalize_object()
        addresses = [engine.get_function_address(symbol(k)) for k in range(len(signatures))]
    except RuntimeError as error:
        raise OSError(f"the machine code can't be loaded: {error}") from error
    if not all(addresses):
        raise OSError("a kernel isn't in the machine code")
    return [_function(address, signature, engine) for address, signature in zip(addresses, signatures)]


def _function(address: int, signature: str, engine: object) -> Callable[..., None]:
    if is_linked(signature):
        function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        function.address, function.owner = address, engine
        return function
    arguments, kinds = arguments_of(signature), list[Any]()
    for dtype, ndim in arguments:
        kinds += [_SCALARS[dtype.name]] if ndim is None else [ctypes.c_void_p, *[ctypes.c_int64] * ndim]
    function, addressof, char = ctypes.CFUNCTYPE(None, *kinds)(address), ctypes.addressof, ctypes.c_char

    def called(*values: Any) -> None:
        if len(values) != len(arguments):
            raise TypeError(f"a kernel takes {len(arguments)} arguments, but got {len(values)}.")
        passed: list[Any] = []
        for place, ((dtype, ndim), value) in enumerate(zip(arguments, values)):
            if ndim is None:
                passed.append(value)
            elif type(value) is np.ndarray and value.ndim == ndim and value.dtype == dtype and value.flags.carray:
                # Four times as fast as `value.ctypes.data`; there is no buffer without entries.
                passed.append(addressof(char.from_buffer(value)) if value.size else 0)  # type: ignore[arg-type]
                passed += value.shape
            else:
                raise _wrong_array(place, arguments[place], value)
        function(*passed)

    called.owner = engine  # type: ignore[attr-defined]
    return called


def _wrong_array(place: int, argument: Argument, value: object) -> TypeError:
    """Return the error for an array whose memory the kernel would misread."""
    got = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
    expected = f"a contiguous, writable array of {argument.dtype} with {argument.ndim} axes"
    return TypeError(f"argument {place} of a kernel must be {expected}, but is {got}.")


# The cache on disk: one file per kernel.
#
# The files are executed, so files or folders that other users can write to are ignored, and so are files with a wrong
# checksum. A file is written under a temporary name and then renamed, so it is always complete.
#
# The ranks of a job need the same kernels at the same time, and divide the work: the kernels of a program are compiled in
# parts. A process locks a part, compiles it and writes it to the disk; then it takes the next part that isn't locked; at
# last it waits for the other parts. The operating system unlocks what a process had locked that has ended, and nobody waits
# for a process that doesn't get on: each can compile all parts.


_SUFFIX, _UNFINISHED, _LOCKS = ".kernel", "unfinished-", "locks"
# The number of entries, and the age of unfinished files in seconds, beyond which files are removed.
_MAX_ENTRIES, _MAX_AGE = 4096, 86_400.0


def find(path: Path) -> bytes | None:
    """Return the content of a kernel's file; None if the file is missing or can't be trusted."""
    with contextlib.suppress(OSError), open(path, "rb", opener=_private_file) as file:
        checksum, _, content = file.read().partition(b"\n")
        if checksum == _checksum(content):
            os.utime(path)
            return content
    return None


def keep(path: Path, content: bytes) -> None:
    """Write a kernel's file, or replace an invalid one."""
    unfinished = ""
    if path.exists() and find(path) is None:
        _log.warning("the compiled kernel in %s was changed after it was written; it is compiled again.", path)
    try:
        descriptor, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=path.parent)
        with open(descriptor, "wb") as file:
            file.write(_checksum(content) + b"\n" + content)
        os.replace(unfinished, path)
        _remove_old_files(path.parent)
    except OSError as error:  # for example a full disk
        _log.info("the compiled kernel isn't kept in %s: %s", path.parent, error)
        if unfinished:
            Path(unfinished).unlink(missing_ok=True)


def _remove_old_files(folder: Path) -> None:
    """Remove the least recently used kernels, and files left by processes that were killed."""
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if entry.is_file()]  # other versions of mpiad may have made folders here
    kernels = [file for file in files if file.name.endswith(_SUFFIX)]
    unfinished = [file for file in files if file.name.startswith(_UNFINISHED)]
    # The times of all kernels are only read if there are too many, and then a quarter is removed, since a program may
    # compile hundreds.
    surplus = len(kernels) - _MAX_ENTRIES + _MAX_ENTRIES // 4 if len(kernels) > _MAX_ENTRIES else 0
    least = sorted(kernels, key=_last_use)[:surplus] if surplus else []
    for file in (*least, *[file for file in unfinished if time.time() - _last_use(file) > _MAX_AGE]):
        Path(file).unlink(missing_ok=True)


def _last_use(file: os.DirEntry[str]) -> float:
    """Return the time at which a file was used last; infinity if another process has just renamed or removed it."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _private_file(path: str, flags: int) -> int:
    """Open a regular file; raise a PermissionError if other users can write to it."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
    # The status is that of the open file, since the path may already refer to another file.
    status = os.fstat(descriptor)
    if not is_private(status) or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise PermissionError(f"{path} must be a regular file to which no other user can write")
    return descriptor


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


_log = logging.getLogger("mpiad")

# The source files that determine a kernel's machine code; any change of these files changes all keys.
_COMPILER = "translation folding kernel_language elementary block_builder arguments machine_code cache".split()

_lock = threading.RLock()
# The least recently used kernels are removed, since functions that change at each call would otherwise fill the memory.
_MAX_LOADED = 128
_Known: TypeAlias = "tuple[int, str, tuple[str, str, str]]"
# Kernels by the level of optimization, fast-math flags and source. A lookup is fast, since a string caches its hash.
_loaded: dict[_Known, Kernel] = {}


class Kernel(NamedTuple):
    """A compiled function."""

    function: Callable[..., None]  # releases the GIL; see `loaded`
    origin: str  # "compiled" by this process, or "disk" if the kernel was loaded from the disk


def kernels_of(sources: Sequence[Source], fast: str = "", call: str = "") -> list[Kernel]:
    """Return compiled functions (see `code_of`), logged as INFO for a public `call`, else DEBUG."""
    # If two threads need a kernel, the second thread waits for the first.
    with _lock:
        known = {(optimization_level, fast, source.key): source for source in sources}
        # Those that no earlier program has are compiled together.
        missing = {key: source for key, source in known.items() if key not in _loaded}
        if missing:
            _loaded.update(_from_disk_or_compiled(missing, call))
        for key in known:
            _loaded[key] = _loaded.pop(key)
        kernels = [_loaded[optimization_level, fast, source.key] for source in sources]
        while len(_loaded) > _MAX_LOADED:
            del _loaded[next(iter(_loaded))]
        return kernels


def kernel_of(text: str, name: str, signature: str, fast: str = "", call: str = "") -> Kernel:
    """Return the compiled function `name` of a text; see `kernels_of`."""
    return kernels_of([Source(text, name, signature)], fast, call)[0]


def is_cached(source: Source) -> bool:
    """Return whether a kernel is in memory, or in the cache on disk as compiled by the same compiler for any machine."""
    # LLVM, which knows the machine, isn't imported.
    known = optimization_level, "", source.key
    if known in _loaded:
        return True
    folder, key = cache_folder(), _source_key([known])
    return folder is not None and any(file.startswith(key) and file.endswith(_SUFFIX) for file in os.listdir(folder))


def functions_of(module: str, signatures: Mapping[str, str], fast: str = "") -> list[Callable[..., None]]:
    """Return compiled functions from the source of a module, given their names and signatures; see `kernels_of`."""
    text = inspect.getsource(sys.modules[module])
    return [made.function for made in kernels_of([Source(text, *each) for each in signatures.items()], fast)]


def _from_disk_or_compiled(known: Mapping[_Known, Source], call: str) -> dict[_Known, Kernel]:
    """Return kernels from the disk, compiled by this process and written to the disk, or compiled by another process."""
    started, folder, made = time.perf_counter(), cache_folder(), dict[_Known, Kernel]()
    waiting = [_Part({each: known[each] for each in part}, folder) for part in _parts(known)]
    first = os.getpid() % len(waiting)  # ranks begin with different parts
    waiting, limit = waiting[first:] + waiting[:first], 0.0
    with _Locks(folder) as locks:
        while waiting:
            locked = []
            for part in waiting:
                functions, origin = part.found(), "disk"
                if functions is None and (limit and time.perf_counter() > limit or locks.take(part.key)):
                    functions = part.found()  # by another process, before this one has locked it
                    if functions is None:
                        functions, origin = part.compiled(), "compiled"
                    locks.release(part.key)
                if functions is None:
                    locked.append(part)
                else:
                    made.update(zip(part.known, [Kernel(function, origin) for function in functions]))
            if len(locked) == len(waiting):
                limit = limit or time.perf_counter() + _PATIENCE + 10 * (time.perf_counter() - started)
                time.sleep(0.005)
            waiting = locked
    seconds, name = time.perf_counter() - started, next(iter(known.values())).name
    action = "compiled" if any(kernel.origin == "compiled" for kernel in made.values()) else "loaded"
    names = f"{name} kernel was" if len(known) == 1 else f"{len(known)} kernels were"
    _log.log(logging.INFO if call else logging.DEBUG, f"{call or 'kernels'}: the {names} {action} in {seconds:.2f} s.")
    return made


# The largest number of parts of a program's kernels, and the length of texts for each part: about 0.1 s.
_MOST_PARTS, _PART = 8, 5000
_PATIENCE = 10.0  # the least number of seconds that a process waits for others; see `_from_disk_or_compiled`


def _parts(known: Iterable[_Known]) -> list[list[_Known]]:
    """Return parts of about equal lengths of texts."""
    count = min(_MOST_PARTS, 1 + sum(len(each[2][0]) for each in known) // _PART)
    parts, lengths = [list[_Known]() for _ in range(count)], [0] * count
    for each in sorted(known, key=lambda each: len(each[2][0]), reverse=True):
        k = lengths.index(min(lengths))
        parts[k].append(each)
        lengths[k] += len(each[2][0])
    return [part for part in parts if part]


class _Part:
    """Kernels with one object file."""

    def __init__(self, known: Mapping[_Known, Source], folder: Path | None) -> None:
        self.known, self.sources, self.keys = known, [*known.values()], [source.key for source in known.values()]
        self.key = _source_key([*known]) + _checksum(_machine().encode()).decode()[:_KEY]
        self.path = None if folder is None else folder / f"{self.key}{_SUFFIX}"

    def found(self) -> list[Callable[..., None]] | None:
        """Return the functions from the disk; None if they aren't there, or can't be used."""
        content = None if self.path is None else find(self.path)
        if content is None:
            return None
        header, _, file = content.partition(b"\n")
        texts, outside = json.loads(header)
        try:
            return self._loaded(file, outside) if texts == [list(each) for each in self.keys] else None
        except OSError as error:
            _log.info("the compiled kernel of %s can't be used: %s", self.key, error)
            return None

    def compiled(self) -> list[Callable[..., None]]:
        """Return the compiled functions, which are written to the disk."""
        file, outside = code_of(self.sources, next(iter(self.known))[1])
        if self.path is not None:
            keep(self.path, json.dumps([self.keys, outside]).encode() + b"\n" + file)
        return self._loaded(file, outside)

    def _loaded(self, file: bytes, outside: Sequence[str]) -> list[Callable[..., None]]:
        return loaded(file, outside, [source.signature for source in self.sources])


class _Locks:
    """Parts that this process compiles, as locks of bytes of a file, which others of this user see."""

    def __init__(self, folder: Path | None) -> None:
        self._path, self._file = None if folder is None else folder / _LOCKS, -1

    def __enter__(self) -> _Locks:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def take(self, key: str) -> bool:
        """Return whether no other process has locked a part, which is locked then if this system has locks."""
        if self._path is None:
            return True
        try:
            if self._file < 0:
                self._file = _private_file(str(self._path), os.O_RDWR | os.O_CREAT)
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:15], 16))
        except OSError as error:
            return not isinstance(error, BlockingIOError)
        return True

    def release(self, key: str) -> None:
        """Unlock a part, if it is locked."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # of file systems without locks
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, int(key[:15], 16))


# The length of each half of a kernel's key.
_KEY = 32


def _source_key(known: Sequence[_Known]) -> str:
    """Return the first half of the key of an object file, which depends on its kernels and on the compiler."""
    return _checksum(f"{_compiler()}\n{json.dumps(known)}".encode()).decode()[:_KEY]


@cache
def _compiler() -> str:
    """Return the checksum of the source files of the compiler."""
    return _checksum(b"\n".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _COMPILER)).decode()


@cache
def _machine() -> str:
    """Return a text of everything that determines the machine code besides the source key; it determines the other half."""
    import llvmlite
    import llvmlite.binding as llvm

    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return "\n".join([llvmlite.__version__, *processor])
