"""Where mpiad keeps what the next process of this user may use: compiled kernels, and what the user has been told."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from mpiad.environment_variables import path

_log = logging.getLogger("mpiad")


def cache_folder() -> Path | None:
    """Return the folder that ``MPIAD_CACHE`` names, made where it is missing; None where nothing can be kept.

    By default that is the folder ``mpiad`` of the user's cache. ``MPIAD_CACHE=0`` keeps nothing. What is kept may be run as
    code, so a folder that others than this user can write into isn't used.
    """
    given = path("MPIAD_CACHE")
    if given is None:
        return None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(given) if given else Path(base) / "mpiad"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
        why = "others than this user can write there, or this user can't"
    except OSError as error:
        why = str(error)
    _log.info("nothing is kept in %s: %s.", folder, why)
    return None


def is_private(folder: Path) -> bool:
    """Tell whether a folder belongs to this user, and nobody else can write into it."""
    facts = folder.stat()
    mine = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
    return mine and not (os.name == "posix" and facts.st_mode & 0o022)


def first_time(what: str) -> bool:
    """Tell whether this user's processes ask this for the first time; always True where nothing can be kept."""
    folder = cache_folder()
    if folder is None:
        return True
    try:
        (folder / what).touch(exist_ok=False)  # of several processes at the same time, one makes it
    except FileExistsError:
        return False
    except OSError as error:
        _log.debug("%s wasn't kept: %s", folder / what, error)
    return True
