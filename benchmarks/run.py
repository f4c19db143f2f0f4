"""All benchmarks, one after the other, and one table of what they aim at.

    python benchmarks/run.py [--only primitives.py vi.py]

or `make bench`. Each is a job of its own, with its ranks and its share of half an hour: one that fails, or takes longer, is
a line of the table, and the next begins. A benchmark prints its own tables as it runs, and tells this program what it aims
at (`reaches.py`). Before and after each the machine is looked at (`machine.py`), and the table says where it was slower
than at its best in this run. The exit status is 0 whatever the figures are. The figures are also written to
`benchmarks/history/`, in a file per commit and run, which `history.py` compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import history
import machine
import reaches

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "tests" / "launch.py"
EXPIRED = 124  # what the launcher returns where the limit has passed


class Job(NamedTuple):
    """A benchmark, and how it is started.

    Attributes
    ----------
    program : str
    ranks : int
        1: without mpiexec.
    limit : float
        Seconds, two to three times what it takes on a quiet machine. The whole run takes about half an hour.
    arguments : str
    """

    program: str
    ranks: int
    limit: float
    arguments: str = ""

    @property
    def name(self) -> str:
        return f"{self.program}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


JOBS = (
    Job("primitives.py", 2, 90),
    Job("gradient_cost.py", 1, 180),
    Job("gradient_cost.py", 2, 90),
    Job("implicit.py", 1, 120),
    Job("posterior.py", 1, 60),
    Job("hippylib_poisson.py", 1, 120, "--methods hpcn hmala dr --scale 0.25"),
    Job("aristoff_bangerth.py", 2, 120, "--samples 500 --nuts 0 --informed 0"),
    Job("real_time_posterior.py", 2, 60),
    Job("sampling.py", 1, 450, "--cells 16 64 --samples 300 --long 1000"),
    Job("local_adjoints.py", 1, 80),
    Job("time_loops.py", 2, 60),
    Job("strong_scaling.py", 1, 120, "--cells 20 256 --rounds 1"),
    Job("beside_peers.py", 1, 180, "--rounds 2"),
    Job("guard.py", 2, 60),
    # Peers take minutes to compile their programs, again in each round; 10⁵ systems are in ensemble_ranks.py.
    Job("ensemble.py", 1, 360, "--n 1000 10000 --rounds 1 --budget 1.5"),
    Job("ensemble_choice.py", 1, 600, "--rounds 1 --cold-rounds 1"),
    Job("ensemble_stragglers.py", 1, 60),
    Job("ensemble_ranks.py", 2, 310, "--repeats 3"),
    Job("ensemble_fits.py", 2, 120),
    Job("ensemble_fits.py", 1, 120, "--pooled"),
    Job("ensemble_events.py", 1, 120, "--repeats 3"),
    # Small ones to two tolerances; by itself it measures all.
    Job("ensemble_stiff.py", 1, 400, "--systems robertson oregonator hires --count 1000 --peer-count 20 --rtol 1e-4 1e-7"),
    Job("ensemble_generated.py", 1, 120, "--conditions 100 --repeats 2"),
    Job("ensemble_sparse.py", 1, 90, "--counts 8 --repeats 3"),
    Job("optimize.py", 2, 70, "--variables 10000000"),
    Job("linalg.py", 1, 40),
    Job("linalg.py", 2, 40),
    Job("root_driven.py", 2, 40),
    Job("training.py", 2, 40),
    Job("networks.py", 1, 180, "--rounds 2 --budget 0.3"),
    Job("vi.py", 2, 50),
    Job("vi_peers.py", 1, 120),
    Job("multigrid.py", 1, 150),
    Job("multigrid.py", 2, 60),
    Job("inverse.py", 1, 120, "--sizes 16 64"),
    Job("domain.py", 2, 30),
    Job("redistribution.py", 2, 20),
    Job("redistribution.py", 5, 60),
    Job("fft.py", 1, 120, "--quick"),
    Job("fft.py", 2, 90, "--quick"),
    Job("wave.py", 1, 60),
    Job("wave_peers.py", 1, 150, "--budget 0.5"),
    Job("weak_scaling.py", 2, 60),
    Job("shallow_water.py", 1, 300, "--budget 0.5"),
    Job("triangular_shallow_water.py", 1, 90, "--refine 1 --rounds 5"),
    Job("triangular_shallow_water.py", 2, 60, "--refine 1 --rounds 5"),
    Job("optimize_peers.py", 2, 40),
    Job("topology.py", 1, 120, "--elements 24 12 12 --iterations 5"),
    Job("topology.py", 2, 90, "--elements 24 12 12 --iterations 5"),
)


class Row(NamedTuple):
    """A line of the table, and the job that it is of, by number."""

    job: int
    line: str
    figure: float | None
    reach: str
    reached: str


def run(job: Job, figures: Path) -> int:
    """Run a benchmark, whose figures go to a file, and return its exit status."""
    command = [sys.executable, str(LAUNCH), "--ranks", str(job.ranks), "--limit", str(job.limit), "--"]
    command += [str(HERE / job.program), *job.arguments.split()]
    return subprocess.run(command, env={**os.environ, reaches.FILE: str(figures)}).returncode


def rows_of(number: int, job: Job, figures: Path, status: int) -> list[Row]:
    """Return what a benchmark has said of its figures, and how it ended where it didn't end well."""
    said = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    rows = [row(number, found) for found in said]
    if status:
        how = f"not finished in {job.limit:g} s" if status == EXPIRED else f"failed: exit status {status}"
        rows.append(Row(number, job.name, None, "", how))
    return rows or [Row(number, job.name, None, "", "finished")]


def row(number: int, found: dict) -> Row:
    """Return the line of one figure."""
    if "why" in found:
        return Row(number, found["line"], None, "", found["why"])
    figure, most, least = found["figure"], found["at_most"], found["at_least"]
    reach = f"≤ {most:.4g}" if most is not None else f"≥ {least:.4g}" if least is not None else ""
    good = (most is None or figure <= most) and (least is None or figure >= least)
    return Row(number, found["line"], figure, reach, ("yes" if good else "NO") if reach else "")


def print_table(rows: list[Row], states: list[machine.State]) -> None:
    """Print all rows, each with the state that the machine was in before or after its job, the worse of the two."""
    best = machine.best_of(states)
    cells = [("line", "figure", "reach", "reached", "machine")]
    for each in rows:
        figure = "" if each.figure is None else f"{each.figure:.3g}"
        cells.append(
            (each.line, figure, each.reach, each.reached, machine.described(states[each.job : each.job + 2], best))
        )
    widths = [max(len(cell[k]) for cell in cells) for k in range(5)]
    cells.insert(1, tuple("-" * width for width in widths))
    for cell in cells:
        print("| " + " | ".join(text.ljust(width) for text, width in zip(cell, widths)) + " |")
    reached, missed = (sum(each.reached == word for each in rows) for word in ("yes", "NO"))
    print(f"{reached} of {reached + missed} reaches are reached.")
    work = f"{best.memory:.1f} µs for a pass over 1.2 MB, {best.arithmetic:.1f} µs for 2,000 exponentials"
    print(f"The machine at its best: {work}, {best.share:.0%} of a core.")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=sorted({job.program for job in JOBS}), help="these benchmarks alone")
    parser.add_argument("--history", type=Path, default=history.FOLDER, help="the folder to which the figures are written")
    options = parser.parse_args()
    only = options.only
    jobs = [job for job in JOBS if only is None or job.program in only]
    rows: list[Row] = []
    states = [machine.probe()]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            print(f"\n==== {job.name} {job.arguments}".rstrip() + f" ({number + 1} of {len(jobs)}) ====", flush=True)
            figures, start = Path(folder) / str(number), time.monotonic()
            status = run(job, figures)
            rows += rows_of(number, job, figures, status)
            states.append(machine.probe())
            print(f"---- {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n==== all, in {(time.monotonic() - begin) / 60:.0f} minutes ====")
    print_table(rows, states)
    best = machine.best_of(states)
    figures = [
        history.Figure(
            jobs[each.job].name, each.line, each.figure, machine.described(states[each.job : each.job + 2], best)
        )
        for each in rows
        if each.figure is not None
    ]
    print(f"written to {history.write(options.history, figures, best)}")


if __name__ == "__main__":
    main()
