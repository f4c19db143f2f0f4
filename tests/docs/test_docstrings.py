"""The examples in docstrings do what stands below them, on any number of ranks."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator

import autograd.numpy as np
import pytest

import mpiad

ROOMS = ("debug", "ensemble", "extend", "linalg", "optimize", "parallel", "testing", "timestepping", "vi")
# What ends MPI, and what writes to the standard output of the root.
WITHOUT = {"jit", "mpi_finalize", "mpi_print"}


def public() -> Iterator[tuple[str, object]]:
    """Yield the public functions, classes and methods, by name."""
    for place in (mpiad, *(getattr(mpiad, room) for room in ROOMS if hasattr(mpiad, room))):
        for name in getattr(place, "__all__", ()):
            thing = getattr(place, name)
            if callable(thing):
                yield f"{place.__name__}.{name}", thing
            if inspect.isclass(thing):
                for method, value in inspect.getmembers(thing, inspect.isfunction):
                    yield f"{place.__name__}.{name}.{method}", value


EXAMPLES = {name: thing for name, thing in public() if ">>>" in (inspect.getdoc(thing) or "")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_does_what_it_shows(name, rank, size):
    names = {"np": np, "mpiad": mpiad, "rank": rank, "size": size}
    text = inspect.getdoc(EXAMPLES[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    said = []
    failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=said.append).failed
    assert not failed, "".join(said)


@pytest.mark.serial
def test_public_functions_have_an_example():
    assert sorted(name for name in mpiad.__all__ if f"mpiad.{name}" not in EXAMPLES) == sorted(WITHOUT)
