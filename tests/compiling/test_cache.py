"""Kernels are compiled once, kept whole, and never taken from files that somebody or something has changed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import launch
import numpy as np
import pytest

from mpiad.cache_folder import cache_folder
from mpiad.compiling import cache

pytestmark = pytest.mark.serial

TEXT = """

def run(x, y, out):
    out[0] = math.sqrt(x) + {constant} * y
"""
SIGNATURE = "void(float64, float64, float64[::1])"

PROGRAM = """
import json, sys, time
from mpiad.compiling.cache import kernel_of
import numpy as np
out = np.zeros(1)
print("ready", flush=True)
made = kernel_of(sys.stdin.read(), "run", "void(float64, float64, float64[::1])")
made.function(4.0, 3.0, out)
print(json.dumps([made.origin, out[0]]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path / "kernels"))
    cache._loaded.clear()
    yield tmp_path / "kernels"
    cache._loaded.clear()


def made(constant=2.0):
    kernel, out = cache.kernel_of(TEXT.format(constant=constant), "run", SIGNATURE), np.zeros(1)
    kernel.function(4.0, 3.0, out)
    assert out[0] == 2.0 + 3.0 * constant
    return kernel


def again(constant=2.0):
    cache._loaded.clear()
    return made(constant).origin


def start(folder, program=PROGRAM):
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=launch.launch_environment(1, folder.parent, {}),
    )  # fmt: skip


def together(processes, constant):
    """Let processes that have loaded everything ask for a kernel at the same time; return origins, values and warnings."""
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write(TEXT.format(constant=constant))
        process.stdin.flush()
    for process in processes:
        process.stdin.close()
    found = []
    for process in processes:
        origin, value = json.loads(process.stdout.read())
        found.append((origin, value, process.stderr.read()))
        assert process.wait(50) == 0
    return found


def entries(folder):
    """Return the files of a folder, without the one whose bytes processes lock."""
    return [path for path in folder.iterdir() if path.name != "locks"]


def the_entry(folder):
    (entry,) = entries(folder)
    return entry


def test_a_kernel_is_compiled_once(folder):
    first = made()
    assert first.origin == "compiled" and made() is first
    assert made(5.0).function is not first.function
    assert again() == "disk" and again(5.0) == "disk"
    assert len(entries(folder)) == 2
    # Another one of the same text, whose operations may be fused.
    assert cache.kernel_of(TEXT.format(constant=5.0), "run", SIGNATURE, "contract").origin == "compiled"


@pytest.mark.launches
def test_the_next_process_takes_it_from_disk(folder):
    made()
    ((origin, value, err),) = together([start(folder)], 2.0)
    assert (origin, value, err) == ("disk", 8.0, "")


@pytest.mark.launches
def test_processes_that_begin_together_leave_one_file(folder):
    found = together([start(folder) for _ in range(2)], 7.0)
    assert [each[1:] for each in found] == [(23.0, "")] * 2
    assert len(entries(folder)) == 1 and again(7.0) == "disk"


# Each kernel is a part of its own.
SIX = """
import json, sys
from mpiad.compiling.cache import Source, kernels_of
import numpy as np
lines = [f"    out[0] = math.sin(out[0]) + {k}.5 * x" for k in range(150)]
texts = ["\\n".join([f"def run(x, out):", f"    out[0] = {k}.0", *lines]) for k in range(6)]
print("ready", flush=True)
sys.stdin.read()
made = kernels_of([Source(text, "run", "void(float64, float64[::1])") for text in texts])
out = np.zeros((6, 1))
for kernel, each in zip(made, out):
    kernel.function(0.25, each)
print(json.dumps([[kernel.origin for kernel in made], out[:, 0].tolist()]))
"""


@pytest.mark.launches
def test_processes_that_begin_together_divide_the_kernels(folder):
    found = together([start(folder, SIX) for _ in range(3)], 0)
    expected = np.arange(6.0)
    for k in range(150):
        expected = np.sin(expected) + (k + 0.5) * 0.25
    assert len(entries(folder)) == 6
    for _, values, err in found:
        np.testing.assert_allclose(values, expected, rtol=1e-13)
        assert not err
    # Each is compiled by one process, and read by the others.
    assert all(sorted(each) == ["compiled", "disk", "disk"] for each in zip(*[origins for origins, *_ in found]))


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(descriptor, fcntl.LOCK_EX, 0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(folder):
    """A process that has locked all parts, and compiles none."""
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-c", HOLDER, str(folder / "locks")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.launches
def test_the_kernels_of_a_process_that_is_killed_are_compiled_by_another(holder):
    threading.Timer(0.3, holder.kill).start()
    started = time.monotonic()
    assert made().origin == "compiled" and time.monotonic() - started > 0.25
    holder.wait(50)


@pytest.mark.launches
def test_nobody_waits_for_ever_for_the_kernels_of_another_process(holder, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE", 0.2)
    assert made().origin == "compiled" and holder.poll() is None


def test_without_locks_each_process_compiles(monkeypatch):
    def unsupported(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "lockf", unsupported)
    assert made().origin == "compiled" and again() == "disk"


@pytest.mark.launches
def test_processes_that_find_damage_together_make_it_again(folder):
    made()
    path = the_entry(folder)
    path.write_bytes(path.read_bytes()[:-9])
    found = together([start(folder) for _ in range(2)], 2.0)
    assert "compiled" in [origin for origin, *_ in found]
    assert any("compiled again" in warnings for *_, warnings in found)
    assert len(entries(folder)) == 1 and again() == "disk"


def test_a_full_disk_leaves_nothing(folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        assert made().origin == "compiled" and not entries(folder)
    assert again() == "compiled" and again() == "disk"


@pytest.mark.parametrize("part", ["checksum", "text", "functions", "machine code"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_what_was_damaged_is_made_again(folder, part, damage, caplog):
    made()
    path = the_entry(folder)
    content = path.read_bytes()
    place = {"checksum": 9, "text": content.index(b"math.sqrt"), "functions": content.index(b", []") + 3}.get(part, -9)
    path.write_bytes(content[:place] if damage == "cut" else content[:place] + b"?" + content[place:][1:])
    assert again() == "compiled"
    assert "compiled again" in caplog.text
    assert again() == "disk" and len(entries(folder)) == 1


def test_what_is_missing_is_made_again(folder, caplog):
    made()
    the_entry(folder).unlink()
    assert again() == "compiled" and not caplog.text


def test_an_entry_of_another_text_is_not_taken(folder):
    made()
    other = the_entry(folder).read_bytes()
    made(5.0)
    (path,) = [path for path in entries(folder) if path.read_bytes() != other]
    path.write_bytes(other)
    assert again(5.0) == "compiled"


def test_those_that_were_used_longest_ago_go(folder, monkeypatch):
    monkeypatch.setattr("mpiad.compiling.cache._MAX_ENTRIES", 2)
    made()
    first = the_entry(folder)
    made(5.0)
    (second,) = set(entries(folder)) - {first}
    left = [folder / "unfinished-by-a-killed-process", folder / "unfinished-yet"]
    for path, age in ((first, 30.0), (second, 20.0), (left[0], 1e5), (left[1], 10.0)):
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    earlier = folder / "unfinished-folder-of-an-earlier-version"
    earlier.mkdir()
    os.utime(earlier, (time.time() - 1e5,) * 2)
    assert again() == "disk"  # the first is used
    made(7.0)
    assert first.exists() and not second.exists() and not left[0].exists() and left[1].exists()


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_folder_that_others_can_write_into_is_not_used(folder):
    made()
    folder.chmod(0o777)
    assert cache_folder() is None and again() == "compiled"
    folder.chmod(0o700)
    the_entry(folder).chmod(0o770)
    assert again() == "compiled"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_used(folder):
    made()
    os.chown(folder, 12345, 12345)
    assert cache_folder() is None and again() == "compiled"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_a_folder_that_others_can_replace_is_not_used(folder, monkeypatch, tmp_path, caplog):
    """A parent that others can write into: they can rename the folder, and put another one in its place."""
    above = tmp_path / "shared" / "mine"
    above.mkdir(parents=True)
    monkeypatch.setenv("MPIAD_CACHE", str(above / "kernels"))
    for mode, kept in ((0o700, True), (0o770, False), (0o777, False), (0o1777, True)):
        above.parent.chmod(mode)
        with caplog.at_level("INFO", "mpiad"):
            assert (cache_folder() is not None) is kept, oct(mode)
        assert (f"other users can write into {above.parent}" in caplog.text) is not kept
        caplog.clear()
    # The same folder by a link elsewhere.
    above.parent.chmod(0o777)
    (tmp_path / "link").symlink_to(above)
    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path / "link" / "kernels"))
    assert cache_folder() is None


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_folders_above_are_made_for_this_user_alone(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path / "new" / "kernels"))
    before = os.umask(0o002)
    try:
        assert made().origin == "compiled" and again() == "disk"
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.name != "posix", reason="links and pipes are POSIX's")
def test_links_and_pipes_are_not_read(folder, tmp_path):
    made()
    entry = the_entry(folder)
    elsewhere = entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(elsewhere)
    assert again() == "compiled" and not entry.is_symlink()
    entry.unlink()
    os.mkfifo(entry)
    assert again() == "compiled" and again() == "disk"


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_what_is_checked_is_what_is_read(folder, monkeypatch):
    """A file that is replaced after its mode was looked at: by path the new one was read."""
    path = cache_folder() / "key.kernel"
    cache.keep(path, b"own")
    cache.keep(path.with_stem("other"), b"planted")
    looked = []

    def replacing(look):
        def replaced(what, **kwargs):
            facts = look(what, **kwargs)
            if os.path.lexists(folder / "other.kernel") and os.path.samestat(facts, os.lstat(folder / "key.kernel")):
                looked.append((folder / "other.kernel").replace(folder / "key.kernel"))
            return facts

        return replaced

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", replacing(Path.stat))
        patched.setattr(os, "fstat", replacing(os.fstat))
        assert cache.find(path) == b"own" and looked
    assert cache.find(path) == b"planted"


def test_the_users_own_folder_may_be_named_by_a_tilde(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MPIAD_CACHE", "~/x")
    assert made().origin == "compiled"
    assert len(entries(tmp_path / "home" / "x")) == 1 and not (tmp_path / "~").exists()


@pytest.mark.skipif(os.name != "posix", reason="numbers of users are POSIX's")
def test_without_a_home_kernels_are_kept_among_temporary_files(folder, monkeypatch, tmp_path):
    for name in ("MPIAD_CACHE", "XDG_CACHE_HOME", "HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made()
    kept = tmp_path / f"mpiad-{os.getuid()}"
    assert kept.stat().st_mode & 0o777 == 0o700 and again() == "disk"
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")  # as others could, before the first use
    assert cache_folder() is None and again() == "compiled"


def test_without_a_place_kernels_are_compiled_all_the_same(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file" / "below"), "0"):
        monkeypatch.setenv("MPIAD_CACHE", place)
        assert again() == "compiled" == again()
    assert not folder.exists()


def test_the_default_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("MPIAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made()
    assert (tmp_path / "cache" / "mpiad").stat().st_mode & 0o777 == 0o700
    assert len(entries(tmp_path / "cache" / "mpiad")) == 1


def test_a_kernel_that_does_not_compile_leaves_nothing(folder):
    with pytest.raises(Exception, match="undefined_name"):
        cache.kernel_of(TEXT.format(constant="undefined_name"), "run", SIGNATURE)
    assert not folder.exists() or not entries(folder)
