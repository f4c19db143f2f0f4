"""`scan` against the same loop on the whole grid in one process, whose derivatives plain autograd takes."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad as plain_grad
from autograd import make_jvp as plain_jvp
from autograd import make_vjp as plain_vjp
from mpi4py import MPI

import mpiad
from mpiad.testing import check_grads
from mpiad.timestepping import CheckpointSchedule, scan

STEPS = 7
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
COUNTS = [3 + rank % 2 for rank in range(SIZE)]
CELLS = sum(COUNTS)
MINE = slice(sum(COUNTS[:RANK]), sum(COUNTS[: RANK + 1]))
KEPT = [
    1,
    2,
    4,
    STEPS - 1,
    STEPS,
    50,
    CheckpointSchedule(1, 2),
    CheckpointSchedule(0, 3),
    CheckpointSchedule(2, recorded=3),
]
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def after(u, left, right, k, x, c):
    """Return the next state of cells between neighbours: nonlinear, and different in each step."""
    return u + c * (left - 2 * u + right) + 0.02 * (k + 1) * anp.sin(u) * x


class Whole:
    """The loop on the whole ring, in one process."""

    def __init__(self):
        rng = np.random.default_rng(5)
        self.point = rng.normal(size=CELLS), rng.normal(size=STEPS), rng.uniform(0.1, 0.2, CELLS)
        self.along = rng.normal(size=CELLS), rng.normal(size=STEPS), rng.normal(size=CELLS)

    def loss(self, args):
        u, x, c = args
        total = 0.0
        for k in range(STEPS):
            u = after(u, anp.roll(u, 1), anp.roll(u, -1), k, x[k], c)
            total = total + anp.sum(u**2) ** 2 / (k + 1) + u[0] ** 3
        return total + anp.sum(u**4)

    def gradient(self, args):
        return plain_grad(self.loss)(args)


def step(u, k, x, c):
    before, behind = (RANK - 1) % SIZE, (RANK + 1) % SIZE
    left, right = mpiad.mpi_exchange(u["u"][-1:], behind, before), mpiad.mpi_exchange(u["u"][:1], before, behind)
    padded = anp.concatenate([left, u["u"], right])
    return {"u": after(u["u"], padded[:-2], padded[2:], k, x, c)}


def observe(u, k, c):
    return mpiad.mpi_allreduce(anp.sum(u["u"] ** 2)), u["u"][:1]


def loss(args, kept):
    """Return this rank's part of the loss; x is one variable, of which every rank holds a copy."""
    u, x, c = args
    x = mpiad.mpi_bcast(x, SIZE - 1)
    last, (squares, first) = scan(step, {"u": u}, STEPS, c, inputs=x, observe=observe, checkpoints=kept)
    part = anp.sum(last["u"] ** 4)
    if RANK == 0:
        part = part + anp.sum(squares**2 / anp.arange(1, STEPS + 1)) + anp.sum(first**3)
    return part


def mine(args):
    u, x, c = args
    return u[MINE], x, c[MINE]


def agrees(found, whole):
    """Compare with the whole gradient; that of x lies on the rank that it is broadcast from."""
    u, x, c = whole
    np.testing.assert_allclose(found[0], u[MINE], **CLOSE)
    np.testing.assert_allclose(found[1], x if RANK == SIZE - 1 else 0 * x, **CLOSE)
    np.testing.assert_allclose(found[2], c[MINE], **CLOSE)


@pytest.mark.parametrize("kept", [None, *KEPT])
def test_value_and_gradient_are_those_of_the_whole_grid(kept):
    whole = Whole()
    value, found = mpiad.value_and_grad(lambda args: loss(args, kept), objective="sum")(mine(whole.point))
    np.testing.assert_allclose(value, whole.loss(whole.point), rtol=1e-12)
    agrees(found, whole.gradient(whole.point))


@pytest.mark.parametrize("kept", [None, 2, CheckpointSchedule(1, 1), CheckpointSchedule(1, recorded=2)])
def test_tangent_and_curvature_are_those_of_the_whole_grid(kept):
    whole = Whole()
    fun = lambda args: loss(args, kept)  # noqa: E731
    _, tangent = mpiad.jvp(fun, mine(whole.point), mine(whole.along))
    _, expected = plain_jvp(whole.loss)(whole.point)(whole.along)
    np.testing.assert_allclose(MPI.COMM_WORLD.allreduce(tangent), expected, rtol=1e-11)
    found = mpiad.hvp(fun, objective="sum")(mine(whole.point), mine(whole.along))
    _, expected = plain_jvp(whole.gradient)(whole.point)(whole.along)
    agrees(found, expected)


@pytest.mark.parametrize("kept", [1, 3])
def test_gradient_of_a_gradient_is_that_of_the_whole_grid(kept):
    whole = Whole()

    def squares(args):
        inner = mpiad.grad(lambda args: loss(args, kept), objective="sum")(args)
        return sum(anp.sum(g**2) for g in inner)

    def expected(args):
        return sum(anp.sum(g**2) for g in whole.gradient(args))

    agrees(mpiad.grad(squares, objective="sum")(mine(whole.point)), plain_grad(expected)(whole.point))


@pytest.mark.thorough
def test_gradient_passes_the_taylor_test():
    point = mine(Whole().point)
    check_grads(lambda args: loss(args, 2), point, objective="sum")


def test_transposed_product_may_be_taken_twice():
    whole = Whole()
    pull, value = mpiad.make_vjp(lambda args: loss(args, 2))(mine(whole.point))
    one = np.asarray(1.0)
    first, second = pull(one), pull(one)
    agrees(first, whole.gradient(whole.point))
    for a, b in zip(first, second):
        np.testing.assert_array_equal(a, b)


def test_a_kept_jacobian_multiplies_as_that_of_the_whole_grid():
    whole = Whole()
    linear = mpiad.linearize(lambda args: loss(args, 2))(mine(whole.point))
    total = MPI.COMM_WORLD.allreduce(float(linear.jvp(mine(whole.along))))
    np.testing.assert_allclose(total, plain_jvp(whole.loss)(whole.point)(whole.along)[1], rtol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_compiled", [lambda rank: False, lambda rank: rank % 2 == 0], ids=["interpreted", "compiled"])
def test_batches_of_products(is_compiled):
    """Of the last state and the observed values; a batch runs as many steps as one product."""
    whole, calls, rng = Whole(), [], np.random.default_rng(9)
    u, x, c = whole.point
    vs, ws, vs_c = rng.normal(size=(3, 3, CELLS))

    def counted(*args):
        calls.append(1)
        return step(*args)

    advance = mpiad.jit(step) if is_compiled(RANK) else counted

    def states(args):
        last, (squares, _) = scan(advance, {"u": args[0]}, STEPS, args[1], inputs=x, observe=observe, checkpoints=2)
        return last["u"] * squares[1]

    def in_one_process(args):
        v, squares = args[0], []
        for k in range(STEPS):
            v = after(v, anp.roll(v, 1), anp.roll(v, -1), k, x[k], args[1])
            squares.append(anp.sum(v**2))
        return v * squares[1]

    pull, value = plain_vjp(in_one_process)((u, c))
    push = plain_jvp(in_one_process)((u, c))
    linear = mpiad.linearize(states)((u[MINE], c[MINE]))
    np.testing.assert_allclose(linear.value, value[MINE], **CLOSE)
    for _ in range(2):
        calls.clear()
        found = linear.vjp(ws[:, MINE], batch=True)
        for part, expected in zip(found, zip(*[pull(w) for w in ws])):
            np.testing.assert_allclose(part, np.array(expected)[:, MINE], **CLOSE)
    batch, _ = len(calls), calls.clear()
    linear.vjp(ws[0, MINE])
    assert batch == len(calls)
    linear.jvp((vs[0, MINE], vs_c[0, MINE]))
    calls.clear()
    along = linear.jvp((vs[:, MINE], vs_c[:, MINE]), batch=True)
    assert len(calls) in (0, STEPS)  # each step once for all directions
    for row, *direction in zip(along, vs, vs_c):
        np.testing.assert_allclose(row, push(tuple(direction))[1][MINE], **CLOSE)
    slopes = mpiad.grad(lambda w: anp.sum(linear.vjp(w, batch=True)[0] ** 2), objective="sum")(ws[:, MINE])
    for row, w in zip(slopes, ws):
        np.testing.assert_allclose(row, 2 * push((pull(w)[0], 0 * c))[1][MINE], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kept", [2, STEPS])
def test_products_use_the_stored_states_again(kept):
    """Also if a step writes into its argument, which it does in runs without a trace."""
    calls, x, w = [], np.linspace(0.5, 1.5, 4) + RANK, np.cos(np.arange(4.0))

    def advance(u, k, c):
        calls.append(1)
        if isinstance(u, np.ndarray):
            u *= 1.5
            return mpiad.mpi_allreduce(c) * u**2 / 4
        return mpiad.mpi_allreduce(c) * (1.5 * u) ** 2 / 4

    c = np.ones(4) / SIZE
    pull = mpiad.linearize(lambda u: scan(advance, u, STEPS, c, checkpoints=kept))(x).vjp
    slope = np.ones(4)
    for _ in range(STEPS):
        slope, x = slope * 1.125 * x, 0.5625 * x**2
    counts = []
    for scale in (1.0, 2.0, 3.0):
        calls.clear()
        np.testing.assert_allclose(pull(scale * w), scale * w * slope, **CLOSE)
        counts.append(len(calls))
    assert counts == [counts[0]] * 3 and (kept < STEPS or counts[0] == STEPS)


def test_batches_of_products_with_the_hessian():
    whole, vs = Whole(), np.random.default_rng(9).normal(size=(2, CELLS))
    u, x, c = whole.point
    product = mpiad.make_hvp(lambda u: loss((u, x, c[MINE]), 2), objective="sum")(u[MINE]).product
    for row, v in zip(product(vs[:, MINE], batch=True), vs):
        above, below = (whole.gradient((u + step * v, x, c))[0] for step in (1e-5, -1e-5))
        np.testing.assert_allclose(row, ((above - below) / 2e-5)[MINE], rtol=1e-6, atol=1e-6)


@pytest.mark.also_jitted
def test_a_rank_that_loses_interest_does_not_stop_the_others():
    """Only rank 0's loss depends on the loop: the others' adjoints of it run all the same."""
    whole = Whole()

    def fun(args):
        u, x, c = args
        last = scan(lambda u, k, c: step(u, k, 1.0, c), {"u": u}, STEPS, c, checkpoints=2)
        return anp.sum(last["u"] ** 2) if RANK == 0 else None

    found = mpiad.grad(fun)(mine(whole.point))

    def expected(args):
        u, _, c = args
        for k in range(STEPS):
            u = after(u, anp.roll(u, 1), anp.roll(u, -1), k, 1.0, c)
        return anp.sum(u[: COUNTS[0]] ** 2)

    exact = plain_grad(expected)(whole.point)
    np.testing.assert_allclose(found[0], exact[0][MINE], **CLOSE)
    np.testing.assert_allclose(found[2], exact[2][MINE], **CLOSE)


@pytest.mark.parametrize("kept", [1, 2, STEPS])
def test_a_rank_that_differentiates_by_nothing_takes_part_in_the_adjoint(kept):
    """Its steps send what others differentiate by what they get; none of its own arguments is traced."""

    def advance(u, k, c):
        return 0.5 * anp.sin(u) + c * mpiad.mpi_exchange(u, (RANK + 1) % SIZE, (RANK - 1) % SIZE)

    def fun(u, c, kept):
        u, c = (mpiad.stop_gradient(u), mpiad.stop_gradient(c)) if RANK == SIZE - 1 else (u, c)
        return anp.sum(scan(advance, u, STEPS, c, checkpoints=kept) ** 2)

    start = np.array([0.3 + RANK, 0.7])
    exact = mpiad.grad(lambda u, c: fun(u, c, None), (0, 1), objective="sum")(start, 0.4)
    found = mpiad.grad(lambda u, c: fun(u, c, kept), (0, 1), objective="sum")(start, 0.4)
    np.testing.assert_allclose(found[0], exact[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-12)


def test_without_a_trace_nothing_is_kept_and_the_value_is_the_same():
    whole = Whole()
    assert MPI.COMM_WORLD.allreduce(loss(mine(whole.point), 1)) == pytest.approx(whole.loss(whole.point), rel=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 1, 3, CheckpointSchedule(1, 2)])
def test_state_of_several_dtypes(kept):
    """A complex amplitude beside a single-precision one, against the complex step of NumPy's own loop."""

    def advance(u, k, a):
        z, w = u
        return z * anp.exp(1j * a * (k + 1)) + 0.1 * anp.sum(w), (w * np.float32(0.9)).astype(np.float32)

    def fun(a):
        z, w = scan(advance, (np.array([1 + 2j]), np.ones(3, np.float32)), 5, a, checkpoints=kept)
        return anp.real(z[0]) ** 2 + anp.sum(w)

    def exact(a):
        x, y, w = 1.0, 2.0, np.ones(3, np.float32)
        for k in range(5):
            angle = a * (k + 1)
            x, y = x * np.cos(angle) - y * np.sin(angle) + 0.1 * float(w.sum()), x * np.sin(angle) + y * np.cos(angle)
            w = w * np.float32(0.9)
        return x**2 + float(w.sum())

    value, slope = mpiad.value_and_grad(fun)(0.3)
    assert value == pytest.approx(exact(0.3).real, rel=1e-6)
    assert slope == pytest.approx(exact(0.3 + 1e-30j).imag / 1e-30, rel=1e-6)


@pytest.mark.each_value
@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 2])
@pytest.mark.parametrize("n", [3, 60])
@pytest.mark.parametrize("start", ["constant", "traced"])
def test_a_compiled_state_that_is_constant_at_the_start_or_in_between(start, n, kept):
    """The state after step 0 doesn't depend on a, in x: J = 6 a^(n-1) (0.5 + n a)."""

    def advance(u, k, a):
        return {"x": u["x"] * a if k else np.array([2.0, 4.0]), "y": u["y"] + a}

    def fun(a):
        u0 = {"x": np.ones(2) * (a if start == "traced" else 1.0), "y": 0.5}
        u = scan(advance, u0, n, a, checkpoints=kept)
        return anp.sum(u["x"]) * u["y"]

    jitted, outside = mpiad.jit(fun, strict=True), mpiad.jit(mpiad.value_and_grad(fun, objective="mean"), strict=True)
    inside = mpiad.value_and_grad(mpiad.jit(fun, strict=True), objective="mean")
    for a in (0.99, 1.01):
        value = 6 * a ** (n - 1) * (0.5 + n * a)
        slope = 6 * a ** (n - 2) * ((n - 1) * (0.5 + n * a) + n * a)
        np.testing.assert_allclose(jitted(a), value, rtol=1e-12)
        np.testing.assert_allclose(inside(a), (value, slope), rtol=1e-12)
        np.testing.assert_allclose(outside(a), (value, slope), rtol=1e-12)
    with pytest.raises(TypeError, match=r"u0 has dtype float32 and shape \(2,\), but step 0 returned dtype float64"):
        mpiad.jit(lambda a: scan(lambda u, k, a: u * a, np.ones(2, np.float32), n, a, checkpoints=kept))(np.ones(2))


@pytest.mark.serial
def test_a_step_may_write_into_one_buffer_of_its_own():
    buffer = np.empty(3)

    def advance(u, k, c):
        if mpiad.stop_gradient(c) is not c:
            return u + c * anp.cos(u)
        np.add(u, c * np.cos(u), out=buffer)
        return buffer

    def fun(c, kept):
        return anp.sum(scan(advance, np.arange(3.0), 6, c, checkpoints=kept) ** 2)

    expected = mpiad.grad(lambda c: fun(c, None))(0.2)
    for kept in (1, 2, 6):
        assert mpiad.grad(lambda c, kept=kept: fun(c, kept))(0.2) == pytest.approx(expected, rel=1e-13)


@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 1, 2, 6, CheckpointSchedule(1, 2)])
def test_a_step_may_write_into_the_state_that_it_gets(kept):
    """Where nothing is traced `u += ...` writes into the array; the caller's and those that are kept stay as they are."""

    def advance(u, k, c):
        u += c * anp.sin(u) * (k + 1)
        return u

    def fun(u, c, kept, step=advance):
        return anp.sum(scan(step, u, 6, c, checkpoints=kept) ** 2)

    start = np.arange(1.0, 4.0)
    expected = mpiad.grad(lambda u, c: fun(u, c, None, lambda u, k, c: u + c * anp.sin(u) * (k + 1)), (0, 1))(start, 0.1)
    pull, _ = mpiad.make_vjp(lambda u, c: fun(u, c, kept), (0, 1))(start, 0.1)
    for _ in range(2):
        for found, exact in zip(pull(1.0), expected):
            np.testing.assert_allclose(found, exact, rtol=1e-13)
    fun(start, 0.1, kept)
    np.testing.assert_array_equal(start, [1.0, 2.0, 3.0])


def _vaccinate(u, k, beta):
    """Change the plain part of the state by plain numbers, after some entries were read and before others are."""
    susceptible, infected, doses = u
    contacts = beta * susceptible[1:] * infected[:1]
    susceptible -= np.array([30.0, 10.0])
    doses += k
    new = beta * susceptible * infected + 0.1 * anp.concatenate([contacts, contacts])
    return susceptible - new, 0.8 * infected + new * doses, doses


def _vaccinate_without_changes(u, k, beta):
    susceptible, infected, doses = u
    contacts = beta * susceptible[1:] * infected[:1]
    rest, given = susceptible - np.array([30.0, 10.0]), doses + k
    new = beta * rest * infected + 0.1 * anp.concatenate([contacts, contacts])
    return rest - new, 0.8 * infected + new * given, given


@pytest.mark.serial
@pytest.mark.filterwarnings("ignore:.*isn't compiled")
@pytest.mark.parametrize("kept", [None, 2])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_step_may_change_the_plain_part_of_its_state(kept, is_jitted):
    """In all derivatives, beside steps that change nothing: the values that were read before a change count."""

    def infected(beta, step):
        start = np.array([990.0, 1000.0]), np.array([10.0, 5.0]), np.zeros(2)
        return anp.sum(scan(step, start, 5, beta, checkpoints=kept)[1] ** 2) * 1e-3

    step = mpiad.jit(_vaccinate) if is_jitted else _vaccinate
    changing, exact = (lambda beta, step=step: infected(beta, step) for step in (step, _vaccinate_without_changes))
    for _ in range(2):
        assert mpiad.grad(changing)(5e-4) == pytest.approx(plain_grad(exact)(5e-4), rel=1e-13)
        assert mpiad.jvp(changing, 5e-4, 1.0)[1] == pytest.approx(plain_grad(exact)(5e-4), rel=1e-13)
        second = plain_grad(plain_grad(exact))(5e-4)
        assert mpiad.hvp(changing)(5e-4, 1.0) == pytest.approx(second, rel=1e-12)
        assert mpiad.grad(mpiad.grad(changing))(5e-4) == pytest.approx(second, rel=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 2])
def test_steps_cannot_change_the_callers_inputs(kept):
    inputs = np.ones((2, 3))

    def step(u, k, x, c):
        x *= 0.5
        return u - c * x

    with pytest.raises(ValueError, match="read-only"):
        mpiad.grad(lambda c: anp.sum(scan(step, np.ones(3), 2, c, inputs=inputs, checkpoints=kept)))(1.0)
    np.testing.assert_array_equal(inputs, 1.0)


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("kept", [None, 2])
def test_the_variable_from_which_a_loop_starts_stays_as_it_is(kept, is_jitted, rank):
    """Its square distance from a state that steps write into, beside a closed form, in all derivatives."""

    def halve(u, k):
        u *= 0.5
        return u

    step = mpiad.jit(halve) if is_jitted else halve

    def distance(u):
        return mpiad.mpi_allreduce(anp.sum((scan(step, u, 3, checkpoints=kept) - u) ** 2))

    u, v = np.arange(1.0, 4.0) + rank, np.array([1.0, -2.0, 0.5]) * (rank + 1)
    total = mpiad.mpi_allreduce
    for _ in range(2):
        value, gradient = mpiad.value_and_grad(distance)(u)
        assert value == pytest.approx(distance(u)) == pytest.approx((7 / 8) ** 2 * total(np.sum(u**2)))
        np.testing.assert_allclose(gradient, 2 * (7 / 8) ** 2 * u, rtol=1e-14)
        assert mpiad.jvp(distance, u, v)[1] == pytest.approx(2 * (7 / 8) ** 2 * total(np.sum(u * v)))
        np.testing.assert_allclose(mpiad.hvp(distance)(u, v), 2 * (7 / 8) ** 2 * v, rtol=1e-14)


@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 1, 5])
def test_what_is_observed_stays_where_the_state_is_written_into(kept):
    def advance(u, k):
        u += k
        return u

    last, seen = scan(advance, np.zeros(2), 5, observe=lambda u, k: {"all": u, "first": u[:1]}, checkpoints=kept)
    np.testing.assert_array_equal(seen["all"], np.outer([0, 1, 3, 6, 10], [1, 1]))
    np.testing.assert_array_equal(seen["first"][:, 0], [0, 1, 3, 6, 10])
    np.testing.assert_array_equal(last, [10, 10])


@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 1, 2, 5])
def test_cotangents_that_are_the_same_array_are_added_up_apart(kept):
    """A sum's adjoint hands one array to the state and to the parameter; neither may see what the other gets."""
    weights = np.array([1.0, -2.0, 3.0])
    by_u, by_c = mpiad.grad(lambda u, c: weights @ scan(lambda u, k, c: u + c, u, 5, c, checkpoints=kept), (0, 1))(
        np.ones(3), np.zeros(3)
    )
    np.testing.assert_array_equal(by_u, weights)
    np.testing.assert_array_equal(by_c, 5 * weights)


@pytest.mark.serial
@pytest.mark.parametrize("kept", [None, 1, 2, 5])
def test_a_step_may_forget_the_state_before_it(kept):
    def fun(u, c):
        last = scan(lambda u, k, c: {"new": c * (k + 1.0), "old": u["new"] ** 2}, u, 5, c, checkpoints=kept)
        return last["new"] + last["old"]

    by_u, by_c = mpiad.grad(fun, (0, 1))({"new": 0.5, "old": 0.1}, 0.3)
    assert by_u == {"new": 0.0, "old": 0.0}
    assert by_c == pytest.approx(5 + 2 * 16 * 0.3, rel=1e-14)


@pytest.mark.serial
def test_no_steps_return_the_state():
    u = {"u": np.ones(2)}
    assert scan(lambda u, k: u, u, 0, checkpoints=1)["u"] is u["u"]


@pytest.mark.few(2)
@pytest.mark.each_value
@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize("checkpoints", [1, 2, 5, CheckpointSchedule(2, recorded=3)], ids=str)
def test_tangents_of_gradients(checkpoints, jitted, rank, size):
    """Products of `linearize(grad(F))` with the Hessian, which the whole ring in one process has as well."""
    shared = np.random.default_rng(3)
    x, v = shared.normal(size=(2, CELLS)) / 2
    before, behind = (rank - 1) % size, (rank + 1) % size

    def step(u, k):
        left = mpiad.mpi_exchange(u[-1:], dest=behind, source=before)
        return u + 0.1 * anp.concatenate([left, u[:-1]]) * u**2 - 0.01 * (k + 1) * anp.sin(u)

    def whole(u):
        for k in range(5):
            u = u + 0.1 * anp.roll(u, 1) * u**2 - 0.01 * (k + 1) * anp.sin(u)
        return anp.sum(u**3)

    advance = mpiad.jit(step) if jitted else step
    gradient = mpiad.grad(lambda u: anp.sum(scan(advance, u, 5, checkpoints=checkpoints) ** 3), objective="sum")
    linear = mpiad.linearize(gradient)(x[MINE])
    expected = plain_jvp(plain_grad(whole))(x)(v)[1][MINE]
    np.testing.assert_allclose(linear.jvp(v[MINE]), expected, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(linear.vjp(v[MINE]), expected, rtol=1e-11, atol=1e-12)
    several = linear.jvp(np.stack([v[MINE], 2 * v[MINE]]), batch=True)
    np.testing.assert_allclose(several, [expected, 2 * expected], rtol=1e-11, atol=1e-12)


@pytest.mark.one_rank
@pytest.mark.parametrize("x", [0.5, np.float64(0.5), np.array(0.5)])
def test_derivatives_by_a_number_are_numbers(x):
    """With and without checkpoints, not arrays without axes."""
    for checkpoints in (None, 2):

        def loss(a, checkpoints=checkpoints):
            return anp.sum(scan(lambda u, k, a: a * u, np.arange(3.0), 4, a, checkpoints=checkpoints) ** 2)

        found = mpiad.grad(loss, objective="sum")(x), mpiad.hvp(loss, objective="sum")(x, 1.0), mpiad.jvp(loss, x, 1.0)[1]
        assert [type(number) for number in found] == [np.float64] * 3
        np.testing.assert_allclose(found, [5 * 8 * 0.5**7, 5 * 56 * 0.5**6, 5 * 8 * 0.5**7], rtol=1e-13)


@pytest.mark.one_rank
@pytest.mark.filterwarnings("error")
def test_complex_and_real_arrays_of_one_state():
    """Without warnings of casts."""
    start = np.array([1.0, 0.3j]), np.array([1.0, 0.3])

    def step(s, k, a):
        return s[0] * (1 - 0.1 * a) + 0.1 * s[1] ** 2, s[1] + 0.1 * anp.real(s[0]) ** 2

    def loss(a, checkpoints):
        z, x = scan(step, start, 5, a, checkpoints=checkpoints)
        return anp.sum(anp.abs(z) ** 2) + anp.sum(x**2)

    def by_parts(a):  # holomorphic in a
        x, y, r = start[0].real, start[0].imag, start[1]
        for _ in range(5):
            x, y, r = x * (1 - 0.1 * a) + 0.1 * r**2, y * (1 - 0.1 * a), r + 0.1 * x**2
        return np.sum(x**2 + y**2 + r**2)

    slope = lambda a: by_parts(a + 1e-30j).imag / 1e-30  # noqa: E731
    for checkpoints in (None, 2):
        np.testing.assert_allclose(mpiad.grad(loss, objective="sum")(0.7, checkpoints), slope(0.7), rtol=1e-13)
        curvature = (8 * (slope(0.701) - slope(0.699)) - slope(0.702) + slope(0.698)) / 12e-3
        np.testing.assert_allclose(mpiad.hvp(loss, objective="sum")(0.7, checkpoints, 1.0), curvature, rtol=1e-9)


@pytest.mark.serial
@pytest.mark.parametrize("communicates", [False, True])
def test_a_variable_from_outside_of_the_step_is_refused_with_the_remedy(communicates):
    total = mpiad.mpi_allreduce if communicates else lambda x: x
    x, v = np.array([1.0, -2.0]), 0.5

    def outside(a):
        return anp.sum(scan(lambda u, k: total(a) * u, x, 3, checkpoints=2))

    def param(a):
        return anp.sum(scan(lambda u, k, a: total(a) * u, x, 3, a, checkpoints=2))

    for derivative in (mpiad.grad(outside), lambda a: mpiad.jvp(outside, a, v)):
        with pytest.raises(TypeError, match="so that step gets it|a scan with checkpoints, .* to scan among the params"):
            derivative(2.0)
    np.testing.assert_allclose(mpiad.grad(param)(2.0), 3 * 2.0**2 * x.sum(), rtol=1e-14)
