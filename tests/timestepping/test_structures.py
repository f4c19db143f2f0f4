"""What `step` and `observe` return has the structure, shapes and dtypes of the state and of the first observation."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.timestepping import CheckpointSchedule, scan

grad = partial(mpiad.grad, objective="sum")  # each rank's own derivative

MODES = [(fun, kept) for fun in (lambda step: step, mpiad.jit) for kept in (None, 2)]
modes = pytest.mark.parametrize(("compiled", "kept"), MODES, ids=["plain", "plain-2", "jit", "jit-2"])
Spin = namedtuple("Spin", "x v")
Swapped = namedtuple("Swapped", "v x")
STATES = {
    "keys": ({"x": 1.0, "v": 0.0}, lambda u: {"x": u["x"] + u["v"], "y": u["v"]}, "dict with the keys 'x', 'y'"),
    "dict": ({"x": 1.0, "v": 0.0}, lambda u: (u["v"], u["x"]), "a tuple of 2"),
    "nested": ({"a": ((1.0, 2.0), 3.0)}, lambda u: {"a": (u["a"][0][0], (u["a"][0][1], u["a"][1]))}, "a single "),
    "length": ((1.0, 2.0), lambda u: (u[0], u[1], u[1]), "a tuple of 3"),
    "fields": (Spin(1.0, 2.0), lambda u: Swapped(u.v, u.x), r"a Swapped of \('v', 'x'\)"),
}
KNOWN = {
    "keys": "u0 is a dict with the keys 'v', 'x'",
    "dict": "u0 is a dict with the keys 'v', 'x'",
    "nested": r"u0\['a'\]\[0\] is a tuple of 2",
    "length": "u0 is a tuple of 2",
    "fields": r"u0 is a Spin of \('x', 'v'\)",
}


@modes
@pytest.mark.parametrize("name", STATES)
def test_a_state_of_another_structure(name: str, compiled: Callable, kept: int | None) -> None:
    u0, step, text = STATES[name]

    def last(a: float) -> float:
        u = scan(compiled(lambda u, k, a: step(mpiad.pytrees.map_leaves(lambda x: a * x, u))), u0, 4, a, checkpoints=kept)
        return sum(mpiad.pytrees.flatten(u)[0])

    for run in (last, grad(last)):
        with pytest.raises(TypeError, match=f"{KNOWN[name]}, but step 0 returned .*{text}"):
            run(2.0)


@modes
def test_equal_structures(compiled: Callable, kept: int | None) -> None:
    """Keys may have another order, and a list may replace a tuple."""

    def last(a: float) -> float:
        u = scan(
            compiled(lambda u, k, a: [{"q": u[0]["q"], "p": a * u[0]["p"]}]),
            ({"p": 1.0, "q": 3.0},),
            3,
            a,
            checkpoints=kept,
        )
        return u[0]["p"] + u[0]["q"]

    assert last(2.0) == 11.0 and grad(last)(2.0) == 12.0


OBSERVATIONS = {
    "length": (
        lambda u, k: (u[0], u[1]) if k == 0 else (u[0],),
        "after step 1 .* a tuple of 1, and after step 0 a tuple of 2",
    ),
    "keys": (
        lambda u, k: {"p": u[0]} if k % 2 == 0 else {"q": u[1]},
        "after step 1 .* keys 'q', and after step 0 .* keys 'p'",
    ),
    "nested": (lambda u, k: (u, [u] * (1 + k)), r"after step 1 .* a list of 2 at \[1\], and after step 0 a list of 1"),
    "shape": (lambda u, k: u[: 1 + (k > 2)], r"after step 3 .*float64 of shape \(2,\), and after step [0-2] .* \(1,\)"),
    "dtype": (lambda u, k: u if k < 3 else u.astype(np.float32), "after step 3 it returned float32 .* step [0-2] float64"),
    "nothing": (
        lambda u, k: None,
        "arrays of floats, in dicts, lists and tuples, but after step 0 it returned NoneType None",
    ),
    "text": (lambda u, k: (u, "a"), "arrays of floats, in dicts, lists and tuples, but after step 0 it returned str 'a'"),
}


@modes
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_another_observation(name: str, compiled: Callable, kept: int | None) -> None:
    observe, text = OBSERVATIONS[name]

    def total(u0: np.ndarray) -> float:
        return anp.sum(scan(compiled(lambda u, k: 0.5 * u), u0, 6, observe=observe, checkpoints=kept)[0])

    for run in (total, grad(total)):
        with pytest.raises(TypeError, match=f"observe must return .*{text}"):
            run(np.array([1.0, 2.0]))


def test_observed_integers() -> None:
    _, (squares, numbers) = scan(lambda u, k: 2.0 * u, 1.0, 3, observe=lambda u, k: (u**2, k))
    np.testing.assert_array_equal(squares, [4.0, 16.0, 64.0])
    np.testing.assert_array_equal(numbers, [0, 1, 2])


@pytest.mark.parametrize("kept", [None, 2])
def test_params_and_inputs_that_become_the_state(kept: int | None) -> None:
    """Steps that change their state in place leave the caller's arrays as they are."""

    def step(u: np.ndarray, k: int, x: np.ndarray, start: np.ndarray) -> np.ndarray:
        if k == 0:
            return start
        if k == 2:
            return x
        u *= 0.5
        return u

    start, inputs = np.array([1.0, 2.0]), np.ones((4, 2))
    loss = lambda start, n: anp.sum(scan(step, np.zeros(2), n, start, inputs=inputs[:n], checkpoints=kept) ** 2)  # noqa: E731
    assert loss(start, 2) == 1.25 and loss(start, 4) == 0.5
    np.testing.assert_array_equal(grad(loss)(start, 2), [0.5, 1.0])
    np.testing.assert_array_equal(start, [1.0, 2.0])
    np.testing.assert_array_equal(inputs, np.ones((4, 2)))


def test_a_python_number_next_to_single_precision() -> None:
    u0 = np.ones(3, np.float32)

    def loss(a: float) -> float:
        return anp.sum(scan(lambda u, k, a: u * a, u0, 2, a, checkpoints=2))

    assert loss(0.5) == 0.75
    with pytest.raises(TypeError, match=r"float64.* Python number a, it is a float64: pass np.float32\(a\)"):
        grad(loss)(0.5)
    gradient = grad(loss)(np.float32(0.5))  # type: ignore[arg-type]
    assert gradient == 3.0 and type(gradient) is np.float32


def test_states_that_underflow_in_checkpoints() -> None:
    def loss(u0: np.ndarray) -> float:
        schedule = CheckpointSchedule(memory=2, dtype="float32")
        return anp.sum(scan(lambda u, k: u * u * 1e50, u0, 3, checkpoints=schedule))

    with pytest.raises(FloatingPointError, match=r"below 1.18e-38, and .* CheckpointSchedule\(dtype='float32'\). Scale"):
        grad(loss)(np.array([1e-50]))


def test_the_folder_of_checkpoints() -> None:
    with pytest.raises(TypeError, match="directory must be the path of a folder, or None, but got int 3"):
        scan(lambda u, k: u, 1.0, 2, checkpoints=CheckpointSchedule(disk=2, directory=3))  # type: ignore[arg-type]
