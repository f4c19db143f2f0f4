"""Solves and sparse matrices: dot products, Taylor rates of both orders, complex steps; parts uneven, one of them empty."""

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse

import mpiad
from mpiad.linalg import DistributedMatrix, factorized, newton, solve
from mpiad.testing import check_adjoint, check_grads


class Case:
    """A random matrix with a strong diagonal, whose rows are divided among the ranks, and vectors."""

    def __init__(self, rank_rng, rank, size):
        lengths = [4 + 2 * r for r in range(size)]
        if size > 2:
            lengths[1] = 0
        rng, total = rank_rng(70), sum(lengths)
        self.whole = scipy.sparse.random_array((total, total), density=0.3, rng=rng, format="csr")
        self.whole = (self.whole + 4 * scipy.sparse.eye_array(total)).tocsr()
        self.own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        self.matrix = DistributedMatrix(self.whole[self.own])
        self.b, self.w, self.v = rng.standard_normal((3, total))[:, self.own]
        self.values = self.matrix.values
        self.lengths = lengths

    def kept(self, values, method):
        return factorized(self.matrix.with_values(values), method=method)

    def probed(self, values):
        return factorized(self.matrix.operator(), self.b, values, pattern=self.whole[self.own])

    def entered(self, values):
        """Each entry is the sum of two."""
        rows, columns = (np.concatenate([part, part]) for part in self.matrix.indices)
        parts = anp.concatenate([0.25 * values, 0.75 * values])
        return DistributedMatrix.from_entries(rows, columns, parts, self.whole.shape, counts=self.lengths)

    def root(self, values, b, **settings):
        def residual(u, values, b):
            return self.matrix.with_values(values).matvec(u) + 0.3 * u**3 - b

        pattern = self.whole[self.own]
        return newton(residual, 0 * self.b, values, b, jacobian="sparse", pattern=pattern, rtol=1e-13, **settings)


# The solution, or another vector, as a function of the case, the matrix's values and b.
VECTORS = {
    "gathered": lambda case, a, b: case.kept(a, "gathered")(b),
    "gathered, transposed": lambda case, a, b: case.kept(a, "gathered").T(b),
    "schwarz": lambda case, a, b: case.kept(a, "schwarz")(b),
    "schwarz, transposed": lambda case, a, b: case.kept(a, "schwarz").T(b),
    "probed": lambda case, a, b: case.probed(a)(b),
    "several": lambda case, a, b: anp.sum(case.kept(a, "auto")(anp.stack([b, anp.sin(b)])) ** 2, axis=0),
    "newton": lambda case, a, b: case.root(a, b),
    "newton, factors used again": lambda case, a, b: case.root(a, b, reuse=3),
    "entries": lambda case, a, b: case.entered(a).matvec(b) + case.entered(a).rmatvec(b) ** 2,
    "matrix": lambda case, a, b: case.matrix.with_values(a).solve(b, rtol=1e-13),
    "direct": lambda case, a, b: case.matrix.with_values(a).T.solve(b, method="direct"),
    "systems": lambda case, a, b: anp.sum(
        solve(case.matrix.operator(), anp.stack([b, b**2]), a, method="gmres", batch=1, rtol=1e-13) ** 2, axis=0
    ),
}
# Linear in b; the name of the transpose.
TRANSPOSES = {"gathered": "gathered, transposed", "schwarz": "schwarz, transposed", "probed": "gathered, transposed"}
# Holomorphic, and without iterations, which would stop before the imaginary parts converge.
HOLOMORPHIC = ["gathered", "gathered, transposed", "probed", "several", "entries"]


@pytest.fixture
def case(rank_rng, rank, size):
    return Case(rank_rng, rank, size)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", VECTORS)
def test_taylor_rates(case, name):
    def loss(x):
        return mpiad.mpi_allreduce(anp.sum(case.w * anp.sin(VECTORS[name](case, x["values"], x["b"]))))

    check_grads(loss, {"values": case.values, "b": case.b}, step=0.05)


@pytest.mark.parametrize("name", TRANSPOSES)
def test_dot_products(case, name):
    vector, transpose = (VECTORS[each] for each in (name, TRANSPOSES[name]))
    transposed = lambda b: transpose(case, case.values, b)  # noqa: E731
    ulps = 1e5 if name == "schwarz" else 64.0  # iterations end at a relative residual of 1e-12
    check_adjoint(lambda b: vector(case, case.values, b), case.b, adjoint=transposed, ulps=ulps)


@pytest.mark.parametrize("name", HOLOMORPHIC)
def test_complex_steps(case, name, rng):
    vector = VECTORS[name]
    directions = {"values": rng.standard_normal(case.values.shape), "b": case.v}
    point = {"values": case.values, "b": case.b}
    moved = {key: x + 1e-30j * directions[key] for key, x in point.items()}
    expected = np.imag(vector(case, moved["values"], moved["b"])) / 1e-30
    _, tangent = mpiad.jvp(lambda x: vector(case, x["values"], x["b"]), point, directions)
    np.testing.assert_allclose(tangent, expected, 1e-9, 1e-12)


@pytest.mark.parametrize("name", ["gathered", "schwarz", "newton", "systems"])
def test_batches_of_products(case, name, rng):
    """A batch through `linearize`, against one product after the other."""
    vector, directions = VECTORS[name], rng.standard_normal((3, *case.b.shape))
    at = mpiad.linearize(lambda b: vector(case, case.values, b))(case.b)
    for product in (at.jvp, at.vjp):
        np.testing.assert_allclose(
            product(directions, batch=True), [product(direction) for direction in directions], 1e-9, 1e-12
        )
