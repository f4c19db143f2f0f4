"""Compiled kernels on disk, a file each: it is written whole or not at all, and checked before it is used.

What is kept is run as code, so nothing is taken from a folder or file that somebody else can write into, nor from one whose
checksum isn't that of its content. A file is made under a name of its own and renamed when it is complete. Of processes
that want the same one at the same time, one makes it, and the others wait.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mpiad.cache_folder import cache_folder, is_private

try:
    import fcntl
except ImportError:  # not on Windows: there each process makes its own
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("mpiad")

_SUFFIX, _UNFINISHED, _LOCK = ".kernel", "unfinished-", "lock-"
_MOST_ENTRIES, _DAY = 256, 86_400.0
# So long after a lock was taken others wait for it, in seconds, and look so often: its holder may have been stopped.
_PATIENCE, _LOOK = 10.0, 0.01


class Store:
    """A folder that holds entries.

    `root`: exists, and belongs to this user alone.
    """

    def __init__(self, root: Path):
        self.root = root

    def find(self, key: str) -> bytes | None:
        """Return the content of an entry, None where there is none that can be trusted."""
        path = self._path(key)
        try:
            with open(path, "rb", opener=_own_file) as file:
                checksum, _, content = file.read().partition(b"\n")
                if checksum == _checksum(content):
                    os.utime(path)
                    return content
        except OSError:
            pass
        return None

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of an entry, which one process has at a time; without it, where that takes too long."""
        lock = self._lock(self.root / f"{_LOCK}{key}")
        try:
            yield
        finally:
            if lock is not None:
                # Removed while it is held: who waits for it sees that, and opens the next one.
                Path(lock.name).unlink(missing_ok=True)
                lock.close()

    def _lock(self, path: Path) -> IO | None:
        end = time.monotonic() + _PATIENCE
        while fcntl is not None and time.monotonic() < end:
            try:
                lock = open(path, "a", opener=_own_file)
            except OSError:
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    os.utime(path)
                    return lock
            except FileNotFoundError:  # it was removed, and is another one's by now
                pass
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # a file system without locks
                    lock.close()
                    return None
                if time.time() - os.fstat(lock.fileno()).st_mtime > _PATIENCE:
                    end = 0.0
                time.sleep(_LOOK)
            lock.close()
        return None

    def keep(self, key: str, content: bytes) -> None:
        """Make an entry, in place of what isn't one; by who holds its lock."""
        path, unfinished = self._path(key), ""
        if path.exists() and self.find(key) is None:
            _log.warning("the compiled kernel in %s isn't what was written there; it is made again.", path)
        try:
            descriptor, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.root)
            with open(descriptor, "wb") as file:
                file.write(_checksum(content) + b"\n" + content)
            os.replace(unfinished, path)
            self._tidy()
        except OSError as error:  # a full disk
            _log.info("the compiled kernel isn't kept in %s: %s", self.root, error)
            if unfinished:
                Path(unfinished).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / f"{key}{_SUFFIX}"

    def _tidy(self) -> None:
        """Remove what processes that were killed have left, and entries that were used longest ago."""
        used = {}
        for path in self.root.iterdir():
            try:
                if path.is_file():  # earlier versions had folders
                    used[path] = path.stat().st_mtime
            except FileNotFoundError:  # another process has just finished or removed it
                continue
        entries = [path for path in sorted(used, key=used.__getitem__) if path.suffix == _SUFFIX]
        left = [path for path in used if path.name.startswith(_UNFINISHED) and time.time() - used[path] > _DAY]
        for path in (*left, *entries[:-_MOST_ENTRIES]):
            path.unlink(missing_ok=True)


def _own_file(path: str, flags: int) -> int:
    """Open a file of this user's own: what is checked is what is read, and neither a link nor a pipe."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
    facts = os.fstat(descriptor)
    if not is_private(facts) or not stat.S_ISREG(facts.st_mode):
        os.close(descriptor)
        raise PermissionError(f"{path} isn't a file of this user's alone")
    return descriptor


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def store() -> Store | None:
    """Return where kernels are kept, None where they can't be."""
    root = cache_folder()
    return None if root is None else Store(root)
