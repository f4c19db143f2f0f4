"""The examples on divided grids: the same answer on any number of ranks, and the truth where there is time for it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
from device_double import DeviceArray, on_device

import mpiad

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]
# Four ranks divide the shots too, into two groups; three divide the grid unevenly.
SMALL = {
    "examples/heat_source.py": ("--cells", 13, "--steps", 3, "--iterations", 8, "--most", 1),
    "examples/particles.py": ("--cells", 16, "--per-cell", 6, "--steps", 12, "--iterations", 3, "--most", 1),
    "examples/seismic_inversion.py": (
        "--shape", 30, 33, "--shots", 2, "--batch", 1, "--steps", 90, "--iterations", 2, "--least", 9,
    ),
}  # fmt: skip
BLOCK = (
    *("--shape", 16, 20, 22, "--layer", 3, "--shots", 2, 2, "--encoded", 2, "--receivers", 5, "--steps", 32),
    *("--recorded", 4, "--iterations", 2, 3, "--products", 2, "--pairs", 1, "--least", 0.6),
)
COMPUTED = re.compile(r"\d\.\d{12}e[+-]\d\d")


def computed(done: CompletedProcess) -> list[float]:
    """Return the numbers that a program printed with all their digits."""
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = [float(number) for number in COMPUTED.findall(done.stdout)]
    assert len(numbers) == 2, done.stdout
    return numbers


def sounded(done: CompletedProcess) -> list[float]:
    """Return by how much both ways lower the objective, each with the error of m."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(number) for number in COMPUTED.findall(done.stdout)]


@pytest.mark.thorough
@pytest.mark.parametrize("program", SMALL, ids=lambda program: Path(program).stem)
def test_ranks_have_one_answer(mpirun: Run, program: str, rank_counts: tuple) -> None:
    # Checkpoints change nothing, either: here one rank keeps all states, the others few.
    seismic = "seismic" in program
    one, *others = (
        computed(mpirun(n, program, *SMALL[program], *(("--checkpoints", 100) if seismic and n == 1 else ()), timeout=70))
        for n in ((1, 4) if seismic and 2 not in rank_counts else rank_counts)
    )
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-10)


@pytest.mark.thorough
def test_start_of_the_heat_is_recovered(mpirun: Run, tmp_path: Path) -> None:
    arguments = ("--cells", 16, "--steps", 4, "--iterations", 40, "--most", 0.25, "--picture", tmp_path / "heat.png")
    computed(mpirun(2, "examples/heat_source.py", *arguments))
    assert (tmp_path / "heat.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_velocity_in_three_dimensions_is_that_of_any_groups(mpirun: Run) -> None:
    """Four ranks are two groups of two: runs and grid are both divided."""
    one, four = (sounded(mpirun(ranks, "examples/seismic_3d.py", *BLOCK, timeout=80)) for ranks in (1, 4))
    # States are kept in single precision, which rounds differently where a number differs in its last digit.
    np.testing.assert_allclose(four, one, rtol=1e-6)


@pytest.mark.thorough
def test_waves_on_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The objective, its gradient and a product of Gauss-Newton's matrix, on the stand-in and on the host."""
    if importlib.import_module("device_on_cpu").COMPILER is None:
        pytest.skip("there is no compiler of C++")
    path = Path(__file__).parents[2] / "examples" / "seismic_3d.py"
    spec = importlib.util.spec_from_file_location("seismic_3d", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    arguments = "--shape 12 13 14 --layer 2 --shots 1 2 --encoded 1 --receivers 3 --steps 8 --recorded 4".split()
    options = example.parser.parse_args([*arguments, "--device", "gpu"])
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = []
    for is_there in (False, True):
        if is_there:
            monkeypatch.setattr(example, "select", lambda: 0)
            monkeypatch.setattr(example, "to_device", partial(mpiad.device.to_device, like=on_device(0.0)))
        ground = example.Ground(options)
        m = ground.truth / 10
        kept = mpiad.linearize(ground.residuals)(m)
        found.append([*mpiad.value_and_grad(ground.objective)(m), kept.vjp(kept.jvp(m))])
        assert isinstance(ground.residuals(m)[0], DeviceArray) is is_there
        for jitted in (ground.compiled, ground.seen):
            assert not jitted.form().jitted.is_interpreted
    for host, there in zip(*found):
        np.testing.assert_allclose(there, host, rtol=1e-9, atol=1e-9 * np.max(np.abs(host)))
    assert "1 of 1 ranks have no GPU, so the waves run on the host. select: CuPy can't be loaded" in capsys.readouterr().err


@pytest.mark.thorough
def test_bodies_are_those_of_any_number_of_ranks(mpirun: Run) -> None:
    arguments = ("--elements", 24, 4, 8, "--iterations", 12, "--most", 1)
    done = [mpirun(ranks, "examples/topology_3d.py", *arguments, timeout=60) for ranks in (1, 3)]
    compliances = [float(re.findall(r"-> (\S+) in 12 iterations", each.stdout)[0]) for each in done]
    assert compliances[0] > 0
    np.testing.assert_allclose(compliances[1], compliances[0], rtol=1e-6)


@pytest.mark.thorough
def test_velocity_is_improved(mpirun: Run, tmp_path: Path) -> None:
    arguments = ("--shape", 40, 48, "--shots", 3, "--steps", 150, "--iterations", 8, "--least", 0.3)
    done = mpirun(2, "examples/seismic_inversion.py", *arguments, "--picture", tmp_path / "velocity.png", timeout=80)
    computed(done)
    guess, recovered = (float(number) for number in re.findall(r"(?:guess|recovered) (\d\.\d+e-\d\d)", done.stdout))
    assert recovered < guess
    assert (tmp_path / "velocity.png").stat().st_size > 10_000
