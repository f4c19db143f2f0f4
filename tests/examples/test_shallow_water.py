"""The start of a shallow-water flow: recovered, the same on any number of ranks, and compiled as it is interpreted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]
PROGRAM = "examples/shallow_water.py"
SMALL = ("--cells", 15, 26, "--hours", 6, "--iterations", 4, "--least", 1)


def printed(done: CompletedProcess) -> str:
    """Return what a program printed, once it has ended well and nothing fell back."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "isn't compiled" not in done.stderr
    return done.stdout


@pytest.mark.thorough
def test_ranks_have_one_answer(mpirun: Run, rank_counts: tuple) -> None:
    # The first one isn't compiled.
    expected = printed(mpirun(1, PROGRAM, *SMALL, "--interpreted", timeout=70))
    for n in rank_counts:
        assert printed(mpirun(n, PROGRAM, *SMALL, timeout=70)) == expected


@pytest.mark.thorough
def test_start_is_recovered(mpirun: Run, tmp_path: Path) -> None:
    picture, film = tmp_path / "start.png", tmp_path / "window.gif"
    arguments = ("--cells", 22, 44, "--hours", 6, "--iterations", 10, "--picture", picture, "--animation", film)
    shown = printed(mpirun(2, PROGRAM, *arguments, timeout=100))
    guess, analysis = (float(number) for number in re.findall(r"(?:guess|analysis) (\d\.\d+)", shown))
    assert 3 * analysis <= guess
    assert picture.stat().st_size > 10_000
    assert film.read_bytes().startswith(b"GIF89a")


@pytest.mark.thorough
def test_a_start_that_is_not_recovered_fails(mpirun: Run) -> None:
    done = mpirun(1, PROGRAM, "--cells", 15, 26, "--hours", 3, "--iterations", 0, "--interpreted", timeout=70)
    assert done.returncode != 0 and "not recovered" in done.stderr
