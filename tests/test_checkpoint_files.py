"""Files of a state: whole or not at all, refused where they are damaged."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from machine_load import slowdown

from mpiad import checkpoint_files
from mpiad.checkpoint_files import read, read_description, require_same_problem, write

pytestmark = pytest.mark.serial

ARRAYS = {"x": np.linspace(0.0, 1.0, 50_000), "count": np.array(3), "empty": np.zeros((0, 2))}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    write(file, {"ranks": 2, "variables": ["float64[3]"]}, iter(ARRAYS.items()))
    assert read_description(file) == {"ranks": 2, "variables": ["float64[3]"]}
    description, found = read(file)
    assert description == read_description(file) and list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    assert [name.name for name in tmp_path.iterdir()] == ["state.npz"]


def test_whatever_byte_is_damaged_is_found(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    write(file, {"ranks": 2}, [("x", np.linspace(0.0, 1.0, 9)), ("count", np.array(3))])
    whole = file.read_bytes()
    np.savez(tmp_path / "foreign.npz", x=np.ones(3))
    flipped = [whole[:k] + bytes([whole[k] ^ 1 << k % 8]) + whole[k + 1 :] for k in range(len(whole))]
    cut = [whole[:k] for k in range(0, len(whole), 7)]
    foreign = [b"x = 3\n", whole + b"0", whole + whole, bytes(len(whole)), (tmp_path / "foreign.npz").read_bytes()]
    for damaged in [*flipped, *cut, *foreign]:
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.npz is damaged.*Delete it"):
            read(file)
    file.write_bytes(whole)
    assert read_description(file) == {"ranks": 2}


def test_what_cannot_be_read_is_not_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read .Is a directory"):
        read(tmp_path)


def test_of_two_writers_the_last_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        yield "x", np.ones(50_000)
        # Another process's, which comes and goes meanwhile: it also looks for what was left there.
        checkpoint_files._remove_unfinished.cache_clear()
        write(file, {"by": 2}, [("x", np.zeros(3))])
        assert read_description(file) == {"by": 2}
        yield "y", np.ones(50_000)

    write(file, {"by": 1}, arrays())
    description, found = read(file)
    assert description == {"by": 1} and list(found) == ["x", "y"]
    assert [name.name for name in tmp_path.iterdir()] == ["state.npz"]


KILLED = """
import os, runpy, signal, sys
from pathlib import Path
import numpy as np

def arrays():
    yield "x", np.ones(50_000)
    os.kill(os.getpid(), signal.SIGKILL)

runpy.run_path(sys.argv[1])["write"](Path(sys.argv[2]), {}, arrays())
"""


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "state[1].npz"
    ended = subprocess.run([sys.executable, "-c", KILLED, checkpoint_files.__file__, file], timeout=60 * slowdown())
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"state\[1\]\.npz\.\w+\.part", left.name)
    kept = tmp_path / "state[1].npz.old.part"
    kept.write_bytes(b"a user's own")
    write(file, {}, ARRAYS.items())
    assert sorted(tmp_path.iterdir()) == [file, kept]


def test_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="[Oo]bject arrays"):
        write(tmp_path / "state.npz", {}, [("x", np.array([print]))])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    write(file, {"iteration": 1}, ARRAYS.items())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(file, {"iteration": 2}, ARRAYS.items())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_description(file) == {"iteration": 1}
    assert [name.name for name in tmp_path.iterdir()] == ["state.npz"]


def test_another_problem_is_refused_by_what_differs() -> None:
    require_same_problem(Path("run.npz"), {"ranks": 2, "m": 10}, {"ranks": 2, "m": 10}, "minimize")
    with pytest.raises(
        ValueError, match=r"^minimize: the checkpoint run.npz .*: ranks is 2 in the file, but 3 in this call\. Use"
    ):
        require_same_problem(Path("run.npz"), {"ranks": 2, "m": 10}, {"ranks": 3, "m": 10}, "minimize")
    with pytest.raises(ValueError, match="m is missing in the file, but 5 in this call"):
        require_same_problem(Path("run.npz"), {}, {"m": 5}, "minimize")
