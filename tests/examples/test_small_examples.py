"""The small examples print what their closed forms say, on the ranks of their first lines and on others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

pytestmark = pytest.mark.launches

Run = Callable[..., CompletedProcess]
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]?\d+)?")


def lines_of(done: CompletedProcess) -> list[str]:
    """Return what a program printed, once it has ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


def numbers_after(label: str, line: str) -> list[float]:
    """Return the numbers that follow a label in a line, up to the next label."""
    tail = re.split(r"[a-z]{2,}", line.split(label, 1)[1], maxsplit=1)[0]
    return [float(number) for number in NUMBER.findall(tail)]


def check_sum_of_powers(ranks: int, lines: list[str]) -> None:
    first, second = lines
    for line, theta in ((first, 1.0), (second, 0.5)):
        polynomial = np.polynomial.Polynomial(np.ones(ranks))
        assert numbers_after("f = ", line) == pytest.approx([polynomial(theta)], abs=1e-6)
        assert numbers_after("df/dtheta = ", line) == pytest.approx([polynomial.deriv()(theta)], abs=1e-6)
    if ranks == 4:
        assert "f = 4.000000, df/dtheta = 6.000000" in first


def check_solve_cubic(ranks: int, lines: list[str]) -> None:
    (line,) = lines
    roots = np.polynomial.Polynomial(np.append(-1.0, np.ones(ranks - 1))).roots()
    (expected,) = roots.real[(abs(roots.imag) < 1e-9) & (roots.real > 0.0)]
    assert numbers_after("theta = ", line)[0] == pytest.approx(expected, abs=1e-13)
    if ranks == 4:
        assert line.startswith("theta = 0.54368901269207")


def check_reduce_sum(ranks: int, lines: list[str]) -> None:
    assert len(lines) == ranks
    for line in lines:
        assert numbers_after("L = ", line) == [55.0 * ranks * (ranks - 1) / 2]
        assert numbers_after("gradient of a = ", line) == [1.0] * 10


def check_broadcast(ranks: int, lines: list[str]) -> None:
    assert len(lines) == ranks
    for rank, line in enumerate(lines):
        assert numbers_after("L = ", line) == [{2: 20.0, 4: 360.0}[ranks]]
        assert numbers_after("gradient of a = ", line) == [{2: 4.0, 4: 24.0}[ranks] * (rank == ranks - 1)] * 10


def check_send_receive(ranks: int, lines: list[str]) -> None:
    assert ranks == 4
    before = [0.0, 2.0, 8.0, 6.0]  # rank 2's a counts twice, rank 0's not at all
    after = [4.0, 2.0, 4.0, 6.0]  # ranks 0 and 2 both hold what was rank 2's
    for rank, line in enumerate(lines):
        assert numbers_after("J = ", line) == [10.0 * (4 + 1 + 4 + 9)]
        assert numbers_after("gradient before ", line) == [before[rank]] * 10
        assert numbers_after("after ", line) == [after[rank]] * 10


def check_custom_operator(ranks: int, lines: list[str]) -> None:
    n = 8 * ranks
    u = np.sin(1.0 + np.arange(n) ** 2)
    # A periodic ring is diagonal in Fourier space: each wave decays by its own factor in each of the 20 steps.
    decay = (1 - 0.4 * (1 - np.cos(2 * np.pi * np.arange(n) / n))) ** 20
    diffused = np.fft.ifft(decay * np.fft.fft(u)).real
    gradient = 2 * np.fft.ifft(decay * np.fft.fft(diffused)).real
    assert len(lines) == ranks
    for rank, line in enumerate(lines):
        assert numbers_after("J = ", line) == pytest.approx([diffused @ diffused], abs=1e-11)
        assert numbers_after("first cell ", line) == pytest.approx([gradient[8 * rank]], abs=1e-11)


def check_parameter_sweep(ranks: int, lines: list[str]) -> None:
    first, second = lines
    assert first.startswith("48 values")
    assert numbers_after("first zero at", first)[0] == pytest.approx(np.pi / 2, abs=1e-10)
    assert numbers_after("largest error", second)[0] < 1e-10


CHECKS = {
    "examples/sum_of_powers.py": check_sum_of_powers,
    "examples/solve_cubic.py": check_solve_cubic,
    "examples/reduce_sum.py": check_reduce_sum,
    "examples/broadcast.py": check_broadcast,
    "examples/send_receive.py": check_send_receive,
    "examples/custom_operator.py": check_custom_operator,
    "examples/parameter_sweep.py": check_parameter_sweep,
}


@pytest.mark.thorough
def test_on_four_ranks(mpirun: Run, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """All in one job: each start of four ranks costs more than what they do."""
    programs = [shutil.copy(request.config.rootpath / name, tmp_path) for name in CHECKS]
    lines_of(mpirun(4, "tests/run_in_turn.py", *programs))
    for program, check in zip(programs, CHECKS.values(), strict=True):
        check(4, Path(f"{program}.stdout").read_text().splitlines())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, 4) for name in CHECKS]
    + [(name, 2) for name in list(CHECKS)[:4]]
    + [("examples/sum_of_powers.py", 1), ("examples/sum_of_powers.py", 3), ("examples/reduce_sum.py", 1)]
    + [("examples/custom_operator.py", ranks) for ranks in (1, 2, 3)]
    + [("examples/parameter_sweep.py", ranks) for ranks in (1, 3)],
)
def test_by_itself(mpirun: Run, name: str, ranks: int) -> None:
    CHECKS[name](ranks, lines_of(mpirun(ranks, name)))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_coupled_solvers(mpirun: Run, ranks: int) -> None:
    (line,) = lines_of(mpirun(ranks, "examples/coupled_solvers.py", env={"OMP_NUM_THREADS": "1"}))
    assert numbers_after("the model's ", line) == pytest.approx([0.35], abs=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks, mebibytes",
    [pytest.param(1, 1, marks=pytest.mark.thorough), (2, 8), pytest.param(4, 4, marks=pytest.mark.thorough)],
)
def test_halo_deadlock(mpirun: Run, ranks: int, mebibytes: int) -> None:
    lines = lines_of(mpirun(ranks, "examples/halo_deadlock.py", "--mebibytes", mebibytes))
    squares = sum((1 + rank) ** 2 for rank in range(ranks))
    for line, count in zip(lines, (1, mebibytes * 2**17), strict=True):
        assert int(line.split()[0]) == 8 * count
        assert numbers_after("J = ", line)[0] == pytest.approx(count * squares / 2, rel=1e-5)


def test_every_example_names_its_command_and_is_tested(request: pytest.FixtureRequest) -> None:
    folder = request.config.rootpath
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].rglob("test_*.py")))
    for path in sorted((folder / "examples").glob("*.py")):
        name = f"examples/{path.name}"
        assert f'"{name}"' in tests, f"{name} isn't run by a test"
        first_lines = path.read_text().splitlines()[:4]
        assert any(re.fullmatch(rf"    mpiexec -n \d+ python {name}", line) for line in first_lines), name
