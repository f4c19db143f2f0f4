"""The figures of former runs of `make bench`, by commit: which have changed.

    python benchmarks/history.py [--picture history.png] [--last 8] [--step 0.1]

`run.py` writes a JSON file per run. A figure of the newest run is compared with the median of the same figure in the last
runs on machines of the same kind (processor and number of cores), of other commits. It is flagged if it differs by more
than the step of 10 %; a flag in a line that isn't "quiet" says little. The exit status is the number of flags in quiet
lines, 99 at most.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "history"
QUIET = "quiet"


class Figure(NamedTuple):
    """A figure of one run.

    Attributes
    ----------
    job, line : str
        The benchmark with its ranks, and what was measured.
    value : float
    state : str
        The state of the machine meanwhile, "quiet" if nothing slowed it down.
    """

    job: str
    line: str
    value: float
    state: str


class Step(NamedTuple):
    """A figure that differs from the median of the runs before, by more than the step."""

    figure: Figure
    median: float
    runs: int


def kind_of_machine() -> str:
    """Return the processor and the number of cores."""
    model = platform.processor() or platform.machine()
    if (file := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in file.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def commit() -> tuple[str, bool]:
    """Return the commit of the tree, and whether files differ from it; "unknown" outside of a repository."""
    found = [
        subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True)
        for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    if any(each.returncode for each in found):
        return "unknown", True
    return found[0].stdout.strip(), bool(found[1].stdout.strip())


def write(folder: Path, figures: list[Figure], best: tuple[float, ...]) -> Path:
    """Write the figures of a run to a new file and return its path; `best`: the state of the machine at its best."""
    sha, changed = commit()
    seconds = time.time()
    run = {
        "commit": sha,
        "changed": changed,
        "time": seconds,
        "machine": kind_of_machine(),
        "best": list(best),
        "figures": [figure._asdict() for figure in figures],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(seconds))}-{sha[:12]}{'-changed' * changed}.json"
    path.write_text(json.dumps(run, indent=1) + "\n")
    return path


def read(folder: Path) -> list[dict[str, Any]]:
    """Return all runs, the oldest first."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda run: run["time"])


def by_name(run: dict[str, Any]) -> dict[tuple[str, str], Figure]:
    """Return the figures of a run."""
    return {(each["job"], each["line"]): Figure(**each) for each in run["figures"]}


def comparable(runs: list[dict[str, Any]], last: int) -> list[dict[str, Any]]:
    """Return the last runs before the newest one on the same kind of machine, without those of its own commit."""
    *before, newest = runs
    same = [run for run in before if run["machine"] == newest["machine"]]
    return [run for run in same if newest["changed"] or run["commit"] != newest["commit"]][-last:]


def steps(runs: list[dict[str, Any]], last: int = 8, step: float = 0.1) -> list[Step]:
    """Return the figures of the newest run that differ from the median of the runs before."""
    before = [by_name(run) for run in comparable(runs, last)]
    found = []
    for name, figure in by_name(runs[-1]).items():
        if values := [run[name].value for run in before if name in run]:
            median = statistics.median(values)
            if abs(figure.value - median) > step * abs(median):
                found.append(Step(figure, median, len(values)))
    return found


def draw(runs: list[dict[str, Any]], flagged: list[Step], path: Path, last: int) -> None:
    """Draw each figure of the newest run over the runs on its kind of machine, relative to their median."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [*comparable(runs, last), runs[-1]]
    names = [step.figure[:2] for step in flagged] or list(by_name(runs[-1]))
    fig, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for name in names:
        points = [(k, run[name].value) for k, run in enumerate(map(by_name, shown)) if name in run]
        median = statistics.median(value for _, value in points)
        if median:
            axes.plot([k for k, _ in points], [value / median for _, value in points], "o-", label=" – ".join(name))
    axes.axhspan(0.9, 1.1, color="0.9", zorder=0)
    axes.set_xticks(range(len(shown)), [run["commit"][:8] for run in shown], rotation=60)
    axes.set_ylabel("figure / median of the runs")
    if len(names) <= 12:
        axes.legend(fontsize="x-small")
    fig.savefig(path, dpi=120)
    pyplot.close(fig)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--last", type=int, default=8, help="how many runs the median is of")
    parser.add_argument("--step", type=float, default=0.1, help="the smallest relative change that is flagged")
    parser.add_argument("--picture", type=Path, help="a file for a picture of the figures that have changed, or of all")
    options = parser.parse_args()
    runs = read(options.folder)
    if not runs:
        sys.exit(f"{options.folder} has no runs: `make bench` writes one")
    flagged, newest = steps(runs, options.last, options.step), runs[-1]
    before = comparable(runs, options.last)
    print(f"{newest['commit'][:12]} on {newest['machine']}, compared with {len(before)} runs of other commits")
    for figure, median, count in flagged:
        change = f"{figure.value / median - 1.0:+.0%}" if median else "from zero"
        print(f"{figure.job}: {figure.line}: {figure.value:.4g}, median {median:.4g} of {count} ({change}; {figure.state})")
    print(f"{len(flagged)} of {len(newest['figures'])} figures changed by more than {options.step:.0%}")
    if options.picture is not None:
        draw(runs, flagged, options.picture, options.last)
    sys.exit(min(sum(step.figure.state == QUIET for step in flagged), 99))


if __name__ == "__main__":
    main()
