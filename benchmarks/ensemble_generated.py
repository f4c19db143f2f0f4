"""Large generated models of biology: the first value, the first gradient, and repeated ones.

    python benchmarks/ensemble_generated.py [--proteins 30] [--conditions 170] [--repeats 5] [--source model.py]

`generated_model` writes the text of a right-hand side as a generator does that reads SBML: one line per reaction, one sum
of reactions per state, each rate law written out. The model is a cascade of proteins, each of which is phosphorylated twice
by a protein above it and is bound by a scaffold: 94 states, 158 reactions and 121 rates for 30 proteins. Each condition has
a row of parameters, with a dose of the input of its own. The loss compares the states at eight times with data. First
times are those of this process with an empty cache of kernels; repeated ones are the smallest of several. All times are of
the process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from reaches import report

import autograd.numpy as np  # isort: skip

import mpiad
from mpiad.ensemble import EnsembleProblem, ODEProblem, Rodas5P, solve

MOST = 3.0  # a gradient with its value over the value
SCAFFOLDS = 4


def generated_model(proteins: int) -> tuple[str, list[float], list[float]]:
    """Return the text of `model(u, p, t)`, initial states and the rates p["k"]."""
    rng = numpy.random.default_rng(0)
    states: list[str] = []
    initial: list[float] = []
    rates: list[float] = []
    reactions: list[str] = []
    terms: dict[str, list[str]] = {}

    def species(name: str, amount: float) -> str:
        states.append(name)
        initial.append(amount)
        terms[name] = []
        return name

    def rate(typical: float) -> str:
        rates.append(typical * 10 ** rng.uniform(-0.4, 0.4))
        return f"k{len(rates) - 1}"

    def reaction(law: str, reactants: list[str], products: list[str]) -> None:
        reactions.append(law)
        for name in reactants:
            terms[name].append(f"-v{len(reactions) - 1}")
        for name in products:
            terms[name].append(f"+v{len(reactions) - 1}")

    scaffolds = [species(f"scaffold{n}", 1.0) for n in range(SCAFFOLDS)]
    active = ["input"]
    feedback = rate(0.5)
    for n in range(proteins):
        free, once, twice = (species(f"P{n}{form}", amount) for form, amount in (("", 1.0), ("p", 0.0), ("pp", 0.0)))
        enzyme, michaelis, phosphatase = active[max(0, len(active) - 1 - int(rng.integers(3)))], rate(0.5), rate(0.8)
        inhibition = f"(1.0 + ({twice} / {feedback}) ** 2)" if n % 3 == 0 else "1.0"
        forward = rate(3.0)
        for before, after in ((free, once), (once, twice)):
            law = f"{forward} * {enzyme} * {before} / ({michaelis} + {free} + {once}) / {inhibition}"
            reaction(f"cytosol * ({law})", [before], [after])
            reaction(f"cytosol * ({phosphatase} * {after} / ({michaelis} + {once} + {twice}))", [after], [before])
        # The scaffold binds the active form, and releases the protein without its phosphates.
        scaffold, binding = scaffolds[n % SCAFFOLDS], rate(0.05)
        reaction(f"cytosol * ({binding} * {twice} * {scaffold} / (1.0 + {scaffold}))", [twice], [free])
        if n % 8 == 0:
            reaction(f"nucleus * (0.1 * {binding} * {twice} * {scaffold})", [scaffold], [])
            reaction(f"nucleus * (0.1 * {binding} * (1.0 - {scaffold}))", [], [scaffold])
        active.append(twice)
    lines = [
        "def model(u, p, t):",
        f"    {', '.join(states)} = u",
        f"    {', '.join(f'k{i}' for i in range(len(rates)))} = p['k']",
    ]
    lines += ["    cytosol, nucleus = p['volumes']", "    input = p['dose'] * np.exp(-0.05 * t)"]
    lines += [f"    v{i} = {law}" for i, law in enumerate(reactions)]
    volume = {name: "nucleus" if name in scaffolds else "cytosol" for name in states}
    sums = [f"        ({' '.join(terms[name]) or '0.0 * t'}) / {volume[name]}," for name in states]
    return "\n".join([*lines, "    return [", *sums, "    ]", ""]), initial, rates


def loss_of(proteins: int, conditions: int) -> tuple[Callable[[Any], Any], Any, str]:
    """Return the loss of the logarithms of the rates, these logarithms, and the text of the model."""
    text, u0, rates = generated_model(proteins)
    names: dict[str, Any] = {"np": np}
    exec(compile(text, "generated_model", "exec"), names)
    times = np.linspace(2.5, 20.0, 8)
    doses, volumes = 10 ** np.linspace(-1.0, 0.5, conditions), np.array([1.0, 0.3])
    problem = ODEProblem(names["model"], u0, (0.0, 20.0), {"k": np.array(rates), "volumes": volumes, "dose": 1.0})

    def loss(log_k: Any) -> Any:
        rows = np.ones((conditions, 1))
        p = {"k": np.exp(log_k) * rows, "volumes": volumes * rows, "dose": doses}
        ensemble = EnsembleProblem(problem, p=p)
        u = solve(ensemble, Rodas5P(), saveat=times, rtol=1e-6, atol=1e-8, compile=True).u
        return np.mean((u - 0.3) ** 2)

    return loss, np.log(np.array(rates)), text


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call on the processor."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main() -> None:
    """Print times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proteins", type=int, default=30)
    parser.add_argument("--conditions", type=int, default=170)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--source", type=Path, help="file for the text of the model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MPIAD_CACHE"] = folder
        loss, log_k, text = loss_of(options.proteins, options.conditions)
        if options.source:
            options.source.write_text(text)
        gradient = mpiad.value_and_grad(loss)
        first_value, first_gradient = seconds(lambda: loss(log_k)), seconds(lambda: gradient(log_k))
        value, both = (
            min(seconds(call) for _ in range(options.repeats)) for call in (lambda: loss(log_k), lambda: gradient(log_k))
        )
    print(f"{3 * options.proteins + SCAFFOLDS} states, {len(log_k)} rates, {options.conditions} conditions")
    print(f"first value {first_value:.2f} s, first gradient {first_gradient:.2f} s, then {value:.4f} s and {both:.4f} s")
    report("generated model: gradient / value", both / value, at_most=MOST)


if __name__ == "__main__":
    main()
