"""Files that hold the state of a long computation: written whole or not at all, as data, never as a pickle.

A file is one of NumPy's npz: arrays by name, and a JSON description of the problem that the state belongs to. It is
written next to its final path under a name of its own, flushed to the disk, and only then renamed: a process killed at any
moment leaves the old file or the new one, and of several processes that write the same file the last one wins. It ends with
a checksum of all its bytes, which is compared before anything else is read: NumPy and zipfile read some damaged files
silently, with an array missing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

try:
    import fcntl
except ImportError:  # not on Windows: there files left by killed processes can't be distinguished from others
    fcntl = None  # type: ignore[assignment]

_DESCRIPTION = "description"
_CHECKSUM = 8  # hexadecimal digits, the archive's comment: by zip's format a file's last bytes
_PIECE = 1 << 20


def write(path: Path, description: dict[str, Any], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a file, replacing an older one if there is one; an OSError if it can't be written, and the older file stays.

    The description must be serializable by JSON; the arrays, each with its name, may be generated while they are written.
    """
    part, file = begin(path)
    try:
        with file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.comment = bytes(_CHECKSUM)
                _put(archive, _DESCRIPTION, np.frombuffer(json.dumps(description).encode(), np.uint8))
                for name, array in arrays:
                    _put(archive, name, array)
            checksum = _checksum(file)
            file.seek(-_CHECKSUM, os.SEEK_END)
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)  # while it is locked, so that no process removes it as left over
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def begin(path: Path) -> tuple[Path, IO[bytes]]:
    """Return a new file in the folder of a path, by a name that no other process uses, locked if possible.

    An OSError if the path names a device, a pipe or a folder, which the new file mustn't replace.
    """
    require_regular(path)
    _remove_left_over(path.absolute())  # first: they may be the files that fill the disk
    while True:
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        file = open(part, "x+b")
        # Between its making and its lock another process may have taken it for one that was left.
        if _lock(file) is not False and part.exists():
            return part, file
        file.close()


def _lock(file: IO[bytes]) -> bool | None:
    """Return whether this process has locked a file; None if the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@functools.cache  # in each process: if thousands of ranks share a folder it takes long to list
def _remove_left_over(path: Path) -> None:
    """Remove unfinished files of killed processes: files whose locks have ended with them, on other nodes too."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):
        # Another process may remove it first.
        with contextlib.suppress(OSError), open(part, "r+b") as file:
            if _lock(file):
                data_of(part).unlink(missing_ok=True)
                part.unlink()


def require_regular(path: Path) -> None:
    """Raise an OSError if the path is that of a device, a pipe or a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "It is no regular file", str(path))


def data_of(part: Path) -> Path:
    """Return the data file for one made by `begin`, for libraries that write the data and that its lock would block."""
    return part.with_name(f"{part.name}.data")


def files_of_ranks(path: Path) -> list[Path]:
    """Return the files, by name, that ranks have written for a path, each its own two: of any number of ranks."""
    # Escaped: brackets in the user's file name are literal.
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank*of*.?{glob.escape(path.suffix)}"))


def _put(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    # The size isn't known when the member is begun, and it may be more than 2 GiB.
    with archive.open(name + ".npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _checksum(file: IO[bytes]) -> bytes:
    """Return the checksum of all bytes before a file's own checksum, and leave the file there."""
    left, found = file.seek(0, os.SEEK_END) - _CHECKSUM, 0
    file.seek(0)
    while left > 0:
        piece = file.read(min(left, _PIECE))
        if not piece:  # another process truncates it at this moment
            break
        left, found = left - len(piece), zlib.crc32(piece, found)
    return b"%08x" % found


def sync_folder(folder: Path) -> None:
    """Flush the names of a folder's files to the disk."""
    # Until the folder is on the disk, a crash of the machine may bring back the name's old file.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remedy(error: OSError, path: Path) -> str:
    """Return a remedy for a file that couldn't be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Make room on the disk."
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)."
    return f"See to it that this user can write into the folder {path.parent}, or name a file in another one."


def read_description(path: Path) -> dict[str, Any]:
    """Return a file's description; a ValueError if it is damaged."""
    with _opened(path) as found:
        return _description(found)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a file's description, and its arrays by name; a ValueError if it is damaged.

    Both are of one state: between two readings another process may have put another file in its place.
    """
    with _opened(path) as found:
        return _description(found), {name: found[name] for name in found.files if name != _DESCRIPTION}


def _description(found: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(bytes(found[_DESCRIPTION]))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        require_regular(path)
        with open(path, "rb") as file:
            if _checksum(file) != file.read():
                raise ValueError(
                    f"the checkpoint {path} is damaged, or isn't one: its last bytes aren't the checksum of the others. "
                    "Delete it to start again, or restore a copy."
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as found:
                yield found
    except OSError as error:
        raise ValueError(
            f"the checkpoint {path} can't be read ({error.strerror or error}). Let this user read it, name another file, "
            "or delete it to start again."
        ) from error


def require_problem(path: Path, found: dict[str, Any], wanted: dict[str, Any], call: str) -> None:
    """Raise a ValueError if a file's description differs from the wanted one."""
    said = []
    for name in wanted:
        # Both as JSON: after reading there are lists in place of tuples.
        there, here = (json.dumps(side.get(name, "nothing")) for side in (found, wanted))
        if there != here:
            said.append(f"{name} is {there:.80} there and {here:.80} here")
    if said:
        raise ValueError(
            f"{call}: the checkpoint {path} belongs to another problem: {'; '.join(said)}. Make the call that it belongs "
            "to, name another file, or delete it."
        )
