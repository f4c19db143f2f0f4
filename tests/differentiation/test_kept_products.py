"""`linearize`, `make_hvp`: one record, many products."""

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from elliptic_matrix import elliptic_matrix
from mpi4py import MPI
from one_process import assert_close, directions, flat, gradients, hessian, inputs, jacobian, objective, pieces

import mpiad
from mpiad.linalg import solve_elliptic
from mpiad.linalg.multigrid.preconditioner import Multigrid


def program(x, rank, size):
    """An array on every rank, of a length that differs by rank."""
    every = mpiad.mpi_allgather(x**2, axis=0)
    right = mpiad.mpi_exchange(anp.sin(x[:2]), (rank + 1) % size, (rank - 1) % size)
    return anp.concatenate([every[: rank + 2], x * anp.sum(right)])


def outputs(xs):
    every = anp.concatenate([x**2 for x in xs])
    return [anp.concatenate([every[: r + 2], x * anp.sum(anp.sin(xs[r - 1][:2]))]) for r, x in enumerate(xs)]


def losses(xs):
    total = sum(anp.sum(anp.sin(x)) for x in xs)
    return [total**2 * anp.sum(x**3) + r * total for r, x in enumerate(xs)]


def loss(x, rank):
    total = mpiad.mpi_allreduce(anp.sum(anp.sin(x)))
    return total**2 * anp.sum(x**3) + rank * total


@pytest.fixture(params=["interpreted", "compiled"])
def way(request):
    return mpiad.jit if request.param == "compiled" else lambda fun: fun


def test_products_with_the_jacobian_and_its_transpose(way, rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    ys, dense = outputs(xs), jacobian(outputs, xs)
    kept = mpiad.linearize(way(lambda x: program(x, rank, size)))(xs[rank])
    assert_close(kept.value, ys[rank])
    vs, ws = [directions(xs, seed) for seed in (1, 2)], [directions(ys, seed) for seed in (3, 4)]
    tangents = [pieces(dense @ flat(v), ys)[rank] for v in vs]
    cotangents = [pieces(dense.T @ flat(w), xs)[rank] for w in ws]
    for v, w, tangent, cotangent in zip(vs, ws, tangents, cotangents):  # each may be called repeatedly, in any order
        assert_close(kept.jvp(v[rank]), tangent)
        assert_close(kept.vjp(w[rank]), cotangent)
    assert_close(kept.jvp(np.stack([v[rank] for v in vs]), batch=True), np.stack(tangents))
    assert_close(kept.vjp(np.stack([w[rank] for w in ws]), batch=True), np.stack(cotangents))


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
def test_products_with_the_hessian(kind, way, rank, size, rank_rng):
    xs, root = inputs(rank_rng, size), size - 1

    def whole(zs):
        return objective(losses(zs), kind, root)

    dense = hessian(whole, xs)
    value, gradient, product = mpiad.make_hvp(way(lambda x: loss(x, rank)), objective=kind, root=root)(xs[rank])
    assert_close(np.asarray(value), np.asarray(whole(xs)))
    assert_close(gradient, gradients(whole, xs)[rank])
    vs = [directions(xs, seed) for seed in (1, 2)]
    expected = [pieces(dense @ flat(v), xs)[rank] for v in vs]
    for v, known in zip(vs, expected):
        assert_close(product(v[rank]), known)
    assert_close(product(np.stack([v[rank] for v in vs]), batch=True), np.stack(expected))


@pytest.mark.parametrize("kind", ["root", "sum"])
def test_one_variable_of_which_all_hold_a_copy(kind, rank, size, rng):
    """What each rank does with its own copy counts, and the direction is one as well."""
    tree = {"a": np.arange(1.0, 4.0), "n": 2, "b": 0.7}

    def copies(xs):
        return objective([x[r % 3] ** 2 * anp.sum(x**3) + xs[0][3] * x[1] for r, x in enumerate(xs)], kind)

    def whole(z):
        return copies([z] * size)

    def fun(x):
        first = mpiad.mpi_bcast(x["b"])
        return x["a"][rank % 3] ** 2 * (anp.sum(x["a"] ** 3) + x["b"] ** 3) + first * x["a"][1]

    def known(z):
        return {"a": z[:3], "n": 0, "b": z[3]}

    z, v = np.append(tree["a"], tree["b"]), np.array([0.3, -1.0, 2.0, 0.5])
    value, gradient, product = mpiad.make_hvp(fun, objective=kind, shared=True)(tree)
    assert_close(np.asarray(value), np.asarray(whole(z)))
    for found, expected in (
        (gradient, known(autograd.grad(whole)(z))),
        (product({"a": v[:3], "n": 0, "b": v[3]}), known(autograd.hessian(whole)(z) @ v)),
    ):
        for name in ("a", "b", "n"):
            assert_close(np.asarray(found[name]), np.asarray(expected[name]))


def test_complex_variables(rank, size, rank_rng):
    """By real and imaginary parts: a product is (∂/∂x - i ∂/∂y) of the slope along v, as a gradient is of J."""
    zs = [rank_rng(r).standard_normal((2, 3)) @ [[1, 0], [0, 1], [1, 1]] @ [1, 1j] for r in range(size)]
    vs = [np.exp(1j * (r + np.arange(2))) for r in range(size)]

    def fun(z):
        w = mpiad.mpi_allreduce(z**2)
        return anp.real(anp.sum(w * anp.conj(w) * z) + anp.sum(z**3))

    def whole(parts):
        zs = anp.reshape(parts, (size, 2, 2))
        total = sum(_times(zs[r], zs[r]) for r in range(size))
        square = anp.sum(total**2, axis=0)
        return sum(anp.sum(square * zs[r][0] + _times(_times(zs[r], zs[r]), zs[r])[0]) for r in range(size))

    flat_z, flat_v = (np.concatenate([[z.real, z.imag] for z in each]).ravel() for each in (zs, vs))
    expected = (autograd.hessian(whole)(flat_z) @ flat_v).reshape(size, 2, 2)[rank]
    found = mpiad.make_hvp(fun, objective="sum")(zs[rank]).product(vs[rank])
    assert_close(found, expected[0] - 1j * expected[1])
    kept = mpiad.linearize(lambda z: mpiad.mpi_allreduce(anp.conj(z) * z**2))(zs[rank])
    slope = sum(np.conj(v) * z**2 + np.conj(z) * 2 * z * v for z, v in zip(zs, vs))
    assert_close(kept.jvp(vs[rank]), slope)


def _times(a, b):
    return anp.array([a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]])


def test_ranks_without_results_and_products_that_are_differentiated(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (3,))
    vs, ws = directions(xs, 1), directions([np.zeros(3)] * 2, 2)

    def at_the_root(x):
        total = mpiad.mpi_sum(x**3, root=0)
        return (total, 7) if rank == 0 else None

    kept = mpiad.linearize(at_the_root)(xs[rank])
    tangent, back = kept.jvp(vs[rank]), kept.vjp((ws[0], 0) if rank == 0 else None)
    if rank == 0:
        assert_close(tangent[0], sum(3 * x**2 * v for x, v in zip(xs, vs)))
        assert tangent[1] == 0
    else:
        assert tangent is None
    assert_close(back, 3 * xs[rank] ** 2 * ws[0])

    def curvature(x, v):
        return mpiad.mpi_allreduce(anp.sum(v * mpiad.make_hvp(lambda y: loss(y, rank), objective="sum")(x).product(v)))

    def whole(zs):
        def value(z):
            return sum(losses(pieces(z, xs)))

        return anp.dot(flat(vs), anp.dot(autograd.hessian(value)(flat(zs)), flat(vs)))

    assert_close(mpiad.grad(curvature)(xs[rank], vs[rank]), gradients(whole, xs)[rank])


def test_solves_of_products(monkeypatch, rank, rank_rng):
    """J v and Jᵀ w take one solve each, a Hessian product two, and none of them V-cycles for the value again."""
    domain, solves, plain = mpiad.Domain((12, 12)), [], Multigrid.solve

    def counted(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        solves.extend([1] if len(self.history) > 1 else [])  # of a right-hand side of zeros nothing is solved
        return out

    def taken(call):
        solves.clear()
        call()
        return len(solves)

    def state(m):
        return solve_elliptic(domain, anp.exp(m), np.ones(domain.local_shape))

    monkeypatch.setattr(Multigrid, "solve", counted)
    m, *vs = rank_rng(rank).standard_normal((6, *domain.local_shape))
    kept, v, vs = mpiad.linearize(state)(m), vs[0], np.stack(vs)
    assert [taken(lambda: kept.jvp(v)), taken(lambda: kept.vjp(v)), taken(lambda: kept.vjp(kept.jvp(v)))] == [1, 1, 2]
    product = mpiad.make_hvp(lambda m: domain.sum(state(m) ** 2))(m).product
    assert taken(lambda: product(v)) == 2
    # Of five directions the right-hand sides are solved for together.
    assert [taken(lambda: kept.jvp(vs, batch=True)), taken(lambda: kept.vjp(vs, batch=True))] == [1, 1]
    assert taken(lambda: product(vs, batch=True)) == 2


@pytest.mark.thorough
def test_several_directions_of_a_solve(rank_rng):
    """Beside dense matrices: from A(κ) u = f, with A linear in κ = exp m, follows A u̇ = -A(κ ṁ) u."""
    shape = (5, 4)
    domain, whole = mpiad.Domain(shape), rank_rng(0)
    m, *vs = whole.standard_normal((4, *shape))
    matrix = elliptic_matrix(np.exp(m), 0.0, (1.0, 1.0)).toarray()
    u = np.linalg.solve(matrix, np.ones(20))
    turned = [elliptic_matrix(np.exp(m) * e.reshape(shape), 0.0, (1.0, 1.0)) @ u for e in np.eye(20)]
    dense = -np.linalg.solve(matrix, np.stack(turned, axis=1))

    def mine(fields):
        return np.ascontiguousarray(np.reshape(fields, (-1, *shape))[(slice(None), *domain.owned)])

    def state(m):
        return solve_elliptic(domain, anp.exp(m), np.ones(domain.local_shape), rtol=1e-12)

    kept, flat_vs = mpiad.linearize(state)(mine(m)[0]), np.reshape(vs, (3, 20))
    along = kept.jvp(mine(vs), batch=True)
    np.testing.assert_allclose(along, mine(flat_vs @ dense.T), atol=1e-9)
    np.testing.assert_allclose(kept.vjp(along, batch=True), mine(flat_vs @ dense.T @ dense), atol=1e-9)
    # Of J = Σ u²/2 the gradient is duᵀu; its change along v by differences of the dense one.
    product = mpiad.make_hvp(lambda m: 0.5 * domain.sum(state(m) ** 2), objective="root")(mine(m)[0]).product
    found = product(mine(vs), batch=True)
    for each, v in zip(found, vs):
        slopes = [_gradient_of_square(m + step * v, shape) for step in (1e-5, -1e-5)]
        np.testing.assert_allclose(each, mine((slopes[0] - slopes[1]) / 2e-5)[0], atol=1e-6)


def _gradient_of_square(m, shape):
    matrix = elliptic_matrix(np.exp(m), 0.0, (1.0, 1.0)).toarray()
    u = np.linalg.solve(matrix, np.ones(m.size))
    back = np.linalg.solve(matrix, u)
    units = np.eye(m.size).reshape(-1, *shape)
    return np.array([-back @ (elliptic_matrix(np.exp(m) * e, 0.0, (1.0, 1.0)) @ u) for e in units])


def test_several_directions_pass_messages_under_way_and_sums_of_fewer_ranks(rank, size, rank_rng):
    """All ranks meet communications in one order, though only some of them can take several cotangents at once."""
    right, left = (rank + 1) % size, (rank - 1) % size

    def program(x):
        coming, going = mpiad.mpi_irecv(x, left), mpiad.mpi_isend(anp.sin(x), right)
        total = mpiad.mpi_iallreduce(x**2)
        y = mpiad.mpi_exchange(x**3, right, left)
        if rank == 0:  # between two exchanges, and on one rank alone
            y = y * mpiad.mpi_allreduce(anp.sum(y), comm=MPI.COMM_SELF)
        z = mpiad.mpi_exchange(y * x, left, right)
        came, gone, total = mpiad.mpi_wait(coming), mpiad.mpi_wait(going), mpiad.mpi_wait(total)
        return z * came + gone * total

    def outputs(xs):
        ys = [xs[r - 1] ** 3 for r in range(size)]
        ys[0] = ys[0] * anp.sum(ys[0])
        total = sum(x**2 for x in xs)
        after = [(r + 1) % size for r in range(size)]
        return [ys[after[r]] * xs[after[r]] * anp.sin(xs[r - 1]) + anp.sin(xs[r]) * total for r in range(size)]

    xs = inputs(rank_rng, size, lambda r: (2,))
    dense, kept = jacobian(outputs, xs), mpiad.linearize(program)(xs[rank])
    vs = [directions(xs, seed) for seed in (1, 2, 3)]
    mine = np.stack([v[rank] for v in vs])
    assert_close(kept.jvp(mine, batch=True), np.stack([pieces(dense @ flat(v), xs)[rank] for v in vs]))
    assert_close(kept.vjp(mine, batch=True), np.stack([pieces(dense.T @ flat(v), xs)[rank] for v in vs]))


def test_forms_that_do_not_fit_are_refused(rank):
    kept = mpiad.linearize(lambda x: x**2)(np.ones(2))
    with pytest.raises(TypeError, match=r"\(2,\).*\(3,\)"):
        kept.jvp(np.ones(3))
    with pytest.raises(TypeError, match="jvp: v is a list of 2, but a single ndarray in the argument"):
        kept.jvp([np.ones(2), np.ones(2)])
    with pytest.raises(ValueError, match="first axis"):
        mpiad.linearize(lambda x: x**2)(1.0).jvp(1.0, batch=True)
    with pytest.raises(ValueError, match="same number of directions"):
        mpiad.linearize(lambda x: x[0] * x[1])([1.0, 2.0]).jvp([np.ones(2), np.ones(3)], batch=True)
    with pytest.raises(TypeError, match="make_hvp.*floating-point"):
        mpiad.make_hvp(lambda n: 1.0)(3)


@pytest.mark.serial
def test_integers_among_the_variables():
    x, v = np.array([1.0, -2.0, 3.0]), np.array([0.5, 1.0, -1.5])
    kept = mpiad.linearize(lambda p: p[0] ** 2 * p[1])((x, 3))
    for of_integer in (0, None):
        np.testing.assert_allclose(kept.jvp((v, of_integer)), 6 * x * v, rtol=1e-15)
    back, none = kept.vjp(v)
    np.testing.assert_allclose(back, 6 * x * v, rtol=1e-15)
    assert none is None
