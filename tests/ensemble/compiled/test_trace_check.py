"""A program that isn't what f computes is found before it is used."""

from __future__ import annotations

import numpy as np
import pytest
from kernels_on_cpu import parameters_of
from traced_right_hand_sides import SYSTEMS

from mpiad.compiling.program import Untraceable
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.compiled.trace import program_of

pytestmark = pytest.mark.serial


def batch_of(f, shape, p, n=3, dtype=float):
    u0 = np.random.default_rng(4).normal(size=(int(np.prod(shape)), n)).astype(dtype)
    return Batch(f, shape, u0, p, np.linspace(0, 1, n), np.ones(n))


@pytest.mark.parametrize("name", sorted(SYSTEMS))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_what_was_traced_is_accepted(name, dtype):
    system = SYSTEMS[name]
    batch = batch_of(system.f, (system.states,), parameters_of(system.p, False), dtype=dtype)
    program_of(batch)


def test_matrices_and_numbers_as_states():
    matrices = Parameters([np.ones((2, 2, 3))], [True], lambda leaves: leaves[0])
    matrix = batch_of(lambda u, p, t: u @ p + t, (2, 2), matrices)
    number = batch_of(lambda u, p, t: -u * p, (), Parameters([np.arange(3.0)], [True], lambda leaves: leaves[0]))
    for batch in (matrix, number):
        program_of(batch)


def test_an_f_that_looks_at_types_is_refused():
    def f(u, p, t):
        return -u if isinstance(u, np.ndarray) else u

    batch = batch_of(f, (2,), parameters_of(None, False))
    with pytest.raises(Untraceable, match="types of its arguments") as caught:
        program_of(batch)
    assert caught.value.place.endswith(f"test_trace_check.py:{f.__code__.co_firstlineno}")


def test_imaginary_parts_that_numpy_loses_are_missed():
    # Before NumPy 2.5 those of an array of objects are zero, as all are where the trajectories begin.
    def f(u, p, t):
        return [np.array([u[0], u[0]]).imag[0], u[1]]

    u0 = np.ones((2, 3), complex)
    batch = Batch(f, (2,), u0, parameters_of(None, False), np.zeros(3), np.ones(3))
    if np.array([1j], object).imag[0] == 1.0:
        program_of(batch)
        return
    with pytest.raises(Untraceable, match="types of its arguments"):
        program_of(batch)


def test_nothing_to_solve_is_accepted():
    batch = batch_of(lambda u, p, t: -u, (2,), parameters_of(None, False))
    program_of(batch.share(slice(0, 0)))
