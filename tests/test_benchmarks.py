"""What `make bench` makes of benchmarks that reach their aims, that don't, that fail and that don't end."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PROGRAMS = {
    "good.py": """
report("smaller is better", 1.25, at_most=1.3)
report("larger is better", 1.75, at_least=1.8)
report("no aim", 12345.6)
report_missing("a peer", "peer not installed")
""",
    "bad.py": 'report("before the end", 2, at_most=1)\nraise SystemExit(3)',
    "endless.py": "import time\ntime.sleep(60)",
    "silent.py": "pass",
}


@pytest.mark.serial
@pytest.mark.thorough
def test_all_that_happens_is_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    run, machine = importlib.import_module("run"), importlib.import_module("machine")
    for name, text in PROGRAMS.items():
        imports = f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nfrom reaches import report, report_missing\n"
        (tmp_path / name).write_text(imports + text)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "JOBS", tuple(run.Job(name, 1, 2 if name == "endless.py" else 50) for name in PROGRAMS))
    # Slow memory between the first two programs, and others at work at the end.
    states = [(10.0, 5.0, 1.0), (25.0, 5.0, 1.0), (10.0, 5.0, 1.0), (10.0, 5.5, 1.0), (10.0, 5.0, 0.4)]
    monkeypatch.setattr(machine, "probe", lambda: machine.State(*states.pop(0)))
    monkeypatch.setattr(sys, "argv", ["run.py"])
    run.main()
    lines = [line.split("|")[1:-1] for line in capfd.readouterr().out.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line] for line in lines]
    assert table[2:] == [
        ["smaller is better", "1.25", "≤ 1.3", "yes", "memory × 2.5"],
        ["larger is better", "1.75", "≥ 1.8", "NO", "memory × 2.5"],
        ["no aim", "1.23e+04", "", "", "memory × 2.5"],
        ["a peer", "", "", "peer not installed", "memory × 2.5"],
        ["before the end", "2", "≤ 1", "NO", "memory × 2.5"],
        ["bad.py, 1 rank", "", "", "failed: exit status 3", "memory × 2.5"],
        ["endless.py, 1 rank", "", "", "not finished in 2 s", "quiet"],
        ["silent.py, 1 rank", "", "", "finished", "40% of a core"],
    ]
