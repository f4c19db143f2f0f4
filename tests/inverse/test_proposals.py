"""The proposals of chains and their chances of acceptance, compared with dense Gaussian densities.

The misfit isn't quadratic and the Laplace approximation is wrong (mean shifted, covariance halved), so no factor of a ratio
is 1: without one, or with the gradient of another point, the chance differs.
"""

import inspect
import math

import autograd.numpy as anp
import numpy as np
import pytest
from dense_prior import DensePrior
from mpi4py import MPI

import mpiad
from mpiad.inverse import crank_nicolson, delayed_rejection, hamiltonian, langevin, sampling, sampling_target
from mpiad.inverse.laplace_approximation import Posterior
from mpiad.inverse.sampling_target import Draw, State
from mpiad.linalg.eigenpairs import EigenPairs

pytestmark = pytest.mark.one_rank

CELLS = 5


def gradient_of(fun):
    return mpiad.grad(fun, comm=MPI.COMM_SELF)


class Problem:
    """A misfit of three cubic observations; `reference`: mean and covariance of the approximation, dense."""

    def __init__(self, pairs=2):
        random = np.random.default_rng(1)
        factor = random.standard_normal((CELLS, CELLS))
        self.prior = DensePrior(factor @ factor.T / CELLS + 0.2 * np.eye(CELLS), random.standard_normal(CELLS))
        self.rows, self.data = random.standard_normal((3, CELLS)), random.standard_normal(3)
        values, vectors = np.linalg.eigh(self.prior.root.T @ (0.2 * self.rows.T @ self.rows) @ self.prior.root)
        vectors = (self.prior.root @ vectors).T[::-1][:pairs]
        # 1 / (1 + λ) is halved.
        found = EigenPairs(1.0 + 2.0 * np.maximum(values[::-1][:pairs], 0.0), vectors, np.zeros(pairs), 0)
        self.posterior = Posterior(self.prior.mean + 0.2 * random.standard_normal(CELLS), self.prior, found)

    def misfit(self, m):
        y = anp.dot(self.rows, m)
        return 0.1 * anp.sum((y + 0.1 * y**3 - self.data) ** 2)

    def reference(self, informed):
        if not informed:
            return self.prior.mean, self.prior.covariance
        spectral = np.einsum("i,ij,ik", self.posterior.values, self.posterior.vectors, self.posterior.vectors)
        precision = self.prior.precision + self.prior.precision @ spectral @ self.prior.precision
        return self.posterior.mean, np.linalg.inv(precision)

    def log_target(self, m):
        """Return the logarithm of the posterior's density, up to a constant."""
        away = m - self.prior.mean
        return -self.misfit(m) - 0.5 * away @ self.prior.precision @ away

    def log_proposal(self, m, new, beta, informed, with_gradient):
        """Return the logarithm of the density of a proposal from m at `new`, in all directions or, up to a constant."""
        mean, covariance = self.reference(informed)
        away = new - self.centre(m, beta, informed, with_gradient)
        return -0.5 * away @ np.linalg.solve(covariance, away) / beta**2

    def centre(self, m, beta, informed, with_gradient):
        mean, covariance = self.reference(informed)
        a = math.sqrt(1.0 - beta**2)
        found = mean + a * (m - mean)
        if with_gradient:
            gradient = -gradient_of(self.log_target)(m) - np.linalg.solve(covariance, m - mean)
            found = found - (1.0 - a) * covariance @ gradient
        return found


class Values:
    """In place of the collective evaluation."""

    def __init__(self, misfit):
        self.untraced = self.value = misfit
        self.gradient = gradient_of(misfit)


def target_of(problem, method):
    known = sampling._METHODS[method]
    reference = sampling._problem(method, None, problem.misfit, problem.prior, problem.posterior).reference
    found = sampling_target.Target(Values(problem.misfit), reference, known.slope)
    proposed = []
    at = found.at

    def noted(field, slope=False):
        proposed.append(at(field, slope))
        return proposed[-1]

    found.at = noted
    return found, proposed


METHODS = [("pcn", False, False), ("mala", False, True), ("hpcn", True, False), ("hmala", True, True)]


def chances(problem, name, informed, with_gradient):
    """Return the chances of steps from several fields, by the library and by dense densities."""
    target, proposed = target_of(problem, name)
    module, found = langevin if with_gradient else crank_nicolson, []
    for k in range(30):
        beta = (0.2, 0.4, 0.9)[k % 3] if not informed else (0.6, 0.8, 1.0)[k % 3]
        state = target.at(
            problem.prior.mean + (0.4 + 0.4 * informed) * np.random.default_rng(k).standard_normal(CELLS), with_gradient
        )
        move = module.step(target, state, (beta,), Draw(problem.prior, 3, 0, k))
        old, new = state.field, proposed[-1].field
        log_ratio = problem.log_target(new) - problem.log_target(old)
        log_ratio += problem.log_proposal(new, old, beta, informed, with_gradient)
        log_ratio -= problem.log_proposal(old, new, beta, informed, with_gradient)
        found.append((move.chances[0], math.exp(min(log_ratio, 0.0))))
        assert (move.state is proposed[-1]) == move.accepted[0]
    return np.transpose(found)


@pytest.mark.parametrize("name, informed, with_gradient", METHODS)
def test_chance_of_acceptance(name, informed, with_gradient):
    ours, dense = chances(Problem(), name, informed, with_gradient)
    np.testing.assert_allclose(ours, dense, rtol=1e-9, atol=1e-14)
    assert np.sum((dense > 0.01) & (dense < 0.99)) >= 3


@pytest.mark.parametrize("name, informed, with_gradient", METHODS)
def test_distribution_of_proposals(name, informed, with_gradient):
    """Proposals with all unit vectors as noise: their differences are a root of β²C."""
    problem, beta = Problem(), 0.6
    target, proposed = target_of(problem, name)
    state, module = target.at(problem.prior.mean + 0.5, with_gradient), langevin if with_gradient else crank_nicolson
    draw = Draw(problem.prior, 0, 0, 0)
    for xi in np.vstack([np.zeros(CELLS), np.eye(CELLS)]):
        draw.deviation = lambda xi=xi: problem.prior.sqrt(xi)
        module.step(target, state, (beta,), draw)
    centre, *others = [each.field for each in proposed[1:]]
    np.testing.assert_allclose(centre, problem.centre(state.field, beta, informed, with_gradient), atol=1e-12)
    root = np.array(others) - centre
    np.testing.assert_allclose(root.T @ root, beta**2 * problem.reference(informed)[1], atol=1e-12)


def test_hamiltonian_path():
    """The end of the path and the change of the whole energy, by dense matrices; the path is reversible."""
    problem = Problem()
    target, proposed = target_of(problem, "hhmc")
    (mean, covariance), found = problem.reference(True), []

    def path(m, p, angle):
        def kicked(m, p):
            gradient = -gradient_of(problem.log_target)(m) - np.linalg.solve(covariance, m - mean)
            return p - 0.5 * angle * covariance @ gradient

        for _ in range({0.9: 1, 0.5: 3, 0.1: 8}[angle]):
            p, away = kicked(m, p), m - mean
            m, p = mean + math.cos(angle) * away + math.sin(angle) * p, math.cos(angle) * p - math.sin(angle) * away
            p = kicked(m, p)
        return m, p

    def energy(m, p):
        return 0.5 * p @ np.linalg.solve(covariance, p) - problem.log_target(m)

    for k in range(30):
        angle = (0.1, 0.5, 0.9)[k % 3]
        state = target.at(mean + 0.3 * np.random.default_rng(k).standard_normal(CELLS), True)
        draw = Draw(problem.prior, 3, 0, k)
        start = state.field, target.reference.narrowed(draw.deviation())
        move = hamiltonian.step(target, state, (math.sin(angle),), draw)
        end = path(*start, angle)
        np.testing.assert_allclose(proposed[-1].field, end[0], atol=1e-10)
        chance = math.exp(min(energy(*start) - energy(*end), 0.0))
        np.testing.assert_allclose(move.chances[0], chance, rtol=1e-8, atol=1e-14)
        if chance > 0.01:  # otherwise the path may diverge, and rounding grows
            np.testing.assert_allclose(path(end[0], -end[1], angle)[0], start[0], atol=1e-8)
        assert move.state is (proposed[-1] if move.accepted[0] else state)
        found.append(chance)
    assert sum(0.01 < chance < 0.99 for chance in found) >= 3


def test_delayed_rejection():
    """Both stages and the step of the complement, compared with densities of the projected coordinates."""
    problem = Problem()
    target, proposed = target_of(problem, "dr")
    reference, sizes, found = problem.posterior, (0.8, 0.5, 0.6), []
    scale = np.sqrt(1.0 + reference.values)
    mean, covariance = problem.reference(True)

    def coordinates(m):
        return scale * (reference.vectors @ problem.prior.precision @ (m - mean))

    def log_first(old, new):
        away = coordinates(new) - math.sqrt(1.0 - sizes[0] ** 2) * coordinates(old)
        return -0.5 * away @ away / sizes[0] ** 2

    def centre(m):
        gradient = -gradient_of(problem.log_target)(m) - np.linalg.solve(covariance, m - mean)
        a = math.sqrt(1.0 - sizes[1] ** 2)
        return a * coordinates(m) - (1.0 - a) * (reference.vectors @ gradient) / scale

    def log_second(old, new):
        away = coordinates(new) - centre(old)
        return -0.5 * away @ away / sizes[1] ** 2

    def first_chance(old, new):
        log_ratio = problem.log_target(new) - problem.log_target(old) + log_first(new, old) - log_first(old, new)
        return math.exp(min(log_ratio, 0.0))

    for k in range(100):
        state = State(problem.prior.mean + 0.7 * np.random.default_rng(k).standard_normal(CELLS), 0.0, 0.0)
        state = target.at(state.field)
        count, draw = len(proposed), Draw(problem.prior, 4, 0, k)
        move, u = delayed_rejection.step(target, state, sizes, draw), state.field
        first, *rest = [each.field for each in proposed[count:]]
        noise = reference.vectors @ problem.prior.precision @ draw.deviation()
        expected = math.sqrt(1.0 - sizes[0] ** 2) * coordinates(u) + sizes[0] * noise
        np.testing.assert_allclose(coordinates(first), expected, atol=1e-10)
        np.testing.assert_allclose(move.chances[0], first_chance(u, first), rtol=1e-9, atol=1e-14)
        moved = first
        if not move.accepted[0]:
            assert len(rest) == 3 and rest[0] is u  # the gradient at the current field, the second proposal, the complement
            second = rest[1]
            log_ratio = problem.log_target(second) - problem.log_target(u) + log_first(second, first) - log_first(u, first)
            log_ratio += log_second(second, u) - log_second(u, second)
            chance = first_chance(second, first)
            expected = (1.0 - chance) * math.exp(log_ratio) / (1.0 - first_chance(u, first))
            np.testing.assert_allclose(move.chances[1], min(1.0, expected), rtol=1e-9, atol=1e-14)
            found.append(move.chances[1])
            noise = reference.vectors @ problem.prior.precision @ draw.deviation(second=True)
            np.testing.assert_allclose(coordinates(second), centre(u) + sizes[1] * noise, atol=1e-10)
            moved = second if move.accepted[1] else u
        last = rest[-1] if rest else None
        np.testing.assert_allclose(coordinates(last), coordinates(moved), atol=1e-10)
        complement = np.eye(CELLS) - reference.vectors.T @ reference.vectors @ problem.prior.precision
        a = math.sqrt(1.0 - sizes[2] ** 2)
        noise = (last - moved) - (a - 1.0) * complement @ (moved - mean)
        np.testing.assert_allclose(noise, sizes[2] * complement @ draw.deviation(), atol=1e-10)
        # Under the complement's own Gaussian the step is reversible, so the chance is the ratio of exp(-Ψ).
        psi = [-problem.log_target(m) - 0.5 * (m - mean) @ np.linalg.solve(covariance, m - mean) for m in (moved, last)]
        np.testing.assert_allclose(move.chances[2], math.exp(min(psi[0] - psi[1], 0.0)), rtol=1e-9, atol=1e-14)
    assert sum(0.01 < chance < 0.99 for chance in found) >= 3


def test_delayed_rejection_without_a_gradient():
    """A field at which the misfit is finite and its gradient isn't: no second stage, and the field keeps its density."""
    problem = Problem()
    target, _ = target_of(problem, "dr")
    target._evaluation.gradient = lambda m: m * math.nan
    state = target.at(problem.prior.mean + 0.5)
    for k in range(10):
        move = delayed_rejection.step(target, state, (1.0, 0.5, 1e-9), Draw(problem.prior, 4, 0, k))
        assert math.isnan(move.chances[1]) and math.isfinite(move.state.psi)
        assert move.accepted[0] or move.chances[2] == pytest.approx(1.0, abs=1e-6)
    assert target.solves[2] > 0


FACTORS = [
    ("hpcn", sampling_target, "misfit + linear - 0.5", "misfit - 0.5"),
    ("hpcn", sampling_target, " - 0.5 * float(weights @ coordinates)", ""),
    ("hmala", sampling_target, "np.append(-weights, 1.0)", "np.append(-weights, 0.0)"),
    ("hmala", sampling_target, "np.append(-weights, 1.0)", "np.append(0.0 * weights, 1.0)"),
    ("pcn", crank_nicolson, "state.psi - new.psi", "0.0"),
    ("hpcn", crank_nicolson, "state.psi - new.psi", "state.misfit - new.misfit"),
    ("mala", langevin, "state.psi - new.psi +", "0.0 +"),
    ("mala", langevin, " + log_density(beta, there_here", " + 0.0 * log_density(beta, there_here"),
    ("hmala", langevin, "log_ratio -= log_density(", "log_ratio -= 0.0 * log_density("),
    ("hmala", langevin, "0.5 * (1.0 - a) * squared", "0.0"),
    ("mala", langevin, "(along_new - a * along_old", "(along_new"),
    ("mala", langevin, "(along_new - a * along_old", "(-a * along_old"),
    ("hmala", langevin, " / (1.0 + a)", ""),
    ("hhmc", hamiltonian, "state.psi - place.psi - energy", "-energy"),
    ("hhmc", hamiltonian, "state.psi - place.psi - energy", "state.psi - place.psi"),
    ("hhmc", hamiltonian, "(0.5 * kick * squared - along)", "-along"),
    ("hhmc", hamiltonian, "(0.5 * kick * squared - along)", "0.5 * kick * squared"),
    ("hhmc", hamiltonian, "angle if 0 < k < steps else 0.5 * angle", "angle"),
    ("dr", delayed_rejection, "log_ratio = state.psi - last.psi", "log_ratio = 0.0"),
    ("dr", delayed_rejection, "np.sum((z1 - a * z) ** 2) - ", "-"),
    ("dr", delayed_rejection, " - np.sum((z1 - a * z2) ** 2)", ""),
    ("dr", delayed_rejection, "math.log(-math.expm1(last.psi - rejected.psi)) - ", "-"),
    ("dr", delayed_rejection, " - math.log(-math.expm1(state.psi - rejected.psi))", ""),
    ("dr", delayed_rejection, "or last.psi >= rejected.psi", ""),
    ("dr", delayed_rejection, "(1.0, new, here)", "(0.0, new, here)"),
    ("dr", delayed_rejection, "(-1.0, here, new)", "(0.0, here, new)"),
    ("dr", delayed_rejection, "draw.accepts(state.psi - tried.psi)", "draw.accepts(0.0)"),
    ("dr", delayed_rejection, "draw.accepts(state.psi - new.psi)", "draw.accepts(0.0)"),
]


@pytest.mark.few(10)
@pytest.mark.parametrize("name, module, factor, otherwise", FACTORS)
def test_a_missing_factor_is_found(monkeypatch, name, module, factor, otherwise):
    """Without a factor of a ratio of acceptance in the source, the tests above fail."""
    source = inspect.getsource(module)
    assert source.count(factor) == 1
    names = {"__name__": module.__name__}
    exec(compile(source.replace(factor, otherwise), module.__file__, "exec"), names)
    for key, value in names.items():
        if getattr(value, "__module__", None) == module.__name__:
            monkeypatch.setattr(module, key, value)
    with pytest.raises(
        (AssertionError, ValueError, OverflowError), match=r"Not equal to tolerance|math (domain|range) error"
    ):
        if name == "dr":
            test_delayed_rejection()
        elif module is hamiltonian:
            test_hamiltonian_path()
        else:
            test_chance_of_acceptance(*next(each for each in METHODS if each[0] == name))
