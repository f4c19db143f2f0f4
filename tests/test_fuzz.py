"""Random programs themselves: the reference's arithmetic, that they are drawn alike, and what a failure shows."""

import os
import subprocess
import sys
from pathlib import Path

import autograd
import numpy as np
import pytest
from machine_load import slowdown
from programs import arithmetic, jets, steps
from programs.drawing import drawn
from programs.steps import read, script, written

HERE = Path(__file__).parent
WRONG = """
from mpiad.primitives import catalogue, reduce_scatter
operation = catalogue.REDUCE_SCATTER
forward, right, tangent = reduce_scatter._forward, operation.adjoint, operation.tangent
def adjoint(*args):
    vjp = right(*args)
    return lambda g: 3 * vjp(g)
operation.define(forward, adjoint, tangent)
"""


def local_loss(num, x, kinds):
    """Apply every local function once."""
    registers = arithmetic.begin(num, x, kinds)
    for k, form in enumerate(arithmetic.FORMS):
        if k not in (3, 5):  # plain autograd has no untraced value
            registers[k % 3] = arithmetic.store(num, form(num, registers[k % 3], registers[(k + 1) % 3]), kinds[k % 3])
    for part in (3, 2, -1, 0):
        y = arithmetic.fill(num, arithmetic.take(num, registers[0], part), part)
        registers[1] = arithmetic.store(num, y + arithmetic.mix(num, arithmetic.spread(num, y, (2, 2))), kinds[1])
    return arithmetic.loss(num, registers, 1)


@pytest.mark.serial
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("kinds", [(False, False, False), (True, False, True)])
def test_the_reference_s_derivatives_are_autograd_s(is_complex, kinds):
    program = drawn(1, 1, 0)[0]._replace(size=1, seed=4, complex_input=is_complex, shared=False)
    xs, vs = arithmetic.inputs(program)
    jet = local_loss(jets, jets.variables(xs, vs)[0], kinds)

    def loss(x):
        return local_loss(arithmetic.on_arrays(False), x, kinds)

    def slope(x):
        return autograd.numpy.real(autograd.numpy.sum(autograd.grad(loss)(x) * vs[0]))

    np.testing.assert_allclose(jet.value, loss(xs[0]), rtol=1e-13)
    np.testing.assert_allclose(jets.cut(jet.first, xs)[0], autograd.grad(loss)(xs[0]), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(jet.along, slope(xs[0]), rtol=1e-11)
    np.testing.assert_allclose(jets.cut(jet.second, xs)[0], autograd.grad(slope)(xs[0]), rtol=1e-11, atol=1e-12)


@pytest.mark.serial
def test_a_seed_always_draws_the_same_programs_and_another_draws_others():
    first, again, other = drawn(3, 4, 5), drawn(3, 4, 5), drawn(3, 4, 6)
    assert first == again != other


@pytest.mark.serial
@pytest.mark.thorough
def test_all_kinds_of_step_are_drawn():
    for falling_back, kinds in ((False, steps.DRAWN_ALWAYS), (True, steps.KINDS[:-1])):
        programs = [program for seed in range(2) for program in drawn(3, 25, seed, falling_back=falling_back)]
        assert {type(step) for program in programs for step in program.steps} == set(kinds)


@pytest.mark.serial
def test_what_is_printed_is_the_program():
    for program in drawn(2, 20, 1):
        assert read(written(program)) == program == read(repr(program))
        compile(script(program), "script", "exec")


@pytest.mark.launches
@pytest.mark.limit(180)
@pytest.mark.thorough
def test_fuzz_finds_a_wrong_adjoint_and_makes_the_program_small(tmp_path, mpirun):
    before = tmp_path / "wrong.py"
    before.write_text(WRONG)
    command = [sys.executable, str(HERE / "fuzz.py"), "--programs", "3", "--ranks", "2", "--seed", "4"]
    command += ["--shrink", str(15 * slowdown()), "--compiled", "none", "--before", str(before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * slowdown())
    assert done.returncode == 1, done.stdout + done.stderr
    text = done.stdout[done.stdout.index("the smallest program found") :]
    assert "Scatter(call='reduce_scatter'" in text and "off by" in text and "--seed 4" in text
    assert len(read(text[text.index("Program(size") : text.index("])\n")]).steps) <= 2, text
    smallest = text[text.index("# PYTHONPATH") : text.index("])\n") + 3]
    job = mpirun(2, smallest, env={"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])})
    assert job.returncode == 0, "the program is right: the adjoint was wrong"


@pytest.mark.launches
@pytest.mark.limit(120)
@pytest.mark.thorough
def test_fuzz_with_diagnose_finds_a_wrong_adjoint(tmp_path):
    before = tmp_path / "wrong.py"
    before.write_text(WRONG)
    command = [sys.executable, str(HERE / "fuzz.py"), "--programs", "3", "--ranks", "2", "--seed", "4", "--diagnose"]
    command += ["--shrink", "0", "--compiled", "none", "--before", str(before)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110 * slowdown())
    assert done.returncode == 1, done.stdout + done.stderr
    assert "mpi_reduce_scatter has an adjoint with a relative error of" in done.stdout


@pytest.mark.launches
@pytest.mark.thorough
@pytest.mark.limit(120)
def test_fuzz_ends_with_zero_where_all_pass():
    command = [sys.executable, str(HERE / "fuzz.py"), "--programs", "4", "--ranks", "1", "2", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110 * slowdown())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks: 2 of 2 programs pass" in done.stdout
