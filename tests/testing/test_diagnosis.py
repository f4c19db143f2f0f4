"""`diagnose` finds wrong adjoints by rank and line, and nothing in right programs."""

import inspect
import os
import time

import autograd.numpy as anp
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from device_double import on_device
from machine_load import slowdown
from testing import wrong_adjoints

import mpiad
from mpiad.ensemble import ODEProblem, solve
from mpiad.testing import diagnose


def line_of(fun):
    """Return the line of a function that ends in the function's name, as reports show it."""
    lines, first = inspect.getsourcelines(fun)
    place = next(k for k, line in enumerate(lines) if line.endswith(f"# {fun.__name__}\n"))
    return f"wrong_adjoints.py:{first + place} in {fun.__name__}"


def x_of(rank):
    return np.random.default_rng((92, rank)).standard_normal(6)


def found(fun, x):
    began = time.monotonic()
    report = diagnose(fun, x)
    assert time.monotonic() - began < 10 * slowdown()
    return {(finding.rank, finding.line) for finding in report.findings}


@pytest.mark.parametrize("fun", [*wrong_adjoints.LOCAL, *wrong_adjoints.OF_NEIGHBORS])
def test_a_wrong_adjoint_is_found_on_each_rank(fun, rank, size):
    if fun is wrong_adjoints.copies_in_place and os.environ.get("MPIAD_DEBUG"):
        with pytest.raises(RuntimeError, match="copies_in_place.*changed in place"):  # the debug mode finds it before
            diagnose(fun, x_of(rank))
        return
    assert found(fun, x_of(rank)) == {(r, line_of(fun)) for r in range(size)}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("fun", wrong_adjoints.ON_SEVERAL_RANKS)
def test_a_wrong_adjoint_that_communicates_is_found_on_each_rank(fun, rank, size):
    assert found(fun, x_of(rank)) == {(r, line_of(fun)) for r in range(size)}


def test_an_error_on_one_rank_is_found_there(rank, size):
    def loss(x):
        y = wrong_adjoints.softsign(x) if rank == size - 1 else anp.tanh(x)
        return mpiad.mpi_allreduce(anp.sum(y * mpiad.mpi_bcast(x, 0)))

    report = diagnose(loss, x_of(rank))
    assert [(each.rank, each.operation, each.argument) for each in report.findings] == [(size - 1, "softsign", 0)]
    assert "softsign has an adjoint with a relative error of" in repr(report)


@pytest.mark.mpi(min_size=2)
def test_the_rank_whose_cotangent_is_wrong_is_found(rank, size):
    # All ranks communicate in the operator, and one of them returns a wrong cotangent.
    total = mpiad.extend.custom_operator(lambda x, c: wrong_adjoints.WORLD.allreduce(c * x))

    def rule(ans, x, c):
        return lambda g: c * wrong_adjoints.WORLD.allreduce(g) * (1.01 if rank == 1 else 1.0)

    mpiad.extend.defvjp(total, rule, lambda ans, x, c: lambda g: anp.sum(x * wrong_adjoints.WORLD.allreduce(g)))
    report = diagnose(lambda x: anp.sum(total(anp.sin(x), anp.sum(x)) * x), x_of(rank))
    assert [(each.rank, each.argument) for each in report.findings] == [(1, 0)]
    assert report.findings[0].error == pytest.approx(0.01, rel=0.3)


def relu(x):
    return anp.maximum(x, 0.0)


def ties_between_ranks(x):
    same = mpiad.mpi_bcast(x, 0)
    return anp.sum(mpiad.mpi_allreduce(same, op=wrong_adjoints.MPI.MAX) * x)


RIGHT = {
    "zeros": (lambda x: anp.sum(relu(0 * x) * x + relu(anp.concatenate([x, 0 * x])[3:9])), 1.0),
    "ties": (lambda x: anp.max(anp.concatenate([x, x])) + anp.max(anp.stack([x, x, x]) * x), 1.0),
    "sorted ties": (lambda x: anp.sum(anp.sort(anp.concatenate([x, x, x]))[::2] * anp.arange(9)), 1.0),
    "ties between ranks": (ties_between_ranks, 1.0),
    "clipped": (lambda x: anp.sum(anp.clip(x * 10, -1, 1) * anp.arange(1.0, 7.0)), 1.0),
    "steep": (lambda x: anp.sum(anp.exp(30 * x) + anp.tanh(1e3 * x)), 1.0),
    "small": (lambda x: anp.sum(anp.log(x**2)), 1e-8),
    "large": (lambda x: anp.sum(anp.sin(x * 1e-9)) / anp.sum(x**2), 1e9),
    "cancelling": (lambda x: anp.var(x + 1e6) + anp.sum((x + 1e6) - (x[::-1] + 1e6)), 1.0),
    "solved": (lambda x: anp.sum(anp.linalg.solve(anp.outer(x, x) + 1e-6 * np.eye(6), x)), 1.0),
    "eigenvalues": (lambda x: anp.sum(anp.linalg.eigh(anp.outer(x, x) + anp.diag(x))[0] * x), 1.0),
    "complex": (lambda x: anp.sum(anp.abs(anp.fft.ifft(anp.exp(1j * anp.fft.fft(x)))) ** 2 * x), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_right_programs_raise_no_alarm(case, rank):
    fun, scale = RIGHT[case]
    report = diagnose(fun, x_of(rank) * scale)
    assert not report.findings and not report.unrepeatable
    assert report.checked > report.unchecked


def test_single_precision(rank):
    x = x_of(rank).astype(np.float32)
    assert not diagnose(lambda x: mpiad.mpi_allreduce(anp.sum(anp.sin(x) ** 3 / (1 + x**2))), x).findings
    assert found(wrong_adjoints.has_a_wrong_sign, x)


def test_device_arrays(rank, size):
    scaled = primitive(lambda x: x * x)
    defvjp(scaled, lambda ans, x: lambda g: 2.02 * x * g)  # it should be 2 x g
    x = on_device(x_of(rank))
    assert not diagnose(lambda x: mpiad.mpi_allreduce(anp.sum(anp.sin(x)[1:4] * x[2:5])), x).findings
    findings = diagnose(lambda x: mpiad.mpi_allreduce(anp.sum(scaled(x) * x)), x).findings
    assert [(each.rank, each.argument) for each in findings] == [(r, 0) for r in range(size)]


def test_steps_of_compiled_and_checkpointed_functions_are_checked(rank, size):
    @mpiad.jit
    def step(u, k, c):
        return u + 0.1 * anp.sin(u) * mpiad.mpi_allreduce(c)

    def loss(x):
        u = mpiad.timestepping.scan(step, x, 4, anp.sum(x), checkpoints=2)
        return anp.sum(mpiad.timestepping.scan(lambda u, k: wrong_adjoints.softsign(u), u, 3, checkpoints=2))

    report = diagnose(loss, x_of(rank))
    assert {each.operation for each in report.findings} == {"softsign"}
    assert report.checked >= size * (4 * 4 + 3)
    step_only = diagnose(mpiad.jit(lambda x: anp.sum(step(x, 0, 2.0))), x_of(rank))
    assert not step_only.findings and step_only.checked >= size * 4


def test_several_arguments_and_cotangents(rank, size):
    def fun(x, y):
        return {"a": wrong_adjoints.softsign(x["u"]), "b": anp.dot(y, x["u"])}

    x, y = {"u": x_of(rank), "name": "x"}, np.ones((2, 6))
    with pytest.raises(TypeError, match="without cotangents= the function must return one real number"):
        diagnose(fun, x, y)
    with pytest.raises(ValueError, match="cotangents= must have the shapes of the results"):
        diagnose(fun, x, y, cotangents=1.0)
    report = diagnose(fun, x, y, argnum=(0, 1), cotangents={"a": np.ones(6), "b": np.ones(2)})
    assert [(each.rank, each.operation) for each in report.findings] == [(r, "softsign") for r in range(size)]


def test_a_function_that_is_not_deterministic_is_named(rank, size):
    rng = np.random.default_rng(rank)
    report = diagnose(lambda x: anp.sum(x * rng.standard_normal(6)), x_of(rank))
    assert [text.split(" at ")[0] for text in report.unrepeatable] == [f"rank {r}: multiply" for r in range(size)]
    assert not report.findings


def test_a_solve_with_steps_of_its_own_is_not_checked(rank, size):
    def loss(p):
        problem = ODEProblem(lambda u, p, t: anp.stack([u[1], -p[0] * u[0] - p[1] * u[1] ** 3]), np.ones(2), (0.0, 1.0), p)
        return anp.sum(solve(problem, saveat=[0.5, 1.0]).u ** 2)

    report = diagnose(loss, np.array([1.0, 0.3]))
    assert not report.findings and report.unchecked >= size


@pytest.mark.one_rank  # only sums are exchanged
def test_solves_are_checked_whatever_their_tolerance_is(rank, size):
    squared = primitive(lambda x: x * x)
    defvjp(squared, lambda ans, x: lambda g: 2.02 * x * g)  # it should be 2 x g

    def solved(x, square):
        def matvec(u, x):
            return (2.0 + square(x) + np.arange(6)) * u + 0.1 * (anp.roll(u, 1) + anp.roll(u, -1))

        return anp.sum(mpiad.linalg.solve(matvec, anp.sin(x) + 1, x, rtol=1e-3) ** 3)

    def root(x, square):
        return anp.sum(mpiad.linalg.newton(lambda u, x: 3 * u + u**3 - square(x), np.zeros(6), x, rtol=1e-3) ** 2)

    for fun, name in ((solved, "solution"), (root, "root")):
        report = diagnose(fun, x_of(rank), lambda x: x**2)
        assert not report.findings and not report.unchecked
        report = diagnose(fun, x_of(rank), squared)
        assert [(each.rank, each.operation) for each in report.findings] == [(r, name) for r in range(size)]
        assert all(1e-3 < each.error < 2e-2 for each in report.findings)


def test_a_solve_that_cannot_be_more_accurate_raises_no_alarm(rank):
    vectors, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))
    matrix = vectors @ np.diag(np.logspace(0, 10, 6)) @ vectors.T

    def loss(x):
        def matvec(u, x):
            return anp.dot(matrix, (2 + anp.sin(x)) * u)

        return anp.sum(
            mpiad.linalg.solve(matvec, x + 2, x, rtol=1e-2, method="bicgstab", comm=wrong_adjoints.MPI.COMM_SELF)
        )

    report = diagnose(loss, np.linspace(0.3, 1.0, 6))
    assert not report.findings and report.unchecked


@pytest.mark.parametrize("package", ["jax", "torch"])
def test_functions_of_other_frameworks(rank, size, package):
    module = pytest.importorskip(package)
    if package == "jax":
        module.config.update("jax_enable_x64", True)
        wrong = module.custom_vjp(lambda x: x * x)
        wrong.defvjp(lambda x: (x * x, x), lambda x, g: (2.02 * x * g,))  # it should be 2 x g
        wrap, sin = mpiad.interop.from_jax, module.numpy.sin
    else:

        class Wrong(module.autograd.Function):
            @staticmethod
            def forward(x):
                return x * x

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)

            @staticmethod
            def backward(ctx, g):
                return 2.02 * ctx.saved_tensors[0] * g  # it should be 2 x g

        wrap, sin, wrong = mpiad.interop.from_torch, module.sin, Wrong.apply
    right, faulty = wrap(lambda x, y: sin(x) * y), wrap(lambda x, y: sin(x) * wrong(y))

    def loss(x, function):
        return mpiad.mpi_allreduce(anp.sum(function(x, anp.cos(x)) * x))

    report = diagnose(loss, x_of(rank), right)
    assert not report.findings and not report.unchecked
    for of, everyones in ((faulty, range(size)), (faulty if rank == size - 1 else right, [size - 1])):
        findings = diagnose(loss, x_of(rank), of).findings
        assert [(each.rank, each.argument) for each in findings] == [(r, 1) for r in everyones]
        assert "test_diagnosis.py" in findings[0].line and findings[0].error == pytest.approx(0.01, rel=0.3)


def test_branches_are_reported(rank, size):
    x = x_of(rank)

    def loss(x):
        y = anp.tanh(x)
        return anp.sum(y) if x[0]._value >= first else anp.sum(y**2)

    first = x[0]
    report = diagnose(loss, x)
    assert len(report.branches) >= size and "in place of sum" in report.branches[0]
    assert not report.findings and report.unchecked >= size


def test_a_result_that_nothing_reads_is_not_checked(rank):
    def loss(x):
        anp.sin(x)
        return anp.sum(x)

    report = diagnose(loss, x_of(rank))
    assert report.unchecked == mpiad.mpi_size()


@pytest.mark.mpi(min_size=2)
def test_communications_that_do_not_match_are_refused(rank, size):
    def loss(x):
        if rank == 0:
            mpiad.mpi_send(x, 1, tag=7)
        return anp.sum(x)

    with pytest.raises(mpiad.errors.CommunicationMismatchError, match="rank 0: mpi_send at test_diagnosis"):
        diagnose(loss, x_of(rank))
    mpiad.reset()  # drops the message


def test_an_adjoint_that_overwrites_its_argument(rank):
    overwriting = mpiad.extend.custom_operator(lambda x: x + 1)

    def overwrite(g):
        g *= 2
        return g / 2

    mpiad.extend.defvjp(overwriting, lambda ans, x: overwrite)
    report = diagnose(lambda x: anp.sum(overwriting(anp.sin(x)) * x), x_of(rank))
    assert "overwrites its argument" in report.findings[0].text


def test_a_cotangent_of_a_wrong_shape(rank):
    scaled = primitive(lambda x, c: x * c)
    defvjp(scaled, lambda ans, x, c: lambda g: g * c, lambda ans, x, c: lambda g: g * x)
    report = diagnose(lambda x: anp.sum(scaled(x, anp.sum(x))), x_of(rank))
    assert "returns an array of shape (6,) for one of shape ()" in report.findings[0].text
    assert report.findings[0].argument == 1


def test_a_cotangent_that_is_not_finite(rank):
    report = diagnose(lambda x: anp.sum(anp.sqrt(x * 0) * x), x_of(rank))
    assert "isn't finite" in report.findings[0].text
