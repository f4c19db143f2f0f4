"""What isn't an objective raises on all ranks, and names the rank."""

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad

WRONG = {
    "array": lambda x: x * 2.0,
    "constant array": lambda x: np.ones(2),
    "complex": lambda x: anp.sum(x) * 1j,
    "complex constant": lambda x: 2j,
    "string": lambda x: "loss",
    "None": lambda x: None,
    "list": lambda x: [anp.sum(x)],
    "tuple": lambda x: (anp.sum(x), 0.0),
    "dict": lambda x: {"loss": anp.sum(x)},
    "empty": lambda x: (),
    "boolean": lambda x: anp.allclose(x, x),
}


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_return_raises_on_all_ranks(wrong, kind, rank, size):
    bad = size - 1

    def program(x):
        total = mpiad.mpi_allreduce(anp.sum(x**2))
        return WRONG[wrong](x) if rank == bad else total

    with pytest.raises(TypeError, match=f"one real number.*on rank {bad}"):
        mpiad.value_and_grad(program, objective=kind, root=bad)(np.ones(3))
    # Nothing is left under way: the next one is right.
    assert mpiad.value_and_grad(lambda x: mpiad.mpi_allreduce(anp.sum(x)))(np.ones(3))[0] == 3.0 * size


@pytest.mark.mpi(min_size=2)
def test_several_wrong_returns_are_counted(rank, size):
    with pytest.raises(TypeError, match=f"on rank 0 .*{size - 1} more"):
        mpiad.grad(lambda x: x, objective="sum")(np.ones(rank + 2))


@pytest.mark.mpi(min_size=2)
def test_a_wrong_return_off_the_root_raises_too(rank, size):
    with pytest.raises(TypeError, match="on rank 1"):
        mpiad.grad(lambda x: x if rank == 1 else anp.sum(x))(np.ones(2))


def test_the_error_shows_what_was_returned(rank, size):
    with pytest.raises(TypeError, match=r"array of float32, shape \(2, 3\)"):
        mpiad.grad(lambda x: np.ones((2, 3), np.float32))(1.0)
    with pytest.raises(TypeError, match="mpiad.jacobian"):
        mpiad.grad(lambda x: x)(np.ones(2))
