"""Files of a state: whole or not at all, refused where they are damaged."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from mpiad.checkpoint_files import differences, read, read_description, write

pytestmark = pytest.mark.serial

ARRAYS = {"x": np.linspace(0.0, 1.0, 50_000), "count": np.array(3), "empty": np.zeros((0, 2))}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    write(file, {"ranks": 2, "variables": ["float64[3]"]}, iter(ARRAYS.items()))
    assert read_description(file) == {"ranks": 2, "variables": ["float64[3]"]}
    found = read(file)
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
    assert [name.name for name in tmp_path.iterdir()] == ["state.npz"]


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "empty"])
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "state.npz"
    write(file, {}, ARRAYS.items())
    whole = file.read_bytes()
    half = len(whole) // 2
    file.write_bytes({
        "cut": whole[:half], "changed": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :], "foreign": b"x = 3\n",
        "empty": b"",
    }[damage])
    with pytest.raises(ValueError, match=r"state\.npz is damaged.*Delete it"):
        read(file)


def test_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="[Oo]bject arrays"):
        write(tmp_path / "state.npz", {}, [("x", np.array([print]))])


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


def test_differences_name_what_differs() -> None:
    assert differences({"ranks": 2, "m": 10}, {"ranks": 2, "m": 10}) == ""
    assert differences({"ranks": 2, "m": 10}, {"ranks": 3, "m": 10}) == "ranks is 2 there and 3 here"
    assert "m is \"nothing\" there" in differences({}, {"m": 5})
