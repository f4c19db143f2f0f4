"""What can't be used is refused, with what came and what to do."""

from __future__ import annotations

import re

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad as plain_grad
from mpi4py import MPI

import mpiad
from mpiad.ensemble import (
    RK4,
    RK45,
    EnsembleGPU,
    EnsembleMPI,
    EnsembleProblem,
    EnsembleSerial,
    EnsembleThreads,
    EnsembleVectorized,
    Event,
    ODEProblem,
    Rodas5P,
    remake,
    solve,
)

pytestmark = pytest.mark.serial

GOOD = ODEProblem(lambda u, p, t: [u[1], -u[0]], [0.0, 1.0], (0.0, 1.0), 1.0)


@pytest.mark.parametrize(
    "f, kind, text",
    [
        (lambda u, p, t: [u[0]], ValueError, r"returned shape \(1, 3\), .*\(2, 3\) was expected.*columns"),
        (lambda u, p, t: np.array([1.0, 2.0]), ValueError, r"returned shape \(2,\)"),
        (lambda u, p, t: np.sum(u) * u[0], ValueError, r"returned shape \(3,\)"),
        (lambda u, p, t: [u, u], ValueError, r"each component must be a number"),
        (lambda u, p, t: np.array([u[0], 1.0]), ValueError, "components of different shapes"),
        (lambda u, p, t: [1j * u[0], u[1]], TypeError, "complex128 for u of float64"),
        (lambda u, p, t: None, ValueError, r"returned shape \(\)"),
        (lambda u, p, t: u.__setitem__(0, 1.0), TypeError, "writes into its arguments"),
        (lambda u, p, t: np.multiply(t, 2, out=t), TypeError, "writes into its arguments"),
    ],
)
def test_derivative(f, kind, text):
    with pytest.raises(kind, match=text):
        solve(remake(GOOD, f=f))


def test_parameters_taken_for_columns_are_found():
    # p has as many entries as a working set of one trajectory has columns.
    with pytest.raises(ValueError, match=r"can't compute with columns .*broadcast.*shape \(2, "):
        solve(remake(GOOD, f=lambda u, p, t: p * u, p=np.ones(2)))


NUMBERS = np.array([1.0, 2.0, 3.0])
DECAY = ODEProblem(lambda u, p, t: [-p[0] * u[0]], [1.0], (0.0, 1.0))
OF_ALL = EnsembleProblem(DECAY, p=NUMBERS)
COUNTED = remake(DECAY, f=lambda u, p, t: [-p * u[0]])
FIRST_OF_ALL = {
    "rows": (OF_ALL, {}),
    "alike": (remake(OF_ALL, p=np.ones(3)), {}),
    "one": (remake(OF_ALL, p=np.ones(1)), {}),
    "integers": (remake(OF_ALL, p=np.array([1, 2, 3])), {}),
    "serial": (OF_ALL, {"ensemblealg": EnsembleSerial()}),
    "threads": (OF_ALL, {"ensemblealg": EnsembleThreads(2)}),
    "over ranks": (OF_ALL, {"ensemblealg": EnsembleMPI(comm=MPI.COMM_SELF)}),
    "Rodas5P": (OF_ALL, {"alg": Rodas5P()}),
    "compiled": (OF_ALL, {"compile": True}),
    "a number": (EnsembleProblem(DECAY, lambda one, i, repeat: remake(one, p=float(i))), {"trajectories": 3}),
    "dict": (EnsembleProblem(remake(DECAY, f=lambda u, p, t: [-p["k"][0] * u[0]]), p={"k": NUMBERS}), {}),
    "last": (EnsembleProblem(remake(DECAY, f=lambda u, p, t: [-p[-1] * u[0]]), p=NUMBERS), {}),
    "sum": (EnsembleProblem(remake(DECAY, f=lambda u, p, t: [-np.sum(p) * u[0]]), p=NUMBERS), {}),
    "first time": (EnsembleProblem(remake(COUNTED, f=lambda u, p, t: [-p * u[0] * t[0]]), p=NUMBERS), {}),
    "mean time": (EnsembleProblem(remake(COUNTED, f=lambda u, p, t: [-p * u[0] + np.mean(t)]), p=NUMBERS), {}),
    "condition": (remake(OF_ALL, problem=COUNTED), {"events": Event(lambda u, p, t: u[0] - p[0] / 4)}),
    "affect": (
        remake(OF_ALL, problem=COUNTED),
        {"events": Event(lambda u, p, t: u[0] - 0.5, affect=lambda u, p, t: [u[0] + p[0]])},
    ),
    "given times": (
        remake(OF_ALL, problem=COUNTED),
        {"events": Event(times=lambda p: [p[0] / 4], affect=lambda u, p, t: [u[0] + 1.0])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FIRST_OF_ALL)
def test_what_is_the_first_trajectorys_in_all_is_found(case):
    ensemble, more = FIRST_OF_ALL[case]
    with pytest.raises(ValueError, match=r"trajectories must not depend on each other"):
        solve(ensemble, **more)


def test_what_is_the_first_trajectorys_in_all_is_found_where_it_is_differentiated():
    with pytest.raises(ValueError, match=r"t\[0\] and p\[0\] are those of the first trajectory"):
        mpiad.grad(lambda p: np.sum(solve(remake(OF_ALL, p=p)).u_end))(NUMBERS)


def test_numbers_as_parameters_are_each_trajectorys():
    exact = np.exp(-NUMBERS)[:, None]
    numbered = EnsembleProblem(COUNTED, lambda one, i, repeat: remake(one, p=float(i)))
    for ensemble, more in ((remake(OF_ALL, problem=COUNTED), {}), (numbered, {"trajectories": 3})):
        for way in (EnsembleSerial(), EnsembleVectorized()):
            sol = solve(ensemble, ensemblealg=way, rtol=1e-9, atol=1e-11, **more)
            np.testing.assert_allclose(sol.u_end, exact, rtol=1e-7)


@pytest.mark.parametrize(
    "own, rows",
    [([1.0], NUMBERS), (1.0, NUMBERS[:, None]), ([1.0, 2.0], np.ones((3, 4))), ({"a": 1.0}, {"a": NUMBERS, "b": NUMBERS})],
    ids=["numbers", "arrays", "lengths", "parts"],
)
def test_rows_of_another_shape_than_the_problems_parameters(own, rows):
    with pytest.raises(ValueError, match="each row of p= of the ensemble must have the shape of its problem's p"):
        solve(EnsembleProblem(remake(DECAY, p=own), p=rows))


def time_first(t, y, args):
    return [-args[0] * y[0]]


@pytest.mark.parametrize("fun", [time_first, lambda t, y: -y, lambda t, x, p: -x], ids=["diffrax", "SciPy", "lambda"])
def test_time_as_the_first_argument(fun):
    with pytest.raises(TypeError, match=r"f must be a function of \(u, p, t\), but .* takes \(t, .*SciPy and diffrax"):
        ODEProblem(fun, [1.0], (0.0, 1.0))
    for name in ("condition", "affect"):
        with pytest.raises(TypeError, match=rf"Event: {name} must be a function of \(u, p, t\)"):
            Event(**{"condition": lambda u, p, t: u[0], name: fun})


@pytest.mark.parametrize(
    "way", [EnsembleSerial(), EnsembleVectorized(), EnsembleThreads(2), EnsembleMPI(comm=MPI.COMM_SELF)]
)
@pytest.mark.parametrize("affect", [None, lambda u, p, t: [u[0] + 1.0]])
def test_conditions_that_are_true_or_false(way, affect):
    for condition in (lambda u, p, t: u[0] < 0.5, lambda u, p, t: np.logical_and(u[0] < 0.5, t > 0)):
        with pytest.raises(TypeError, match=r"condition returned True or False.*u\[0\] - 0.5 with direction=-1"):
            solve(remake(OF_ALL, problem=COUNTED), ensemblealg=way, events=Event(condition, affect=affect))


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ({"saveat": [0.5, 1.5]}, ValueError, r"1.5 lies outside of \(0.0, 1.0\)"),
        ({"saveat": [0.5, 0.2]}, ValueError, "in the order of the solve"),
        ({"saveat": -0.1}, ValueError, "interval must be above zero"),
        ({"saveat": "all"}, TypeError, "'all'"),
        ({"saveat": [[0.1], [0.2]]}, ValueError, "2 rows"),
        ({"saveat": 0.5, "save_everystep": True}, ValueError, "not both"),
        ({"rtol": -1.0}, ValueError, "rtol must be zero or more, and finite, but got -1.0"),
        ({"rtol": -1e-3}, ValueError, "-0.001"),
        ({"rtol": np.nan}, ValueError, "nan"),
        ({"rtol": np.inf}, ValueError, "rtol must be zero or more, and finite, but got inf"),
        (
            {"saveat": np.ones((1, 2, 2))},
            ValueError,
            r"of shape \(1, n_saved\), but has \(1, 2, 2\)",
        ),
        ({"atol": -1.0}, ValueError, "atol must be zero or more"),
        ({"atol": [1e-6] * 3}, ValueError, r"shape of a state, \(2,\)"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"alg": RK4()}, ValueError, "needs their size, as dt=0.01"),
        ({"alg": RK45}, TypeError, r"Write RK45\(\) with parentheses"),
        ({"ensemblealg": None}, TypeError, "ensemblealg must be an EnsembleAlgorithm"),
        ({"trajectories": 3}, ValueError, "needs an EnsembleProblem"),
        ({"events": [3]}, TypeError, "events must be mpiad.ensemble.Event"),
        ({"rtol": [1e-6] * 3}, ValueError, r"rtol must be .* shape of a state, \(2,\)"),
        ({"rtol": [1e-6, -1e-6]}, ValueError, "rtol must be zero or more"),
        ({"reltol": 1e-6}, TypeError, "'reltol'; the argument is called rtol"),
        ({"abstol": 1e-6}, TypeError, "'abstol'; the argument is called atol"),
        ({"callback": None}, TypeError, "'callback'; the argument is called events"),
        ({"maxiters": 9}, TypeError, "'maxiters'; the argument is called max_steps"),
        ({"t_eval": [0.5]}, TypeError, "'t_eval'; the argument is called saveat"),
        ({"method": RK45()}, TypeError, "'method'; the argument is called alg"),
        ({"color": 1}, TypeError, r"solve\(\) got an unexpected keyword argument 'color'\.$"),
    ],
)
def test_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        solve(GOOD, **arguments)


def test_problems():
    with pytest.raises(TypeError, match="four arguments"):
        ODEProblem(lambda du, u, p, t: None, [1.0], (0, 1))
    with pytest.raises(TypeError, match="f must be a function"):
        ODEProblem(3, [1.0], (0, 1))
    with pytest.raises(TypeError, match="no field 'u1'; it has f, u0, tspan, p"):
        remake(GOOD, u1=3)
    with pytest.raises(TypeError, match="must be an ODEProblem"):
        EnsembleProblem(lambda u: u)
    with pytest.raises(ValueError, match="not both"):
        EnsembleProblem(GOOD, prob_func=lambda *a: GOOD, u0=np.ones((3, 2)))
    with pytest.raises(TypeError, match="problem must be an ODEProblem or EnsembleProblem"):
        solve(3)
    for tspan in (1.0, (0, np.inf), (0, np.nan), (0, 10**400), (0, 1, 2)):
        with pytest.raises(ValueError, match="tspan must be two"):
            solve(remake(GOOD, tspan=tspan))
    with pytest.raises(TypeError, match="u0 must be numbers"):
        solve(remake(GOOD, u0=["a", "b"]))


def test_integers_become_floats():
    sol = solve(remake(GOOD, u0=[0, 1]), rtol=1e-8)
    assert sol.u_end.dtype == float
    np.testing.assert_allclose(sol.u_end, [np.sin(1), np.cos(1)], rtol=1e-6)


@pytest.mark.parametrize(
    "fun, kind, text",
    [
        (lambda prob, i, repeat: remake(prob, u0=np.zeros(i + 1)), ValueError, r"\(2,\) for trajectory 1, but \(3,\)"),
        (lambda prob, i, repeat: remake(prob, p=np.zeros(i)), ValueError, "p must have one shape"),
        (lambda prob, i, repeat: remake(prob, p=[np.zeros(1)] * i), ValueError, r"'p\[1\]'\] in trajectory 2"),
        (
            lambda prob, i, repeat: remake(prob, p={"k": 1.0, "w": 2.0} if i == 1 else {"a": 2.0, "k": 1.0}),
            ValueError,
            r"""\["p\['k'\]", "p\['w'\]"\] in trajectory 1, but \["p\['a'\]", "p\['k'\]"\] in trajectory 2""",
        ),
        (lambda prob, i, repeat: remake(prob, f=lambda u, p, t: u), ValueError, "another f for trajectory 1"),
        (lambda prob, i, repeat: None, TypeError, "returned NoneType for trajectory 1"),
    ],
)
def test_prob_func(fun, kind, text):
    with pytest.raises(kind, match=text):
        solve(EnsembleProblem(GOOD, prob_func=fun), trajectories=4)


def test_counts():
    with pytest.raises(ValueError, match="trajectories=N is needed"):
        solve(EnsembleProblem(GOOD))
    with pytest.raises(ValueError, match="has 3 rows, but there are 4"):
        solve(EnsembleProblem(GOOD, u0=np.ones((3, 2))), trajectories=4)
    with pytest.raises(ValueError, match="trajectories must be an integer"):
        solve(EnsembleProblem(GOOD), trajectories=-1)
    with pytest.raises(ValueError, match=r"shape \(N, \*\(2,\)\)"):
        solve(EnsembleProblem(GOOD, u0=np.ones((3, 5))))


@pytest.mark.parametrize("gradient", [mpiad.grad, plain_grad])
@pytest.mark.parametrize("shape", [(2,), (2, 3)], ids=["columns", "matrix"])
def test_what_f_closes_over_is_refused(gradient, shape):
    def loss(x):
        return anp.sum(solve(remake(GOOD, u0=np.ones(shape), f=lambda u, p, t: x * u)).u_end)

    with pytest.raises(NotImplementedError, match="Pass it as p"):
        gradient(loss)(2.0)


def test_a_traced_time_to_save_at_is_refused():
    for saveat in (lambda x: x, lambda x: [0.1, x], lambda x: anp.array([[0.1, x]])):
        with pytest.raises(NotImplementedError, match="saveat is traced.*mpiad.stop_gradient"):
            mpiad.grad(lambda x: anp.sum(solve(EnsembleProblem(GOOD), trajectories=1, saveat=saveat(x)).u))(0.5)  # noqa: B023


def test_a_derivative_that_cannot_be_traced():
    def loss(x):
        return anp.sum(solve(remake(GOOD, u0=x, f=lambda u, p, t: np.array([u[1], u[0]]))).u_end)

    with pytest.raises(TypeError, match="autograd.numpy"):
        mpiad.grad(loss)(np.ones(2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"saveat": [0.5, 0.2]}, "order of the solve.* but got 0.2 after 0.5"),
        ({"saveat": [0.5], "save_everystep": True}, r"not both, but got saveat=\[0.5\]"),
    ],
)
def test_messages_show_what_came(given, words):
    problem = ODEProblem(lambda u, p, t: -u, [1.0], (0.0, 1.0))
    ensemble = EnsembleProblem(problem, prob_func=lambda prob, i, repeat: prob)
    with pytest.raises(ValueError, match=words):
        solve(ensemble, trajectories=3, **given)


def _same(u, p, t):
    return u


@pytest.mark.parametrize(
    "given, kind, text",
    [
        ({"condition": _same, "times": [1.0], "affect": _same}, ValueError, "either a condition or times, not both"),
        ({"times": [1.0]}, ValueError, "but no affect"),
        ({"condition": _same, "affect": 2.0}, TypeError, "affect must be a function, but got float"),
        ({}, TypeError, "condition must be a function, but got NoneType"),
        ({"times": [1.0, np.nan], "affect": _same}, TypeError, "times must be a list of numbers"),
        ({"times": "noon", "affect": _same}, TypeError, "times must be a list of numbers"),
        *(
            ({"condition": _same, "direction": x}, ValueError, f"direction must be -1, 0 or 1, but got {x!r}")
            for x in ("up", np.nan, 5, 0.5, None, [1], True)
        ),
        *(
            ({"condition": _same, "terminal": x}, TypeError, f"terminal must be True or False, but got {x!r}")
            for x in ("no", 2, 0.0)
        ),
        *(
            ({"condition": _same, "interior_points": x}, ValueError, f"an integer, zero or more, but got {x!r}")
            for x in ("6", 2.5, -1, None)
        ),
    ],
)
def test_events_that_say_too_much_or_too_little(given, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        Event(**given)


def test_fields_of_events_are_python_numbers():
    event = Event(_same, terminal=np.False_, direction=np.float64(-1), interior_points=np.int64(3))
    assert [*map(repr, (event.terminal, event.direction, event.interior_points))] == ["False", "-1", "3"]


@pytest.mark.parametrize(
    "event, more, kind, text",
    [
        (Event(times=[0.5], affect=lambda u, p, t: [u[0]] * 3), {}, ValueError, "affect returned 3 components"),
        (Event(times=[0.5], affect=lambda u, p, t: [u[0], np.ones(9)]), {}, ValueError, "affect returned 2 components of"),
        (
            Event(times=[0.5], affect=lambda u, p, t: u + np.sum(u)),
            {},
            ValueError,
            "an affect of the events returns .* for a trajectory",
        ),
        (Event(times=[0.5], affect=lambda u, p, t: 1j * u), {}, TypeError, "affect returned complex128"),
        (Event(times=[0.5], affect=lambda u, p, t: u.__setitem__(0, 1)), {}, TypeError, "affect writes into its arguments"),
        (
            Event(times=lambda p: [np.nan], affect=_same),
            {},
            ValueError,
            "one of them is NaN: nan. Give numpy.inf",
        ),
        (Event(times=lambda p: None, affect=_same), {}, ValueError, r"times\(p\) must return a list of times.*got None"),
        (Event(times=lambda p: ["noon"], affect=_same), {}, ValueError, r"times\(p\) must return .* got 'noon'"),
        (Event(times=lambda p: np.ones(3), affect=_same), {}, ValueError, r"of shape \(3,\)"),
        (Event(times=lambda p: np.ones(2), affect=_same), {}, ValueError, r"got \[1. 1.\] of shape \(2,\)"),
    ],
)
def test_affects_and_times_that_cant_be_used(event, more, kind, text):
    with pytest.raises(kind, match=text):
        solve(ODEProblem(lambda u, p, t: [u[1], -u[0]], np.ones(2), (0.0, 1.0)), events=event, **more)


def test_what_is_traced_around_an_event_is_refused():
    def loss(x, event):
        return solve(ODEProblem(lambda u, p, t: [-u[0]], np.ones(1), (0.0, 1.0)), events=event(x)).u_end[0]

    for event in (
        lambda x: Event(times=[x], affect=_same),
        lambda x: Event(times=[0.5], affect=lambda u, p, t: [u[0] + x]),
    ):
        with pytest.raises(NotImplementedError, match="traced value"):
            mpiad.grad(loss)(0.5, event)


@pytest.mark.parametrize("option", ["dense_output", "save_everystep"])
def test_derivatives_of_all_steps_around_an_event_are_refused(option):
    event = Event(times=[0.5], affect=_same)
    with pytest.raises(NotImplementedError, match="Pass the times as saveat"):
        mpiad.grad(
            lambda x: solve(ODEProblem(lambda u, p, t: [-u[0]], [x], (0.0, 1.0)), events=event, **{option: True}).u_end[0]
        )(1.0)


def test_events_that_act_are_refused_on_gpus():
    ensemble = EnsembleProblem(ODEProblem(lambda u, p, t: [-u[0]], np.ones(1), (0.0, 1.0)), u0=np.ones((2, 1)))
    with pytest.raises(NotImplementedError, match="EnsembleGPU. .*use EnsembleVectorized"):
        solve(ensemble, ensemblealg=EnsembleGPU(), events=Event(times=[0.5], affect=_same))
