"""Where states are kept, and what bad input gets."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import autograd.numpy as anp
import numpy as np
import pytest
from machine_load import slowdown

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan
from mpiad.timestepping.snapshots import Snapshots

pytestmark = pytest.mark.serial


def advance(u, k, c):
    return {"a": anp.sin(u["a"]) * c, "b": (u["b"] * 2).astype(np.float32)}


def start():
    return {"a": np.linspace(0, 1, 6).reshape(2, 3), "b": np.float32(1.5)}


def nameless_files(folder):
    """Return the sizes of this process's open files in a folder that have no name in it."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [link.stat().st_size for link in links if link.exists() and os.readlink(link).startswith(f"{folder}/")]


def test_a_file_without_a_name_is_where_asked_and_is_removed(tmp_path):
    seen = []

    def watched(u, k, c):
        seen.extend(nameless_files(tmp_path))
        assert os.listdir(tmp_path) == []
        return advance(u, k, c)

    kept = CheckpointSchedule(1, 3, tmp_path)
    found = mpiad.grad(lambda c: anp.sum(scan(watched, start(), 20, c, checkpoints=kept)["a"]))(0.8)
    expected = mpiad.grad(lambda c: anp.sum(scan(advance, start(), 20, c)["a"]))(0.8)
    assert found == pytest.approx(expected, rel=1e-14)
    # Three states at most, each of 6 doubles, a single and two headers.
    assert max(seen) == 3 * (6 * 8 + 4 + 2 * 128)
    assert nameless_files(tmp_path) == os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
import autograd.numpy as np
import mpiad
from mpiad.timestepping import CheckpointSchedule, scan

def step(u, k, c):
    if k == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return u * c

mpiad.grad(lambda c: np.sum(scan(step, np.ones(50), 9, c, checkpoints=CheckpointSchedule(1, 3, sys.argv[1]))))(0.9)
"""


def test_a_killed_process_leaves_no_file(tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=60 * slowdown())
    assert ended.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kept, size, close",
    [
        # Per cell two doubles and one complex number, in half their bytes, and four bytes that were single already.
        (CheckpointSchedule(4, dtype="float32"), 256 * 20, 1e-5),
        (CheckpointSchedule(1, 3, dtype="float32"), 256 * 20, 1e-5),
        # Five numbers in two bytes each, and the first few of each in four.
        (CheckpointSchedule(4, compress=True), 256 * 10, 1e-5),
        (CheckpointSchedule(1, 3, compress=True), 256 * 10, 1e-5),
    ],
)
def test_states_in_fewer_bytes_hardly_change_the_gradient(kept, size, close, monkeypatch):
    """A wave with real, complex and single-precision parts; the loop itself is run as ever."""
    sizes = {"memory": 0, "file": 0}
    keep = Snapshots.keep

    def noted(self, *args):
        keep(self, *args)
        sizes["memory"] = max(sizes["memory"], sum(map(size_of, self._memory.values())))
        sizes["file"] = max(sizes["file"], self._end - sum(map(headers, self._on_disk.values())))

    def size_of(leaves):
        return sum(array.nbytes for leaf in leaves for array in leaf.arrays)

    def headers(stored):
        return 128 * sum(len(leaf.arrays) for leaf in stored[1])

    monkeypatch.setattr(Snapshots, "keep", noted)

    def wave(u, k, c):
        flow = 0.4 * (anp.roll(u["p"], 1) + anp.roll(u["p"], -1) - 2 * u["p"])
        turned = u["z"] * anp.exp(1j * c * u["p"])
        return {"p": 2 * u["p"] - u["q"] + c * flow, "q": u["p"], "z": turned, "s": (u["s"] * 0.9).astype(np.float32)}

    def loss(c, kept):
        hump = np.exp(-(((np.linspace(0, 1, 256) - 0.5) / 0.1) ** 2))
        first = {"p": hump, "q": hump, "z": hump + 0j, "s": hump.astype(np.float32)}
        end = scan(wave, first, 40, c, checkpoints=kept)
        return anp.sum(anp.real(end["z"]) * end["p"] ** 2) + anp.sum(end["s"])

    speeds = np.linspace(0.6, 0.8, 256)
    value, gradient = mpiad.value_and_grad(lambda c: loss(c, kept))(speeds)
    expected = mpiad.value_and_grad(lambda c: loss(c, None))(speeds)
    assert value == expected[0]
    assert 0.0 < np.linalg.norm(gradient - expected[1]) < close * np.linalg.norm(expected[1])
    assert sizes == pytest.approx({"memory": kept.memory * size, "file": kept.disk * size}, rel=0.03)


def test_a_state_beyond_single_precision_is_named():
    kept = CheckpointSchedule(9, dtype="float32")
    with pytest.raises(FloatingPointError, match=r"before step 3 has entries beyond 3.40e\+38.*Scale the state"):
        mpiad.grad(lambda c: scan(lambda u, k, c: u * c, np.float64(1e30), 9, c, checkpoints=kept))(1e3)


@pytest.mark.parametrize("failing", [2, 8])
@pytest.mark.parametrize("call", [0, 1])
def test_an_exception_in_a_step_leaves_no_files(tmp_path, failing, call):
    """On the way there, in the last step too, or back; without the garbage collector."""
    calls = []

    def watched(u, k, c):
        calls.append(k)
        if k == failing and calls.count(k) > call:
            raise KeyError("in the step")
        return advance(u, k, c)

    gc.disable()
    try:
        with pytest.raises(KeyError):
            mpiad.grad(
                lambda c: anp.sum(scan(watched, start(), 9, c, checkpoints=CheckpointSchedule(1, 3, tmp_path))["a"])
            )(0.8)
        assert nameless_files(tmp_path) == os.listdir(tmp_path) == []
    finally:
        gc.enable()


def test_a_gradient_that_nobody_asks_for_leaves_no_files(tmp_path):
    kept = CheckpointSchedule(1, 3, tmp_path)
    gc.disable()
    try:
        pull, _ = mpiad.make_vjp(lambda c: anp.sum(scan(advance, start(), 9, c, checkpoints=kept)["a"]))(0.8)
        assert len(nameless_files(tmp_path)) == 1
        del pull
        assert nameless_files(tmp_path) == os.listdir(tmp_path) == []
    finally:
        gc.enable()


def test_a_file_that_cannot_be_written_says_where(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match=rf"step 0 can't be written in {tmp_path}.*No space left"):
        mpiad.grad(lambda c: anp.sum(scan(advance, start(), 9, c, checkpoints=CheckpointSchedule(0, 2, tmp_path))["a"]))(
            0.8
        )


@pytest.mark.parametrize(
    "wrong, kind, text",
    [
        ({"checkpoints": 0}, ValueError, "stores no state"),
        ({"checkpoints": -1}, ValueError, "memory=-1"),
        ({"checkpoints": 2.5}, TypeError, "float 2.5"),
        ({"checkpoints": True}, TypeError, "bool True"),
        ({"checkpoints": CheckpointSchedule(1, 1, "nowhere/at/all")}, ValueError, "nowhere/at/all"),
        ({"n_steps": -3}, ValueError, "-3"),
        ({"n_steps": 2.0}, TypeError, "float 2.0"),
        ({"step": 5}, TypeError, "int 5"),
        ({"observe": "u"}, TypeError, "str 'u'"),
        ({"u0": np.arange(3)}, TypeError, "u0 is of dtype int64. Convert it. A counter isn't needed in the state"),
        ({"u0": {"a": np.ones(2), "n": 4}}, TypeError, r"u0\['n'\] is of int 4. Convert it. A counter isn't needed"),
        ({"u0": object()}, TypeError, r"of object <obj.*\. Pass .* dict, list, tuple, or .*mpiad\.pytrees\.register\.$"),
        ({"u0": {"a": "text"}}, TypeError, r"u0\['a'\] is of str 'text'. Pass floats or arrays"),
        ({"inputs": np.ones(4)}, ValueError, r"n_steps=5 .* inputs has shape \(4,\)"),
        ({"inputs": {"x": 1.0}}, ValueError, r"inputs\['x'\] has shape \(\)"),
        ({"step": lambda u, k, x=0: u[:2]}, ValueError, r"step 0 returned dtype float64 and shape \(2,\)"),
        ({"step": lambda u, k, x=0: u.astype(np.float32)}, TypeError, "dtype float32"),
        ({"step": lambda u, k, x=0: (u, u)}, TypeError, "u0 is a single float, but step 0 returned a tuple of 2"),
        ({"step": lambda u, k, x=0: None}, ValueError, "step 0 returned NoneType None"),
        ({"observe": lambda u, k: u[: k + 1]}, TypeError, r"after step 1 it returned float64 of shape \(2,\)"),
        ({"observe": lambda u, k: 3}, TypeError, "arrays of floats"),
        ({"n_steps": 0, "observe": lambda u, k: u}, ValueError, "nothing to observe"),
        (
            {"checkpoints": CheckpointSchedule(2, dtype="float16")},
            ValueError,
            r"dtype='float32'\), but got dtype='float16'",
        ),
        ({"checkpoints": CheckpointSchedule(2, dtype="float32", compress=True)}, ValueError, "use one of them"),
        ({"checkpoints": CheckpointSchedule(2, host=1)}, TypeError, "host must be True or False, but got int 1"),
        (
            {"checkpoints": CheckpointSchedule(2, recorded=0)},
            ValueError,
            "recorded must be an integer above zero, but got 0",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(wrong, kind, text):
    given = {"step": lambda u, k, x=0: u + x, "u0": np.ones(3), "n_steps": 5, "checkpoints": 2, **wrong}
    with pytest.raises(kind, match=text):
        scan(**given)


def test_a_traced_value_from_around_the_step_is_refused():
    with pytest.raises(TypeError, match="from outside.*among the params"):
        mpiad.grad(lambda c: anp.sum(scan(lambda u, k: u * c, np.ones(3), 4, checkpoints=2)))(0.5)
    with pytest.raises(TypeError, match="from outside.*among the params"):
        mpiad.grad(lambda c: scan(lambda u, k: u, 1.0, 4, observe=lambda u, k: u * c, checkpoints=2)[1][0])(0.5)


def test_without_checkpoints_a_step_may_use_what_is_around_it():
    assert mpiad.grad(lambda c: scan(lambda u, k: u * c, 1.0, 4))(0.5) == pytest.approx(4 * 0.5**3)
