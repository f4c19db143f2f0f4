"""`make_vjp`, `make_jvp`, `jvp`, `hvp`: products with the Jacobian and Hessian of the whole program."""

import autograd.numpy as anp
import numpy as np
import pytest
from mpi4py import MPI
from one_process import (
    assert_close,
    directions,
    gradients,
    hessian_products,
    inputs,
    jacobian,
    objective,
    pieces,
)

import mpiad


def program(x, rank, size):
    """An array on every rank, of a length that differs by rank."""
    every = mpiad.mpi_allgather(x**2, axis=0)
    largest = mpiad.mpi_reduce(anp.sum(x), op=MPI.MAX, root=size - 1)
    largest = mpiad.mpi_bcast(largest, root=size - 1)
    right = mpiad.mpi_exchange(anp.sin(x[:2]), (rank + 1) % size, (rank - 1) % size)
    return anp.concatenate([every[: rank + 2] * largest, x * anp.sum(right)])


def outputs(xs):
    every = anp.concatenate([x**2 for x in xs])
    largest = anp.max(anp.array([anp.sum(x) for x in xs]))
    return [anp.concatenate([every[: r + 2] * largest, x * anp.sum(anp.sin(xs[r - 1][:2]))]) for r, x in enumerate(xs)]


def test_make_vjp_is_the_transposed_jacobian(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    ys = outputs(xs)
    vjp, value = mpiad.make_vjp(program)(xs[rank], rank, size)
    assert_close(value, ys[rank])
    dense = jacobian(outputs, xs)
    for seed in (1, 2):  # it may be called repeatedly
        cotangents = directions(ys, seed)
        expected = pieces(dense.T @ np.concatenate(cotangents), xs)[rank]
        assert_close(vjp(cotangents[rank]), expected)


@pytest.mark.parametrize("call", [lambda f, x, v: mpiad.make_jvp(f)(x)(v), mpiad.jvp], ids=["make_jvp", "jvp"])
def test_tangents_are_the_jacobian(call, rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    vs, ys = directions(xs), outputs(xs)
    value, tangent = call(lambda x: program(x, rank, size), xs[rank], vs[rank])
    assert_close(value, ys[rank])
    assert_close(tangent, pieces(jacobian(outputs, xs) @ np.concatenate(vs), ys)[rank])


def test_jvp_and_vjp_agree_on_nests(rank, size, rng):
    """⟨A v, w⟩ = ⟨v, Aᵀ w⟩, added up over all ranks, for a nest that each rank fills in another way."""

    def nested(tree, scale):
        total = mpiad.mpi_allreduce(anp.sum(tree["a"]) * tree["b"][0] * scale)
        return {"total": total**2, "more": (tree["a"] * total, [tree["b"][1] * tree["n"], 3.0])}

    def leaves(tree):
        return [tree["total"], tree["more"][0], tree["more"][1][0]]

    def random_tree():
        return {"a": rng.standard_normal(rank + 1), "b": (rng.standard_normal(), rng.standard_normal((2, 2))), "n": 2}

    x, v = random_tree(), random_tree()
    value, tangent = mpiad.make_jvp(nested)(x, 0.5)(v)
    w = {"total": 0.3, "more": (rng.standard_normal(rank + 1), [rng.standard_normal((2, 2)), 1.0])}
    vjp, again = mpiad.make_vjp(nested)(x, 0.5)
    back = vjp(w)

    assert type(value["more"]) is tuple and type(tangent["more"][1]) is list
    for one, other in zip(leaves(value), leaves(again)):
        assert_close(one, other)
    assert tangent["more"][1][1] == 0.0
    here = sum(np.sum(t * s) for t, s in zip(leaves(tangent), leaves(w)))
    there = np.sum(back["a"] * v["a"]) + back["b"][0] * v["b"][0] + np.sum(back["b"][1] * v["b"][1])
    sums = MPI.COMM_WORLD.allreduce(np.array([here, there]))
    assert_close(sums[0], sums[1], rounding=1e-13)


def test_a_second_argument_and_keywords(rank, size, rank_rng):
    xs = inputs(rank_rng, size, lambda r: (2,))
    vs = directions(xs)

    def scaled(a, x, *, power):
        return a * mpiad.mpi_allreduce(x**power)

    total, slope = sum(x**3 for x in xs), sum(3 * x**2 * v for x, v in zip(xs, vs))
    value, tangent = mpiad.make_jvp(scaled, argnum=1)(2.0, xs[rank], power=3)(vs[rank])
    assert_close(value, 2 * total)
    assert_close(tangent, 2 * slope)
    both = mpiad.make_jvp(scaled, argnum=(1, 0))(2.0, xs[rank], power=3)((vs[rank], 0.5))[1]
    assert_close(both, 2 * slope + 0.5 * total)
    vjp, _ = mpiad.make_vjp(scaled, argnum=(1, 0))(2.0, xs[rank], power=3)
    by_x, by_a = vjp(np.ones(2) * (rank + 1))
    assert_close(by_x, 2 * 3 * xs[rank] ** 2 * sum(range(1, size + 1)))
    assert_close(by_a, np.sum(total) * (rank + 1))


def test_constants_have_zero_tangents_and_take_any_cotangent(rank):
    value, tangent = mpiad.jvp(lambda x: (np.ones(3), mpiad.mpi_barrier(), 2), np.ones(2), np.ones(2))
    assert_close(tangent[0], np.zeros(3))
    assert tangent[1] is None and value[2] == 2
    vjp, _ = mpiad.make_vjp(lambda x: np.ones(3))(np.ones(2))
    assert_close(vjp(np.ones(3)), np.zeros(2))


def test_requests_in_a_program_that_is_run_backwards_repeatedly(rank, size, rank_rng):
    """Each run starts and completes the reverse messages anew."""
    xs, right, left = inputs(rank_rng, size, lambda r: (2,)), (rank + 1) % size, (rank - 1) % size

    def shifted(x):
        requests = [mpiad.mpi_isend(x**2, right), mpiad.mpi_irecv(x, left), mpiad.mpi_iallreduce(x)]
        sent, came, total = mpiad.mpi_waitall(requests[:: 1 if rank % 2 else -1])[:: 1 if rank % 2 else -1]
        return came * total + sent

    def outputs(zs):
        return [zs[r - 1] ** 2 * sum(zs) + zs[r] ** 2 for r in range(size)]

    dense = jacobian(outputs, xs)
    vjp, _ = mpiad.make_vjp(shifted)(xs[rank])
    for seed in (1, 2, 3):
        cotangents = directions(xs, seed)
        assert_close(vjp(cotangents[rank]), pieces(dense.T @ np.concatenate(cotangents), xs)[rank])
    rows = mpiad.jacobian(shifted, root=size - 1)(xs[rank])
    assert_close(rows, dense[-2:, 2 * rank : 2 * rank + 2])


def test_a_form_that_does_not_fit_is_refused(rank):
    vjp, _ = mpiad.make_vjp(lambda x: (x, x))(np.ones(2))
    with pytest.raises(TypeError, match="the cotangent is a single ndarray, but a tuple of 2 in the value"):
        vjp(np.ones(2))
    with pytest.raises(TypeError, match=r"\(2,\).*\(3,\)"):
        vjp((np.ones(2), np.ones(3)))
    with pytest.raises(TypeError, match=r"\(2,\).*\(\)"):
        mpiad.jvp(lambda x: x, np.ones(2), 1.0)
    with pytest.raises(TypeError, match="jvp: v is a list of 2, but a single ndarray in the argument"):
        mpiad.jvp(lambda x: x, np.ones(2), [1.0, 2.0])


X, V = {"a": 1.0, "b": 2.0}, {"b": 1.0, "c": 0.0}
PRODUCTS = {
    "jvp": lambda f: mpiad.jvp(f, X, V),
    "make_jvp": lambda f: mpiad.make_jvp(f)(X)(V),
    "linearize": lambda f: mpiad.linearize(f)(X).jvp(V),
    "batch": lambda f: mpiad.linearize(f)(X).jvp({"b": np.ones(2), "c": np.ones(2)}, batch=True),
    "hvp": lambda f: mpiad.hvp(lambda x: f(x)["a"])(X, V),
    "make_hvp": lambda f: mpiad.make_hvp(lambda x: f(x)["a"])(X).product(V),
    "make_vjp": lambda f: mpiad.make_vjp(f)(X)[0](V),
    "vjp": lambda f: mpiad.linearize(f)(X).vjp(V),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_directions_with_other_keys(name):
    """Leaves of other names aren't taken in the order of their keys."""
    of = "value" if name in ("make_vjp", "vjp") else "argument"
    text = f"a dict with the keys 'b', 'c', but a dict with the keys 'a', 'b' in the {of}. Pass"
    with pytest.raises(TypeError, match=text):
        PRODUCTS[name](lambda x: {"b": x["b"] ** 3, "a": x["a"] ** 2 * x["b"]})


def loss(x, rank, size):
    y = program(x, rank, size)
    return mpiad.mpi_allreduce(anp.sum(y**2) * (rank + 1.0)) + anp.sum(x) ** 3 * (rank + 2.0)


def losses(xs):
    shared = sum(anp.sum(y**2) * (r + 1.0) for r, y in enumerate(outputs(xs)))
    return [shared + anp.sum(x) ** 3 * (r + 2.0) for r, x in enumerate(xs)]


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
def test_hvp_with_each_objective(kind, rank, size, rank_rng):
    xs, root = inputs(rank_rng, size), size - 1
    vs = directions(xs)
    got = mpiad.hvp(loss, objective=kind, root=root)(xs[rank], rank, size, vs[rank])
    assert_close(got, hessian_products(lambda zs: objective(losses(zs), kind, root), xs, vs)[rank])


@pytest.mark.parametrize("kind", ["root", "sum", "mean"])
def test_hvp_of_a_shared_variable(kind, rank, size, rank_rng):
    theta, v = np.array([0.4, -0.2, 1.3]), np.array([1.0, 0.5, -2.0])
    xs = inputs(rank_rng, size, lambda r: (3,))

    def model(theta, x):
        first = mpiad.mpi_bcast(theta, root=size - 1)
        return mpiad.mpi_allreduce(anp.sum(anp.sin(first * x) ** 2)) ** 2 * (rank + 1.0) + anp.sum(theta**3 * x)

    def whole(one):
        total = sum(anp.sum(anp.sin(one[0] * x) ** 2) for x in xs) ** 2
        return objective([total * (r + 1.0) + anp.sum(one[0] ** 3 * x) for r, x in enumerate(xs)], kind)

    got = mpiad.hvp(model, objective=kind, shared=True)(theta, xs[rank], v)
    assert_close(got, hessian_products(whole, [theta], [v])[0])


def test_hvp_by_a_tuple_of_arguments_and_by_nests(rank, size, rank_rng):
    xs, vs = inputs(rank_rng, size), None
    vs = directions(xs)

    def apart(a, b):
        return mpiad.mpi_allreduce(anp.prod(a) * anp.sum(b**3))

    def whole(zs):
        return sum(anp.prod(z[:2]) * anp.sum(z[2:] ** 3) for z in zs)

    expected = hessian_products(whole, xs, vs)[rank]
    x, v = xs[rank], vs[rank]
    first, second = mpiad.hvp(apart, argnum=(0, 1))(x[:2], x[2:], (v[:2], v[2:]))
    assert_close(np.concatenate([first, second]), expected)
    nest = mpiad.hvp(lambda tree: apart(tree["a"], tree["b"]))({"a": x[:2], "b": x[2:]}, {"a": v[:2], "b": v[2:]})
    assert_close(np.concatenate([nest["a"], nest["b"]]), expected)


def test_vjp_can_be_differentiated_by_its_cotangent_and_by_the_argument(rank, size, rank_rng):
    xs = inputs(rank_rng, size)
    ws, vs = directions(outputs(xs), 3), directions(xs, 4)

    def weighted(zs):  # Σ_r ⟨v_r, (Jᵀ w)_r⟩ by reverse over reverse, in one process
        g = gradients(lambda ys: sum(anp.sum(w * y) for w, y in zip(ws, outputs(ys))), zs)
        return sum(anp.sum(v * part) for v, part in zip(vs, g))

    def mine(x):
        vjp, _ = mpiad.make_vjp(program)(x, rank, size)
        return anp.sum(vjp(ws[rank]) * vs[rank])

    assert_close(mpiad.grad(mine, objective="sum")(xs[rank]), gradients(weighted, xs)[rank])

    vjp, _ = mpiad.make_vjp(program)(xs[rank], rank, size)
    by_cotangent = mpiad.grad(lambda w: anp.sum(vjp(w) * vs[rank]), objective="sum")(ws[rank])
    assert_close(by_cotangent, pieces(jacobian(outputs, xs) @ np.concatenate(vs), ws)[rank])


def test_constants_have_no_tangent():
    value, tangent = mpiad.jvp(lambda x: (x**2, 5, "a", np.arange(2)), 3.0, 1.0)
    assert value[:3] == (9.0, 5, "a")
    assert tangent[:3] == (6.0, 0, None)
    np.testing.assert_array_equal(tangent[3], [0, 0])


@pytest.mark.parametrize("argnum", [(0, 0), (1, -1), (-2, 0), (np.int64(0), -2)])
@pytest.mark.parametrize(
    "call", [mpiad.grad, mpiad.value_and_grad, mpiad.make_vjp, mpiad.make_jvp, mpiad.hvp, mpiad.jacobian, mpiad.linearize]
)
def test_an_argument_named_twice(call, argnum):
    given = (1.0, 2.0, (1.0, 1.0)) if call is mpiad.hvp else (1.0, 2.0)
    with pytest.raises(ValueError, match="contains an argument twice"):
        call(lambda a, b, *rest: a * b, argnum)(*given)


def test_arguments_named_from_the_end():
    assert mpiad.grad(lambda a, b: a * b**2, (-1, 0), objective="sum")(3.0, 2.0) == (12.0, 4.0)
    with pytest.raises(TypeError, match=r"argnum=\(0, -3\) refers to positional arguments, but only 2 were given"):
        mpiad.grad(lambda a, b: a * b, (0, -3))(1.0, 2.0)


@pytest.mark.serial
@pytest.mark.interpreted
@pytest.mark.parametrize("kept_of", [mpiad.jvp, lambda f, x, v: mpiad.hvp(f)(x, v), lambda f, x, v: mpiad.grad(f)(x)])
def test_values_that_outlive_their_trace_are_constants(kept_of):
    x, v, kept = np.array([1.0, -2.0, 3.0]), np.array([0.5, 1.0, -1.5]), []
    keeping = lambda x: kept.append(2 * x) or anp.sum(x**2)  # noqa: E731
    kept_of(keeping, x, v)
    (factor,) = kept
    for f in (lambda x: factor * x**3, lambda x: x**3 * factor, lambda x: anp.where(x > 0, factor, factor) * x**3):
        along = mpiad.jvp(f, x, v)[1]
        np.testing.assert_allclose(along, 2 * x * 3 * x**2 * v, rtol=1e-15)
        np.testing.assert_allclose(mpiad.grad(lambda x: anp.sum(f(x)))(x), 2 * x * 3 * x**2, rtol=1e-15)  # noqa: B023
        np.testing.assert_allclose(mpiad.hvp(lambda x: anp.sum(f(x)))(x, v), 2 * x * 6 * x * v, rtol=1e-15)  # noqa: B023


@pytest.mark.serial
def test_a_function_without_a_derivative_is_named():
    x = np.array([1.0, 2.0])
    with pytest.raises(NotImplementedError, match=r"nancumprod can't be differentiated with respect to argument \(0,\)"):
        mpiad.grad(lambda x: anp.sum(anp.nancumprod(x) * x))(x)
    with pytest.raises(NotImplementedError, match=r"nancumprod can't be differentiated forwards"):
        mpiad.jvp(lambda x: anp.nancumprod(x) * x, x, x)


def test_complex_directions_of_real_variables_are_refused(rank, size):
    """Their imaginary parts would be lost; the products of both parts are those of the dense matrix."""
    n, rng = 2 * size + 1, np.random.default_rng(0)
    rows = slice(2 * rank, 2 * rank + 2 + (rank == size - 1))
    matrix, u, z = rng.standard_normal((n, n)), np.linspace(0, 1, n), np.exp(1j * np.arange(n))

    def fun(u):
        return matrix[rows] @ mpiad.mpi_allgather(u, axis=0) + np.sin(u)

    def energy(u):
        return mpiad.mpi_allreduce(np.sum(u**4))

    x, v, linear = u[rows], z[rows], mpiad.linearize(fun)(u[rows])
    exact = (matrix + np.diag(np.cos(u))) @ z
    np.testing.assert_allclose(linear.jvp(v.real) + 1j * linear.jvp(v.imag), exact[rows], rtol=1e-12)
    products = {
        "linear.jvp": lambda: linear.jvp(v), "batch": lambda: linear.jvp(np.stack([v, v]), batch=True),
        "linear.vjp": lambda: linear.vjp(v), "make_vjp": lambda: mpiad.make_vjp(fun)(x)[0](v),
        "jvp": lambda: mpiad.jvp(fun, x, v), "hvp": lambda: mpiad.hvp(energy)(x, v),
        "make_hvp": lambda: mpiad.make_hvp(energy)(x).product(v), "number": lambda: mpiad.jvp(np.sin, 1.0, 1j),
    }  # fmt: skip
    for name, product in products.items():
        with pytest.raises(TypeError, match="complex128 for a value or argument of float64: its imaginary part"):
            print(name, product())
    with pytest.raises(TypeError, match=rf"hvp: expected shape \({len(x)},\), .* got \({len(x) + 1},\)"):
        mpiad.hvp(energy)(x, np.ones(len(x) + 1))
    # A complex variable has complex directions.
    np.testing.assert_allclose(mpiad.jvp(lambda x: x**2, 1.0 + 1j, 2j)[1], 2 * (1 + 1j) * 2j, rtol=1e-15)


def test_directions_of_several_arguments_are_a_tuple():
    with pytest.raises(TypeError, match=r"make_jvp: the product takes one direction v, but got 2\. .*\(\(v, w\)\)\."):
        mpiad.make_jvp(lambda x, y: x * y, (0, 1))(2.0, 3.0)(1.0, 1.0)
