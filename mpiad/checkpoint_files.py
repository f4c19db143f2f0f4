"""Files that hold the state of a long computation: written whole or not at all, as data, never as a pickle.

A file is one of NumPy's npz: arrays by name, and beside them a description in JSON, of what the state belongs to. It is
written beside its place, brought to the disk, and only then renamed, so that whoever is killed at any moment leaves the old
file or the new one. The format carries checksums, which are looked at in reading.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["differences", "files_of_ranks", "read", "read_description", "write"]

_DESCRIPTION = "description"
# What NumPy and zipfile raise of files that were cut short, overwritten, or never written here.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError, UnicodeDecodeError, ValueError)


def write(path: Path, description: dict[str, Any], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a file, in place of an older one where there is one.

    Parameters
    ----------
    path : Path
    description : dict
        What JSON can hold.
    arrays : iterable of (str, array)
        May be made while they are written.

    Raises
    ------
    OSError
        Where it can't be written; the older file stays.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                _put(archive, _DESCRIPTION, np.frombuffer(json.dumps(description).encode(), np.uint8))
                for name, array in arrays:
                    _put(archive, name, array)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    _sync_folder(path.parent)


def files_of_ranks(path: Path) -> list[Path]:
    """Return the files beside a path, by name, that ranks have written for it, each its own two: of any number of ranks."""
    # Escaped: in a user's name brackets mean themselves.
    return sorted(path.parent.glob(f"{glob.escape(path.stem)}.rank*of*.?{glob.escape(path.suffix)}"))


def _put(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    # How much comes isn't known when the member is begun, and it may be more than 2 GiB.
    with archive.open(name + ".npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)


def _sync_folder(folder: Path) -> None:
    # Until the folder is on the disk, a crash of the machine may bring back the name's old file.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_description(path: Path) -> dict[str, Any]:
    """Return a file's description; a ValueError where it is damaged."""
    with _opened(path) as found:
        return json.loads(bytes(found[_DESCRIPTION]))


def read(path: Path) -> dict[str, np.ndarray]:
    """Return a file's arrays by name; a ValueError where it is damaged."""
    with _opened(path) as found:
        return {name: found[name] for name in found.files if name != _DESCRIPTION}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with np.load(path, allow_pickle=False) as found:
            yield found
    except _DAMAGE as error:
        raise ValueError(
            f"the checkpoint {path} is damaged, or isn't one: {type(error).__name__}: {error}. Delete it to start anew, or "
            "put back a copy."
        ) from error


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return what a description says otherwise than is wanted, in words; empty where it says the same."""
    said = []
    for name in wanted:
        # Both as JSON: what was read has lists where tuples were written.
        there, here = (json.dumps(side.get(name, "nothing")) for side in (found, wanted))
        if there != here:
            said.append(f"{name} is {there:.80} there and {here:.80} here")
    return "; ".join(said)
