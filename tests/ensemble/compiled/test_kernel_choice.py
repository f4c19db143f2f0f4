"""When f is compiled, and what is said where it can't be."""

from __future__ import annotations

import logging
import re
from functools import partial

import numpy as np
import pytest

from mpiad.compiling import cache
from mpiad.ensemble import RK45, EnsembleProblem, EnsembleSerial, ODEProblem, solve
from mpiad.ensemble.compiled import kernel_choice, traced_problem

pytestmark = [pytest.mark.serial, pytest.mark.limit(240)]


def decay(u, p, t):
    return [-u[0]]


def many(f, count=kernel_choice.LEAST_TRAJECTORIES, d=1):
    return EnsembleProblem(ODEProblem(f, np.ones(d), (0.0, 0.1)), u0=np.ones((count, d)))


def is_compiled(sol):
    try:
        return bool(sol.problem.kernel_source())
    except ValueError as error:
        assert "compile=True" in str(error)
        return False


def test_by_size_and_backend():
    assert is_compiled(solve(many(decay)))
    assert not is_compiled(solve(many(decay, kernel_choice.LEAST_TRAJECTORIES - 1)))
    assert not is_compiled(solve(many(decay), compile=False))
    # The whole ensemble counts, not a batch.
    assert is_compiled(solve(many(decay), batch_size=300))
    assert not is_compiled(solve(many(decay), RK45(), EnsembleSerial(), max_steps=1))
    assert is_compiled(solve(many(decay, 3), compile=True))


def test_complex_numbers(caplog):
    u0 = np.ones((1000, 1), complex)
    assert is_compiled(solve(EnsembleProblem(ODEProblem(decay, u0[0], (0.0, 0.1)), u0=u0)))
    assert not caplog.records

    def unordered(u, p, t):
        return [np.maximum(u[0], 0.5)]

    assert not is_compiled(solve(EnsembleProblem(ODEProblem(unordered, u0[0], (0.0, 0.1)), u0=u0)))
    line = f"test_kernel_choice.py:{unordered.__code__.co_firstlineno + 1}: it takes maximum of complex numbers"
    assert line in caplog.records[0].getMessage()


def test_an_f_that_branches_is_told_once(caplog):
    def branches(u, p, t):
        return [-u[0] if np.all(u[0] > 0) else u[0]]

    for _ in range(2):
        assert not is_compiled(solve(many(branches)))
    (record,) = caplog.records
    assert "test_kernel_choice.py" in record.getMessage() and "arrays instead" in record.getMessage()
    with pytest.raises(TypeError, match=r"test_kernel_choice.py:\d+"):
        solve(many(branches, 5), compile=True)


def test_large_ones(caplog, monkeypatch):
    monkeypatch.setattr(traced_problem, "MOST_COMPONENTS", 3)
    assert not is_compiled(solve(many(lambda u, p, t: -u, d=4)))
    assert "4 components" in caplog.text and "up to 3" in caplog.text
    assert is_compiled(solve(many(lambda u, p, t: -u, 3, d=4), compile=True))


def test_operations_that_change_from_solve_to_solve(caplog, monkeypatch):
    monkeypatch.setattr(traced_problem, "_MOST_PROGRAMS", 2)

    def closing_over(n):
        return lambda u, p, t: [sum(-(u[0] ** (k + 2)) for k in range(n))]

    assert [is_compiled(solve(many(closing_over(n)))) for n in (1, 2, 3, 1)] == [True, True, False, True]
    assert "Pass the changing values as p" in caplog.text


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
