"""The choice of compile="auto" beside both of its ways, kernels and arrays, and beside SciPy and diffrax, on one core.

    python benchmarks/ensemble_choice.py [--cases "one Lotka-Volterra solve" ...] [--rounds 5] [--cold-rounds 2]
        [--no-peers]

`benchmarks/choice/systems.py` says what is solved; and the ten models of `tests/ensemble/test_biology_models.py`, for which
only cold solves are timed. Cold solves are the first ones of new processes without kernels on
disk. For the other solves kernels are on disk: a process with compile=True has put them there. The first solve of a process
is timed in new processes, without imports, and later solves in one process, in which the sides alternate; the least of all
times counts. The later solves of "auto" begin after as many as it takes to settle. diffrax runs where `make bench-peers`
has installed it, after its compilation.
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from choice.systems import CASES, Case, run
from reaches import report, report_missing
from scipy.integrate import solve_ivp
from timing import fastest

from mpiad.pytrees import flatten

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "ensemble"))

from test_biology_models import MODELS, by_ensemble  # noqa: E402

import mpiad  # noqa: E402

PEERS = HERE.parent / ".venv-peers" / "bin" / "python"
LIMIT = 300
WAYS: dict[str, Any] = {"auto": "auto", "kernel": True, "arrays": False}
OVER_BETTER, OVER_SCIPY = 1.2, {"RK45": 0.5, "LSODA": 1.0}
SLOW = 20  # A side that takes so many times as long as the fastest is timed once.
# Width, number of layers and of trajectories.
PEER_CASES = {
    "hybrid, 12, gradient": (8, 1, 12), "hybrid, 200, gradient": (8, 1, 200), "MLP of width 24, gradient": (24, 1, 1000),
    "two layers of width 24, gradient": (24, 2, 1000), "two layers of width 64, gradient": (64, 2, 1000),
}  # fmt: skip
# Seconds of the first solve by a kernel, its compilation included.
COLD = {
    "100 species": 5, "100 species, gradient": 10, "100 species, Rodas5P": 8, "100 species, Rodas5P, gradient": 16,
    "POLLU": 3, "POLLU, gradient": 6,
}  # fmt: skip
# The bound on a cold solve by "auto": a factor of the better way, and an addition in seconds.
COLD_FACTOR, COLD_ADDITION = 1.5, 0.3
SETTLING = 300  # solves by "auto", at most
# Objectives of models of biology and, after these, their gradients.
BIOLOGY = {f"{name}{part}": (model, bool(part)) for part in ("", ", gradient") for name, model in MODELS.items()}


def first(name: str, way: str) -> dict[str, Any]:
    """Return the time of the first solve of this process."""
    begin, execution = time.perf_counter(), ""
    if name in BIOLOGY:
        model, is_gradient = BIOLOGY[name]
        loss = lambda x: by_ensemble(model, x, WAYS[way], rtol=1e-6, atol=1e-9)  # noqa: E731
        (mpiad.grad(loss) if is_gradient else loss)(np.log(model.rates))
    else:
        _, execution = run(CASES[name], WAYS[way])
    return {"seconds": time.perf_counter() - begin, "execution": execution}


def by_scipy(case: Case) -> np.ndarray:
    """Return the final state."""
    problem: Any = case.problem
    arguments = lambda t, u: problem.f(u, problem.p, t)  # noqa: E731
    return solve_ivp(arguments, problem.tspan, problem.u0, case.scipy, rtol=case.rtol, atol=case.atol).y[:, -1]


def later(name: str, rounds: int) -> dict[str, Any]:
    """Return the times of later solves of this process, by side, and what "auto" has settled for."""
    case, begin = CASES[name], time.perf_counter()
    execution = ""
    for _ in range(SETTLING):
        _, execution = run(case, "auto")
        if execution == "kernel: in memory" or time.perf_counter() - begin > 20:
            break
    results = [flatten(run(case, way)[0])[0] for way in WAYS.values()]
    for other in results[1:]:
        for x, y in zip(results[0], other):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-9)
    calls = {name: lambda way=way: run(case, way) for name, way in WAYS.items()}
    if case.scipy:
        calls["scipy"] = lambda: by_scipy(case)
    best = dict.fromkeys(calls, np.inf)
    for k in range(rounds):
        for side, call in calls.items():
            # Several in succession: after another side, code and data are outside of the caches.
            if not k or best[side] < SLOW * min(best.values()):
                best[side] = min(best[side], fastest([call], 4 if k else 1)[0])
    return {"execution": execution, **best}


def child(folder: str, *arguments: str, python: str = sys.executable, program: Path = Path(__file__)) -> dict[str, Any]:
    """Return what a process of this benchmark prints."""
    environment = {**os.environ, "MPIAD_CACHE": folder}
    command = [python, str(program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, rounds: int, cold_rounds: int, folder: str, peers: bool) -> None:
    """Measure a case, print its figures and report its ratios."""
    colds = dict.fromkeys(WAYS, np.inf)
    for _ in range(cold_rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as empty:
                colds[way] = min(colds[way], child(empty, "--first", name, way)["seconds"])
    if name in CASES:
        cold = min(colds["kernel"], child(folder, "--first", name, "kernel")["seconds"])
        report(f"{name}, cold, kernel, seconds", cold, at_most=COLD.get(name))
    if cold_rounds:
        print(f"{name}\n  cold: {shown(colds)}", flush=True)
        bound = COLD_FACTOR * min(colds["kernel"], colds["arrays"]) + COLD_ADDITION
        report(f"{name}, cold, auto over 1.5 times the better way + 0.3 s", colds["auto"] / bound, at_most=1.0)
    if not rounds or name in BIOLOGY:
        return
    case = CASES[name]
    firsts = dict.fromkeys(WAYS, np.inf)
    how = ""
    for _ in range(rounds):
        for way in WAYS:
            found = child(folder, "--first", name, way)
            firsts[way] = min(firsts[way], found["seconds"])
            how = found["execution"] if way == "auto" else how
    times = child(folder, "--later", name, "--rounds", str(4 * rounds))
    print(f"{name}\n  cold: kernel {cold:.2f} s\n  first: {shown(firsts)}; {how}")
    print(f"  later: {shown(times)}; {times['execution']}", flush=True)
    for label, each in (("first", firsts), ("later", times)):
        better = min(each["kernel"], each["arrays"])
        report(f"{name}, {label} solve, auto over the better way", each["auto"] / better, at_most=OVER_BETTER)
    if case.scipy:
        line = f"{name}, later solve, auto over {case.scipy}"
        report(line, times["auto"] / times["scipy"], at_most=OVER_SCIPY[case.scipy])
    if name in PEER_CASES and peers:
        line = f"{name}, later solve, auto over diffrax"
        if not PEERS.exists():
            report_missing(line, "peer not installed")
            return
        program = HERE / "choice" / "side_diffrax.py"
        peer = child(folder, *map(str, PEER_CASES[name]), str(4 * rounds), python=str(PEERS), program=program)
        print(f"  diffrax: {1e3 * peer['seconds']:.2f} ms")
        report(line, times["auto"] / peer["seconds"])


def shown(times: dict[str, Any]) -> str:
    """Return times in milliseconds."""
    return ", ".join(f"{side} {1e3 * seconds:.2f} ms" for side, seconds in times.items() if not isinstance(seconds, str))


def main() -> None:
    """Measure all cases, or in a child one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *BIOLOGY], default=[*CASES, *BIOLOGY])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-rounds", type=int, default=2)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--first", nargs=2)
    parser.add_argument("--later")
    options = parser.parse_args()
    if options.first or options.later:
        print(json.dumps(first(*options.first) if options.first else later(options.later, options.rounds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            measured(name, options.rounds, options.cold_rounds, folder, not options.no_peers)


main()
