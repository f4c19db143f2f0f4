"""Every program in README and docs is run whole, under its ranks, and does what the page says.

Those of `FIRST` run in `make test`; the others with `--thorough`, in `make test-docs` and in `make examples`.
"""

from __future__ import annotations

import importlib
import json
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import shown_programs
from _pytest.mark import ParameterSet
from machine_load import slowdown
from shown_programs import PageError, pictures_of, programs_of

pytestmark = pytest.mark.unguarded

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SHOWN = {name: programs_of(page.read_text(), name) for page, name in zip(PAGES, NAMES)}
PROGRAMS = [program for programs, _ in SHOWN.values() for program in programs]
# By the names of programs: the program with the snippet that saves its picture, and the picture's name.
DRAWING = {
    program.name: (program, picture) for name in NAMES for program, picture in pictures_of((ROOT / name).read_text(), name)
}
NOTEBOOKS = [name for name in NAMES if "```{notebook}" in (ROOT / name).read_text()]
SNIPPETS = [(name, text) for name, (_, snippets) in SHOWN.items() for text in snippets]

# Pages whose programs each run of the tests runs.
FIRST = ("README.md", "docs/start/first_gradient.md", "docs/start/tutorial.md")
ALONE = ("part_of_a_job.py", "unreset.py")  # other ranks' world; one rank raises while the other waits
# These take more than half a second. They run with `--thorough`, and with `make examples`: alone, like all others.
SLOW = (
    "coefficient.py", "coin.py", "conductivity.py", "cooling.py", "correlated.py", "counted.py", "cubic.py",
    "currents.py", "decay_fit.py", "fit.py", "four_d_var.py", "implicit_heat.py", "line.py", "many_fits.py", "neurons.py",
    "outbreak_fit.py", "outbreak_grid.py", "ported_heat.py", "receptor.py", "release.py", "rod_on_ranks.py",
    "rod_samples.py", "root_block.py", "several_starts.py", "smooth.py", "time_loop.py", "weight.py", "wells.py",
)  # fmt: skip
# Their programs import one another, and packages of `make recipes`.
RECIPES = ("docs/howto/samplers_and_optimizers.md", "docs/howto/other_frameworks.md")
TUTORIAL = "docs/start/pde_tutorial.md"  # all of its programs run on one number of ranks, and on another
TOGETHER = 70  # programs of one job, which all end without an error or all with one

# What every program takes its time for, on a busy machine too.
PROLOGUE = "import autograd.numpy\nimport mpiad\n"
PAGE = """
```python
# mpiexec -n 2 python total.py
from mpiad import mpi_allreduce, mpi_print

mpi_print(mpi_allreduce(1.5))
```
```text
3.0
3.0
```
"""
WRONG_PAGE = """
```python
# mpiexec -n 2 python wrong.py
from mpiad import mpi_allreduce

mpi_allreduce("a")
```
```text
TypeError: mpi_allreduce: x must be an array
or number
```
"""


def run(program: shown_programs.Program, mpirun, tmp_path: Path) -> None:
    """Run a program and compare; an AssertionError where it does something else than the page says."""
    if not program.ends:
        with pytest.raises(pytest.fail.Exception, match="no end after"):
            # On a quiet machine, as limits are given: the launcher makes them longer by the load.
            mpirun(program.ranks, program.text, timeout=1.0 + 2 * seconds_of_a_start(mpirun))
        return
    check(program, job_of(program, mpirun, tmp_path))


def seconds_of_a_start(mpirun, measured: list[float] = []) -> float:  # noqa: B006 - measured once
    """Return how long two ranks take to start, on a quiet machine."""
    if not measured:
        start = time.monotonic()
        mpirun(2, PROLOGUE)
        measured.append((time.monotonic() - start) / slowdown())
    return measured[0]


def job_of(program: shown_programs.Program, mpirun, tmp_path: Path) -> CompletedProcess:
    """Run a program that ends under its own name, which errors show, and where it may write files."""
    path = tmp_path / program.name
    for other in SHOWN[program.page][0] if program.page in RECIPES else [program]:
        (tmp_path / other.name).write_text(other.text)
    return mpirun(program.ranks, path, cwd=tmp_path, timeout=200 if program.page in RECIPES else 40)


def check(program: shown_programs.Program, job: CompletedProcess) -> None:
    compare(program, job.stdout, job.stderr)
    assert (job.returncode != 0) == bool(program.error), (program.page, program.name, job.returncode)


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    """Return a text without its numbers and blanks, and the numbers."""
    number = r"-?\d+(?:\.\d*)?"
    return re.sub(number, " ", text).split(), [float(value) for value in re.findall(number, text)]


def compare(program: shown_programs.Program, stdout: str, stderr: str) -> None:
    """Compare what a program that ends has printed with what the page says."""
    if program.error:
        assert program.error in shown_programs.errors_in(stderr), (program.page, program.name)
        assert stdout.startswith(program.stdout), (program.page, program.name)
    elif program.page in RECIPES and "sampl" in program.text:
        # A chain is another one with other releases of the packages, and on other processors.
        (words, numbers), (expected, values) = map(words_and_numbers, (stdout, program.stdout))
        assert (stderr, words) == ("", expected), (program.page, program.name)
        assert numbers == pytest.approx(values, rel=0.3, abs=0.05), (program.page, program.name)
    else:
        assert (stderr, stdout) == ("", program.stdout), (program.page, program.name)


def is_alone(program: shown_programs.Program) -> bool:
    return program.name in ALONE or not program.ends or program.page in RECIPES


def in_turn() -> Iterator[ParameterSet]:
    """Yield the programs that end, at most `TOGETHER` to a job: those on as many ranks, and with errors or without."""
    alike: dict[tuple, list[shown_programs.Program]] = {}
    for program in PROGRAMS:
        if not is_alone(program) and program.name not in SLOW and program.page != TUTORIAL:
            alike.setdefault((program.page not in FIRST, program.ranks, bool(program.error)), []).append(program)
    for (later, ranks, _), group in sorted(alike.items()):
        for job in (group[i : i + TOGETHER] for i in range(0, len(group), TOGETHER)):
            yield pytest.param(
                job, marks=[pytest.mark.thorough] if later else [], id=f"{ranks} ranks, from {job[0].name} on"
            )


def run_in_turn(ranks: int, programs: list[shown_programs.Program], mpirun, folder: Path) -> None:
    """Run programs, with the snippets that save their pictures, in one job; compare what each does with its page."""
    paths = []
    for program in programs:
        drawing, _ = DRAWING.get(program.name, (program, ""))
        paths.append(folder / program.name.removesuffix(".py") / program.name)
        paths[-1].parent.mkdir()
        paths[-1].write_text(drawing.text)
    raising = ["--raising"] if programs[0].error else []
    job = mpirun(ranks, "tests/run_in_turn.py", *raising, *paths, timeout=200)
    for program, path in zip(programs, paths):
        compare(program, Path(f"{path}.stdout").read_text(), Path(f"{path}.stderr").read_text())
        if program.name in DRAWING:
            check_picture(program, path.parent)
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")


def check_picture(program: shown_programs.Program, folder: Path) -> None:
    _, picture = DRAWING[program.name]
    assert (folder / picture).stat().st_size > 0
    assert (ROOT / "docs" / "images" / "pages" / picture).exists()


@pytest.mark.launches
@pytest.mark.limit(240)
@pytest.mark.parametrize("programs", list(in_turn()))
def test_shown_programs_do_what_their_pages_say(programs, mpirun, tmp_path):
    run_in_turn(programs[0].ranks, programs, mpirun, tmp_path)


def alone() -> Iterator[ParameterSet]:
    """Yield all programs; most are run in turn with others, and by themselves once more."""
    for program in PROGRAMS:
        marks = []
        if program.page in RECIPES:
            marks = [pytest.mark.limit(240), pytest.mark.skipif(not find_spec("umbridge"), reason="run by make recipes")]
        yield pytest.param(program, marks=marks, id=f"{program.page}:{program.name}")


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.parametrize("program", list(alone()))
def test_a_shown_program_does_what_the_page_says(program, mpirun, tmp_path):
    run(program, mpirun, tmp_path)


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.limit(120)
@pytest.mark.parametrize("ranks", [2, 1, 3, 4])
def test_the_pde_tutorial_prints_the_same_on_any_number_of_ranks(ranks, mpirun, tmp_path):
    run_in_turn(ranks, SHOWN[TUTORIAL][0], mpirun, tmp_path)


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in DRAWING if name in SLOW])
def test_a_snippet_draws_the_picture_that_its_page_shows(name, mpirun, tmp_path):
    (shown,) = (program for program in PROGRAMS if program.name == name)
    run_in_turn(shown.ranks, [shown], mpirun, tmp_path)


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.limit(240)
def test_pages_run_as_notebooks(mpirun, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_extensions")
    programs = []
    for name in NOTEBOOKS:
        notebook = json.loads(importlib.import_module("notebooks").notebook((ROOT / name).read_text()))
        code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
        raising = [program.text.strip() for program in SHOWN[name][0] if program.error]
        assert len(code) >= len(SHOWN[name][0])
        programs.append(tmp_path / Path(name).stem / "notebook.py")
        programs[-1].parent.mkdir()
        programs[-1].write_text("\n".join(cell for cell in code if not any(text.endswith(cell) for text in raising)))
    job = mpirun(1, "tests/run_in_turn.py", *programs, timeout=200)
    assert job.returncode == 0, "".join(Path(f"{path}.stderr").read_text() for path in programs)


def test_snippets_are_python():
    for page, text in SNIPPETS:
        compile(text, page, "exec")


def test_names_of_programs_are_unique():
    names = [program.name for program in PROGRAMS]
    assert set(SLOW) < set(names)
    assert len(names) == len(set(names)) > 0


@pytest.mark.launches
def test_a_page_is_believed_only_where_its_program_prints_that(mpirun, tmp_path):
    ((program,), _) = programs_of(PAGE, "page.md")
    job = job_of(program, mpirun, tmp_path)
    check(program, job)
    program.stdout = "3.0\n3.1\n"
    with pytest.raises(AssertionError):
        check(program, job)


@pytest.mark.launches
def test_a_page_is_believed_only_where_its_program_raises_that(mpirun, tmp_path):
    ((program,), _) = programs_of(WRONG_PAGE, "page.md")
    assert program.error == "TypeError: mpi_allreduce: x must be an array or number"
    with pytest.raises(AssertionError):
        run(program, mpirun, tmp_path)


@pytest.mark.launches
def test_a_program_that_ends_is_not_one_that_never_ends(mpirun, tmp_path):
    ((program,), _) = programs_of(PAGE.replace("3.0\n3.0", "(never ends)"), "page.md")
    with pytest.raises(pytest.fail.Exception):
        run(program, mpirun, tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("# mpiexec -n 2 python total.py\n", "", "not marked"),
        ("```python", "```python example", "not marked"),
        ("```python", "```py", "not marked"),
        ("```text", "so it prints\n```text", "isn't followed"),
        ("```text", "```console", "isn't followed"),
    ],
)
def test_python_that_nobody_runs_is_refused(before, after, complaint):
    with pytest.raises(PageError, match=complaint):
        programs_of(PAGE.replace(before, after), "page.md")
