"""Run an example on several numbers of ranks and compare what it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np

Run = Callable[..., CompletedProcess]


def check_same_answers(
    mpirun: Run,
    counts: Sequence[int],
    program: str,
    folder: Path,
    *arguments: object,
    timeout: float = 60,
    close: float = 1e-10,
) -> dict:
    """Compare the arrays of `--save` to `close`, return those of the first; programs print the same but for ranks."""
    saved = []
    for ranks in counts:
        place = folder / str(ranks)
        place.mkdir()
        done = mpirun(ranks, program, *arguments, "--save", "answer.npz", timeout=timeout, cwd=place)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"on {ranks} ranks" in done.stdout
        pictures = list(place.glob("demo/*.png"))
        assert len(pictures) == 1 and pictures[0].read_bytes().startswith(b"\x89PNG")
        with np.load(place / "answer.npz") as found:
            saved.append({name: found[name] for name in found.files})
    for other in saved[1:]:
        for name, array in saved[0].items():
            np.testing.assert_allclose(other[name], array, rtol=0, atol=close * np.abs(array).max(), err_msg=name)
    return saved[0]
