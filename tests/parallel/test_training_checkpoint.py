"""Trainings that go on from a file, beside those that were never stopped."""

import json
import os

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI

from mpiad import checkpoint_files
from mpiad.parallel import Adam, DistributedDataContainer, DistributedOptimizer, load_checkpoint, save_checkpoint

COMM = MPI.COMM_WORLD
ROOT = COMM.size - 1
X = np.random.default_rng(0).normal(size=(23, 3))


@pytest.fixture
def path(tmp_path):
    """A file that all ranks know."""
    return COMM.bcast(tmp_path) / "run.npz"


def loss(p, x):
    return anp.mean(anp.tanh(x @ p["w"] + p["b"]) ** 2) + 0.1 * p["b"] ** 2


def train(epochs, path=None, accumulate=1):
    """Train with noise of each rank's own, from the file where there is one; return parameters and the next noise."""
    params = {"w": np.ones(3, np.float32), "b": 0.5}
    optimizer = DistributedOptimizer(Adam(0.05), accumulate=accumulate)
    state, rng, start = optimizer.setup(params), np.random.default_rng(COMM.rank), 0
    data = DistributedDataContainer(X, batch_size=9, shuffle=True, rng=3)
    found = None if path is None else load_checkpoint(path, root=ROOT)
    if found is not None:
        params, start = found.tree["params"], found.tree["epoch"]
        state, rng = found.own
    for epoch in range(start, epochs):
        data.set_epoch(epoch)
        for x in data:
            state, params, _ = optimizer.step(state, params, loss, x + 0.1 * rng.normal(size=x.shape))
        if path is not None:
            save_checkpoint(path, {"params": params, "epoch": epoch + 1}, own=(state, rng), root=ROOT)
    return params, rng.normal(size=2)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_goes_on_bit_for_bit(path, accumulate):
    whole, noise = train(5, None, accumulate)
    train(3, path, accumulate)
    params, again = train(5, path, accumulate)
    assert params["w"].tobytes() == whole["w"].tobytes()
    assert params["w"].dtype == np.float32
    assert params["b"] == whole["b"]
    np.testing.assert_array_equal(again, noise)
    assert COMM.bcast(None if COMM.rank else sorted(p.name for p in path.parent.glob("run*"))) == ["run.npz"]


@pytest.mark.serial
def test_a_nest_comes_back_as_it_was(path):
    tree = {
        "a": [np.arange(3), (np.float32(0.1), 1e-300, 2**100, -0.0)], 3: None, "s": "ä", "c": 1j / 3,
        "e": np.zeros((0, 2)), "f": 0.1 + 0.2,
        "yes": True,
    }  # fmt: skip
    save_checkpoint(path, tree)
    found = load_checkpoint(path).tree
    assert repr(found) == repr(tree)
    assert found["a"][1][0].dtype == np.float32
    assert type(found["a"][1]) is tuple
    np.testing.assert_array_equal(found["a"][0], tree["a"][0])
    assert load_checkpoint(path).own is None


@pytest.mark.serial
def test_names_that_read_alike_stay_apart(path):
    tree = {
        1: np.ones(2), "1": np.zeros(2), "a/b": np.array(3.0), "a": {"b": np.array(4.0), "b'": np.array(5.0)},
        np.int64(7): np.array(6.0), np.int64(8): np.array(7.0),
    }  # fmt: skip
    save_checkpoint(path, tree, own=[tree], comm=MPI.COMM_SELF)
    found = load_checkpoint(path, comm=MPI.COMM_SELF)
    for nest in (found.tree, found.own[0]):
        assert list(nest) == list(tree)
        for key in (1, "1", "a/b", 7, 8):
            np.testing.assert_array_equal(nest[key], tree[key])
        assert (nest["a"]["b"], nest["a"]["b'"]) == (4.0, 5.0)


@pytest.mark.serial
@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_go_on(path, kind):
    rng = np.random.Generator(getattr(np.random, kind)(5))
    rng.integers(10, size=3, dtype=np.int32)  # some keep half a word for the next number
    save_checkpoint(path, rng)
    again = load_checkpoint(path).tree
    assert again.integers(1000, size=5, dtype=np.int32).tolist() == rng.integers(1000, size=5, dtype=np.int32).tolist()
    assert again.normal() == rng.normal()


@pytest.mark.parametrize("seed", [5, (3, 4), np.random.SeedSequence(9, spawn_key=(2, 7)), "entropy"])
def test_generators_that_spawn_go_on(path, seed):
    """The children of a restored generator are those of an uninterrupted run, on all ranks."""
    rng = np.random.default_rng(COMM.bcast(np.random.SeedSequence().entropy, ROOT) if seed == "entropy" else seed)
    rng.spawn(2)
    rng.normal()
    save_checkpoint(path, {"rng": rng})
    again = load_checkpoint(path).tree["rng"]
    expected = [child.normal() for child in rng.spawn(3)]
    assert [child.normal() for child in again.spawn(3)] == expected
    assert again.normal() == rng.normal()
    assert COMM.allgather(expected) == [expected] * COMM.size


def test_without_a_file_the_training_begins(path):
    assert load_checkpoint(path) is None


def test_what_is_no_data_is_refused_on_all_ranks(path):
    with pytest.raises(TypeError, match=rf"own/{ROOT}/rule is Adam .*Save the parts"):
        save_checkpoint(path, {}, own={"rule": Adam() if COMM.rank == ROOT else 1})
    assert load_checkpoint(path) is None


def test_a_damaged_file_is_refused_on_all_ranks(path):
    save_checkpoint(path, {"a": np.arange(1000.0)}, root=ROOT)
    if COMM.rank == ROOT:
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    COMM.Barrier()
    with pytest.raises(ValueError, match="damaged"):
        load_checkpoint(path, root=ROOT)


def test_what_only_the_root_finds_out_about_a_path_is_raised_on_all_ranks(path, monkeypatch):
    def forbidden(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    for call in (lambda: save_checkpoint(7, {}, root=ROOT), lambda: load_checkpoint(7, root=ROOT)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="parallel.(save|load)_checkpoint: .*not '?int'?"):
            call()
    if COMM.rank == ROOT:
        monkeypatch.setattr(type(path), "exists", forbidden)
    with pytest.raises(ValueError, match="parallel.load_checkpoint: .*Permission denied"):
        load_checkpoint(path, root=ROOT)
    COMM.Barrier()


def test_parts_of_another_number_of_ranks_are_refused(path):
    save_checkpoint(path, {"a": 1.0}, own=COMM.rank)
    if COMM.rank == 0:
        said = checkpoint_files.read_description(path)
        said["ranks"], said["own"] = COMM.size + 1, [*said["own"], said["own"][0]]
        checkpoint_files.write(path, json.loads(json.dumps(said)), [])
    COMM.Barrier()
    with pytest.raises(
        ValueError, match=rf"states \(own\) of {COMM.size + 1} rank\(s\), but this communicator has {COMM.size}"
    ):
        load_checkpoint(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(path, monkeypatch):
    save_checkpoint(path, {"epoch": 1}, root=ROOT)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files.os, "fsync", full)
    with pytest.raises((OSError, RuntimeError), match="can't be written .No space left.*Free space on the disk"):
        save_checkpoint(path, {"epoch": 2}, root=ROOT)
    monkeypatch.undo()
    assert load_checkpoint(path, root=ROOT).tree == {"epoch": 1}


def test_the_error_about_a_wrong_folder_is_the_same_on_all_ranks(path):
    save_checkpoint(path, {"epoch": 1}, root=ROOT)
    for wrong, text in (
        (path.parent / "missing" / "run.npz", "There is no folder .*missing: create it"),
        (path / "run.npz", "There is no folder .*run.npz: create it"),
        (path.parent, "Pass the name of a file: this is a folder"),
    ):
        with pytest.raises(OSError, match=f"parallel.save_checkpoint: {wrong} can't be written .*{text}") as caught:
            save_checkpoint(wrong, {"epoch": 2}, root=ROOT)
        assert caught.type is OSError


def test_the_checkpoint_of_another_model_is_refused_on_all_ranks(path):
    params = {"w": np.ones((3, 2)), "b": np.zeros(2)}
    state = Adam().setup(params)
    save_checkpoint(path, {"params": params, "state": state, "epoch": 3}, own=[np.ones(COMM.rank + 1)])
    for like in (params, state, {"params": params, "state": state, "epoch": 0}, [np.zeros(COMM.rank + 1)]):
        assert load_checkpoint(path, like=like).tree["epoch"] == 3
    for like, text in (
        ({**params, "w": np.ones((2, 3))}, r"\['w'\] must have .*\(2, 3\).* of like\['w'\], but has shape \(3, 2\)"),
        ({**params, "w": np.ones((3, 2), np.float32)}, r"\['w'\] must have .*float32 of like\['w'\], but has .*float64"),
        ({"w": params["w"], "bias": params["b"]}, "no part of it has the structure"),
        ([np.zeros(COMM.rank + 1 + (COMM.rank == ROOT))], r"own\[0\] must have the shape"),
    ):
        with pytest.raises(ValueError, match=f"parallel.load_checkpoint: .*{text}"):
            load_checkpoint(path, like=like)


def test_a_path_that_only_the_root_tries_is_refused_on_all_ranks(path):
    with pytest.raises(ValueError, match="null"):
        save_checkpoint("a\0b", {"a": 1}, root=ROOT)
    if COMM.rank == 0:
        os.mkfifo(path)
    COMM.Barrier()
    with pytest.raises(OSError, match="can't be written .It isn't a regular file"):
        save_checkpoint(path, {"a": 1}, root=ROOT)
    with pytest.raises(ValueError, match="can't be read .It isn't a regular file"):
        load_checkpoint(path, root=ROOT)
