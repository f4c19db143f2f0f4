"""In-place operators, views and arrays to write into: traced programs mean what NumPy means, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse
from autograd.numpy.fft import fft
from in_place_programs import check
from mpi4py import MPI

import mpiad
from mpiad.timestepping import scan

X = np.array([0.5, -0.75, 1.25, 0.3])
V = np.array([0.2, 0.9, -0.4, 0.7])
STALE = r"memory was changed in place under another name.*test_in_place\.py:\d+ in"
WRITING = "can't be differentiated when it gets an array to write into.*(Take its result|and it returns nothing else)"


def relax(f: Any) -> None:
    f += 0.5 * (1 - f)


def relaxed(x: Any) -> Any:
    y = x * 2.0
    relax(y)
    return anp.sum(y**2)


def argument(x: Any) -> Any:
    relax(x)
    return anp.sum(x**2)


def by_jitted(x: Any) -> Any:
    y = x * 2.0
    mpiad.jit(relax)(y)
    return anp.sum(y**2)


def values(fun: Callable, x: np.ndarray) -> dict[str, Any]:
    """Return the value in each mode."""
    found: dict[str, Any] = {
        "reverse": mpiad.value_and_grad(fun)(x)[0],
        "forward": mpiad.jvp(fun, x, V)[0],
        "hvp": mpiad.value_and_grad(lambda x: mpiad.value_and_grad(fun)(x)[0])(x)[0],
        "linearize": mpiad.linearize(fun)(x).value,
        "make_vjp": mpiad.make_vjp(fun)(x)[1],
        "make_hvp": mpiad.make_hvp(fun)(x)[0],
        "of jit": mpiad.value_and_grad(mpiad.jit(fun))(x)[0],
        "forward of jit": mpiad.jvp(mpiad.jit(fun), x, V)[0],
        "jit of": mpiad.jit(mpiad.value_and_grad(fun))(x)[0],
        "jit": mpiad.jit(fun)(x.copy()),
        "drive": mpiad.drive(lambda f: f.value_and_gradient(x)[0], fun),
        "drive, plain": mpiad.drive(lambda f: f(x), fun),
    }
    return found


@pytest.mark.serial
@pytest.mark.parametrize("fun", [relaxed, argument, by_jitted])
def test_a_function_called_for_its_effect(fun: Callable) -> None:
    x = X.copy()
    y = 0.5 * (1 + (x if fun is argument else 2 * x))
    for mode, value in values(fun, x).items():
        np.testing.assert_allclose(value, np.sum(y**2), rtol=1e-14, err_msg=mode)
    slope = y if fun is argument else 2 * y
    for form in (fun, mpiad.jit(fun)):
        np.testing.assert_allclose(mpiad.jvp(form, x, V)[1], slope @ V, rtol=1e-14)
    for gradient in (mpiad.grad(fun), mpiad.grad(mpiad.jit(fun)), mpiad.jit(mpiad.grad(fun))):
        np.testing.assert_allclose(gradient(x), slope, rtol=1e-14)
    np.testing.assert_allclose(mpiad.hvp(fun)(x, V), V / 2 if fun is argument else 2 * V, rtol=1e-14)
    assert np.array_equal(x, X)  # a derivative doesn't change the arrays that it is given


@pytest.mark.serial
def test_minimize_and_batches_see_changes() -> None:
    result = mpiad.minimize(lambda x: relaxed(x) + 0.84, np.full(2, 3.0))
    np.testing.assert_allclose((result.fun, *result.x), (0.84, -0.5, -0.5), atol=1e-8)

    def curve(x: Any) -> Any:
        y = anp.sin(x)
        y *= x
        return y

    np.testing.assert_allclose(mpiad.jacobian(curve)(X), np.diag(np.cos(X) * X + np.sin(X)), atol=1e-14)


@pytest.mark.serial
def test_each_operator_is_numpys() -> None:
    def program(np: Any, x: Any) -> Any:
        a = np.reshape(x, (2, 2)) + 2.0
        kept = a
        a += x[:2]
        a -= 0.25
        a *= a
        a /= x[0] + 1.0
        a %= 7.0
        a **= 1.5
        a @= np.array([[1.0, 0.5], [0.0, 1.0]])
        b = a * 1.0
        b //= 0.3
        total = np.sum(x)
        before = total
        total += 1.0  # a scalar: `before` keeps its value
        return np.sum(np.sin(kept)) + np.sum(b) + total * before

    def fun(x: Any) -> Any:
        return program(anp, x)

    steps = [(program(np, X + h * V) - program(np, X - h * V)) / (2 * h) for h in (1e-5, 1e-6)]
    for form in (fun, mpiad.jit(fun)):
        J, g = mpiad.value_and_grad(form)(X)
        np.testing.assert_allclose(J, program(np, X), rtol=1e-13)
        np.testing.assert_allclose(g @ V, steps, rtol=1e-6)
        np.testing.assert_allclose(mpiad.jvp(form, X, V)[1], g @ V, rtol=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_dtypes_and_shapes_stay(dtype: type) -> None:
    def fun(x: Any) -> Any:
        y = x * x
        y += np.ones(4)
        y *= np.float64(0.5)
        shapes.append((y.shape, y.dtype, anp.reshape(anp.sum(y), ()).shape))
        return anp.sum(anp.real(y))

    shapes: list[Any] = []
    x = X.astype(dtype)
    g = mpiad.grad(fun)(x)
    mpiad.jvp(fun, x, x)
    assert g.dtype == dtype and set(shapes) == {((4,), np.dtype(dtype), ())}
    np.testing.assert_allclose(g, x, rtol=1e-6)
    compiled = mpiad.jit(fun, strict=True)
    np.testing.assert_allclose(compiled(x), fun(x), rtol=1e-6)


@pytest.mark.serial
def test_an_array_without_axes_is_changed_under_all_its_names() -> None:
    def fun(x: Any) -> Any:
        y = x
        x += 1.0
        x *= 2.0
        return y**2

    for form in (fun, mpiad.jit(fun)):
        J, g = mpiad.value_and_grad(form)(np.array(3.0))
        assert (J, g) == (64.0, 32.0)


@pytest.mark.serial
@pytest.mark.parametrize(
    "change, kind",
    [
        (lambda y: y.__iadd__(np.ones((2, 4))), ValueError),
        (lambda y: y.__imul__(1j), TypeError),
        (lambda y: y.__imatmul__(np.ones((4, 3))), ValueError),
        (lambda y: anp.broadcast_to(y, (2, 4)).__iadd__(1.0), ValueError),
    ],
    ids=["grows", "complex", "product", "read-only"],
)
def test_errors_are_numpys(change: Callable, kind: type[Exception]) -> None:
    with pytest.raises(kind) as expected:
        change(np.ones(4))
    for derivative in (mpiad.grad, mpiad.linearize, lambda f: lambda x: mpiad.jvp(f, x, x)):
        with pytest.raises(kind) as found:
            derivative(lambda x: anp.sum(change(x * 2.0)))(X)
        assert str(found.value) == str(expected.value)


def of_view(use: Callable, derive: Callable) -> Any:
    """Differentiate a function that changes a view of y, and uses y, a view of the same part, and one of another part."""

    def fun(x: Any) -> Any:
        y = x * 2.0
        w, other = y[1:3], y[:1]
        same = anp.reshape(y, (2, 2))
        w *= w
        return use(y, w, same, other)

    return derive(fun)(X)


DERIVATIVES = {
    "grad": mpiad.grad, "jvp": lambda f: lambda x: mpiad.jvp(f, x, V)[1], "hvp": lambda f: lambda x: mpiad.hvp(f)(x, V),
    "linearize": lambda f: lambda x: mpiad.linearize(f)(x).vjp(1.0), "grad of grad": lambda f: mpiad.grad(
        lambda x: anp.sum(mpiad.grad(f)(x) * V)
    ), "jit of grad": lambda f: mpiad.jit(mpiad.grad(f)), "grad of jit": lambda f: mpiad.grad(mpiad.jit(f)),
    "jacobian": lambda f: mpiad.jacobian(lambda x: anp.reshape(f(x), (1,))),
}  # fmt: skip
USES: dict[str, Callable] = {
    "base": lambda y, w, same, other: anp.sum(y),
    "sibling": lambda y, w, same, other: anp.sum(same),
    "second operand": lambda y, w, same, other: anp.sum(w * y[1:3]),
    "comparison": lambda y, w, same, other: anp.sum(anp.where(other < y, 1.0, w[0])),
    "second of a comparison": lambda y, w, same, other: anp.sum(w) * (anp.sum(other) < y[0]),
    "message": lambda y, w, same, other: mpiad.mpi_allreduce(anp.sum(w)) + anp.sum(mpiad.mpi_bcast(y)),
    "result": lambda y, w, same, other: y[0],
    "change": lambda y, w, same, other: anp.sum(y.__iadd__(1.0)),
}


@pytest.mark.serial
@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("use", USES)
def test_stale_arrays_raise(name: str, use: str) -> None:
    with pytest.raises(RuntimeError, match=STALE):
        of_view(USES[use], DERIVATIVES[name])


@pytest.mark.serial
@pytest.mark.parametrize("name", DERIVATIVES)
def test_other_views_are_used(name: str) -> None:
    def use(y: Any, w: Any, same: Any, other: Any) -> Any:
        return anp.sum(w) + anp.sum(other**2) + anp.zeros_like(y)[0]

    def closed(x: Any) -> Any:
        return anp.sum(4 * x[:3] ** 2)

    np.testing.assert_allclose(of_view(use, DERIVATIVES[name]), DERIVATIVES[name](closed)(X), rtol=1e-12)


@pytest.mark.serial
def test_rows_that_are_changed_make_their_matrix_stale() -> None:
    def rows(x: Any) -> Any:
        y = anp.reshape(x, (2, 2)) * 1.0
        for k in range(2):
            row = y[k]
            row *= 2.0
        return anp.sum(y)

    with pytest.raises(RuntimeError, match=STALE):
        mpiad.grad(rows)(X)

    def parts(x: Any) -> Any:
        a, b = anp.split(x * 1.0, 2)
        a *= b
        b += 1.0
        return anp.sum(a * b)

    a, b = X[:2], X[2:]
    np.testing.assert_allclose(mpiad.grad(parts)(X), [*(b * (b + 1)), *(a * (2 * b + 1))], rtol=1e-14)


@pytest.mark.serial
def test_a_stale_array_stays_stale_after_its_trace() -> None:
    kept = []

    def fun(x: Any) -> Any:
        y = x * 2.0
        w = y[1:]
        w += 1.0
        kept.append(y)
        return anp.sum(w)

    for derivative in (mpiad.grad(fun), lambda x: mpiad.jvp(fun, x, x)):
        derivative(X)
        with pytest.raises(RuntimeError, match=STALE):
            anp.sum(kept.pop())


@pytest.mark.serial
def test_what_a_record_holds_of_outer_traces_stays() -> None:
    def fun(x: Any) -> Any:
        c = x * 2.0
        linear = mpiad.linearize(lambda y: y * c * y)(x)
        value = linear.value
        c += 1.0
        value *= 3.0
        return anp.sum(linear.vjp(np.ones(4))) + anp.sum(c) + anp.sum(value)

    J, g = mpiad.value_and_grad(fun)(X)
    np.testing.assert_allclose(J, np.sum(4 * X**2 + 2 * X + 1 + 6 * X**3), rtol=1e-14)
    np.testing.assert_allclose(g, 8 * X + 2 + 18 * X**2, rtol=1e-14)


@pytest.mark.serial
def test_steps_that_change_their_state() -> None:
    def step(u: Any, k: int, p: Any) -> Any:
        u += 0.1 * p * anp.sin(u)
        u *= 0.9
        return u

    def unrolled(x: Any) -> Any:
        u = x
        for _ in range(7):
            u = 0.9 * (u + 0.1 * V * anp.sin(u))
        return anp.sum(u**2)

    expected = unrolled(X), autograd.grad(unrolled)(X)
    for checkpoints in (None, 2):
        for each in (step, mpiad.jit(step)):

            def loop(x: Any, each: Any = each, checkpoints: Any = checkpoints) -> Any:
                return anp.sum(scan(each, x, 7, V, checkpoints=checkpoints) ** 2)

            x = X.copy()
            for (J, g), J_expected in (
                (mpiad.value_and_grad(loop)(x), loop(x)),
                (mpiad.value_and_grad(mpiad.jit(loop))(x), loop(x)),
            ):
                np.testing.assert_allclose(J_expected, expected[0], rtol=1e-13)
                np.testing.assert_allclose(J, expected[0], rtol=1e-13)
                np.testing.assert_allclose(g, expected[1], rtol=1e-12)
            assert np.array_equal(x, X)


@pytest.mark.serial
def test_foreign_traces_keep_autograds_meaning() -> None:
    def fun(x: Any) -> Any:
        y = x * 2.0
        kept = y
        y += 1.0
        return anp.sum(kept)

    np.testing.assert_allclose(autograd.grad(fun)(X), np.full(4, 2.0))


@pytest.mark.serial
def test_a_constant_that_is_passed_through_is_not_changed() -> None:
    """Untraced, `mpi_send` returns c itself, so c would change, too."""

    def fun(x: Any) -> Any:
        c = np.ones(4)
        d = mpiad.mpi_exchange(c, None, None)
        d += x
        return anp.sum(c * d)

    try:
        J = mpiad.value_and_grad(fun)(X)[0]
    except RuntimeError as error:
        assert "shares memory with a plain array" in str(error)
    else:
        np.testing.assert_allclose(J, fun(X), rtol=1e-14)


@pytest.mark.serial
@pytest.mark.parametrize("position", range(3))
def test_operators_return_arrays_of_their_own(position: int) -> None:
    @mpiad.extend.custom_operator
    def chosen(*args: Any) -> Any:
        return args[position] if args else 1.0

    mpiad.extend.defvjp_together(
        chosen, lambda ans, *args: lambda g: [g if k == position else None for k in range(len(args))]
    )
    mpiad.extend.defjvp_together(chosen, lambda gs, ans, *args: gs[position] if args else 0.0)

    def fun(x: Any) -> Any:
        args = [x * (k + 1.0) for k in range(3)]
        made = chosen(*args)
        made += chosen()
        return anp.sum(args[position]) + anp.sum(made)

    for form in (fun, mpiad.jit(fun)):
        J, g = mpiad.value_and_grad(form)(X)
        np.testing.assert_allclose(J, fun(X), rtol=1e-14)
        np.testing.assert_allclose(g, np.full(4, 2.0 * (position + 1)), rtol=1e-14)
        np.testing.assert_allclose(mpiad.jvp(form, X, V)[1], np.sum(V) * 2.0 * (position + 1), rtol=1e-14)


@pytest.mark.serial
@pytest.mark.parametrize(
    "passed",
    [
        lambda x: mpiad.mpi_send(x, MPI.PROC_NULL),
        lambda x: mpiad.mpi_exchange(x, None, None),
        lambda x: mpiad.mpi_bcast(x),
        lambda x: mpiad.mpi_allreduce(x),
        lambda x: mpiad.mpi_gather(x, axis=0),
        lambda x: mpiad.mpi_alltoall(x, [4]),
    ],
    ids=["send", "exchange", "bcast", "allreduce", "gather", "alltoall"],
)
def test_messages_that_return_their_argument(passed: Callable) -> None:
    """Changing the result changes the argument, as untraced, or the argument is stale."""

    def fun(x: Any) -> Any:
        y = x * 2.0
        made = passed(y)
        made += 1.0
        return anp.sum(y * y)

    for derivative in (mpiad.value_and_grad(fun), lambda x: mpiad.jvp(fun, x, x)):
        try:
            J = derivative(X)[0]
        except RuntimeError as error:
            mpiad.reset()
            assert "changed in place under another name" in str(error)
            assert fun(X) != np.sum(4 * X**2)
        else:
            np.testing.assert_allclose(J, fun(X), rtol=1e-14)


BUFFERS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, k: anp.sum(x, 0, out=k), "sum, positional": lambda x, k: anp.sum(x, 0, None, k),
    "mean": lambda x, k: anp.mean(x, 0, out=k), "prod": lambda x, k: anp.prod(x, 0, out=k),
    "max": lambda x, k: anp.max(x, 0, k), "min": lambda x, k: anp.min(x, 0, out=k),
    "std": lambda x, k: anp.std(x, 0, out=k),
    "var": lambda x, k: anp.var(x, 0, None, k), "clip": lambda x, k: anp.clip(x[0], 0.0, 1.0, k),
    "einsum": lambda x, k: anp.einsum("ij->j", x, out=k), "cumsum": lambda x, k: anp.cumsum(x[0], 0, None, k),
    "fft": lambda x, k: fft(x[0], out=k.astype(complex)), "outer": lambda x, k: anp.outer(x[0], x[0], np.zeros((2, 2))),
    "trace": lambda x, k: anp.trace(x, out=np.zeros(())), "add": lambda x, k: anp.add(x[0], 1.0, k),
    "exp": lambda x, k: anp.exp(x[0], k),
    "where": lambda x, k: anp.multiply(x[0], 2.0, out=k, where=np.array([True, False])),
    "dot": lambda x, k: anp.dot(x, x[0], k), "take": lambda x, k: anp.take(x[0], [0, 1], None, k),
    "method": lambda x, k: x.sum(0, None, k), "max, method": lambda x, k: x.max(0, k),
    "numpy": lambda x, k: np.sum(x, 0, out=k),
    "floor": lambda x, k: anp.floor(x[0], out=k), "round": lambda x, k: anp.round(x[0], 1, k),
    "sign": lambda x, k: anp.sign(x[0], k), "copyto": lambda x, k: anp.copyto(k, x[0]),
    "fill_diagonal": lambda x, k: anp.fill_diagonal(x, 0.0), "put": lambda x, k: anp.put(k, [0, 1], x[0]),
    "nan_to_num": lambda x, k: anp.nan_to_num(x, copy=False), "median": lambda x, k: anp.median(x, 0, None, True),
    "traced buffer": lambda x, k: anp.round(x[0], 1, x[1]),
}  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.filterwarnings("ignore")
def test_arrays_to_write_into_are_refused(name: str) -> None:
    def fun(x: Any) -> Any:
        k = np.zeros(2)
        BUFFERS[name](anp.reshape(x, (2, 2)), k)
        return anp.sum(k) + anp.sum(x)

    for derive in ("grad", "jvp", "hvp", "linearize", "grad of grad", "grad of jit", "jit of grad"):
        with pytest.raises(TypeError, match=WRITING):
            DERIVATIVES[derive](fun)(X)
    x = X.copy()
    with pytest.raises(TypeError, match="writes (traced values )?into an array|TypeError"):
        mpiad.jit(fun, strict=True)(x)
    x, y = X.copy(), X.copy()
    assert mpiad.jit(fun)(x) == fun(y)  # interpreted


@pytest.mark.serial
def test_parameters_of_other_functions_may_be_called_out() -> None:
    @autograd.extend.primitive
    def scaled(x: Any, out: float) -> Any:
        return x * out

    autograd.extend.defvjp(scaled, lambda ans, x, out: lambda g: g * out, None)
    np.testing.assert_allclose(mpiad.grad(lambda x: anp.sum(scaled(x, out=3.0)))(X), np.full(4, 3.0))


def changed_after(read: Callable) -> Callable:
    def fun(x: Any) -> Any:
        c = np.ones(4)
        y = read(x, c)
        c *= 2.0
        return anp.sum(y)

    return fun


@pytest.mark.serial
@pytest.mark.interpreted  # programs have copies of the arrays that they read
def test_debug_mode_reports_a_plain_array_that_changes_after_it_was_read() -> None:
    late = changed_after(lambda x, c: x * c)
    line = late.__closure__[0].cell_contents.__code__.co_firstlineno
    text = rf"test_in_place\.py:{line} in .* reads an array of shape \(4,\) .* changed in place afterwards"
    with mpiad.debug.checked():
        for derivative in (
            mpiad.grad,
            lambda f: lambda x: mpiad.make_vjp(f)(x)[0](1.0),
            lambda f: lambda x: mpiad.hvp(f)(x, x),
        ):
            with pytest.raises(RuntimeError, match=text):
                derivative(late)(X)
        np.testing.assert_array_equal(mpiad.grad(changed_after(lambda x, c: x + c))(X), np.ones(4))  # isn't needed
        vjp, value = mpiad.make_vjp(anp.exp)(X)
        value *= 2.0
        with pytest.raises(RuntimeError, match="changed in place afterwards"):
            vjp(V)


def first_half(matrix: Any) -> None:
    matrix.data[:2] *= 2.0


# Calls of an array and of a constant, the constant, and its change.
CONSTANTS: dict[str, tuple[Callable, Any, Callable]] = {
    "segment_sum": (lambda x, c: mpiad.segment_sum(x, c, 4), np.array([0, 3, 1, 0]), lambda c: c.__setitem__(0, 2)),
    "sparse_matmul": (lambda x, c: mpiad.linalg.sparse_matmul(c, x), scipy.sparse.csr_array(np.diag(V)), first_half),
    "custom operator": (lambda x, c: SCALED(x, c), V.copy(), lambda c: c.fill(3.0)),
    "exchange of ghosts": (
        lambda x, c: mpiad.GhostExchange(c, (0, 4), comm=MPI.COMM_SELF).fetch(x),
        np.array([0, 3, 1, 0]),
        lambda c: c.__setitem__(0, 2),
    ),
    "interpolation": (
        lambda x, c: mpiad.Domain((4,), comm=MPI.COMM_SELF).interpolate(x, c, spacing=1.0),
        np.array([[0.5], [1.25]]),
        lambda c: c.fill(2.0),
    ),
}
COPIED = {"exchange of ghosts", "interpolation"}
SCALED = mpiad.extend.custom_operator(lambda x, c: x * c)
mpiad.extend.defadjoint(SCALED, lambda g, c: g * c)


@pytest.mark.serial
@pytest.mark.interpreted
@pytest.mark.parametrize("name", CONSTANTS)
def test_debug_mode_knows_the_constants_of_the_librarys_functions(name: str) -> None:
    """Those that adjoints read by reference; for those that are copied, a change has no effect."""
    call, constant, change = CONSTANTS[name]

    def loss(x: Any, changes: bool) -> Any:
        c = constant.copy()
        y = call(x, c)
        if changes:
            change(c)
        return anp.sum(y * np.arange(1.0, 1 + y.size))

    expected = mpiad.grad(loss)(X, False)
    with mpiad.debug.checked():
        np.testing.assert_array_equal(mpiad.grad(loss)(X, False), expected)
        if name in COPIED:
            np.testing.assert_array_equal(mpiad.grad(loss)(X, True), expected)
            return
        with pytest.raises(RuntimeError, match="changed in place afterwards"):
            mpiad.grad(loss)(X, True)

    if name != "custom operator":  # programs have copies of what the other functions read
        np.testing.assert_array_equal(mpiad.grad(mpiad.jit(loss))(X, True), expected)


@pytest.mark.interpreted
def test_several_reverse_passes_of_a_compiled_function_in_debug_mode(rank, size):
    """They overwrite the memory of the program, which no array of the user is; a change of one of those is reported."""
    rows = np.arange(18.0).reshape(6, 3) / 6 + rank

    def sines(x: Any) -> Any:
        return mpiad.mpi_allreduce(rows.T @ anp.sin(rows @ x))

    def changed(x: Any) -> Any:
        c = np.ones(3)
        y = mpiad.jit(lambda x, c: mpiad.mpi_allreduce(x * c))(x, c)
        c *= 2.0
        return y

    def two_products(f: Any) -> list:
        return [f.vjp(x, V[:3]), f.vjp(x, 2 * V[:3])]

    x = np.array([0.1, 0.2, -0.3])
    every = np.concatenate([rows - rank + r for r in range(size)])
    exact = every.T @ (np.cos(every @ x)[:, None] * every)
    with mpiad.debug.checked():
        found = mpiad.jacobian(mpiad.jit(sines), shared=True)(x)
        products = mpiad.drive(two_products, mpiad.jit(sines))
        with pytest.raises(RuntimeError, match="reads an array of shape .* changed in place afterwards"):
            mpiad.grad(lambda x: anp.sum(changed(x)), shared=True)(x)
        # The program of a reverse pass that may be differentiated has a copy.
        np.testing.assert_allclose(mpiad.jacobian(changed, shared=True)(x), size * np.eye(3), rtol=1e-15)
    np.testing.assert_allclose(found, exact, rtol=1e-12)
    if rank == 0:
        np.testing.assert_allclose(products, [V[:3] @ exact, 2 * V[:3] @ exact], rtol=1e-12)


@pytest.mark.serial
@pytest.mark.limit(600)
@pytest.mark.filterwarnings("ignore")
def test_random_programs(request: pytest.FixtureRequest) -> None:
    """Of those without a stale use or `out=`, 90 % equal NumPy's results, and all without views do."""
    counts = check(1000 if request.config.getoption("thorough") else 100, seed=3, compiled=50)
    equal, refused = counts["plain", "equal"], counts["plain", "refused"]
    assert equal >= 0.9 * (equal + refused) > 50
    assert counts["stale", "refused"] and counts["writing", "refused"]
