"""Random programs that mix all primitives with local steps: value, gradient, tangent and second order."""

import autograd.numpy as anp
import numpy as np
import pytest
from one_process import assert_close, directions, gradients, inputs, objective
from random_programs import LENGTH, draw, run_local, run_whole

import mpiad

ROUNDING = 1e-9
"""Of twelve steps, some of which lose digits."""


def loss(registers, weights, constant):
    if constant:
        return 0.75
    return anp.sum(registers[0] * registers[1] * weights) + anp.sum(registers[2] ** 2)


@pytest.mark.filterwarnings("ignore:Output seems independent of input")  # the reference's, where a loss is constant
@pytest.mark.parametrize("seed", range(30))
def test_a_random_program(seed, rank, size, rank_rng):
    rng = np.random.default_rng([seed, 1])
    steps, xs = draw(seed, size), inputs(rank_rng, size, lambda r: (2 * LENGTH,))
    kind, root = ["root", "sum", "mean"][rng.integers(3)], int(rng.integers(size))
    weights, constant = rng.standard_normal((size, LENGTH)), rng.random(size) < 0.2
    vs = directions(xs, seed)

    def program(x):
        return loss(run_local(steps, x, rank), weights[rank], constant[rank])

    def losses(zs):
        return [loss(registers, weights[r], constant[r]) for r, registers in enumerate(run_whole(steps, zs))]

    def whole(zs):
        return objective(losses(zs), kind, root)

    keywords = {"objective": kind, "root": root}
    value, g = mpiad.value_and_grad(program, **keywords)(xs[rank])
    expected = gradients(whole, xs)
    assert_close(value, np.float64(whole(xs)), ROUNDING)
    assert_close(g, expected[rank], ROUNDING)

    of_mine = gradients(lambda zs: losses(zs)[rank], xs)
    tangent = mpiad.jvp(program, xs[rank], vs[rank])[1]
    assert_close(np.float64(tangent), np.float64(sum(np.sum(d * v) for d, v in zip(of_mine, vs))), ROUNDING)

    second = gradients(lambda zs: sum(anp.sum(d * v) for d, v in zip(gradients(whole, zs), vs)), xs)
    if seed % 2:
        got = mpiad.hvp(program, **keywords)(xs[rank], vs[rank])
    else:
        gradient = mpiad.grad(program, **keywords)
        got = mpiad.grad(lambda x: anp.sum(gradient(x) * vs[rank]), objective="sum")(xs[rank])
    assert_close(got, second[rank], ROUNDING)
