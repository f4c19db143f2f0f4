"""Effective samples of hIPPYlib-MUQ's tutorial problem, compared with the published figures.

    python benchmarks/hippylib_poisson.py [--methods hpcn hmala hhmc dr] [--scale 1]

The problem is that of `examples/poisson_posterior.py`, whose docstring says what differs from the tutorial: 33 x 33
unknowns, 300 data, and the logarithm of a flux as quantity of interest. Published (Kim et al. 2023; tutorial of
hippylib2muq) for 20,001 samples after 2,000: effective sizes of 8.8 (pCN), 5.7 (MALA), 191.1 (h-pCN), 305.3 (h-MALA)
and 550.8 (delayed rejection), and 0.6, 0.1, 12.8, 5.4 and 7.8 per minute, on other hardware with a larger state space.
Nothing is published for Hamiltonian Monte Carlo; it is compared with h-MALA.

One chain per method on one core, begun at a sample of the Laplace approximation, with adapted step sizes. The estimator
is Geyer's initial monotone sequence, on the whole chain, for all methods. The chains of the informed methods are long
enough for 200 effective samples. A solve is an evaluation of the forward model or of its adjoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from reaches import report

from mpiad.inverse import sample

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from poisson_posterior import Tutorial, effective_size  # noqa: E402

INFORMED = ("hpcn", "hmala", "dr", "hhmc")
METHODS = ("pcn", "mala", *INFORMED)
PUBLISHED = {"pcn": (8.8, 0.6), "mala": (5.7, 0.1), "hpcn": (191.1, 12.8), "hmala": (305.3, 5.4), "dr": (550.8, 7.8)}
LENGTHS = {"pcn": 20_000, "mala": 20_000, "hpcn": 40_000, "hmala": 20_000, "dr": 10_000, "hhmc": 5_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the lengths of all chains")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args()
    problem = Tutorial(options.seed)
    posterior = problem.laplace(100)
    start = posterior.sample(1)
    print("| method | samples | accepted | log flux | effective | of 1,000 | published | per minute | published | ", end="")
    print("per minute of processor time | per 1,000 solves |\n|" + "---|" * 11, flush=True)
    rates, means, per_solve = {}, {}, {}
    for method in options.methods:
        count = int(options.scale * LENGTHS[method])
        began = time.process_time()
        result = sample(
            problem.misfit, problem.prior, method=method, n_samples=count, warmup=max(count // 10, 500), start=start,
            rng=options.seed, posterior=posterior, quantities=problem.log_flux,
        )  # fmt: skip
        share = count / (count + max(count // 10, 500))
        processor = share * (time.process_time() - began)
        size = effective_size(result.quantities)
        per_thousand, rates[method] = 1e3 * size / count, 60 * size / result.seconds
        means[method] = result.quantities.mean(), result.quantities.std() / np.sqrt(size)
        accepted = ", ".join(f"{rate:.2f}" for rate in np.atleast_1d(result.acceptance))
        per_solve[method] = 1e3 * size / (result.solves["misfit"] + result.solves["gradient"])
        effective, per_minute = PUBLISHED.get(method, (0.0, 0.0))
        published = effective / 20.001, per_minute
        print(
            f"| {method} | {count} | {accepted} | {result.quantities.mean():.3f} ± {result.quantities.std():.3f} ", end=""
        )
        print(f"| {size:.0f} | {per_thousand:.1f} | {published[0]:.2g} | {rates[method]:.0f} | {published[1]:.2g} ", end="")
        print(f"| {60 * size / processor:.0f} | {per_solve[method]:.1f} |", flush=True)
        if method in INFORMED:
            report(f"tutorial of hIPPYlib-MUQ, {method}: effective of 1,000", per_thousand, at_least=published[0])
            report(f"tutorial of hIPPYlib-MUQ, {method}: effective samples", size, at_least=200 * min(options.scale, 1))
    if {"hmala", "hhmc"} <= set(per_solve):
        ratio = per_solve["hhmc"] / per_solve["hmala"]
        report("tutorial of hIPPYlib-MUQ: effective per solve, Hamiltonian to Langevin", ratio, at_least=1.3)
    report("tutorial of hIPPYlib-MUQ: effective per minute, best method", max(rates.values()), at_least=128)
    informed = [means[method] for method in INFORMED if method in means]
    away = max(abs(a - b) / np.hypot(s, t) for a, s in informed for b, t in informed)
    print(f"the means of the informed methods differ by at most {away:.1f} joint standard errors")
    report("tutorial of hIPPYlib-MUQ: difference of the methods, standard errors", away, at_most=4)


if __name__ == "__main__":
    main()
