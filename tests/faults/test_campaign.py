"""The campaign can fail: right programs, silent ones, and ones that hang are reported."""

from __future__ import annotations

import re

import launch
import pytest
import wrong_programs
from wrong_programs import HeaderError

WRONG = """# Rank 1 raises.
# raises: ArithmeticError
# says: rank 1 ended the job.*{here}

import mpiad

def work():
    raise ArithmeticError("seven")  # here

if mpiad.mpi_rank() == 1:
    work()
mpiad.mpi_barrier()
"""


@pytest.fixture
def reported(tmp_path):
    """`reported(text)` returns what the campaign has against a program."""

    def run(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return wrong_programs.complaints(wrong_programs.read(path))

    return run


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The end of WRONG: what a header says is a comment, so that one run is compared with all headers."""
    path = tmp_path_factory.mktemp("wrong") / "program.py"
    path.write_text(WRONG)
    return launch.run_captured(2, [str(path)], limit=20, mpiexec=True)


@pytest.fixture
def missed(tmp_path, job):
    """`missed(text)` returns what the end of WRONG lacks of what the header of a text says."""

    def compare(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return wrong_programs.missing(wrong_programs.read(path), job)

    return compare


@pytest.mark.launches
def test_a_wrong_program_is_as_it_must_be(missed):
    assert missed(WRONG) == []


@pytest.mark.launches
def test_a_right_program_is_reported(reported):
    found = reported(WRONG.replace("== 1", "== 2"))
    assert found[:2] == ["it ended with exit 0", "it didn't raise ArithmeticError"]


@pytest.mark.launches
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rank 1 ended", "rank 0 ended"),
        ("# raises: ArithmeticError", "# raises: ValueError"),
        ("# says: ", "# prints: "),
        ("{here}", "program.py:9"),
    ],
)
def test_a_missing_sentence_is_reported(before, after, missed):
    assert "it didn't" in missed(WRONG.replace(before, after))[0]


@pytest.mark.thorough
@pytest.mark.launches
def test_those_of_one_job_are_reported_apart(tmp_path):
    head = "# All ranks raise.\n# together: yes\n# raises: ArithmeticError\n# says: {here}.*seven\n\nimport mpiad\n"
    texts = {
        "as_it_must_be": 'raise ArithmeticError("seven")  # here\n',
        "right": "mpiad.mpi_barrier()  # here\n",
        "silent": "raise ArithmeticError  # here\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(head + text)
    programs = [wrong_programs.read(tmp_path / f"{name}.py") for name in texts]
    (job,) = wrong_programs.jobs(programs)
    found = wrong_programs.complaints_in_turn(job, tmp_path)
    assert [line for line in found if line.endswith(".py:")] == ["right.py:", "silent.py:"]
    assert found[1] == "it didn't raise ArithmeticError"
    assert found.count(r"it didn't say silent\.py(?::|\", line )7\b.*seven") == 1


@pytest.mark.launches
@pytest.mark.thorough
def test_one_that_hangs_is_reported(reported):
    text = WRONG.replace("{here}", "").replace("# raises: ArithmeticError", "# within: 4")
    found = reported(text.replace("    raise", "    __import__('time').sleep(60)\n    raise"))
    assert found[0].startswith("it didn't end within 4 s") and "program.py" in found[0]


@pytest.mark.serial
@pytest.mark.parametrize(
    "text",
    ["import mpiad\n", "# A mistake.\n# sais: x\nimport mpiad\n", "# A mistake.\n# ranks: 2\nimport mpiad\n"],
)
def test_a_program_that_expects_nothing_is_refused(text, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(text)
    with pytest.raises(HeaderError):
        wrong_programs.read(path)


@pytest.mark.serial
def test_places_and_launchers(tmp_path):
    path = tmp_path / "p.py"
    path.write_text("# A mistake.\n# says: at {here}.\n# within: 3\nx = 1  # here\n")
    (pattern,) = wrong_programs.read(path).says
    assert re.search(pattern, "at p.py:4.") and re.search(pattern, 'at p.py", line 4.')
    assert not re.search(pattern, "at p.py:5.") and not re.search(pattern, "at p.py:44.")
    other = {"MPICH": "Open MPI", "Open MPI": "MPICH"}[wrong_programs.MPI.get_vendor()[0]]
    path.write_text(f"# A mistake.\n# says: a\n# says on {other}: b\n")
    assert wrong_programs.read(path).says == ["a"]
