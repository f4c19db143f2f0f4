"""Posteriors of two epidemics: found alike on any number of ranks, and as a long Markov chain says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

pytestmark = [pytest.mark.launches, pytest.mark.limit(200)]

Run = Callable[..., CompletedProcess]
SMALL = ("--n_agents", 150, "--n_timesteps", 12, "--n_epochs", 3, "--n_samples_per_epoch", 5)


def infer(mpirun: Run, ranks: int, folder: Path, name: str, *arguments: object) -> tuple[str, np.ndarray]:
    folder.mkdir()
    done = mpirun(ranks, name, "--history", "objective.txt", *arguments, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, np.loadtxt(folder / "objective.txt")


CASES = [("examples/sir_vi.py", SMALL), ("examples/influenza_vi.py", ("--n_epochs", 2))]


@pytest.mark.thorough
@pytest.mark.parametrize("name, arguments", CASES)
def test_ranks_share_one_history(mpirun: Run, tmp_path: Path, name: str, arguments: tuple) -> None:
    (_, one), (_, three) = (infer(mpirun, n, tmp_path / str(n), name, *arguments) for n in (1, 3))  # uneven shares
    np.testing.assert_allclose(three, one, rtol=1e-10)


@pytest.mark.thorough
def test_the_epidemic_among_agents_is_found(mpirun: Run, tmp_path: Path) -> None:
    arguments = ("--n_agents", 300, "--n_timesteps", 20, "--n_epochs", 60, "--learning_rate", 1e-2)
    printed, objective = infer(mpirun, 2, tmp_path / "run", "examples/sir_vi.py", *arguments)  # it asserts by itself
    assert np.mean(objective[-10:]) < 0.2 * np.mean(objective[:10])
    medians = [float(line.split()[-2]) for line in printed.splitlines() if line.startswith("log10")]
    np.testing.assert_allclose(medians[1:], np.log10(0.05), atol=0.2)
    assert (tmp_path / "run" / "demo" / "sir_vi.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_the_influenza_is_as_a_markov_chain_says(mpirun: Run, tmp_path: Path) -> None:
    printed, _ = infer(mpirun, 2, tmp_path / "run", "examples/influenza_vi.py")  # it asserts by itself
    assert [line.split(":")[0] for line in printed.splitlines()[:2]] == ["beta", "gamma"]
    assert (tmp_path / "run" / "demo" / "influenza_vi.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_names_of_devices_must_fit_the_ranks(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(2, "examples/sir_vi.py", *SMALL, "--device_ids", "cpu", "cpu", "cpu", timeout=60, cwd=tmp_path)
    assert done.returncode != 0
    assert "has 3 names, but there are 2 ranks" in done.stderr
    done = mpirun(2, "examples/sir_vi.py", *SMALL, "--device_ids", "cpu", "cuda:7", timeout=60, cwd=tmp_path)
    assert done.returncode != 0
    assert "rank 1 has no device 'cuda:7'" in done.stderr
