"""The root's memory: stubs that count what is asked of the ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from mpiad.optimize.evaluated_points import Points
from mpiad.optimize.objective_evaluation import Program
from mpiad.optimize.root_driven import RootDriven
from mpiad.transport import channel


class Evaluation:
    """f = |x|²/2, counted, with the kept forward pass of the real one."""

    def __init__(self, only_both: bool = False, separate: bool = False):
        self.only_both, self.separate = only_both, separate
        self.kept: np.ndarray | None = None

    agreement = SimpleNamespace(raise_if_failed=lambda: None, end_requested=False)

    def value(self, x):
        self.kept = x.copy()
        return 0.5 * float(x @ x)

    def gradient(self, x):
        assert self.separate or np.array_equal(self.kept, x), "the forward pass of another point is kept"
        self.kept = None
        return x.copy()

    def both(self, x):
        return self.value(x), self.gradient(x) if not self.separate else x.copy()

    def product(self, x, direction):
        return direction.copy()


class Solve:
    def __init__(self, evaluation: Evaluation):
        self.sent: list[str] = []
        self.evaluation = evaluation

    def request(self, method, x, direction=None):
        self.sent.append(method)
        return getattr(self.evaluation, method)(x, *([] if direction is None else [direction]))


def points(together: bool, **kind: bool) -> tuple[Points, list[int]]:
    solve = Solve(Evaluation(**kind))
    return Points(solve.evaluation, solve.request, together), solve.sent


def value_at(at: Points, x: np.ndarray) -> float:
    return at.for_method(at.with_value(x))[0]


@pytest.mark.parametrize(
    "together, kind, expected",
    [
        (True, {}, ["both", "both"]),
        (False, {}, ["value", "gradient", "value", "gradient"]),
        (False, {"only_both": True}, ["both", "both"]),
        (False, {"separate": True}, ["value", "gradient", "value", "gradient"]),
        (True, {"separate": True}, ["both", "both"]),
    ],
)
def test_each_point_once(together: bool, kind: dict, expected: list[int]) -> None:
    at, given = points(together, **kind)
    for x in (np.array([1.0, 2.0]), np.array([3.0, 4.0])):
        for _ in range(3):
            assert value_at(at, x) == 0.5 * float(x @ x)
            assert np.array_equal(at.gradient(x), x)
    assert given == expected
    assert at.count("value") == 2


def test_after_a_failure_the_other_ranks_get_no_instructions() -> None:
    """They have left the solve; the same exception is raised if a method has caught it and goes on."""

    class Fails(Evaluation):
        value = both = None
        calls = 0

        def gradient(self, x):
            self.calls += 1
            raise ValueError("rank 1 raised it")

    program = Program(lambda x: 0.0, None, None, (), "root", 0)
    solve = RootDriven(channel(MPI.COMM_SELF, "test"), 0, [program], lambda *args: Fails(separate=True), "test")
    solve.define(0, np.zeros(1))
    at = Points(solve.evaluation, solve.request, False)
    at.at(np.zeros(1)).value = 1.0
    for ask in (at.gradient, lambda x: at.product(x, x), lambda x: value_at(at, x + 1.0)):
        with pytest.raises(ValueError, match="rank 1 raised it"):
            ask(np.zeros(1))
    assert solve.evaluation.calls == 1 and sum(at.counts.values()) == 0
    solve._close()


def test_gradient_of_an_earlier_point_takes_a_new_pass() -> None:
    at, given = points(False)
    x, y = np.array([1.0]), np.array([2.0])
    value_at(at, x), value_at(at, y)
    assert at.gradient(x) == 1.0 and at.gradient(y) == 2.0
    assert given == ["value", "value", "both", "both"]


def test_the_method_s_arrays_may_change() -> None:
    at, given = points(False, only_both=True)
    x = np.array([1.0])
    value_at(at, x)
    x[0] = 5.0
    assert value_at(at, x) == 12.5 and value_at(at, np.array([1.0])) == 0.5
    gradient = at.gradient(x)
    gradient[0] = 0.0
    assert at.gradient(x)[0] == 5.0 and given == ["both", "both"]


def test_the_function_gets_the_method_s_own_array_and_may_change_it() -> None:
    at, given = points(True)
    evaluation = at._evaluation
    got = []
    evaluation.value = lambda x: got.append(x) or Evaluation.value(evaluation, x)
    x = np.array([1.0, 2.0])
    point = at.with_value(x)
    assert got[0] is x and not np.shares_memory(point.x, x)
    x += 1.0
    assert value_at(at, np.array([1.0, 2.0])) == 2.5 and given == ["both"]


def test_products_are_not_remembered() -> None:
    at, given = points(False)
    for _ in range(2):
        assert np.array_equal(at.product(np.zeros(2), np.array([1, 2])), [1.0, 2.0])
    assert given == ["product", "product"] and at.counts["product"] == 2 and at.count("value") == 0
