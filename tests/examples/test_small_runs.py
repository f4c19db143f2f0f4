"""The large examples on small problems: each runs to its end, and gets there some of the way; several in one job.

Whether they find what they are to find, alike on any number of ranks, is shown at their own sizes by the tests marked
`thorough` beside this file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

pytestmark = [pytest.mark.launches, pytest.mark.limit(240)]

TOGETHER = 20  # examples of one job: two ranks take a second to import what they need, and to make a first picture


class Small(NamedTuple):
    """A small run: its command, where its numbers stand in what it prints, and what they must be.

    `thorough`: another example does the same with the same parts, in less time, or both take long.
    """

    ranks: int
    program: str
    arguments: str
    pattern: str
    is_right: Callable[..., bool]
    thorough: bool = False


def is_close(relative: float) -> Callable[[float, float], bool]:
    return lambda x, y: abs(x - y) <= relative * abs(y)


RUNS = [
    Small(
        1, "examples/advection_diffusion.py", "--cells 12 --sensors 4 --pairs 30 --draws 9 --least 0 --picture picture.png",
        r"relative error of m (\S+)\n.*\n.*true (\S+)", lambda error, truth: error < 0.6 and truth > 0,
        thorough=True,
    ),
    Small(
        2, "examples/attention_digits.py", "--epochs 7 --picture picture.png",
        r"loss \S+ -> (\S+)\ntest accuracy (\S+)", lambda loss, accuracy: loss < 0.8 and accuracy > 0.8, thorough=True,
    ),
    Small(
        2, "examples/burgers_control.py", "--cells 10 --steps 3 --iterations 6 --most 1",
        r"error of the amplitudes (\S+)", lambda error: error < 0.05, thorough=True,
    ),
    Small(
        2, "examples/digits_training.py", "",
        r"loss \S+ -> (\S+)\ntest accuracy (\S+)", lambda loss, accuracy: loss < 0.02 and 0.97 <= accuracy <= 1,
        thorough=True,
    ),
    Small(
        2, "examples/early_warning.py", "--cells 16 --gauges 6 --times 30 --events 16 --least 0 --picture picture.png",
        r"correlation with the true uplift (\S+);.*\n.* prior: (\S+)% of", lambda true, share: true > 0.5 and share > 88.0,
        thorough=True,
    ),
    Small(
        2, "examples/ensemble_training.py", "--iterations 5",
        r"Adam .*loss = (\S+)  closed form (\S+)", is_close(1e-7),
    ),
    Small(
        2, "examples/graph_network.py", "--nodes 60 --fields 3 --features 5 --iterations 30 --most 1 --picture picture.png",
        r"other fields: (\S+); (\S+) if nothing", lambda error, before: error < before, thorough=True,
    ),
    Small(
        1, "examples/groundwater_uncertainty.py", "--coarsen 20 --boreholes 24 --pairs 8 --draws 4 --picture picture.png",
        r"of their errors: (\S+) m before, (\S+) m after", lambda before, after: after < before / 3, thorough=True,
    ),
    Small(
        1, "examples/groundwater_posterior.py", "--coarsen 20 --boreholes 24 --pairs 12 --samples 30 --warmup 30 --draws 4"
        " --method hpcn --least 0 --picture picture.png",
        r"chain: .* of their errors: (\S+) m, (\S+) m expected", lambda error, expected: error < 3 * expected,
        thorough=True,
    ),
    Small(
        2, "examples/heat_source.py", "--cells 13 --steps 3 --iterations 8 --most 1 --picture picture.png",
        r"relative error of the start: (\S+)", lambda error: error < 0.4, thorough=True,
    ),
    Small(
        2, "examples/infection_starts.py", "--starts 4 --picture picture.png",
        r"lowest cost (\S+) +SciPy (\S+)", is_close(1e-3), thorough=True,
    ),
    Small(
        2, "examples/influenza_1978.py", "--repetitions 2",
        r"R0 +(\S+) +SciPy +(\S+)", is_close(1e-5), thorough=True,
    ),
    Small(
        2, "examples/influenza_vi.py", "--n_epochs 2",
        r"beta: (\S+) ± .* by the chain (\S+) ±", is_close(0.05), thorough=True,
    ),
    Small(
        2, "examples/membrane_posterior.py", "--samples 6 --warmup 8 --most 99 --picture picture.png",
        r"log likelihood to (\S+), log prior to (\S+)", lambda likelihood, prior: max(likelihood, prior) < 1e-9,
        thorough=True,
    ),
    Small(
        2, "examples/neural_ode.py", "--iterations 5",
        r"loss (\S+) at first, .* after 5 steps; SciPy says (\S+)", lambda first, last: last < first / 5, thorough=True,
    ),
    Small(
        2, "examples/personal_heads.py", "--epochs 5",
        r"own heads: (\S+)\nalone: (\S+)\none head: (\S+)", lambda own, alone, one: min(own, alone) > 0.5 > 2 * one,
        thorough=True,
    ),
    Small(
        2, "examples/pharmacokinetics.py", "--patients 8 --draws 2 --picture picture.png",
        r"CL +(\S+) +SciPy +(\S+)", is_close(1e-5), thorough=True,
    ),
    Small(
        2, "examples/poisson_inverse.py", "--cells 8 --iterations 8 8 --most 1",
        r"field .*log κ (\S+)\n.*network .*log κ (\S+)", lambda field, network: max(field, network) < 0.3,
        thorough=True,
    ),
    Small(
        2, "examples/poisson_posterior.py", "--chains 2 --samples 40 --warmup 20 --methods hpcn dr --picture picture.png",
        r"true log flux (\S+)\nLaplace approximation +(\S+) ±", lambda true, mean: abs(true - mean) < 2.0,
        thorough=True,
    ),
    Small(
        2, "examples/predator_prey.py", "--starts 2 --iterations 12",
        r"delta +(\S+) +SciPy +(\S+)", is_close(0.01), thorough=True,
    ),
    Small(
        2, "examples/reaction_diffusion.py", "--cells 8 --iterations 4 --most 0.06 --picture picture.png",
        r"relative error (\S+), for m = 0 (\S+)", lambda error, blind: error < blind / 4, thorough=True,
    ),
    Small(
        2, "examples/seismic_3d.py", "--shape 16 20 22 --layer 3 --shots 2 2 --encoded 2 --receivers 5 --steps 32"
        " --recorded 4 --iterations 1 2 --products 2 --pairs 1 --least 0.6 --groups 2 --picture picture.png",
        r"lowered to (\S+),.*\nL-BFGS.*\n.*lowered to (\S+),", lambda newton, quasi: newton < 0.6 and quasi < 0.6,
        thorough=True,
    ),
    Small(
        2, "examples/seismic_inversion.py", "--shape 20 22 --shots 2 --batch 1 --steps 50 --iterations 1 --least 9"
        " --picture picture.png",
        r"misfit lowered to (\S+)", lambda misfit: misfit < 0.2, thorough=True,
    ),
    Small(
        2, "examples/shallow_water.py", "--cells 12 18 --hours 3 --iterations 2 --least 1 --picture picture.png",
        r"guess (\S+), analysis (\S+)", lambda guess, analysis: analysis < guess / 3, thorough=True,
    ),
    Small(
        2, "examples/particles.py", "--cells 16 --per-cell 6 --steps 12 --iterations 3 --most 1 --picture picture.png",
        r"derivative (\S+), by a central difference (\S+)", is_close(1e-5), thorough=True,
    ),
    Small(
        2, "examples/sir_vi.py", "--n_agents 150 --n_timesteps 12 --n_epochs 3 --n_samples_per_epoch 5",
        r"counts: (\S+) in the first epochs, (\S+) in the last", lambda first, last: last <= first, thorough=True,
    ),
    Small(
        2, "examples/taylor_green.py", "--points 12 --coarse 4 8 8 --steps 3 --iterations 2 --least 0"
        " --picture picture.png",
        r"energy after ten steps (\S+), .*\ngrowth by 3 steps: random (\S+), optimal (\S+),",
        lambda energy, random, optimal: abs(energy - 0.124953) < 1e-6 and optimal > random,
        thorough=True,
    ),
    Small(
        2, "examples/terrain_inversion.py", "--coarsen 12 --wells 1 --before 8 --iterations 8 --least 0",
        r"correlation with the true log κ +(\S+)", lambda correlation: correlation > 0.5,
        thorough=True,
    ),
    Small(
        2, "examples/triangular_shallow_water.py", "--seconds 20 --iterations 1 --most 9 --picture picture.png",
        r"derivative (\S+), central difference (\S+)", is_close(1e-4), thorough=True,
    ),
    Small(
        2, "examples/topology_3d.py", "--elements 12 6 6 --iterations 5 --most 1 --picture picture.png",
        r"compliance (\S+) -> (\S+) in 5 iterations", lambda first, last: last < first / 2,
        thorough=True,
    ),
]  # fmt: skip


def jobs() -> Iterator[ParameterSet]:
    """Yield the runs in jobs: those on as many ranks."""
    alike: dict[tuple[int, bool], list[Small]] = {}
    for run in RUNS:
        alike.setdefault((run.ranks, run.thorough), []).append(run)
    for (ranks, thorough), group in alike.items():
        for i in range(0, len(group), TOGETHER):
            name = f"{ranks} ranks, from {Path(group[i].program).stem} on"
            yield pytest.param(group[i : i + TOGETHER], marks=[pytest.mark.thorough] if thorough else [], id=name)


@pytest.mark.parametrize("runs", list(jobs()))
def test_small_problems(
    runs: list[Small], mpirun: Callable[..., CompletedProcess], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    programs = [tmp_path / Path(run.program).stem / Path(run.program).name for run in runs]
    for program in programs:  # with its data, and the examples that it imports
        shutil.copytree(request.config.rootpath / "examples", program.parent, ignore=shutil.ignore_patterns("__pycache__"))
    commands = [f"{program} {run.arguments}" for run, program in zip(runs, programs)]
    done = mpirun(runs[0].ranks, "tests/run_in_turn.py", *commands, timeout=200)
    for run, program in zip(runs, programs):
        stdout, stderr = (file.read_text() if file.exists() else "" for file in printed_by(program))
        assert "isn't compiled" not in stderr
        found = re.search(run.pattern, stdout, re.MULTILINE)
        assert found, (run.program, stdout, stderr, done.stderr)
        assert run.is_right(*map(float, found.groups())), (run.program, stdout)
        (picture,) = program.parent.rglob("*.png")
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert done.returncode == 0, done.stdout + done.stderr


def printed_by(program: Path) -> list[Path]:
    return [Path(f"{program}.{kind}") for kind in ("stdout", "stderr")]
