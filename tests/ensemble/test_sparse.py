"""Sparse Jacobians of stiff methods: beside dense ones, SciPy's Radau and explicit methods; patterns that lack an entry."""

from __future__ import annotations

from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from autograd.tracer import getval
from mpi4py import MPI
from scipy.integrate import solve_ivp

import mpiad
from mpiad.ensemble import (
    EnsembleMPI,
    EnsembleProblem,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Rodas5P,
    Rosenbrock23,
    Vern7,
    remake,
    solve,
    sparse_lu,
    steady_state,
)
from mpiad.ensemble.column_lu import Mass, Places
from mpiad.ensemble.sparse_lu import Banded, StepMatrices, reverse_cuthill_mckee
from mpiad.ensemble.sparsity import groups_of

WORLD = MPI.COMM_WORLD
D = 40
TIGHT, LOOSE = {"rtol": 1e-9, "atol": 1e-11}, {"rtol": 1e-4, "atol": 1e-6}
P = np.array([[0.3, 5.0], [0.2, 4.0], [0.5, 7.0]])


def fisher(u, p, t):
    """Return a reaction and diffusion in one dimension with a source that depends on time: a tridiagonal Jacobian."""
    left, right = anp.concatenate([u[:1], u[:-1]]), anp.concatenate([u[1:], u[-1:]])
    return 60 * p[0] * (left - 2 * u + right) + p[1] * u * (1 - u) + anp.sin(3 * t)


def coupled(matrix, u, p, t):
    """Return a decay at many rates with couplings, of which the matrix is constant."""
    return matrix @ anp.sin(u) * p[0] - p[1] * u**3 + anp.cos(2 * t)


def patterns():
    rng, decay = np.random.default_rng(3), np.diag(-np.linspace(10.0, 300.0, D))
    arrow, blocks = decay.copy(), decay + scipy.sparse.block_diag([rng.normal(size=(4, 4))] * (D // 4)).toarray()
    arrow[0], arrow[:, 0] = rng.normal(size=(2, D))
    arrow[0, 0] = -20.0
    scattered = decay + scipy.sparse.random_array((D, D), density=0.03, rng=rng).toarray()
    return {"arrow": arrow, "blocks": blocks, "random": scattered}


MATRICES = patterns()


def arrow(u, p, t):
    """Return `coupled` for this matrix in few operations."""
    matrix, u1 = MATRICES["arrow"], anp.sin(u)
    head = anp.sum(matrix[0][:, None] * u1, axis=0)[None]
    rest = matrix[1:, :1] * u1[:1] + np.diag(matrix)[1:, None] * u1[1:]
    return anp.concatenate([head, rest]) * p[0] - p[1] * u**3 + anp.cos(2 * t)


def blocks(u, p, t):
    """Return `coupled` for this matrix in few operations."""
    matrix = np.array([MATRICES["blocks"][k : k + 4, k : k + 4] for k in range(0, D, 4)])
    terms = matrix[..., None] * anp.reshape(anp.sin(u), (D // 4, 1, 4, -1))
    return anp.reshape(anp.sum(terms, axis=2), u.shape) * p[0] - p[1] * u**3 + anp.cos(2 * t)


SYSTEMS = {"banded": fisher, "arrow": arrow, "blocks": blocks, "random": partial(coupled, MATRICES["random"])}
# The systems differ in their patterns; the others are solved with --thorough.
every_system = pytest.mark.parametrize(
    "system", [pytest.param(name, marks=() if name == "banded" else pytest.mark.thorough) for name in SYSTEMS]
)
BAND = scipy.sparse.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(D, D))
START = np.exp(-(np.linspace(-2, 3, D) ** 2))


def ensemble(f, **changes):
    return EnsembleProblem(ODEProblem(f, START, (0.0, 0.5), P[0], **changes), p=P)


def untraced(f, u, p, t):
    """Return f, with a branch on values, for which f can't be traced."""
    return f(u, p, t) if np.all(getval(u) < 1e9) else f(u, p, t) + 1.0


@pytest.fixture
def dense(monkeypatch):
    """Return the results of a function in which all matrices are dense."""

    def computed(fun):
        with monkeypatch.context() as patch:
            patch.setattr(sparse_lu, "elimination_of", lambda *_: None)
            return fun()

    return computed


@pytest.mark.serial
@every_system
def test_solutions_and_gradients_are_those_of_dense_matrices_and_of_other_methods(system, dense):
    problem, chosen = ensemble(SYSTEMS[system]), []

    def results(alg=None, gradient="adjoint", **tolerances):
        def weighted(p, size):
            changed = remake(problem, p=p, problem=remake(problem.problem, u0=START * size))
            options = {"saveat": [0.2, 0.5], "gradient": gradient, "compile": False}
            sol = solve(changed, alg or Rodas5P(), **options, **(tolerances or LOOSE))
            return anp.sum(sol.u * np.linspace(1, 2, D)) + anp.sum(sol.u_end**2)

        value, (by_p, by_size) = mpiad.value_and_grad(weighted, argnum=(0, 1))(P, np.array(1.0))
        return np.array([value, by_size, *by_p.ravel()])

    original = sparse_lu.elimination_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_lu, "elimination_of", lambda *given: chosen.append(original(*given)) or chosen[-1])
        found = results()
    assert chosen and all(elimination is not None for elimination in chosen)
    np.testing.assert_allclose(found, dense(results), rtol=1e-10)
    np.testing.assert_allclose(found, results(gradient="tangent"), rtol=1e-10)
    np.testing.assert_allclose(results(**TIGHT), results(Vern7(), **TIGHT), rtol=3e-8)


@pytest.mark.serial
@every_system
def test_solutions_are_those_of_radau(system):
    f, problem = SYSTEMS[system], ensemble(SYSTEMS[system])
    radau = solve_ivp(lambda t, u: f(u[:, None], P[1], t)[:, 0], (0, 0.5), START, "Radau", rtol=1e-9, atol=1e-11)
    for alg, rtol, difference in ((Rodas5P(), 1e-9, 1e-7), (Rosenbrock23(), 1e-5, 3e-4)):
        sol = solve(problem, alg, rtol=rtol, atol=1e-2 * rtol)
        np.testing.assert_allclose(sol.u_end[1], radau.y[:, -1], atol=difference)


@pytest.mark.serial
@pytest.mark.thorough
def test_gradients_are_those_of_differences():
    problem, rng = ensemble(fisher), np.random.default_rng(0)
    weighted = lambda p: anp.sum(solve(remake(problem, p=p), Rodas5P(), rtol=1e-11, atol=1e-13).u_end ** 2)  # noqa: E731
    along, step = rng.normal(size=P.shape), 1e-3
    values = {k: weighted(P + k * step * along) for k in (-2, -1, 1, 2)}
    difference = (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * step)
    np.testing.assert_allclose(np.sum(mpiad.grad(weighted)(P) * along), difference, rtol=1e-8)


@pytest.mark.serial
def test_a_state_that_is_a_matrix():
    def spread(u, p, t):
        padded = anp.pad(u, 1, mode="constant")
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return 50 * p[0] * (around - 4 * u) + u * (1 - u)

    problem = ODEProblem(spread, np.ones((7, 7)), (0.0, 0.05), [1.0], jac_sparsity=np.ones((49, 49)))
    sol = solve(problem, Rodas5P(), **TIGHT)
    np.testing.assert_allclose(sol.u_end, solve(problem, Vern7(), **TIGHT).u_end, atol=1e-8)


@pytest.mark.serial
@pytest.mark.thorough
def test_mass_matrices(dense):
    # Linear finite elements, and an algebraic equation for the last component.
    mass = (np.diag(np.full(D, 4.0)) + np.diag(np.ones(D - 1), 1) + np.diag(np.ones(D - 1), -1)) / 6
    mass[-1] = mass[:, -1] = 0.0

    def elements(u, p, t):
        return anp.concatenate([fisher(u, p, t)[:-1], u[-1:] - 0.1 * p[1] * anp.sin(u[-2:-1])])

    problem = remake(ensemble(elements), problem=ODEProblem(elements, START, (0.0, 0.3), P[0], mass_matrix=mass))

    def results():
        def squares(p):
            u = solve(remake(problem, p=p), Rodas5P(), compile=False, **TIGHT).u_end
            return anp.sum(u**2)

        return squares(P), mpiad.grad(squares)(P)

    for found, expected in zip(results(), dense(results)):
        np.testing.assert_allclose(found, expected, rtol=1e-10)

    def reduced(t, v):
        u = np.append(v, 0.1 * P[1, 1] * np.sin(v[-1]))
        return np.linalg.solve(mass[:-1, :-1], fisher(u, P[1], t)[:-1])

    radau = solve_ivp(reduced, (0, 0.3), START[:-1], "Radau", rtol=1e-10, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(solve(problem, Rodas5P(), **TIGHT).u_end[1, :-1], radau, atol=1e-7)


@pytest.mark.serial
def test_events_and_single_precision():
    problem, crossing = ensemble(fisher), Event(lambda u, p, t: u[-1] - 0.5)
    found, expected = (solve(problem, alg, events=crossing, **TIGHT) for alg in (Rodas5P(), Vern7()))
    assert set(found.retcode) == {"Terminated"}
    np.testing.assert_allclose(found.t_reached, expected.t_reached, atol=1e-8)
    single = remake(problem, problem=remake(problem.problem, u0=START.astype(np.float32)), p=P.astype(np.float32))
    sol = solve(single, Rodas5P(), rtol=1e-4, atol=1e-5)
    assert sol.u_end.dtype == np.float32
    np.testing.assert_allclose(sol.u_end, solve(problem, Rodas5P(), **TIGHT).u_end, atol=2e-3)


@pytest.mark.serial
def test_patterns_for_an_f_that_cannot_be_traced():
    expected = solve(ensemble(fisher), Rodas5P(), **LOOSE).u_end
    for pattern in (BAND, BAND.toarray(), BAND.toarray() + np.eye(D, k=5)):
        sol = solve(ensemble(partial(untraced, fisher), jac_sparsity=pattern), Rodas5P(), **LOOSE)
        np.testing.assert_allclose(sol.u_end, expected, rtol=1e-10)
    # NaN times a zero of the matrix reaches all components, but the entries aren't missing.
    matrix = MATRICES["blocks"]
    sol = solve(ensemble(partial(untraced, partial(coupled, matrix)), jac_sparsity=matrix), Rodas5P(), **LOOSE)
    np.testing.assert_allclose(sol.u_end, solve(ensemble(SYSTEMS["blocks"]), Rodas5P(), **LOOSE).u_end, rtol=1e-10)


def hidden(u, p, t):
    """Return `fisher` with another entry of the Jacobian, in row 7 and column 30, after t = 0.1."""
    extra = u[30:31] ** 2 * (getval(t) > 0.1)
    return fisher(u, p, t) + anp.concatenate([0 * u[:7], extra, 0 * u[8:]])


def vanishing(u, p, t):
    """Return `fisher` with another entry of the Jacobian, in row 7 and column 30, that vanishes at u[30] = 0."""
    return fisher(u, p, t) + anp.concatenate([0 * u[:7], u[30:31] ** 2, 0 * u[8:]])


@pytest.mark.serial
@pytest.mark.parametrize("f", [vanishing, partial(untraced, vanishing), partial(untraced, hidden)])
def test_a_missing_entry_is_named(f):
    problem = remake(ensemble(f).problem, u0=np.where(np.arange(D) == 30, 0.0, START))
    problem = remake(problem, jac_sparsity=BAND)
    with pytest.raises(ValueError, match="no entry in row 7 and column 30"):
        solve(problem, Rodas5P(), **TIGHT)


@pytest.mark.serial
def test_a_missing_entry_is_named_by_kernels_too():
    problem = ODEProblem(lambda u, p, t: [u[1] - u[0], -u[1]], [1.0, 2.0], (0.0, 1.0), jac_sparsity=np.eye(2))
    for compiled in (True, False):
        with pytest.raises(ValueError, match="no entry in row 0 and column 1"):
            solve(problem, Rodas5P(), compile=compiled)


@pytest.mark.serial
def test_invalid_patterns():
    for pattern, error, text in (
        (np.ones((D, D - 1)), ValueError, rf"shape \({D}, {D}\), as u0 has {D} components, but has \({D}, {D - 1}\)"),
        ("banded", TypeError, "must be an array or a SciPy sparse matrix, but is str"),
    ):
        with pytest.raises(error, match=text):
            solve(ensemble(fisher, jac_sparsity=pattern), Rodas5P())
    assert set(solve(ensemble(fisher, jac_sparsity="banded"), Vern7()).retcode) == {"Success"}


@pytest.mark.serial
@pytest.mark.parametrize("compile", [False, True])
def test_a_trajectory_without_a_solution_fails_alone(compile):
    p = P.copy()
    p[1, 0] = np.inf
    expected, found = (solve(remake(ensemble(fisher), p=x), Rodas5P(), compile=compile, **LOOSE) for x in (P, p))
    assert found.retcode.tolist() == ["Success", "Unstable", "Success"]
    assert found.u_end[[0, 2]].tobytes() == expected.u_end[[0, 2]].tobytes()


@pytest.mark.serial
@pytest.mark.parametrize("d", [1, 7, 94])
@pytest.mark.parametrize("density", [0.0, 0.03, 0.3])
def test_the_order_of_unknowns_is_that_of_scipy(d, density):
    rng = np.random.default_rng(0)
    for _ in range(10):
        matrix = (rng.random((d, d)) < density) | np.diag(rng.random(d) < 0.7)
        pattern = scipy.sparse.csr_array(matrix | matrix.T)
        expected = scipy.sparse.csgraph.reverse_cuthill_mckee(pattern, symmetric_mode=True)
        np.testing.assert_array_equal(reverse_cuthill_mckee(Places(*np.nonzero(matrix)), d), expected)


@pytest.mark.serial
@pytest.mark.parametrize("name", ["banded", *MATRICES])
def test_factors(name):
    matrix = MATRICES.get(name, np.eye(D, k=1) - 3 * np.eye(D, k=-2))
    rng, places = np.random.default_rng(1), Places(*np.nonzero(matrix))
    entries, right = rng.normal(size=(len(places.rows), 4)), rng.normal(size=(D, 4))
    matrices = StepMatrices(places, Mass(None, 0.25), D)
    assert isinstance(matrices.elimination, Banded) == (name != "arrow")
    # One matrix has no inverse, one isn't finite.
    full = np.zeros((D, D, 4))
    full[places] = entries
    entries[(places.rows == 9) | (places.rows == 10), 1] = 0.0
    scale = np.array([1.0, 0.0, 1.0, 1.0])
    entries[5, 2] = np.nan
    lu = matrices.factorized(entries, scale)
    for transposed in (False, True):
        x = right.copy()
        lu.solve(x, transposed)
        for c in (0, 3):
            dense = full[..., c] + 4 * scale[c] * np.eye(D)
            np.testing.assert_allclose(x[:, c], np.linalg.solve(dense.T if transposed else dense, right[:, c]), rtol=1e-7)
        assert not np.isfinite(x[:, 1:3]).all(axis=0).any()


@pytest.mark.serial
def test_groups_of_columns():
    band = Places(*np.nonzero(np.tri(50, k=2) - np.tri(50, k=-2)))
    assert len(groups_of(band, 50)) == 4
    for matrix in MATRICES.values():
        groups = groups_of(Places(*np.nonzero(matrix)), D)
        assert (groups.sum(axis=0) == 1).all() and ((matrix != 0) @ groups.T <= 1).all()


@pytest.mark.serial
@pytest.mark.parametrize("system", ["banded", pytest.param("arrow", marks=pytest.mark.thorough)])
def test_steady_states(system, dense):
    f = lambda u, p, t: SYSTEMS[system](u, p, 0.0 * t)  # noqa: E731

    def results():
        roots = lambda p: steady_state(EnsembleProblem(ODEProblem(f, START, (0.0, 0.5), P[0]), p=p), Rodas5P())  # noqa: E731
        found = roots(P)
        push = mpiad.make_jvp(lambda p: roots(p).u)(P)(np.ones_like(P))[1]
        return found.u, found.jacobian, mpiad.grad(lambda p: anp.sum(roots(p).u ** 3))(P), push

    found = results()
    for own, expected in zip(found, dense(results)):
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9)
    root = scipy.optimize.root(lambda u: f(u[:, None], P[1], 0.0)[:, 0], found[0][1] + 0.01, tol=1e-13).x
    np.testing.assert_allclose(found[0][1], root, atol=1e-8)


@pytest.mark.serial
def test_a_singular_steady_state():
    f = lambda u, p, t: anp.concatenate([u[:-1] - p[0], (u[-1:] - p[0]) ** 2])  # noqa: E731
    states = EnsembleProblem(ODEProblem(f, np.ones(D), (0.0, 0.0), [1.0]), u0=np.ones((2, D)), p=np.array([[1.0], [0.5]]))
    assert steady_state(states).retcode[0] == "Singular"


@pytest.mark.parametrize("compile", [False, True])
def test_ranks_agree(compile):
    problem, options = ensemble(fisher), LOOSE | {"compile": compile}

    def squares(p, backend):
        return anp.sum(solve(remake(problem, p=p), Rodas5P(), backend, **options).u_end ** 2)

    found, alone = (
        solve(problem, Rodas5P(), backend, **options).u_end for backend in (EnsembleMPI(), EnsembleVectorized())
    )
    assert found.tobytes() == alone.tobytes()
    found, alone = (mpiad.grad(squares, shared=True)(P, backend) for backend in (EnsembleMPI(), EnsembleVectorized()))
    assert found.tobytes() == alone.tobytes()
