"""The script of mutation tests, on a package of two functions of which one is tested by halves."""

import json
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from machine_load import slowdown

HERE = Path(__file__).parent
PACKAGE = '''"""Two functions; this - text is none of their + code."""


def smaller(a: int, b: int) -> bool:
    """Return whether a < b."""
    return a < b


def unused() -> int:
    return 7
'''
TESTS = """import tiny

def test_far_apart():
    assert tiny.smaller(1, 5) and not tiny.smaller(5, 1)
"""
EQUAL = "\ndef test_equal():\n    assert not tiny.smaller(2, 2)\n"
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


@pytest.fixture
def tiny(tmp_path):
    """`tiny(tests)`: the script's outcomes by descriptions, and its exit status."""

    def run(tests, explanation=""):
        for folder in ("tiny", "tests"):
            (tmp_path / "root" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / "tiny" / "__init__.py").write_text(PACKAGE)
        (tmp_path / "root" / "tests" / "test_tiny.py").write_text(tests)
        (tmp_path / "root" / "tests" / "mutants.md").write_text(explanation)
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "mutants.py"), "--root", str(tmp_path / "root"), "--package", "tiny"]
        command += ["--mutants", "2", "--ranks", "1", "--processes", "0", "--report", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100 * slowdown())
        assert (tmp_path / "root" / "tiny" / "__init__.py").read_text() == PACKAGE
        assert report.exists(), done.stdout + done.stderr
        found = json.loads(report.read_text())["mutants"]
        return {mutant["kind"]: (mutant["outcome"], mutant["killer"]) for mutant in found}, done

    return run


@pytest.mark.launches
@pytest.mark.limit(240)
def test_a_mutant_that_a_test_kills_and_survivors(tiny):
    found, done = tiny(TESTS)
    assert found == {"comparison": ("survived", ""), "constant": ("not executed", "")}, done.stdout + done.stderr
    assert done.returncode == 1 and "1 not executed, 1 survived" in done.stdout
    found, done = tiny(TESTS + EQUAL, "- `tiny/__init__.py`: `return 7`: `7` → `8`: nobody calls it.")
    assert found["comparison"] == ("killed", "tests/test_tiny.py::test_equal"), done.stdout + done.stderr
    assert done.returncode == 0 and "not executed, explained" in done.stdout, done.stdout + done.stderr


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
