"""Checkpoint files with the state of a long computation, written atomically and without pickling.

A file has NumPy's npz format: arrays by name, and a JSON description of the problem to which the state belongs. The file is
written under a unique name in the same folder, flushed to the disk, and renamed. If the process is killed, either the old
file or the new file remains. A file ends with a checksum of all other bytes, since NumPy reads some damaged files without
an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import json
import os
import secrets
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

_DESCRIPTION = "description"
_CHECKSUM_LENGTH = 8  # hexadecimal digits; the checksum is the archive's comment, which ends the file
_READ_SIZE = 1 << 20


def write(path: Path, description: dict[str, Any], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a file, which replaces an existing file at the end; an error before that leaves the existing file unchanged."""
    part, file = create_part(path)
    try:
        with file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.comment = bytes(_CHECKSUM_LENGTH)
                _write_array(archive, _DESCRIPTION, np.frombuffer(json.dumps(description).encode(), np.uint8))
                for name, array in arrays:
                    _write_array(archive, name, array)
            checksum = _checksum(file)
            file.seek(-_CHECKSUM_LENGTH, os.SEEK_END)
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)  # `part` is still locked, so other processes don't remove it as unfinished
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def create_part(path: Path) -> tuple[Path, IO[bytes]]:
    """Create and lock a file with a unique name in the folder of `path`; raise the errors of `require_regular`."""
    require_regular(path)
    _remove_unfinished(path.absolute())
    while True:
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        file = open(part, "x+b")
        # Before this process locked the file, another process may have removed it as unfinished.
        if _lock(file) is not False and part.exists():
            return part, file
        file.close()


def _lock(file: IO[bytes]) -> bool | None:
    """Lock a file; return False if another process has locked it, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@functools.cache  # once per path and process, since listing a large folder takes long
def _remove_unfinished(path: Path) -> None:
    """Remove unfinished files of killed processes; such files aren't locked, since the end of a process ends its locks."""
    for part in path.parent.glob(f"{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):
        # Another process may remove the file first.
        with contextlib.suppress(OSError), open(part, "r+b") as file:
            if _lock(file):
                data_path(part).unlink(missing_ok=True)
                part.unlink()


def require_regular(path: Path) -> None:
    """Raise an OSError if the path is a device, a pipe or a folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "It isn't a regular file", str(path))


def data_path(part: Path) -> Path:
    """Return the path of the data file that belongs to `part`, for libraries that can't write to a locked file."""
    return part.with_name(f"{part.name}.data")


def files_of_ranks(path: Path) -> list[Path]:
    """Return the checkpoint files of all ranks for a path, from runs on any number of ranks, sorted by name."""
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank*of*.?{glob.escape(path.suffix)}"))


def _write_array(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    # force_zip64, since an array may exceed 2 GiB.
    with archive.open(name + ".npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _checksum(file: IO[bytes]) -> bytes:
    """Return the checksum of all bytes before the stored checksum; leave the file's position at the stored checksum."""
    remaining, checksum = file.seek(0, os.SEEK_END) - _CHECKSUM_LENGTH, 0
    file.seek(0)
    while remaining > 0:
        chunk = file.read(min(remaining, _READ_SIZE))
        if not chunk:  # another process has truncated the file
            break
        remaining, checksum = remaining - len(chunk), zlib.crc32(chunk, checksum)
    return b"%08x" % checksum


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk, since a crash of the machine could otherwise undo the renaming of files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remedy(error: OSError, path: Path) -> str:
    """Return advice for the message of an error that occurred when the file `path` was written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on the disk."
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of files (ulimit -f)."
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}: create it, or pass a file in another folder."
    if path.is_dir():
        return "Pass the name of a file: this is a folder."
    return f"Make the folder {path.parent} writable for this user, or pass a file in another folder."


class WriteFailures:
    """Warnings about states that couldn't be written; successive failures with the same reason cause one warning."""

    def __init__(self, call: str):
        self._call, self._last = call, None

    @staticmethod
    def reason(error: OSError, file: Path) -> str:
        """Return the reason for a failed write, and a remedy, as text."""
        return f"{file}: {error.strerror or error}. {remedy(error, file)}"

    def report(self, iteration: int, reason: str | None) -> None:
        """Warn that the state of an iteration wasn't written for a new reason; None if it was written."""
        if reason is not None and reason != self._last:
            warnings.warn(
                f"{self._call}: the checkpoint of iteration {iteration} can't be written; the older one is kept ({reason})",
                RuntimeWarning,
                stacklevel=3,
            )
        self._last = reason


def read_description(path: Path) -> dict[str, Any]:
    """Return a file's description; raise a ValueError if the file is damaged or can't be read."""
    with _opened(path) as archive:
        return _description(archive)


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a file's description and its arrays by name; raise a ValueError if the file is damaged or can't be read."""
    with _opened(path) as archive:
        return _description(archive), {name: archive[name] for name in archive.files if name != _DESCRIPTION}


def _description(archive: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(bytes(archive[_DESCRIPTION]))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        require_regular(path)
        with open(path, "rb") as file:
            if _checksum(file) != file.read():
                raise ValueError(
                    f"the checkpoint {path} is damaged, or isn't a checkpoint: its checksum is wrong. Delete it to start "
                    "again, or restore a copy."
                )
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                yield archive
    except OSError as error:
        raise ValueError(
            f"the checkpoint {path} can't be read ({error.strerror or error}). Make it readable for this user, pass "
            "another file, or delete it to start again."
        ) from error


def require_same_problem(path: Path, found: dict[str, Any], expected: dict[str, Any], call: str) -> None:
    """Raise a ValueError if the description `found` in a file differs from the description `expected` of this call."""
    differences = []
    for name in expected:
        # Compared as JSON, which converts tuples to lists.
        in_file, in_call = (json.dumps(side[name]) if name in side else "missing" for side in (found, expected))
        if in_file != in_call:
            differences.append(f"{name} is {in_file:.80} in the file, but {in_call:.80} in this call")
    if differences:
        raise ValueError(
            f"{call}: the checkpoint {path} belongs to another problem: {'; '.join(differences)}. Use the same arguments, "
            "pass another file, or delete it."
        )
