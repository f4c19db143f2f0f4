"""Make `influenza_posterior.json`: the posterior that `influenza_vi.py` is compared with, by a long Markov chain.

    python examples/data/influenza_posterior.py

Random-walk Metropolis in (log β, log γ) with the covariance of a first run as proposal, 4 chains of 20,000 steps
from different starts, the first tenth left out. SciPy's LSODA at 1e-9; nothing of mpiad. It takes some minutes.
"""

import json
from pathlib import Path

import numpy as np
from scipy.integrate import odeint

HERE = Path(__file__).parent
DAYS, IN_BED = np.loadtxt(HERE / "influenza_1978.csv", delimiter=",", skiprows=1, unpack=True)
BOYS, ILL_AT_FIRST, NOISE = 763, 3.0, 20.0
STEPS, CHAINS, BURNT = 20_000, 4, 2_000


def log_posterior(theta):
    beta, gamma = np.exp(theta)

    def epidemic(u, t):
        infections = beta * u[0] * u[1] / BOYS
        return [-infections, infections - gamma * u[1]]

    ill = odeint(epidemic, [BOYS - ILL_AT_FIRST, ILL_AT_FIRST], DAYS, rtol=1e-9, atol=1e-6)[:, 1]
    misfit = np.sum((ill - IN_BED) ** 2) / NOISE**2
    return -0.5 * misfit - 0.5 * np.sum((theta - PRIOR_MEAN) ** 2)


PRIOR_MEAN = np.log([1.5, 0.5])


def chain(start, factor, steps, rng):
    theta, height = start, log_posterior(start)
    out, accepted = np.empty((steps, 2)), 0
    for k in range(steps):
        trial = theta + factor @ rng.standard_normal(2)
        there = log_posterior(trial)
        if np.log(rng.random()) < there - height:
            theta, height, accepted = trial, there, accepted + 1
        out[k] = theta
    return out, accepted / steps


def main():
    rng = np.random.default_rng(1978)
    first, _ = chain(np.log([1.8, 0.45]), 0.01 * np.eye(2), 3000, rng)
    factor = 2.38 / 2**0.5 * np.linalg.cholesky(np.cov(first[500:].T))
    starts = np.log([[1.8, 0.45], [1.6, 0.4], [2.0, 0.5], [1.7, 0.55]])
    runs = [chain(start, factor, STEPS, rng) for start in starts[:CHAINS]]
    kept = np.array([samples[BURNT:] for samples, _ in runs])
    within, between = kept.var(axis=1, ddof=1).mean(axis=0), kept.mean(axis=1).var(axis=0, ddof=1)
    whole = np.exp(kept.reshape(-1, 2))
    found = {
        "how": "random-walk Metropolis, 4 chains of 20,000 steps, 2,000 left out of each; influenza_posterior.py",
        "parameters": ["beta", "gamma"], "mean": whole.mean(axis=0).tolist(), "sd": whole.std(axis=0, ddof=1).tolist(),
        "correlation": float(np.corrcoef(whole.T)[0, 1]), "accepted": [round(rate, 3) for _, rate in runs],
        "potential scale reduction": np.sqrt(1 + between / within).round(5).tolist(),
    }  # fmt: skip
    (HERE / "influenza_posterior.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
