"""Why an f can't be compiled, and in which of its lines."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import TracebackType

import autograd
import numpy as np

# Frames below these folders are not the user's own.
_LIBRARIES = tuple(
    str(Path(folder).resolve())
    for folder in (
        sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], Path(np.__file__).parent,
        Path(autograd.__file__).parent, Path(__file__).parents[1],
    )
)  # fmt: skip


class Untraceable(TypeError):
    """Report an f that can't be turned into straight-line arithmetic, and in which file and line of the user's."""

    def __init__(self, reason: str, place: str):
        super().__init__(f"{place}: {reason}")
        self.reason, self.place = reason, place


class Refusal(TypeError):
    """Leave f where it asks a symbol for what it hasn't; `trace` makes an `Untraceable` of it."""


def where_raised(traceback: TracebackType | None, f: object) -> str:
    """Return the innermost line of the user's in a traceback, else the place of f."""
    place = place_of(f)
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not str(Path(name).resolve()).startswith(_LIBRARIES):
            place = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def place_of(f: object) -> str:
    """Return the file and line where f is written, or its name where it has none."""
    code = getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(f)
