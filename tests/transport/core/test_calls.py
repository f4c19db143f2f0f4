"""What is noted of a call: its name, its line, and backwards those of its forward call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.extend import CustomOperator, custom_operator, defadjoint
from mpiad.primitives.catalogue import ALLREDUCE
from mpiad.primitives.operation import Operation
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Call


class Witness:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str | None]] = []
        self.arguments: list[Any] = []
        self.open = 0

    def began(self, call: Call) -> None:
        self.open += 1
        self.seen.append((call.name, call.direction, str(call.forward_site or call.site)))
        self.arguments.append(call.arguments)

    def ended(self, call: Call) -> None:
        self.open -= 1
        assert call.ended >= call.began


@pytest.fixture
def witness() -> Iterator[Witness]:
    was_noting = calls.is_noting()
    found = Witness()
    calls.observers.append(found)
    calls.note(found)
    yield found
    calls.forget(found)
    calls.observers.remove(found)
    assert found.open == 0 and calls.current() is None and calls.is_noting() == was_noting


def line_below() -> int:
    return inspect.currentframe().f_back.f_lineno + 1  # type: ignore[union-attr]


def test_a_call_is_named_with_its_line(witness: Witness) -> None:
    line = line_below()
    mpiad.mpi_allreduce(np.ones((2, 3)))
    assert witness.seen == [("mpi_allreduce", "forward", f"test_calls.py:{line} in test_a_call_is_named_with_its_line")]
    said = witness.arguments[0]
    assert (said.shape, said.dtype, said.nbytes, said.reduction) == ((2, 3), np.float64, 48, "SUM")


def test_functions_of_one_operation_keep_their_names(witness: Witness) -> None:
    mpiad.mpi_reduce(1.0, mpiad.transport.SUM, 0)
    mpiad.mpi_exscan(1.0)
    assert [name for name, _, _ in witness.seen] == ["mpi_reduce", "mpi_exscan"]


def test_an_adjoint_has_the_site_of_its_forward_call(witness: Witness) -> None:
    lines = []

    def loss(x: Any) -> Any:
        lines.append(line_below())
        y = mpiad.mpi_bcast(x)
        return anp.sum(y * y)

    mpiad.value_and_grad(loss)(np.ones(3))
    site = f"test_calls.py:{lines[0]} in loss"
    assert witness.seen[0] == ("mpi_bcast", "forward", site)
    assert witness.seen[1][0] == "value_and_grad"
    # The adjoint, and the sum that it is made of.
    assert witness.seen[2:] == [("mpi_bcast", "adjoint", site), ("mpi_sum", "adjoint", site)]


def test_second_order_keeps_the_first_line(witness: Witness) -> None:
    def loss(x: Any) -> Any:
        return anp.sum(mpiad.mpi_allreduce(x) ** 3)

    mpiad.hvp(loss, objective="mean")(np.ones(2), np.ones(2))
    backwards = [site for _, direction, site in witness.seen if direction != "forward"]
    assert backwards and len({site for site in backwards if "in loss" in str(site)}) == 1


def test_operators_of_the_users_own_are_named(witness: Witness) -> None:
    @custom_operator
    def total(x: Any) -> Any:
        return mpiad.mpi_allreduce(x)

    defadjoint(total, total)
    mpiad.grad(lambda x: anp.sum(total(x)))(np.ones(2))
    assert ("total", "forward") in {seen[:2] for seen in witness.seen}
    assert ("total", "adjoint") in {seen[:2] for seen in witness.seen}


def test_a_call_ends_by_an_exception_too(witness: Witness) -> None:
    with pytest.raises(TypeError):
        mpiad.mpi_allreduce("text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        mpiad.mpi_send(None, 0)


def test_nothing_is_swapped_while_nobody_asks() -> None:
    if calls.is_noting():
        pytest.skip("calls are noted in this run")

    def functions() -> list[Any]:
        return [
            ALLREDUCE.forward,
            *(getattr(kind, name) for kind in (Operation, CustomOperator) for name in ("vjp", "jvp")),
        ]

    before, witness = functions(), Witness()
    assert before[0].__qualname__ == "_forward" and before[1].__qualname__ == "Operation.vjp"
    calls.note(witness)
    assert not any(now is one for now, one in zip(functions(), before))
    calls.forget(witness)
    assert functions() == before
