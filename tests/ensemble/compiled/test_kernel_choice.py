"""When f is compiled, and what is said where it can't be."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.compiling import cache
from mpiad.compiling.program import Builder
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    ODEProblem,
    Rodas5P,
    Tsit5,
    field_jacobian,
    remake,
    solve,
)
from mpiad.ensemble.compiled import kernel_choice, traced_problem
from mpiad.programs import scalar_recorder

pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]


def decay(u, p, t):
    return [-u[0]]


def many(f, count=1000, d=1):
    return EnsembleProblem(ODEProblem(f, np.ones(d), (0.0, 0.1)), u0=np.ones((count, d)))


def is_compiled(sol):
    try:
        return bool(sol.problem.kernel_source())
    except ValueError as error:
        assert "compile=True" in str(error)
        return False


@pytest.fixture
def forgetting(monkeypatch, tmp_path):
    """Return a function after which this process knows no more than a new one that has the same folder of kernels."""

    def forget():
        for known in (cache._loaded, kernel_choice._histories, traced_problem._known):
            known.clear()

    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path))
    forget()
    return forget


def kinds(solutions):
    """Return the ways of some solutions: a, arrays; c, compiled; d, from the disk; m, from the memory."""
    ends = {"compiled": "c", "cache": "d", "memory": "m"}
    return "".join(
        next((kind for word, kind in ends.items() if word in sol.execution), "?") if is_compiled(sol) else "a"
        for sol in solutions
    )


def swinging(u, p, t):
    return [u[1], -p[0] * u[0]]


SWING = ODEProblem(swinging, [1.0, 0.0], (0.0, 20.0), [2.0])


def test_work_pays_for_a_kernel_at_once_or_by_and_by(forgetting):
    found = [solve(SWING, Tsit5(), rtol=1e-6) for _ in range(30)]
    assert re.fullmatch("aa+cm+", kinds(found))
    assert found[0].execution.startswith("arrays: estimated ") and "loading a kernel 44 ms" in found[0].execution
    np.testing.assert_allclose(found[-1].u, found[0].u, rtol=1e-11)
    # One long solve costs more than a kernel, and so does a large ensemble, in any number of batches.
    forgetting()
    assert kinds([solve(SWING, RK4(), dt=1e-3), solve(SWING, RK4(), dt=1.0)]) == "cm"
    forgetting()
    ensemble = EnsembleProblem(SWING, p=np.linspace(1.0, 2.0, 200_000)[:, None])
    assert kinds([solve(ensemble, RK4(), dt=1.0, batch_size=50_000)]) == "c"


@pytest.mark.thorough
def test_the_same_kernels_give_the_same_choices(forgetting):
    def ways():
        forgetting()
        return kinds(solve(SWING, Tsit5(), rtol=1e-6) for _ in range(30))

    first, second, third = ways(), ways(), ways()
    assert second == third and re.fullmatch("a+dm+", second)
    assert second.index("d") < first.index("c")
    # A kernel of the other way is in memory: even a short solve takes it.
    forgetting()
    solve(SWING, Tsit5(), rtol=1e-6, compile=True)
    assert kinds([solve(SWING, Tsit5(), rtol=1e-2)]) == "m"


LONG = ODEProblem(swinging, [1.0, 0.0], (0.0, 2000.0), [2.0])
RESTARTED = "kernel: restarted, since arrays took more steps than estimated"


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [EnsembleVectorized(), EnsembleThreads(2)], ids=["vectorized", "threads"])
def test_a_solve_with_more_steps_than_estimated_is_restarted(forgetting, backend, capsys):
    ensemble, ended = EnsembleProblem(LONG, p=np.linspace(1.0, 2.0, 3)[:, None]), {"saveat": 500.0, "rtol": 1e-6}
    sol = solve(ensemble, Tsit5(), backend, progress=True, **ended)
    assert sol.execution == RESTARTED
    assert "3/3" in capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
    expected = solve(ensemble, Tsit5(), backend, compile=True, **ended)
    np.testing.assert_array_equal(sol.u, expected.u)
    np.testing.assert_array_equal(sol.naccept, expected.naccept)
    # A solve whose steps become large isn't restarted, although it has covered little of tspan.
    forgetting()
    fading = ODEProblem(lambda u, p, t: [-p[0] * u[0] / (1e-6 + t)], [1.0], (0.0, 1e6), [1.0])
    assert kinds([solve(fading, Tsit5(), rtol=1e-3)]) == "a"


def robertson(u, p, t):
    first, third = 0.04 * u[0], 1e4 * u[1] * u[2]
    return [third - first, first - third - 3e7 * u[1] ** 2, 3e7 * u[1] ** 2]


@pytest.mark.thorough
def test_the_estimated_number_of_steps_of_a_running_solve(forgetting, monkeypatch):
    advances = []

    def recorded(watch, advance):
        advances.append(advance)
        return advance.turns + 1

    monkeypatch.setattr(kernel_choice._Watch, "__call__", recorded)
    growing = ODEProblem(robertson, [1.0, 0.0, 0.0], (0.0, 1e5))
    for problem, alg, most in ((growing, Rodas5P(), 2.0), (remake(LONG, tspan=(0.0, 400.0)), Tsit5(), 1.2)):
        advances.clear()
        sol = solve(problem, alg, rtol=1e-6, atol=1e-9)
        total = sol.naccept + sol.nreject
        assert len(advances) == total > 50
        ratios = np.array([advance.all_turns for advance in advances[5:]]) / total
        assert ratios.max() < most
        assert ratios[-1] == pytest.approx(1.0, abs=0.05)
        assert ratios[len(ratios) // 2] > 0.5


def test_values_and_gradients_share_their_numbers_of_steps(forgetting, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_PATIENCE", np.inf)
    solutions = []

    def loss(p):
        solutions.append(solve(remake(LONG, p=p, tspan=(0.0, 500.0)), Tsit5(), rtol=1e-6))
        return anp.sum(solutions[-1].u_end ** 2)

    loss(np.array([2.0]))
    mpiad.grad(loss)(np.array([2.0]))
    assert kinds(solutions) == "ac"


def test_the_gradient_of_a_restarted_solve(forgetting):
    def loss(p, compile="auto"):
        sol = solve(remake(LONG, p=p), Tsit5(), rtol=1e-6, compile=compile)
        executions.append(sol.execution)
        return anp.sum(sol.u_end**2)

    executions = []
    slopes = [mpiad.grad(lambda p: loss(p, compile))(np.array([2.0])) for compile in ("auto", True)]  # noqa: B023
    assert executions[0] == RESTARTED
    np.testing.assert_array_equal(*slopes)


@pytest.mark.thorough
def test_the_same_choices_in_new_processes(tmp_path):
    program = (
        "from mpiad.ensemble import ODEProblem, Tsit5, solve\n"
        "swing = ODEProblem(lambda u, p, t: [u[1], -p[0] * u[0]], [1.0, 0.0], (0.0, 20.0), [2.0])\n"
        "sols = [solve(swing, Tsit5(), rtol=1e-6) for _ in range(30)]\n"
        "print([(sol.execution, sol.u.tobytes().hex()) for sol in sols])"
    )
    environment = {**os.environ, "MPIAD_CACHE": str(tmp_path)}
    first, second, third = (
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(3)
    )
    assert "compiled" in first and "compiled" not in second
    assert "in the cache" in second and second == third


def test_forward_and_reverse_kernel_belong_together(forgetting, tmp_path):
    def ways(count):
        forgetting()
        solutions = []

        def loss(u0):
            solutions.append(solve(ODEProblem(swinging, u0, (0.0, 20.0), [2.0]), Tsit5(), gradient="adjoint"))
            return anp.sum(solutions[-1].u_end ** 2)

        gradients = [mpiad.grad(loss)(np.array([1.0, 0.0])) for _ in range(count)]
        np.testing.assert_allclose(gradients, [gradients[0]] * count, rtol=1e-11)
        return kinds(solutions)

    first, second = ways(15), ways(4)
    assert re.fullmatch("aa+cm+", first) and re.fullmatch("a*dm+", second)
    files = list(tmp_path.glob("*.kernel"))
    assert len(files) == 2
    before, reverse = sorted(files, key=lambda file: b"# reverse of" in file.read_bytes())
    assert b"# forward of" in before.read_bytes()
    reverse.unlink()
    assert "d" not in ways(4)


def test_a_kernel_that_is_slower_isn_t_taken(forgetting, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_LANE_OPERATION", 1e-6)
    kernel_choice.rates.cache_clear()
    sol = solve(EnsembleProblem(SWING, p=np.linspace(1.0, 2.0, 40_000)[:, None]), RK4(), dt=1.0)
    assert re.fullmatch(r"arrays: estimated [\d.]+ s faster than a kernel", sol.execution)
    kernel_choice.rates.cache_clear()


def test_elementary_functions_are_estimated_as_vector_instructions():
    def time_of_step(operation):
        builder = Builder()
        program = builder.program({"state": 1}, [builder.call(operation, builder.input("state"))])
        return kernel_choice.rates(RK4().tableau, 1, program, gradient=False).lane

    assert (
        time_of_step("exp") == time_of_step("log") == time_of_step("sinh") < time_of_step("arctan") == time_of_step("erf")
    )


def network(u, p, t):
    met = anp.dot(p["outer"], anp.tanh(anp.dot(p["inner"], u)))
    return [u[0] + met[0], met[1] - u[1]]


def test_training_of_a_network_takes_the_kernel_on_disk(forgetting):
    rng = np.random.default_rng(0)
    p = {"inner": rng.normal(size=(24, 2)), "outer": 0.1 * rng.normal(size=(2, 24))}
    solutions = []

    def loss(p, compile):
        problem = EnsembleProblem(ODEProblem(network, np.ones(2), (0.0, 1.0), p), u0=rng.uniform(0.5, 1.5, (1000, 2)))
        solutions.append(solve(problem, Tsit5(), compile=compile))
        return anp.sum(solutions[-1].u_end ** 2)

    mpiad.grad(loss)(p, True)
    forgetting()
    for _ in range(20):
        mpiad.grad(loss)(p, "auto")
    assert re.fullmatch("aa+dm+", kinds(solutions[1:]))


@pytest.mark.usefixtures("free")
def test_by_backend_and_option():
    assert is_compiled(solve(many(decay)))
    assert is_compiled(solve(many(decay, 1)))
    assert is_compiled(solve(many(decay).problem))
    assert is_compiled(solve(many(decay), RK45(), EnsembleThreads(2)))
    assert is_compiled(solve(many(decay), RK45(), EnsembleMPI()))
    for options in ({"compile": False}, {"ensemblealg": EnsembleSerial(), "max_steps": 1}):
        sol = solve(many(decay, 3), **options)
        assert not is_compiled(sol) and sol.execution.startswith("arrays: ")
    assert solve(many(decay, 3), compile=True).execution == "kernel: compile=True"
    assert solve(many(decay, 3), compile=False)[2].execution == "arrays: compile=False"


@pytest.mark.usefixtures("free")
def test_complex_numbers(caplog):
    u0 = np.ones((1000, 1), complex)
    assert is_compiled(solve(EnsembleProblem(ODEProblem(decay, u0[0], (0.0, 0.1)), u0=u0)))
    assert not caplog.records

    def unordered(u, p, t):
        return [np.maximum(u[0], 0.5)]

    assert not is_compiled(solve(EnsembleProblem(ODEProblem(unordered, u0[0], (0.0, 0.1)), u0=u0)))
    line = f"test_kernel_choice.py:{unordered.__code__.co_firstlineno + 1}: it takes maximum of complex numbers"
    assert line in caplog.records[0].getMessage()


@pytest.mark.usefixtures("free")
def test_an_f_that_branches_is_told_once(caplog):
    def branches(u, p, t):
        return [-u[0] if np.all(u[0] > 0) else u[0]]

    for _ in range(2):
        assert not is_compiled(solve(many(branches)))
    (record,) = caplog.records
    assert "test_kernel_choice.py" in record.getMessage() and "arrays instead" in record.getMessage()
    with pytest.raises(TypeError, match=r"test_kernel_choice.py:\d+"):
        solve(many(branches, 5), compile=True)


@pytest.mark.usefixtures("free")
def test_large_ones(caplog, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_MOST_COMPONENTS", 3)
    sol = solve(many(lambda u, p, t: -u, d=4))
    assert not is_compiled(sol)
    assert sol.execution == "arrays: a state has more than 3 components"
    assert not caplog.records
    assert is_compiled(solve(many(lambda u, p, t: -u, 3, d=4), compile=True))
    assert "4 components" in caplog.text and "up to 3" in caplog.text


@pytest.mark.thorough
def test_a_gradient_finds_out_how_often_f_calls_numpy(forgetting):
    """A sum of 200 terms is compiled after a few gradients; by the number of components alone it would be much later."""

    def terms(u, p, t):
        return -p[0] * u - sum(1e-6 * (k % 7) * u for k in range(200))

    def end(p):
        found.append(solve(ODEProblem(terms, np.ones(2), (0.0, 1.0), p), Tsit5(), rtol=1e-6))
        return anp.sum(found[-1].u_end)

    found = []
    for _ in range(12):
        slope = mpiad.grad(end)(np.array([0.5]))
        np.testing.assert_allclose(slope, -2 * np.exp(-0.5 - 1e-6 * sum(k % 7 for k in range(200))), rtol=1e-5)
    assert kinds(found).startswith("a") and is_compiled(found[-1])


@pytest.mark.usefixtures("free")
def test_large_states_of_explicit_and_implicit_methods():
    """A chain of 350 components is compiled with an explicit method; by both it relaxes as its matrix exponential says."""

    def chain(u, p, t):
        return np.concatenate([u[1:], u[:1]]) - u

    start = np.cos(np.arange(350.0))
    problem = ODEProblem(chain, start, (0.0, 0.5))
    modes = np.exp(0.5 * (np.exp(2j * np.pi * np.arange(350) / 350) - 1))
    exact = np.fft.ifft(np.fft.fft(start) * modes).real
    ways = {}
    for alg in (Tsit5(), Rodas5P()):
        sol = solve(problem, alg, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(sol.u_end, exact, atol=1e-7)
        ways[type(alg).__name__] = is_compiled(sol), sol.execution
    assert ways["Tsit5"][0] and ways["Rodas5P"] == (False, "arrays: a state has more than 300 components")


@pytest.mark.few(1)
@pytest.mark.parametrize("alg", [Tsit5(), Rodas5P()])
def test_the_gradient_has_more_operations_than_a_trace_may_have(alg, monkeypatch):
    """The adjoint of f is derived from its program, whose operations are limited, and may be a few times as long."""
    monkeypatch.setattr(scalar_recorder, "_MAX_OPERATIONS", 80)
    rates = np.linspace(0.5, 1.5, 8)

    def f(u, p, t):
        for k in range(4):
            u = u * (1 + p[k] / 4)
        return -u

    def end(p):
        sol = solve(ODEProblem(f, rates, (0.0, 1.0), p), alg, rtol=1e-10, atol=1e-12, compile=True)
        assert is_compiled(sol)
        return anp.sum(sol.u_end)

    p = np.array([0.4, -0.3, 0.2, 0.1])
    factor = np.prod(1 + p / 4)
    np.testing.assert_allclose(end(p), np.sum(rates) * np.exp(-factor), rtol=1e-9)
    slope = -np.sum(rates) * np.exp(-factor) * factor / (4 + p)
    np.testing.assert_allclose(mpiad.grad(end)(p), slope, rtol=1e-8)


@pytest.mark.usefixtures("free")
def test_a_jacobian_with_too_many_operations(caplog, monkeypatch):
    monkeypatch.setattr(field_jacobian, "_MOST_OPERATIONS", 20)
    weights = np.random.default_rng(3).normal(size=(6, 6))
    problem = ODEProblem(lambda u, p, t: anp.tanh(anp.dot(weights, u)) - u, np.ones(6), (0.0, 1.0))
    with pytest.raises(TypeError, match=r"compile=True, but the Jacobian of f can't be compiled .*more than 20 operations"):
        solve(problem, Rodas5P(), compile=True)
    assert is_compiled(solve(problem, Tsit5()))
    sol = solve(problem, Rodas5P(), rtol=1e-8, atol=1e-10)
    assert not is_compiled(sol) and "the Jacobian of f can't be compiled" in caplog.text
    np.testing.assert_allclose(sol.u_end, solve(problem, Tsit5(), rtol=1e-10, atol=1e-12).u_end, atol=1e-7)


@pytest.mark.usefixtures("free")
def test_operations_that_change_from_solve_to_solve(caplog, monkeypatch):
    monkeypatch.setattr(traced_problem, "_MOST_PROGRAMS", 2)

    def closing_over(n):
        return lambda u, p, t: [sum(-(u[0] ** (k + 2)) for k in range(n))]

    assert [is_compiled(solve(many(closing_over(n)))) for n in (1, 2, 3, 1)] == [True, True, False, True]
    assert "Pass the changing values as p" in caplog.text


@pytest.mark.usefixtures("free")
def test_partial_functions_are_those_that_they_call(caplog, monkeypatch):
    monkeypatch.setattr(traced_problem, "_MOST_PROGRAMS", 1)
    functions = [lambda u, p, t: [-u[0]], lambda u, p, t: [-2 * u[0]]]
    assert all(is_compiled(solve(many(partial(f)))) for f in functions)
    assert not caplog.records


def test_a_compilation_is_logged_when_it_happens(caplog, monkeypatch, tmp_path):
    """Once, however many solves use the kernel; and its loading, by another process, which has forgotten it here."""
    monkeypatch.setenv("MPIAD_CACHE", str(tmp_path))
    prob = many(lambda u, p, t: [-1.25 * u[0]], 3)
    for how in ("compiled", "loaded"):
        with caplog.at_level(logging.INFO, logger="mpiad"):
            for _ in range(3):
                solve(prob, compile=True)
        (said,) = [record.getMessage() for record in caplog.records]
        assert re.fullmatch(rf"solve: the forward kernel was {how} in \d+\.\d\d s\.", said)
        caplog.clear()
        cache._loaded.clear()


def test_what_it_may_be():
    with pytest.raises(ValueError, match="compile must be 'auto', True or False, but got 'yes'"):
        solve(many(decay, 3), compile="yes")
