"""Which GPUs a node has, and which of them a rank uses."""

import types

import pytest

from mpiad.transport import launcher
from mpiad.transport.devices import device_settings

pytestmark = pytest.mark.serial


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device_settings, "_CUDA", tmp_path / "cuda")
    monkeypatch.delitem(device_settings.sys.modules, "cupy", raising=False)


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_none():
    assert device_settings.gpus_of_node() == [] and device_settings.device_of(0, 0) == ""


def test_as_the_driver_of_nvidia_tells(tmp_path):
    for number in range(2):
        folder = tmp_path / "cuda" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nIRQ: 1{number}\n")
    program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: another (UUID: GPU-1)'\n")
    assert device_settings.gpus_of_node() == ["NVIDIA H200", "NVIDIA H200"]


def test_a_gpu_may_be_used_where_something_tells_of_one_and_the_environment_hides_none(tmp_path, monkeypatch):
    assert not device_settings.may_use_gpu()
    program(tmp_path / "nvidia-smi", "#!/bin/sh\nexec /bin/sleep 20\n")  # isn't run
    assert device_settings.may_use_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not device_settings.may_use_gpu()


def test_as_nvidia_smi_tells(tmp_path):
    program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA A100-SXM4 (UUID: GPU-1)'\necho note\n")
    assert device_settings.gpus_of_node() == ["NVIDIA A100-SXM4"]


def test_an_nvidia_smi_that_fails_or_hangs_tells_nothing(tmp_path, monkeypatch):
    program(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: x (y)'\nexit 9\n")
    assert device_settings.gpus_of_node() == []
    monkeypatch.setattr(launcher, "_ANSWER_SECONDS", 0.2)
    program(tmp_path / "nvidia-smi", "#!/bin/sh\nexec /bin/sleep 20\n")
    assert device_settings.gpus_of_node() == []


@pytest.mark.parametrize(
    ("setting", "expected"), [(None, ["0", "1", "0"]), ("3,5", ["3", "5", "3"]), ("", ["", "", ""]), ("-1", ["", "", ""])]
)
def test_ranks_of_a_node_take_turns(monkeypatch, setting, expected):
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [device_settings.device_of(rank, 2) for rank in range(3)] == expected


def test_where_cupy_is_loaded_it_decides(monkeypatch):
    runtime = types.SimpleNamespace(getDevice=lambda: 1)
    monkeypatch.setitem(
        device_settings.sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    )
    assert device_settings.device_of(0, 2) == "1"
