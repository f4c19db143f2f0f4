"""What `make bench` makes of benchmarks that reach their aims, that don't, that fail and that don't end."""

from __future__ import annotations

import importlib
import json
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
    monkeypatch.setattr(sys, "argv", ["run.py", "--history", str(tmp_path / "history")])
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
    (path,) = (tmp_path / "history").glob("*.json")
    written = json.loads(path.read_text())
    assert written["commit"][:12] in path.name and written["best"] == [10.0, 5.0, 1.0]
    assert written["figures"][2] == {
        "job": "good.py, 1 rank", "line": "no aim", "value": 12345.6, "state": "memory × 2.5"
    }  # fmt: skip
    assert len(written["figures"]) == 4


def run_of(commit: str, time: float, value: float, **changes: object) -> dict:
    """A run with one figure that varies and one that doesn't."""
    figures = [("wave.py, 1 rank", "gradient", value, "quiet"), ("vi.py, 2 ranks", "speed", 1.9, "memory × 2.0")]
    names = ("job", "line", "value", "state")
    found = {"commit": commit, "changed": False, "time": time, "machine": "one", "best": [], **changes}
    return found | {"figures": [dict(zip(names, figure)) for figure in figures]}


@pytest.mark.few(2)
@pytest.mark.serial
@pytest.mark.parametrize(
    "newest, flagged, code",
    [
        (run_of("e", 9, 1.05), [], 0),
        (run_of("e", 9, 1.2), ["gradient"], 1),  # the median of 0.9, 1.0, 1.1 is 1
        (run_of("e", 9, 0.8), ["gradient"], 1),
        (run_of("e", 9, 1.2, machine="two"), [], 0),  # whose only run before is of another kind
        (run_of("a", 9, 1.2), ["gradient"], 1),  # its own commit doesn't count: the median of 1.0 and 1.1 is 1.05
        (run_of("c", 9, 5.3, machine="three"), [], 0),  # compared with no run
    ],
)
def test_steps_against_the_runs_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, newest: dict, flagged: list, code: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    history = importlib.import_module("history")
    runs = [run_of("a", 1, 0.9), run_of("b", 2, 1.0), run_of("c", 3, 1.1), run_of("d", 4, 5.3, machine="three"), newest]
    runs[3] = {**runs[3], "commit": newest["commit"]} if newest["machine"] == "three" else runs[3]
    for k, run in enumerate(runs):
        (tmp_path / f"{k}.json").write_text(json.dumps(run))
    assert [step.figure.line for step in history.steps(history.read(tmp_path))] == flagged
    picture = tmp_path / "history.png"
    monkeypatch.setattr(sys, "argv", ["history.py", "--folder", str(tmp_path), "--picture", str(picture)])
    with pytest.raises(SystemExit) as ended:
        history.main()
    assert ended.value.code == code and picture.stat().st_size > 1000
    assert f"{len(flagged)} of 2 figures changed by more than 10%" in capsys.readouterr().out


@pytest.mark.serial
def test_steps_while_the_machine_was_slow_are_shown_but_not_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    history = importlib.import_module("history")
    newest = run_of("e", 9, 1.0)
    newest["figures"][1]["value"] = 0.9
    for k, run in enumerate([run_of("a", 1, 1.0), newest]):
        (tmp_path / f"{k}.json").write_text(json.dumps(run))
    monkeypatch.setattr(sys, "argv", ["history.py", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        history.main()
    assert ended.value.code == 0 and "(-53%; memory × 2.0)" in capsys.readouterr().out
