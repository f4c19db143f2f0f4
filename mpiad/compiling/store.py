"""Folders of compiled kernels on disk: each is written whole or not at all, and checked before it is used.

What is kept is run as code, so nothing is taken from a folder that somebody else can write into, nor from one whose
files aren't those that were written. An entry is made in a folder of its own and renamed when it is complete. Of processes
that want the same one at the same time, one makes it, and the others wait; only who holds the entry's lock removes it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
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

__all__ = ["KERNEL", "Store", "store"]

_log = logging.getLogger("mpiad")

KERNEL = "kernel.py"
_SUMS, _UNFINISHED, _LOCK = "sums", "unfinished-", "lock-"
_MOST_ENTRIES, _DAY = 256, 86_400.0
# So long a process waits for one that makes the same entry, in seconds, and looks so often.
_PATIENCE, _LOOK = 60.0, 0.01


class Store:
    """A folder that holds entries.

    `root`: exists, and belongs to this user alone.
    """

    def __init__(self, root: Path):
        self.root = root

    def find(self, key: str, text: str) -> Path | None:
        """Return the folder of an entry with this source text, None where there is none that can be trusted."""
        entry = self.root / key
        try:
            if entry.is_dir() and is_private(entry) and _is_whole(entry) and (entry / KERNEL).read_text() == text:
                os.utime(entry)
                return entry
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
                lock = path.open("a")
            except OSError:
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    return lock
            except FileNotFoundError:  # it was removed, and is another one's by now
                pass
            except OSError as error:
                if not isinstance(error, BlockingIOError):  # a file system without locks
                    lock.close()
                    return None
                time.sleep(_LOOK)
            lock.close()
        return None

    def begin(self, text: str) -> Path:
        """Return a new folder that holds a source text; an OSError where it can't be made."""
        folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root))
        (folder / KERNEL).write_text(text)
        return folder

    def finish(self, folder: Path, key: str) -> None:
        """Make an entry of a folder from `begin`, unless it is there by now."""
        try:
            sums = _sums(folder)
            (folder / _SUMS).write_text(f"{hashlib.sha256(sums.encode()).hexdigest()}\n{sums}")
            folder.rename(self.root / key)
            self._tidy()
        except OSError as error:
            _log.debug("the kernel %s wasn't kept: %s", key, error)
            self.discard(folder)

    def discard(self, folder: Path) -> None:
        """Remove a folder from `begin`."""
        shutil.rmtree(folder, ignore_errors=True)

    def clear(self, key: str) -> None:
        """Remove what lies at the place of an entry and isn't one; by who holds its lock."""
        if (self.root / key).exists():
            _log.warning("the compiled kernel in %s isn't what was written there; it is made again.", self.root / key)
            self.remove(self.root / key)

    def remove(self, entry: Path) -> None:
        """Remove an entry."""
        # Renamed first: another process must not meet half of it.
        try:
            aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.root))
            entry.rename(aside / "removed")
            shutil.rmtree(aside, ignore_errors=True)
        except OSError as error:
            _log.debug("%s wasn't removed: %s", entry, error)

    def _tidy(self) -> None:
        """Remove what processes that were killed have left, and entries that were used longest ago."""
        folders = {}
        for path in self.root.iterdir():
            try:
                if path.is_dir():
                    folders[path] = path.stat().st_mtime
            except FileNotFoundError:  # another process has just finished or removed it
                continue
        left = [path for path in folders if path.name.startswith(_UNFINISHED)]
        for path in left:
            if time.time() - folders.pop(path) > _DAY:
                shutil.rmtree(path, ignore_errors=True)
        for path in sorted(folders, key=folders.__getitem__)[:-_MOST_ENTRIES]:
            self.remove(path)


def store() -> Store | None:
    """Return where kernels are kept, None where they can't be."""
    root = cache_folder()
    return None if root is None else Store(root)


def _is_whole(entry: Path) -> bool:
    """Tell whether the files are those that were written."""
    total, _, sums = (entry / _SUMS).read_text().partition("\n")
    if hashlib.sha256(sums.encode()).hexdigest() != total:
        return False
    return sums == _sums(entry)


def _sums(folder: Path) -> str:
    """Return a line for each file but the list itself."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _SUMS)
    return "".join(f"{_sum(path)} {path.relative_to(folder).as_posix()}\n" for path in files)


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
