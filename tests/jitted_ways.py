"""Tests whose objectives are jitted, too: each is evaluated twice, at its trace and in a replay.

With `--thorough` every test of `PACKAGES` that takes a gradient runs three times: as it is, with its function jitted
inside of `value_and_grad`, and with the two of them jitted together. A test that can't is marked `interpreted`: it counts
calls or messages, or is about what the function itself raises.
"""

from pathlib import Path

import pytest

import mpiad
from mpiad.differentiation import gradient
from mpiad.programs import Jitted

PACKAGES = ("primitives", "domain", "timestepping", "differentiation")
WAYS = ["interpreted", "jitted-inside", "jitted-outside"]


def generate(metafunc: pytest.Metafunc) -> None:
    """Let a test run in all ways, where it can."""
    if "objectives" in metafunc.fixturenames and _has_ways(metafunc):
        metafunc.parametrize("objectives", WAYS, indirect=True)


def _has_ways(metafunc: pytest.Metafunc) -> bool:
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    chosen = "also_jitted" in marks or metafunc.config.getoption("thorough")
    if not chosen or marks & {"interpreted", "launches"}:
        return False
    path, tests = Path(metafunc.definition.path), metafunc.config.rootpath / "tests"
    # The arrays of devices aren't compiled.
    return any(path.is_relative_to(tests / package) for package in PACKAGES) and "device" not in path.stem


@pytest.fixture(autouse=True)
def objectives(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jit what `value_and_grad` and `grad` are given in this test, or what they return."""
    way = getattr(request, "param", WAYS[0])
    if way == WAYS[0]:
        return
    bare = gradient._evaluator

    def evaluator(fun, *rest):
        if isinstance(fun, Jitted):
            return bare(fun, *rest)
        evaluate = bare(mpiad.jit(fun), *rest) if way == "jitted-inside" else mpiad.jit(bare(fun, *rest))

        def twice(*args, **kwargs):
            evaluate(*args, **kwargs)
            return evaluate(*args, **kwargs)

        return twice

    monkeypatch.setattr(gradient, "_evaluator", evaluator)
