"""The way of a jitted call's arguments through the code: folders, and steps from a lower to a higher layer.

    python tests/argument_path.py [--verbose]

Calls compiled functions in all the ways that a call can take: the first call and later ones, compiled and interpreted,
with messages, in derivatives of both modes, of second order and of plain autograd. Counted are the functions of the
library that get an array or a traced value as an argument, alone or in a container. A step leads from one file to another
by a call; it is counted as upwards if the called file is in a higher layer (see `import-linter`'s contract in setup.cfg): a
hook, or a function or an object that was passed down. Methods of the arrays themselves aren't steps, nor is what NumPy and
autograd call.
"""

from __future__ import annotations

import argparse
import configparser
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import autograd
import autograd.numpy as anp
import numpy as np
from autograd.tracer import Box

import mpiad
from mpiad.programs.signature import Arguments
from mpiad.programs.traced_array import TracedArray

ROOT = Path(__file__).parents[1]
PACKAGE = Path(mpiad.__file__).parent
CARRIERS = (np.ndarray, TracedArray, Box, Arguments)


def layers() -> dict[str, int]:
    """Return the numbers of the layers by package, the lowest first, from import-linter's contract."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rows = setup["importlinter:contract:floors"]["layers"].strip().splitlines()
    return {part.strip(" ()"): len(rows) - k for k, row in enumerate(rows) for part in row.split("|")}


def carries(x: object, depth: int = 2) -> bool:
    """Return whether a value is or contains an array or a traced value."""
    if isinstance(x, CARRIERS):
        return True
    if depth and isinstance(x, (tuple, list)):
        return any(carries(part, depth - 1) for part in x[:20])
    return bool(depth and isinstance(x, dict) and any(carries(part, depth - 1) for part in x.values()))


def gets_arguments(frame: FrameType) -> bool:
    """Return whether a function is called with an array or a traced value."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 4) + bool(code.co_flags & 8)  # *args, **kwargs
    return any(carries(frame.f_locals.get(name)) for name in code.co_varnames[:count])


def uses() -> list[Callable[[], object]]:
    """Return calls of compiled functions."""
    x, v = np.linspace(0.5, 1.5, 20), np.linspace(1.0, -1.0, 20)
    large = np.linspace(0.5, 1.5, 20_000)

    def loss(x):
        y = mpiad.mpi_allreduce(anp.sum(anp.sin(x) * x))
        return y**2 + anp.sum(mpiad.mpi_exchange(x, 0, 0) ** 2)

    def branching(x):
        return anp.sum(x**2) if x[0] > 0 else anp.sum(x)

    local, messages, refused = (mpiad.jit(f) for f in (lambda x: anp.sum(anp.sin(x) * x), loss, branching))
    inside = mpiad.jit(mpiad.value_and_grad(loss))
    return [
        *(lambda f=f, y=y: f(y) for f in (local, messages, refused, inside) for y in (x, large) for _ in range(3)),
        *(lambda f=f: mpiad.value_and_grad(f)(x) for f in (local, messages, refused) for _ in range(2)),
        *(lambda f=f: mpiad.jvp(f, x, v) for f in (local, messages, refused) for _ in range(2)),
        *(lambda f=f: mpiad.hvp(f)(x, v) for f in (local, messages, refused) for _ in range(2)),
        *(lambda f=f: mpiad.linearize(f)(x).jvp(v) for f in (local, messages)),
        *(lambda: autograd.grad(local)(x) for _ in range(2)),
    ]


def way(calls: list[Callable[[], object]]) -> tuple[set[CodeType], set[tuple[CodeType, CodeType]]]:
    """Return the functions that get arrays or traced values, and the calls of one by another."""
    visited, steps = set[CodeType](), set[tuple[CodeType, CodeType]]()
    of_library = str(PACKAGE)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(of_library) or not gets_arguments(frame):
            return
        visited.add(frame.f_code)
        caller = frame.f_back
        of_array = isinstance(frame.f_locals.get("self"), CARRIERS)
        if caller is not None and caller.f_code.co_filename.startswith(of_library) and not of_array:
            steps.add((caller.f_code, frame.f_code))

    for call in calls:
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return visited, steps


def place(code: CodeType) -> str:
    """Return the path of a function's file in the package."""
    return str(Path(code.co_filename).relative_to(PACKAGE))


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verbose", action="store_true", help="print the folders and the steps, too")
    verbose = parser.parse_args().verbose
    levels = layers()
    visited, steps = way(uses())
    level = {code: levels.get(place(code).partition("/")[0].removesuffix(".py"), 0) for pair in steps for code in pair}
    folders = sorted({str(Path(place(code)).parent) for code in visited})
    upwards = sorted({f"{place(a)} -> {place(b)}" for a, b in steps if level[b] > level[a]})
    print(f"{len(visited)} functions in {len(folders)} folders, {len(upwards)} steps from a lower to a higher layer")
    if verbose:
        print(*folders, *upwards, sep="\n")


if __name__ == "__main__":
    main()
