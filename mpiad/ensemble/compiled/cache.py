"""Compiled kernels, by their source text: in memory, and on disk for the next process.

What is kept on disk is machine code, which runs without numba (see `machine_code`).
"""

from __future__ import annotations

import hashlib
import logging
import platform
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from mpiad.ensemble.compiled.machine_code import Code, code_of, function_of
from mpiad.ensemble.compiled.store import Store, store

__all__ = ["Kernel", "kernel_of"]

_log = logging.getLogger("mpiad")

_SYMBOLS, _OBJECT = "symbols", "kernel.o"

_lock = threading.RLock()
# By text, name and signature: to hash a text that is the same object costs nothing, and each solve comes here.
_loaded: dict[tuple[str, str, str], Kernel] = {}


class Kernel(NamedTuple):
    """A compiled function.

    Parameters
    ----------
    function : callable
        It checks the types of its arguments, and lets other threads run.
    text : str
        Its source.
    seconds : float
        What it took when this process met the text first.
    origin : str
        "compiled", or "disk" where another process had done it.
    """

    function: Callable[..., None]
    text: str
    seconds: float
    origin: str


def kernel_of(text: str, name: str, signature: str) -> Kernel:
    """Return a function that a text defines, compiled.

    Parameters
    ----------
    text : str
        Of a module, in which `name` is one of numba's functions, with ``no_cpython_wrapper=True`` and
        ``no_cfunc_wrapper=True``. It must allocate nothing and raise nothing, or it isn't kept for the next process.
    name : str
    signature : str
        Of arrays and numbers, as ``void(int64, float64[:, ::1])``.

    Returns
    -------
    Kernel

    Raises
    ------
    ImportError
        Where there is no numba, and nothing was kept.

    Ranks
    -----
    Each for itself. Of ranks that want the same text at the same time one compiles it, and the others wait for what it
    keeps on disk; where nothing is kept, all compile.
    """
    # Under the lock: a second thread waits for the first one's kernel instead of compiling it, too.
    with _lock:
        known = text, name, signature
        if known not in _loaded:
            key = _key(f"{name} {signature}\n{text}")
            started = time.perf_counter()
            function, origin = _from_disk(key, text, signature) or _made(key, text, name, signature)
            _loaded[known] = Kernel(function, text, time.perf_counter() - started, origin)
            _log.debug("kernel %s: %s in %.3f s", key[:12], origin, _loaded[known].seconds)
        return _loaded[known]


def forget() -> None:
    """Forget all kernels in memory."""
    with _lock:
        _loaded.clear()


def _made(key: str, text: str, name: str, signature: str) -> tuple[Callable[..., None], str]:
    """Return the function from the disk or compiled, by one process at a time."""
    kept = store()
    with nullcontext() if kept is None else kept.locked(key):
        # Another process may have compiled it while this one waited for the lock.
        found = _from_disk(key, text, signature)
        if found is not None:
            return found
        if kept is not None:
            kept.clear(key)
        return _compiled(key, text, name, signature)


def _from_disk(key: str, text: str, signature: str) -> tuple[Callable[..., None], str] | None:
    kept = store()
    entry = kept and kept.find(key, text)
    if not kept or not entry:
        return None
    try:
        symbol, *outside = (entry / _SYMBOLS).read_text().split()
        return function_of(Code(symbol, (entry / _OBJECT).read_bytes(), tuple(outside)), signature), "disk"
    except OSError as error:
        _log.info("the compiled kernel in %s can't be used: %s", entry, error)
        return None


def _compiled(key: str, text: str, name: str, signature: str) -> tuple[Callable[..., None], str]:
    names: dict[str, Any] = {"__name__": "mpiad_kernel"}
    exec(compile(text, "<kernel>", "exec"), names)  # noqa: S102 the text is generated here
    code, function = code_of(names[name], signature)
    kept = store()
    folder = kept and code and _begun(kept, text)
    if kept and code and folder:
        try:
            (folder / _SYMBOLS).write_text("\n".join([code.symbol, *code.outside]))
            (folder / _OBJECT).write_bytes(code.file)
            kept.finish(folder, key)
        except OSError as error:
            _log.info("the compiled kernel isn't kept in %s: %s", kept.root, error)
            kept.discard(folder)
    return function, "compiled"


def _begun(kept: Store, text: str) -> Path | None:
    try:
        return kept.begin(text)
    except OSError as error:  # a full disk
        _log.info("the compiled kernel isn't kept in %s: %s", kept.root, error)
        return None


def _key(text: str) -> str:
    return hashlib.sha256(f"{_machine()}\n{text}".encode()).hexdigest()


@cache
def _machine() -> str:
    """Return all that decides what a text is compiled to, beside the text."""
    import llvmlite.binding

    try:
        own = version("mpiad")
    except PackageNotFoundError:
        own = ""
    intrinsics = Path(__file__).with_name("intrinsics.py")
    return "\n".join([
        own, intrinsics.read_text() if intrinsics.exists() else "", version("numba"), platform.python_version(),
        llvmlite.binding.get_host_cpu_name(), llvmlite.binding.get_host_cpu_features().flatten(),
    ])  # fmt: skip
