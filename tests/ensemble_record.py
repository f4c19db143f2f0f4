"""The record of ensembles: the results of 500 random solves and their derivatives, with which later code is compared.

    make ensemble-record
    python tests/ensemble_record.py [--programs 500] [--write]

A program is drawn by its number: a system with its parameters, a method, a way of solving, saved times, events,
options, and the kind of derivative. Its results are states, times, return codes, counts of steps, events, and
derivatives with respect to initial states, parameters and tspan, or the error that it raises. `--write` stores them in
`tests/data/ensemble_record.npz`. Otherwise they are compared with the stored ones: codes, counts and events must be
equal, states agree to 4 units in the last place of the largest one, and derivatives to 1e-10 of the largest one (in
single precision to 16 units). So a new implementation of ensembles is compared with an earlier one, also where both may
be wrong: the other tests compare with references. A record holds for processors of one kind, since NumPy's functions
differ by rounding between kinds; on another one write it anew with the code that is known to be right.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import autograd.numpy as anp
import device_double
import llvmlite
import numpy as np
import stiff_systems
from autograd.tracer import getval
from device_on_cpu import COMPILER, double
from llvmlite.binding import get_host_cpu_name
from mpi4py import MPI

import mpiad
import mpiad.ensemble.backends
from mpiad.ensemble import (
    BS3,
    RK4,
    RK45,
    EnsembleGPU,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    Event,
    ODEProblem,
    PIController,
    Rodas5P,
    Rosenbrock23,
    Tsit5,
    Vern7,
    solve,
)
from mpiad.pytrees import flatten

FILE = Path(__file__).parent / "data" / "ensemble_record.npz"
SEED, PROGRAMS = 5, 500
COUNTS = ("naccept", "nreject", "nf", "njac", "nlu")
ULPS, OF_DERIVATIVES, OF_SINGLE = 4, 1e-10, 16


class System(NamedTuple):
    """A right-hand side, functions that draw one trajectory's initial state and parameters, and the end of tspan."""

    f: Any
    u0: Any
    p: Any
    end: float
    kinds: str = ""  # what it is: "stiff", "complex", "mass", "fails"


def lotka_volterra(u, p, t):
    return [p[0] * u[0] - p[1] * u[0] * u[1], p[1] * u[0] * u[1] - p[2] * u[1]]


def pendulum(u, p, t):
    return [u[1], -p[0] * anp.sin(u[0]) - p[1] * u[1] + 0.3 * anp.cos(t)]


def lorenz(u, p, t):
    return [10.0 * (u[1] - u[0]), u[0] * (p[0] - u[2]) - u[1], u[0] * u[1] - p[1] * u[2]]


def network(u, p, t):
    return p["scale"] * anp.tanh(anp.dot(p["weights"], u) + anp.reshape(p["bias"], (-1, 1))) - u


def falling(u, p, t):
    return [u[1], 0 * u[0] - p[0]]


def rotation(u, p, t):
    return [1j * p[0] * u[0] - 0.1 * u[1], -p[1] * u[1] + u[0] * anp.exp(1j * t)]


def with_an_equation(u, p, t):
    return [-p[0] * u[0] + u[1], u[0] ** 2 + u[1] - p[1]]  # the second component's equation has no derivative


def blow_up(u, p, t):
    return [u[0] ** 2 * p[0], u[1] * 0.0 - 1.0]


MASS = np.diag([1.0, 0.0])


def of_stiff(name, end):
    system = stiff_systems.SYSTEMS[name]

    def drawn(rng):
        return system.p * rng.uniform(0.8, 1.25, system.p.shape)

    return System(system.f, lambda rng: system.u0.astype(float) * rng.uniform(0.9, 1.1), drawn, end, "stiff")


SYSTEMS = {
    "predators": System(lotka_volterra, lambda rng: rng.uniform(0.5, 2, 2), lambda rng: rng.uniform(0.5, 1.5, 3), 3.0),
    "pendulum": System(pendulum, lambda rng: rng.uniform(-1, 1, 2), lambda rng: rng.uniform([4, 0.1], [12, 0.6]), 2.0),
    "lorenz": System(lorenz, lambda rng: rng.uniform(0.5, 1.5, 3), lambda rng: rng.uniform([20, 2], [30, 3]), 0.6),
    "falling": System(falling, lambda rng: rng.uniform([0.5, -1], [2, 1]), lambda rng: rng.uniform(2, 9, 1), 1.5),
    "network": System(
        network, lambda rng: rng.uniform(-1, 1, 3),
        {"weights": lambda rng: rng.normal(size=(3, 3)), "bias": lambda rng: rng.normal(size=3)}, 2.0,
        "tree",
    ),
    "rotation": System(
        rotation, lambda rng: rng.normal(size=2) + 1j * rng.normal(size=2), lambda rng: rng.uniform(0.5, 3, 2), 1.5,
        "complex",
    ),
    "equation": System(
        with_an_equation, lambda rng: (lambda x: np.array([x, 1.0 - x**2]))(rng.uniform(0.2, 0.8)),
        lambda rng: np.array([rng.uniform(0.5, 2), 1.0]), 1.5, "mass",
    ),
    "blow up": System(
        blow_up, lambda rng: rng.uniform([0.3, 0], [1.5, 1]), lambda rng: rng.uniform(0.5, 1.5, 1), 2.0, "fails"
    ),
    "Robertson": of_stiff("Robertson", 40.0),
    "Van der Pol": of_stiff("Van der Pol", 5.0),
    "forced": of_stiff("forced", 0.5),
}  # fmt: skip
EXPLICIT, IMPLICIT = (RK45, Tsit5, BS3, Vern7, RK4), (Rosenbrock23, Rodas5P)
WAYS = ("serial", "vectorized", "threads", "kernels", "mpi", "mpi kernels", "device", "gpu", "one")
TREE_SCALE = 1.2


def put(x: Any) -> Any:
    """Return arrays on the stand-in's device."""
    if isinstance(x, dict):
        return {key: put(value) for key, value in x.items()}
    return device_double.on_device(x) if isinstance(x, np.ndarray) else x


def drawn_events(rng: np.random.Generator, name: str, system: System) -> tuple[Event, ...]:
    """Return some events: that end trajectories, change states, or are only noted, by conditions or at given times."""
    level, time = rng.uniform(0.2, 1.0), rng.uniform(0.2, 0.8) * system.end

    def condition(u, p, t):
        return anp.real(u[0]) - level

    if name == "falling":
        bounce = Event(lambda u, p, t: u[0], direction=-1, affect=lambda u, p, t: [u[0], -0.8 * u[1]])
        return (bounce, Event(condition, terminal=False))[: rng.integers(1, 3)]
    choices = (
        Event(condition, terminal=bool(rng.integers(2)), direction=int(rng.integers(-1, 2))),
        Event(times=[time], affect=lambda u, p, t: 1.1 * u if system.kinds == "tree" else [1.1 * c for c in u]),
        Event(lambda u, p, t: t - time, affect=lambda u, p, t: [c * (1 + 0.1 * level) for c in u]),
    )
    if system.kinds in ("tree", "mass"):
        choices = choices[:2] if system.kinds == "tree" else choices[:1]
    return tuple(choices[k] for k in rng.permutation(len(choices))[: rng.integers(1, 3)])


class Program:
    """A random solve and its derivative, drawn by its number."""

    def __init__(self, number: int):
        rng = np.random.default_rng([SEED, number])
        self.name = list(SYSTEMS)[number % len(SYSTEMS)]
        system = self.system = SYSTEMS[self.name]
        implicit = system.kinds in ("stiff", "mass") or rng.random() < 0.2 and system.kinds != "complex"
        methods = IMPLICIT[system.kinds == "mass" :] if implicit else EXPLICIT  # Rosenbrock23 has no mass matrix
        method = methods[rng.integers(len(methods))]
        self.alg = RK45(controller=PIController()) if method is RK45 and rng.random() < 0.3 else method()
        self.way = WAYS[rng.integers(len(WAYS))]
        self.count = int(rng.integers(1, 6))
        single = rng.random() < 0.15 and system.kinds in ("", "tree")
        dtype = np.float32 if single else None
        self.u0 = np.array([system.u0(rng) for _ in range(self.count)], dtype)
        if system.kinds == "tree":
            p = {key: draw(rng) for key, draw in system.p.items()} | {"scale": TREE_SCALE}
            self.p: Any = {key: np.asarray(value, dtype)[()] for key, value in p.items()}
        else:
            self.p = np.array([system.p(rng) for _ in range(self.count)], dtype)
        self.start, self.end = (0.1, system.end) if rng.random() < 0.8 or system.kinds else (system.end, 0.1)
        digits = rng.integers(3, 5) if method in (BS3, Rosenbrock23) else rng.integers(3, 8)
        self.options: dict[str, Any] = {"rtol": 10.0**-digits, "atol": 10.0 ** -(digits + 1)}
        if single:
            self.options |= {"rtol": 1e-4, "atol": 1e-5}
        if method is RK4:
            self.options["dt"] = abs(self.end - self.start) / rng.integers(9, 40)
        self._draw_saves(rng)
        if rng.random() < 0.45:
            events = drawn_events(rng, self.name, system)
            if self.way in ("device", "gpu") or "save_everystep" in self.options:
                events = tuple(event for event in events if event.affect is None)  # others aren't supported
            self.options["events"] = events
        if rng.random() < 0.1:
            self.options["max_steps"] = int(rng.integers(3, 12))
        if rng.random() < 0.15:
            self.options["dtmax"] = 0.11 * abs(self.end - self.start)
        if system.kinds == "mass" and self.way == "device":
            self.way = "kernels"
        self.kind = ("value", "gradient", "gradient", "gradient", "tangent", "second")[rng.integers(6)]
        if self.kind == "second" and implicit and self.way in ("device", "gpu"):
            self.kind = "gradient"  # second derivatives of Rosenbrock methods aren't supported there
        if self.kind != "value" and rng.random() < 0.3:
            self.options["checkpoints"] = int(rng.integers(1, 6))
        if self.kind == "gradient" and rng.random() < 0.4:
            self.options["gradient"] = ("tangent", "adjoint")[rng.integers(2)]
        self.moves_ends = self.kind != "value" and rng.random() < 0.3
        self.weights = np.random.default_rng(number)

    def _draw_saves(self, rng: np.random.Generator) -> None:
        span = np.sort(rng.uniform(min(self.start, self.end), max(self.start, self.end), 4))
        span = span if self.end > self.start else span[::-1]
        saves = rng.integers(5)
        if saves == 1:
            self.options["saveat"] = span.tolist()
        elif saves == 2 and self.way != "one":
            self.options["saveat"] = np.stack([span * (1 - 0.001 * i) for i in range(self.count)])
            self.options["saveat"] = np.clip(self.options["saveat"], min(self.start, self.end), max(self.start, self.end))
        elif saves == 3:
            self.options["save_everystep"] = True
        elif saves == 4:
            self.options["saveat"] = abs(self.end - self.start) / 5

    def solved(self, x: dict[str, Any]) -> Any:
        """Return the solution; x: initial states, parameters, and tspan if it is differentiated."""
        way, system, on_device = self.way, self.system, self.way == "device"
        tspan = x.get("tspan", (self.start, self.end))
        more = {"mass_matrix": MASS} if system.kinds == "mass" else {}
        shared = system.kinds == "tree"
        template = put(self.u0[0]) if on_device else self.u0[0]
        if way == "one":
            p = x["p"] if shared else x["p"][0]
            return solve(ODEProblem(system.f, x["u0"][0], tspan, p, **more), self.alg, **self.options)
        problem = ODEProblem(system.f, template, tspan, x["p"] if shared else None, **more)
        ensemble = EnsembleProblem(problem, u0=x["u0"], p=None if shared else x["p"])
        backend, kernel = {
            "serial": (EnsembleSerial(), False), "vectorized": (EnsembleVectorized(), False),
            "threads": (EnsembleThreads(2), False), "kernels": (EnsembleVectorized(), True),
            "mpi": (EnsembleMPI(EnsembleVectorized()), False), "mpi kernels": (EnsembleMPI(EnsembleVectorized()), True),
            "device": (EnsembleVectorized(), False), "gpu": (EnsembleGPU(), "auto"),
        }[way]  # fmt: skip
        return solve(ensemble, self.alg, backend, compile=kernel, **self.options)

    def run(self) -> dict[str, Any]:
        """Return the results by name, or the error."""
        try:
            return self._results()
        except Exception as error:  # noqa: BLE001 - errors are results, too
            return {"error": f"{type(error).__name__}: {error}"[:200]}

    def _results(self) -> dict[str, Any]:
        place = put if self.way == "device" else lambda x: x
        x: dict[str, Any] = {"u0": place(self.u0), "p": place(self.p)}
        if self.moves_ends:
            x["tspan"] = np.array([self.start, self.end])
        sol = self.solved(x)
        found = {name: _on_host(getattr(sol, name)) for name in ("u", "t", "u_end", "t_reached", *COUNTS)}
        found["retcode"] = [str(sol.retcode)] if self.way == "one" else [str(code) for code in _on_host(sol.retcode)]
        events = {0: sol.events} if self.way == "one" else sol.events
        listed = [(i, e, float(_on_host(t))) for i, each in sorted(events.items()) for e, t in each]
        found["events"] = [(i, e) for i, e, _ in listed]
        found["event_times"] = np.array([t for _, _, t in listed])
        if self.kind == "value":
            return found

        def loss(x):
            sol = self.solved(x)
            weights = np.random.default_rng(1)
            total = 0.0
            for part in (sol.u, sol.u_end, sol.t_reached):
                if np.shape(_on_host(part)):
                    w = weights.uniform(0.5, 1.5, np.shape(_on_host(part)))
                    w = put(w) if isinstance(getval(part), device_double.DeviceArray) else w
                    known = anp.where(anp.isfinite(part), part, 0.0)
                    total = total + anp.sum(anp.real(known * anp.conj(known)) * w + anp.real(known) * w)
                else:
                    total = total + part**2
            return total

        gradient = mpiad.value_and_grad(loss, objective="root", shared=True)
        if self.kind == "gradient":
            value, cotangents = gradient(x)
            return found | {"value": value, **{f"d_{k}": c for k, c in _leaves("", cotangents)}}
        leaves, build = flatten(x)
        v = build([self._direction(leaf) for leaf in leaves])
        if self.kind == "tangent":
            value, tangent = mpiad.jvp(loss, x, v)
            return found | {"value": value, "d_along": tangent}
        product = mpiad.hvp(loss, objective="root", shared=True)(x, v)
        return found | {f"d_second_{k}": c for k, c in _leaves("", product)}

    def _direction(self, leaf: Any) -> Any:
        """Return random numbers like an argument, on its device."""
        values = self.weights.uniform(-1, 1, np.shape(_on_host(leaf)))
        return put(values) if isinstance(leaf, device_double.DeviceArray) else values.astype(leaf.dtype)


def _on_host(x: Any) -> Any:
    return device_double.on_host(x)


def _leaves(prefix: str, tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [pair for key in sorted(tree) for pair in _leaves(f"{prefix}{key}.", tree[key])]
    return [(prefix.rstrip("."), np.asarray(_on_host(tree)))]


def differences(expected: dict[str, Any], found: dict[str, Any]) -> tuple[list[str], bool]:
    """Return what differs, and whether all numbers are bitwise equal."""
    if sorted(expected) != sorted(found):
        return [f"{sorted(set(expected) ^ set(found))} {found.get('error', expected.get('error', ''))}"], False
    wrong, equal = [], True
    for name, a in expected.items():
        b = found[name]
        if not isinstance(a, np.ndarray) or a.dtype.kind in "iu":
            if np.shape(a) != np.shape(b) or not np.array_equal(a, b):
                wrong.append(f"{name}: {b!r:.80} instead of {a!r:.80}")
            continue
        if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(np.isnan(a), np.isnan(b)):
            wrong.append(f"{name}: {b.dtype} {b.shape} instead of {a.dtype} {a.shape}, or NaN in other places")
            continue
        equal &= a.tobytes() == b.tobytes()
        eps, size = np.finfo(a.dtype).eps, np.nanmax(np.abs(a), initial=0.0)
        is_derivative = name == "value" or name.startswith("d_")
        if is_derivative:  # those with respect to tspan are double numbers, also of states in single precision
            numbers = [x for x in expected.values() if isinstance(x, np.ndarray) and x.dtype.kind in "fc"]
            eps = max(np.finfo(x.dtype).eps for x in numbers)
        tolerance = OF_SINGLE * eps if eps > 1e-10 else OF_DERIVATIVES if is_derivative else ULPS * eps
        gap = np.nanmax(np.abs(a - b), initial=0.0)
        if gap > tolerance * size:
            wrong.append(f"{name}: differs by {gap / size:.1e} of the largest number, {tolerance:.1e} are allowed")
    return wrong, equal


def made_with() -> list[str]:
    """Return what the rounding of numbers depends on: the processor, and the versions of LLVM and NumPy."""
    return [get_host_cpu_name(), llvmlite.__version__, np.__version__]


def write(all_found: list[dict[str, Any]]) -> None:
    """Store results: all numbers in one array, and what they are as JSON."""
    numbers, entries = [], []
    for found in all_found:
        entry = {}
        for name, value in found.items():
            if isinstance(value, np.ndarray):
                entry[name] = [value.dtype.str, list(value.shape)]
                numbers.append(np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8))
            else:
                entry[name] = value
        entries.append(entry)
    text = json.dumps({"made with": made_with(), "programs": entries})
    np.savez_compressed(FILE, numbers=np.concatenate(numbers), entries=np.frombuffer(text.encode(), np.uint8))


def read() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the stored results, and where they were made."""
    with np.load(FILE) as stored:
        about, numbers, at = json.loads(bytes(stored["entries"])), stored["numbers"], 0
    programs = []
    for entry in about.pop("programs"):
        found = {}
        for name, value in entry.items():
            if name in ("retcode", "events", "error"):
                found[name] = [tuple(pair) for pair in value] if name == "events" else value
                continue
            dtype, shape = np.dtype(value[0]), tuple(value[1])
            size = dtype.itemsize * int(np.prod(shape))
            found[name], at = numbers[at : at + size].view(dtype).reshape(shape), at + size
        programs.append(found)
    return about, programs


def results(number: int) -> dict[str, Any]:
    """Return the results of a program, with numbers as arrays."""
    found = Program(number).run()
    return {k: v if k in ("retcode", "events", "error") else np.asarray(_on_host(v)) for k, v in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.add_argument("--write", action="store_true", help="store the results instead of comparing them")
    options = parser.parse_args()
    if COMPILER is None:
        print("The kernels of EnsembleGPU are compiled for this processor by a compiler of C++, and there is none.")
        return 1
    mpiad.ensemble.backends.selected_arrays = lambda device: double
    warnings.simplefilter("ignore")
    logging.getLogger("mpiad").setLevel(logging.CRITICAL)
    if options.write:
        found = [results(number) for number in range(options.programs)]
        write(found)
        codes = Counter(code for each in found for code in each.get("retcode", []))
        errors = Counter(each["error"][:60] for each in found if "error" in each)
        print(f"{len(found)} programs, {FILE.stat().st_size:,} bytes; return codes: {dict(codes)}\nerrors:")
        for text, count in errors.most_common():
            print(f"  {count} {text}")
        return 0
    about, expected = read()
    if about["made with"] != made_with():
        print("The record was made on another processor, or with other versions of LLVM or NumPy: numbers may differ more.")
    wrong = equal = 0
    for number, each in enumerate(expected[: options.programs]):
        found, same = differences(each, results(number))
        equal += same and not found
        wrong += bool(found)
        if found and MPI.COMM_WORLD.rank == 0:
            program = Program(number)
            print(f"{number} {program.name} {type(program.alg).__name__} {program.way} {program.kind}: " + "; ".join(found))
    if MPI.COMM_WORLD.rank == 0:
        print(f"{len(expected[: options.programs])} programs, {equal} bitwise equal, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
