"""Compiled kernels, by their source text: in memory, and on disk for the next process.

What is kept on disk is machine code (see `machine_code`).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from mpiad.compiling.llvm import description
from mpiad.compiling.machine_code import Code, code_of, function_of
from mpiad.compiling.store import store

_log = logging.getLogger("mpiad")

# What decides the machine code of a text: with another one of these, another key.
_COMPILER = (
    "translation.py", "expressions.py", "block_builder.py", "elementary_functions.py", "values.py",
    "arguments.py", "machine_code.py", "llvm.py",
)  # fmt: skip

_lock = threading.RLock()
# Those that were used longest ago go: a function that does something else at each call would fill the memory.
_MOST_LOADED = 256
# By text, name and signature: to hash a text that is the same object costs nothing, and each solve comes here.
_loaded: dict[tuple[str, str, str, str], Kernel] = {}


class Kernel(NamedTuple):
    """A compiled function."""

    function: Callable[..., None]  # it lets other threads run; see `machine_code.function_of`
    seconds: float  # what it took when this process met the text first
    origin: str  # "compiled", or "disk" where another process had done it


def kernel_of(text: str, name: str, signature: str, fast: str = "", call: str = "") -> Kernel:
    """Return the function `name` of a text in the language of `translation`, compiled.

    The signature is one of arrays and numbers, as ``void(int64, float64[:, ::1])``; with ``linked`` for ``void``, of a
    linked kernel. `fast` says how floating-point operations may be changed, as LLVM writes it; not at all by default. Each
    rank calls it for itself: of those that want the same text at the same time one compiles it, and the others wait for
    what it keeps on disk; where nothing is kept, all compile. The log says when this process compiles or loads a kernel, at
    level INFO in the name of a public function, `call`.
    """
    # Under the lock: a second thread waits for the first one's kernel instead of compiling it, too.
    with _lock:
        known = text, name, signature, fast
        if known not in _loaded:
            key = _key(f"{name} {signature} {fast}\n{text}")
            started = time.perf_counter()
            code = partial(code_of, text, name, signature, fast)
            function, origin = _from_disk(key, text, signature) or _made(key, text, code, signature)
            _loaded[known] = Kernel(function, time.perf_counter() - started, origin)
            how, seconds = "compiled" if origin == "compiled" else "loaded", _loaded[known].seconds
            level = logging.INFO if call else logging.DEBUG
            _log.log(level, "%s: the %s kernel was %s in %.2f s.", call or key[:12], name, how, seconds)
            if len(_loaded) > _MOST_LOADED:
                del _loaded[next(iter(_loaded))]
        kernel = _loaded[known] = _loaded.pop(known)
        return kernel


def functions_of(module: str, signatures: Mapping[str, str], fast: str = "") -> list[Callable[..., None]]:
    """Return compiled functions of a module's own text, by their names and signatures; otherwise as `kernel_of`."""
    text = inspect.getsource(sys.modules[module])
    return [kernel_of(text, name, signature, fast).function for name, signature in signatures.items()]


def forget() -> None:
    """Forget all kernels in memory."""
    with _lock:
        _loaded.clear()


def _made(key: str, text: str, code: Callable[[], Code], signature: str) -> tuple[Callable[..., None], str]:
    """Return the function from the disk or compiled, by one process at a time."""
    kept = store()
    if kept is None:
        return function_of(code(), signature), "compiled"
    with kept.locked(key):
        # Another process may have compiled it while this one waited for the lock.
        found = _from_disk(key, text, signature)
        if found is None:
            made = code()
            kept.keep(key, json.dumps([text, made.symbol, made.outside]).encode() + b"\n" + made.file)
            found = function_of(made, signature), "compiled"
        return found


def _from_disk(key: str, text: str, signature: str) -> tuple[Callable[..., None], str] | None:
    kept = store()
    content = None if kept is None else kept.find(key)
    if content is None:
        return None
    head, _, file = content.partition(b"\n")
    source, symbol, outside = json.loads(head)
    if source != text:
        return None
    try:
        return function_of(Code(symbol, file, tuple(outside)), signature), "disk"
    except OSError as error:
        _log.info("the compiled kernel of %s can't be used: %s", key, error)
        return None


def _key(text: str) -> str:
    return hashlib.sha256(f"{_machine()}\n{text}".encode()).hexdigest()


@cache
def _machine() -> str:
    """Return all that decides what a text is compiled to, beside the text."""
    from importlib.metadata import PackageNotFoundError, version  # takes 20 ms, which each import of mpiad would

    try:
        own = version("mpiad")
    except PackageNotFoundError:
        own = ""
    compiler = [Path(__file__).with_name(name) for name in _COMPILER]
    return "\n".join([own, *(file.read_text() for file in compiler if file.exists()), description()])
