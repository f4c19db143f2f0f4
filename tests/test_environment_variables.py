"""Environment variables: what their values mean, and which are refused at the start."""

import pytest

from mpiad import environment_variables
from mpiad.cache_folder import cache_folder
from mpiad.environment_variables import VARIABLES, check, path, switch
from mpiad.transport.devices import device_settings
from mpiad.transport.watch import watch_settings

ON, OFF = ("1", "true", "yes", "on", "True", "ON"), ("0", "false", "no", "off", "FALSE", "Off")
SWITCHES = [name for name, kind in VARIABLES.items() if kind == "switch"]

SHOW = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ.get("PMIX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    if rank == 1:
        os.environ[name] = value
try:
    import mpiad
    mpiad.mpi_init()
    from mpiad.transport.watch import watch_settings
    print("debug", watch_settings.debug())
except ValueError as error:
    print(f"rank {rank}: {error}")
"""


@pytest.mark.serial
@pytest.mark.parametrize("name", SWITCHES)
def test_switches_know_words(name, monkeypatch):
    for words, meaning in ((ON, True), (OFF, False)):
        for word in words:
            monkeypatch.setenv(name, word)
            assert switch(name, not meaning) is meaning
            check()
    for default in (True, False):
        monkeypatch.setenv(name, "")
        assert switch(name, default) is default
        check()
    for word in ("2", "y", "an", "yes please", " "):
        monkeypatch.setenv(name, word)
        with pytest.raises(
            ValueError, match=f"{name} must be 1, true, yes or on, or 0, false, no or off, but got '{word}'"
        ):
            check()


@pytest.mark.serial
def test_settings_are_read_by_words(monkeypatch):
    monkeypatch.delenv("MPIAD_TIMEOUT", raising=False)
    monkeypatch.setenv("MPIAD_DEBUG", "true")
    monkeypatch.setenv("MPIAD_DEBUG_SITES", "no")
    monkeypatch.setenv("MPIAD_CUDA_AWARE", "off")
    assert watch_settings.from_environment() == (True, 300.0, False)
    assert device_settings.from_environment().cuda_aware is False
    monkeypatch.delenv("MPIAD_CUDA_AWARE")
    assert device_settings.from_environment().cuda_aware is None


@pytest.mark.serial
def test_paths_may_be_off_and_not_on(monkeypatch, tmp_path):
    for name in ("MPIAD_CACHE", "MPIAD_TRACE"):
        monkeypatch.setenv(name, "Off")
        assert path(name) is None
        monkeypatch.setenv(name, str(tmp_path))
        assert path(name) == str(tmp_path)
        check()
        monkeypatch.setenv(name, "yes")
        with pytest.raises(ValueError, match=f"{name} must be a path, or 0 for none, but got 'yes'"):
            check()
        monkeypatch.delenv(name)
    monkeypatch.setenv("MPIAD_CACHE", "no")
    monkeypatch.chdir(tmp_path)
    assert cache_folder() is None
    assert environment_variables.path("MPIAD_TRACE") == "" and not list(tmp_path.iterdir())


@pytest.mark.launches
@pytest.mark.parametrize("word, debug", [
    ("YES", True), *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in (("no", False), ("true", True))),
])  # fmt: skip
def test_what_one_rank_switches_on_is_on_on_all(mpirun, word, debug):
    done = mpirun(2, SHOW, "MPIAD_DEBUG", word, env={"MPIAD_DEBUG": None})
    assert done.stdout.splitlines() == [f"debug {debug}"] * 2, done.stdout + done.stderr


@pytest.mark.launches
@pytest.mark.parametrize("name, value", [
    ("MPIAD_TRACE", "1"),
    *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in (("MPIAD_DEBUG", "2"), ("MPIAD_ABORT", "never"))),
])  # fmt: skip
def test_an_unknown_value_on_one_rank_is_refused_on_all(mpirun, name, value):
    done = mpirun(2, SHOW, name, value)
    first, second = sorted(done.stdout.splitlines())
    assert first == "rank 0: an environment variable of mpiad has an invalid value on another rank."
    assert second.startswith(f"rank 1: {name} must be") and f"'{value}'" in second
