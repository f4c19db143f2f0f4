"""Evaluate a model at many parameters: whichever rank is free takes the next one.

    mpiexec -n 4 python examples/parameter_sweep.py

A damped oscillator u'' + 2 c u' + u = 0, u(0) = 1, u'(0) = 0, is integrated by the classical Runge-Kutta method for 48
values of the damping c, with steps that take longer where c is large, so that equal shares would not be equal work. For
each the time of the first zero is found. In closed form it is (pi - arccos(c)) / sqrt(1 - c^2).
"""

import numpy as np

import mpiad

STEP = 2e-3


def slope(state, damping):
    return np.array([state[1], -2.0 * damping * state[1] - state[0]])


def stepped(state, damping, step):
    k1 = slope(state, damping)
    k2 = slope(state + step / 2 * k1, damping)
    k3 = slope(state + step / 2 * k2, damping)
    k4 = slope(state + step * k3, damping)
    return state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def first_zero(damping):
    """Return when u first vanishes: step until its sign changes, then find the step that ends there."""
    state, time = np.array([1.0, 0.0]), 0.0
    while (following := stepped(state, damping, STEP))[0] > 0.0:
        state, time = following, time + STEP
    inside, outside = 0.0, STEP
    for _ in range(50):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if stepped(state, damping, middle)[0] > 0.0 else (inside, middle)
    return time + outside


dampings = np.linspace(0.0, 0.8, 48)
times = mpiad.mpi_map(first_zero, dampings)  # items count on the root only, and the results come back there

if mpiad.mpi_rank() == 0:
    exact = (np.pi - np.arccos(dampings)) / np.sqrt(1.0 - dampings**2)
    error = np.max(np.abs(times - exact))
    print(f"{len(times)} values of c: first zero at {times[0]:.10f} for c = 0, {times[-1]:.10f} for c = 0.8")
    print(f"largest error {error:.1e}")
    assert error < 1e-10, error
