"""The folder for data that later processes of this user read: compiled kernels, and records of displayed notices."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from mpiad.environment_variables import path

_log = logging.getLogger("mpiad")


def cache_folder() -> Path | None:
    """Return the cache folder, created if necessary; None if there can be none, or other users could replace its code."""
    setting = path("MPIAD_CACHE")
    if setting is None:
        return None
    try:
        if setting:
            return private_folder(Path(setting).expanduser())
        home = os.environ.get("HOME")
        base = os.environ.get("XDG_CACHE_HOME") or (home and os.path.join(home, ".cache"))
        return private_folder(Path(base) / "mpiad" if base else own_folder(Path(tempfile.gettempdir())))
    except (OSError, RuntimeError) as error:  # a RuntimeError if "~user" is the home directory of an unknown user
        _log.info("nothing is cached in %s: %s.", setting or "the user's cache", error)
    return None


def private_folder(folder: Path) -> Path:
    """Return a folder, created if necessary; raise an OSError if there can be none, or other users could write into it."""
    # Mode 700, since with a umask of 002 the group could write into new folders.
    for missing in [f for f in (*reversed(folder.parents), folder) if not f.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    # The parents of the path, before and after symbolic links are resolved.
    parents = (*folder.absolute().parents, *folder.resolve().parents)
    exposed = next(filter(_is_exposed, parents), None) if is_private(folder.stat()) else folder
    if exposed is not None or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"other users can write into {exposed}" if exposed else "this user can't write into it")
    return folder


def own_folder(shared: Path) -> Path:
    """Return the path of this user's folder in one that all users share, such as ``/tmp``."""
    folder = shared / f"mpiad-{os.getuid()}"
    if folder.is_symlink() or not shared.is_dir():  # another user could have made a link
        raise OSError(f"{folder} can't be a folder: it is a symbolic link, or {shared} doesn't exist")
    return folder


def is_private(status: os.stat_result) -> bool:
    """Return whether this user owns a folder or file, and other users can't write into it."""
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _is_exposed(parent: Path) -> bool:
    """Return whether users other than this user and root can rename the entries of a folder."""
    status = parent.lstat()
    # In the user namespace of a container, root's files may have another owner.
    is_foreign = status.st_uid not in (0, os.getuid(), os.stat("/").st_uid)
    is_open = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX and not stat.S_ISLNK(status.st_mode)
    return is_foreign or bool(is_open)


def first_time(name: str) -> bool:
    """Return whether this is the first call with this name by any process of this user; True if nothing can be cached."""
    folder = cache_folder()
    if folder is None:
        return True
    try:
        (folder / name).touch(exist_ok=False)  # only one of several concurrent processes succeeds
    except FileExistsError:
        return False
    except OSError as error:
        _log.debug("%s can't be created: %s", folder / name, error)
    return True
