"""Devito's side: the same steps as its operators, all fields of the forward run saved for the gradient.

What counts is the time that Devito gives for its loops, without that of its Python around them, which is milliseconds a
call. The adjoint is written by hand: v_before = 2 v - v_after + Δ(s v), and the gradient adds v Δu in each step.
"""

from __future__ import annotations

import os

os.environ.setdefault("DEVITO_LOGGING", "ERROR")
os.environ.setdefault("DEVITO_LANGUAGE", "C")  # each rank has a core

import acoustics
import devito
import numpy as np
import timing

options = acoustics.arguments()
start, square = acoustics.fields(options.cells)
steps = options.steps
grid = devito.Grid(shape=options.cells, extent=tuple(n - 1 for n in options.cells), dtype=np.float64)
time = grid.time_dim
s = devito.Function(name="s", grid=grid, space_order=2)
s.data[:] = square
u = devito.TimeFunction(name="u", grid=grid, time_order=2, space_order=2)
saved = devito.TimeFunction(name="saved", grid=grid, time_order=2, space_order=2, save=steps + 2)
v = devito.TimeFunction(name="v", grid=grid, time_order=2, space_order=2)
slope = devito.Function(name="slope", grid=grid, space_order=2)


def next_of(field):
    return devito.Eq(field.forward, 2 * field - field.backward + s * field.laplace)


forward = devito.Operator(next_of(u), name="Forward", subs=grid.spacing_map)
forward_saved = devito.Operator(next_of(saved), name="ForwardSaved", subs=grid.spacing_map)
reverse = devito.Operator(
    [devito.Inc(slope, v * saved.laplace), devito.Eq(v.backward, 2 * v - v.forward + (s * v).laplace)],
    name="Reverse",
    subs=grid.spacing_map,
)


def seconds(summary):
    """Return the time of an operator's loops."""
    return sum(part.time for part in summary.values())


def run():
    """Return what the steps alone take."""
    u.data[:] = 0.0
    u.data[0] = u.data[1] = start
    return seconds(forward.apply(time_m=1, time_M=steps))


def run_back():
    """Return what the saved steps and the reverse ones take, with the gradient."""
    saved.data[0] = saved.data[1] = start
    took = seconds(forward_saved.apply(time_m=1, time_M=steps))
    v.data[:] = 0.0
    slope.data[:] = 0.0
    # saved[k] is the field after k - 1 steps; v at time k is the derivative by saved[k + 1].
    v.data[steps % 3] = 2.0 * saved.data[steps + 1]
    return took + seconds(reverse.apply(time_m=1, time_M=steps))


def check():
    """Return J and the gradient's norm."""
    run_back()
    return float(np.sum(saved.data[steps + 1] ** 2)), float(np.sum(np.asarray(slope.data) ** 2) ** 0.5)


timing.measure("devito", options, {"forward": run, "gradient": run_back}, check, told=True)
