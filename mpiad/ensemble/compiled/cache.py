"""Compiled kernels, by their source text: in memory, and on disk for the next process.

A text is a module of its own. It is run with a name ``CACHE``, which says whether numba may keep what it makes, so its
functions begin with ``@numba.njit(cache=CACHE, ...)``. One text should serve one signature: two processes that compile
different ones at the same time would mix up numba's files.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from mpiad.ensemble.compiled.machine_code import Code, code_of, function_of
from mpiad.ensemble.compiled.store import KERNEL, Store, store

__all__ = ["Kernel", "kernel_of", "native_kernel"]

_log = logging.getLogger("mpiad")

_SYMBOLS, _OBJECT = "symbols", "kernel.o"

Names: TypeAlias = dict[str, Any]

_lock = threading.RLock()
_loaded: dict[str, Kernel] = {}


class Kernel(NamedTuple):
    """What a text defines, compiled.

    Parameters
    ----------
    names : dict
        The text's global names.
    text : str
    seconds : float
        That it took, when this process met the text first.
    origin : str
        "compiled", or "disk" where another process had done it.
    """

    names: Names
    text: str
    seconds: float
    origin: str


def kernel_of(text: str, prepare: Callable[[Names], Any]) -> Kernel:
    """Return what a text defines.

    Parameters
    ----------
    text : str
        Of a module that uses ``CACHE``.
    prepare : callable
        Is given the text's global names, and compiles the functions that are needed: by ``names["run"].compile(...)``.

    Returns
    -------
    Kernel

    Raises
    ------
    ImportError
        Where there is no numba.

    Ranks
    -----
    Each for itself; ranks that compile the same text at the same time all do, and one keeps it.
    """
    with _lock:
        key = _key(text)
        # Under the lock: a second thread waits for the first one's kernel instead of compiling it, too.
        if key not in _loaded:
            started = time.perf_counter()
            names, origin = _from_disk(key, text, prepare) or _compiled(key, text, prepare)
            _loaded[key] = Kernel(names, text, time.perf_counter() - started, origin)
            _log.debug("kernel %s: %s in %.3f s", key[:12], origin, _loaded[key].seconds)
        return _loaded[key]


def native_kernel(text: str, name: str, signature: str) -> Kernel:
    """Return a function that a text defines, as machine code.

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
        Its function checks the types of its arguments, and lets other threads run.

    Raises
    ------
    ImportError
        Where there is no numba, and nothing was kept.

    Ranks
    -----
    Each for itself; ranks that compile the same text at the same time all do, and one keeps it.
    """
    with _lock:
        key = _key(f"{name} {signature}\n{text}")
        if key not in _loaded:
            started = time.perf_counter()
            function, origin = _code_from_disk(key, text, signature) or _new_code(key, text, name, signature)
            _loaded[key] = Kernel({name: function}, text, time.perf_counter() - started, origin)
            _log.debug("kernel %s: %s in %.3f s", key[:12], origin, _loaded[key].seconds)
        return _loaded[key]


def _code_from_disk(key: str, text: str, signature: str) -> tuple[Callable[..., None], str] | None:
    kept = store()
    entry = kept and kept.find(key, text)
    if not kept or not entry:
        return None
    try:
        symbol, *outside = (entry / _SYMBOLS).read_text().split()
        return function_of(Code(symbol, (entry / _OBJECT).read_bytes(), tuple(outside)), signature), "disk"
    except OSError as error:
        _log.warning("the compiled kernel in %s can't be used; it is made again: %s", entry, error)
        kept.remove(entry)
        return None


def _new_code(key: str, text: str, name: str, signature: str) -> tuple[Callable[..., None], str]:
    names: Names = {"__name__": "mpiad_kernel", "CACHE": False}
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


def forget() -> None:
    """Forget all kernels in memory."""
    with _lock:
        _loaded.clear()


def _from_disk(key: str, text: str, prepare: Callable[[Names], Any]) -> tuple[Names, str] | None:
    kept = store()
    entry = kept and kept.find(key, text)
    if not kept or not entry:
        return None
    try:
        names = _run(key, text, entry, prepare)
    except Exception:  # noqa: BLE001 the files are pickles of another library, with errors of any kind
        _log.warning("the compiled kernel in %s can't be used; it is made again.", entry, exc_info=True)
        kept.remove(entry)
        return None
    return names, "disk" if _was_found(names) else "compiled"


def _compiled(key: str, text: str, prepare: Callable[[Names], Any]) -> tuple[Names, str]:
    kept = store()
    folder = kept and _begun(kept, text)
    try:
        names = _run(key, text, folder or None, prepare)
    except BaseException:
        if kept and folder:
            kept.discard(folder)
        raise
    if kept and folder:
        kept.finish(folder, key)
    return names, "compiled"


def _begun(kept: Store, text: str) -> Path | None:
    try:
        return kept.begin(text)
    except OSError as error:  # a full disk
        _log.info("the compiled kernel isn't kept in %s: %s", kept.root, error)
        return None


def _run(key: str, text: str, folder: Path | None, prepare: Callable[[Names], Any]) -> Names:
    """Run a text, its functions kept below a folder, or nowhere."""
    from numba.core import config as settings

    config: Any = settings  # its names are made at import
    place = str(folder / KERNEL) if folder else "<kernel>"
    # numba keeps the name of a function's module, and imports it when it loads what it kept.
    module = sys.modules[f"mpiad_kernel_{key[:16]}"] = ModuleType(f"mpiad_kernel_{key[:16]}")
    names = vars(module)
    names["CACHE"] = folder is not None
    elsewhere = config.CACHE_DIR
    # numba keeps files beside the source, where they are checked, and not where NUMBA_CACHE_DIR says.
    config.CACHE_DIR = ""
    try:
        exec(compile(text, place, "exec"), names)  # noqa: S102 the text is generated here
    finally:
        config.CACHE_DIR = elsewhere
    prepare(names)
    return names


def _was_found(names: Names) -> bool:
    return any(sum(part.stats.cache_hits.values()) for part in names.values() if hasattr(part, "stats"))


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
