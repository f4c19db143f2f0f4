"""The script of mutation tests, on a package of three functions: one is tested, one in part, one not at all."""

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from machine_load import slowdown

HERE = Path(__file__).parent
PACKAGE = '''"""Three functions; this - text is none of their + code."""


def difference(a: int, b: int) -> int:
    """Return a - b."""
    return a - b


def smaller(a: int, b: int) -> bool:
    """Return whether a < b."""
    return a < b


def unused() -> int:
    return 7
'''
TESTS = """import tiny

def test_difference():
    assert tiny.difference(5, 3) == 2

def test_far_apart():
    assert tiny.smaller(1, 5) and not tiny.smaller(5, 1)
"""
EXPLANATIONS = [
    "`tiny/__init__.py`: `return a < b`: `<` → `<=`: never called with equal numbers.",
    "`tiny/__init__.py`: `return 7`: `7` → `8`: never called.",
]
OPERATORS = """
def f(x, n):
    total = -x[0] + n  # a sign - in a comment
    for k in range(1, n):
        total += x[k:n]
    if not n or total is not None:
        total.value = 2.5
        raise ValueError(f"{n - 1} is wrong")
    return "double y = x * y;"
"""


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.limit(240)
def test_a_mutant_is_killed_one_survives_and_one_is_not_executed(tmp_path):
    root, report = tmp_path / "root", tmp_path / "report.json"
    for name, text in (("tiny/__init__.py", PACKAGE), ("tests/test_tiny.py", TESTS), ("tests/mutants.md", EXPLANATIONS[1])):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    command = [sys.executable, str(HERE / "mutants.py"), "--root", str(root), "--package", "tiny", "--mutants", "3"]
    command += ["--ranks", "1", "--processes", "0", "--report", str(report)]

    def run():
        done = subprocess.run(command, capture_output=True, text=True, timeout=100 * slowdown())
        found = {mutant["kind"]: mutant for mutant in json.loads(report.read_text())["mutants"]}
        outcomes = {kind: mutant["outcome"] for kind, mutant in found.items()}
        expected = {"sign": "killed", "comparison": "survived", "constant": "not executed"}
        assert outcomes == expected, done.stdout + done.stderr
        assert found["sign"]["killer"] == "tests/test_tiny.py::test_difference"
        assert "1 killed, 1 not executed, 1 survived" in done.stdout and "not executed, explained" in done.stdout
        assert (root / "tiny" / "__init__.py").read_text() == PACKAGE
        return done.returncode

    assert run() == 1
    # The report is complete: the tests aren't run again but for the killer.
    (root / "tests" / "mutants.md").write_text("\n".join(EXPLANATIONS))
    assert run() == 0


@pytest.mark.serial
def test_each_kind_of_change(tmp_path):
    (tmp_path / "f.py").write_text(OPERATORS)
    source = mutants.Source(tmp_path, tmp_path / "f.py")
    found = {(mutant.kind, mutant.line, mutant.before, mutant.after) for mutant in source.mutants()}
    assert found == {
        ("sign", 3, "+", "-"), ("sign", 3, "-x[0]", "x[0]"), ("index", 3, "0", "1"), ("constant", 3, "0", "1"),
        ("bound", 4, "n", "n - 1"), ("constant", 4, "1", "2"), ("sign", 5, "+", "-"), ("bound", 5, "k", "k + 1"),
        ("bound", 5, "n", "n + 1"), ("comparison", 6, "or", "and"), ("comparison", 6, "not n", "n"),
        ("comparison", 6, "is not", "is"), ("statement", 7, "total.value = 2.5", "pass"), ("constant", 7, "2.5", "5.0"),
        ("statement", 8, 'raise ValueError(f"{n - 1} is wrong")', "pass"), ("kernel", 9, "*", "/"),
    }  # fmt: skip
    for mutant in source.mutants():
        assert source.is_valid(mutant), mutant
        changed = source.changed(mutant).split(b"\n")
        others = [line for k, line in enumerate(OPERATORS.encode().split(b"\n"), 1) if k != mutant.line]
        assert [line for k, line in enumerate(changed, 1) if k != mutant.line] == others


@pytest.mark.serial
def test_each_large_package_has_a_mutant_and_a_seed_always_draws_the_same(tmp_path):
    for name, lines in (("small", 5), ("large", 101), ("larger", 303)):
        (tmp_path / "mpiad" / name).mkdir(parents=True)
        (tmp_path / "mpiad" / name / "f.py").write_text("".join(f"x{k} = {k} + y\n" for k in range(lines)))
    files = {s.name: s for s in (mutants.Source(tmp_path, f) for f in sorted(tmp_path.rglob("*.py")))}
    drawn = mutants.draw(files, 8, 1)
    assert [m.file for m in drawn] == ["mpiad/large/f.py"] * 2 + ["mpiad/larger/f.py"] * 6
    assert drawn == mutants.draw(files, 8, 1) != mutants.draw(files, 8, 2)
