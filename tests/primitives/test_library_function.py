"""Functions of C as operators: values and derivatives compared with formulas, what is passed, and what is refused."""

import gc
import threading
import time
import weakref

import autograd.numpy as anp
import numpy as np
import pytest
from jitted import check_jit
from mpi4py import MPI
from shared_libraries import compiled, same_mpi

import mpiad
from mpiad.extend import Communicator, Cotangent, InOut, Input, Output, Tangent, Value, defvjp, library
from mpiad.testing import check_adjoint, check_grads

SOURCE = """
#include <mpi.h>
#include <stdlib.h>
#include <unistd.h>
/* y = k x S, in which S is the sum of all ranks' entries. */
static double total(MPI_Comm comm, int n, const double *x) {
    double s = 0, t;
    for (int i = 0; i < n; ++i) s += x[i];
    MPI_Allreduce(&s, &t, 1, MPI_DOUBLE, MPI_SUM, comm);
    return t;
}
void scaled(MPI_Comm comm, int n, const double *x, double k, double *y) {
    double t = total(comm, n, x);
    for (int i = 0; i < n; ++i) y[i] = k * x[i] * t;
}
void scaled_b(MPI_Comm comm, int n, const double *x, double *xb, double k, double *kb, double *yb) {
    double t = total(comm, n, x), d = 0, e;
    for (int i = 0; i < n; ++i) {
        d += k * x[i] * yb[i];
        xb[i] += k * t * yb[i];
        *kb += x[i] * t * yb[i];
        yb[i] = 0;
    }
    MPI_Allreduce(&d, &e, 1, MPI_DOUBLE, MPI_SUM, comm);
    for (int i = 0; i < n; ++i) xb[i] += e;
}
void scaled_d(MPI_Comm comm, int n, const double *x, const double *xd, double k, const double *kd, double *yd) {
    double t = total(comm, n, x), td = total(comm, n, xd);
    for (int i = 0; i < n; ++i) yd[i] = *kd * x[i] * t + k * xd[i] * t + k * x[i] * td;
}
void rank_of(int *comm, const double *x, double *y) {
    int rank;
    MPI_Comm_rank(MPI_Comm_f2c(*comm), &rank);
    *y = rank + *x;
}
/* Column sums and row sums of a[i, j] at i + m j, by reference as in Fortran. */
void sums(int *m, int *n, const float *a, float *rows, float *columns) {
    for (int i = 0; i < *m; ++i) rows[i] = 0;
    for (int j = 0; j < *n; ++j) {
        columns[j] = 0;
        for (int i = 0; i < *m; ++i) { rows[i] += a[i + *m * j]; columns[j] += a[i + *m * j]; }
    }
}
void sums_b(int *m, int *n, float *ab, const float *rb, const float *cb) {
    for (int j = 0; j < *n; ++j) for (int i = 0; i < *m; ++i) ab[i + *m * j] += rb[i] + cb[j];
}
/* steps of u += c (left - 2 u + right), with a halo of zeros; all steps are kept */
void diffuse(int n, int steps, double c, double *u, double *history) {
    for (int s = 0; s < steps; ++s) {
        for (int i = 0; i < n + 2; ++i) history[s * (n + 2) + i] = u[i];
        for (int i = 1; i <= n; ++i)
            u[i] = history[s * (n + 2) + i] + c * (history[s * (n + 2) + i - 1] - 2 * history[s * (n + 2) + i]
                   + history[s * (n + 2) + i + 1]);
    }
}
void diffuse_b(int n, int steps, double c, double *ub, const double *hb) {
    double *v = malloc((n + 2) * sizeof(double));
    for (int s = steps - 1; s >= 0; --s) {
        for (int i = 0; i < n + 2; ++i) { v[i] = (i > 0 && i <= n) ? ub[i] : 0; ub[i] = (i > 0 && i <= n) ? 0 : ub[i]; }
        for (int i = 1; i <= n; ++i) { ub[i] += v[i] * (1 - 2 * c); ub[i - 1] += c * v[i]; ub[i + 1] += c * v[i]; }
        for (int i = 0; i < n + 2; ++i) ub[i] += hb[s * (n + 2) + i];
    }
    free(v);
}
void shift(int n, double by, const double *x, double *y) { for (int i = 0; i < n; ++i) y[i] = x[i] + by; }
void cube(int n, const double *x, double *y) { for (int i = 0; i < n; ++i) y[i] = x[i] * x[i] * x[i]; }
void cube_b(int n, const double *x, const double *g, double *y) {
    for (int i = 0; i < n; ++i) y[i] = 3 * x[i] * x[i] * g[i];
}
void cube_bd(int n, const double *x, const double *xd, const double *g, const double *gd, double *y) {
    for (int i = 0; i < n; ++i) y[i] = 6 * x[i] * xd[i] * g[i] + 3 * x[i] * x[i] * gd[i];
}
void cube_bb(int n, const double *x, double *xb, const double *g, double *gb, const double *yb) {
    for (int i = 0; i < n; ++i) { xb[i] += 6 * x[i] * g[i] * yb[i]; gb[i] += 3 * x[i] * x[i] * yb[i]; }
}
void address(int n, const double *x, long *y) { *y = (long)x; }
void rest(int n, const double *x, double *y) { usleep(300000); *y = x[0]; }
void leave(int n, const double *x, double *y) { exit((int)x[0]); }
/* n becomes the number of nonzero entries */
void count(int *n, const int *x) { int all = *n; *n = 0; for (int i = 0; i < all; ++i) *n += x[i] != 0; }
void underscored_(int n, const double *x, double *y) { *y = n; }
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return compiled(SOURCE, ".c", tmp_path_factory.mktemp("library"))


@pytest.fixture
def functions(path):
    return library(path)


@pytest.fixture
def scaled(functions):
    fun = functions.function("scaled", comm=Communicator("C"), n=Value("int32"), x=Input("n"), k=Value(), y=Output("n"))
    fun.adjoint("scaled_b", "comm", "n", "x", Cotangent("x"), "k", Cotangent("k"), Cotangent("y", overwritten=True))
    fun.tangent("scaled_d", "comm", "n", "x", Tangent("x"), "k", Tangent("k"), Tangent("y"))
    return fun


def formula(x, k):
    return k * x * mpiad.mpi_allreduce(anp.sum(x))


def test_values_and_derivatives(scaled, path, rank):
    assert same_mpi(path)
    x, v = np.arange(4.0) + rank, np.cos(np.arange(4.0) * (rank + 1))
    np.testing.assert_allclose(scaled(x, 1.5), formula(x, 1.5), 1e-14)
    np.testing.assert_array_equal(scaled(k=1.5, x=x), scaled(x, 1.5))
    got, expected = (
        mpiad.value_and_grad(
            lambda x, k, fun=fun: anp.sum(v * fun(x, k) ** 2), (0, 1), objective="sum", shared=(False, True)
        )(x, 1.5)
        for fun in (scaled, formula)
    )
    np.testing.assert_allclose(got[0], expected[0], 1e-14)
    for a, b in zip(got[1], expected[1]):
        np.testing.assert_allclose(a, b, 1e-13)
    for fun in (scaled, formula):
        tangent = mpiad.jvp(lambda x, fun=fun: fun(x, 1.5), x, v)[1]
        np.testing.assert_allclose(tangent, mpiad.jvp(lambda x: formula(x, 1.5), x, v)[1], 1e-13)
    check_grads(lambda x: anp.sum(v * scaled(anp.sin(x), 1.5)), x, order=1, modes=["rev"], objective="sum")
    # The cotangent is read by the tape, too: an adjoint that overwrites it has a copy.
    shared = mpiad.grad(lambda x: anp.sum((lambda y: y + 2 * scaled(y, 1.0))(x * 1.0)), objective="sum")
    plain = mpiad.grad(lambda x: anp.sum((lambda y: y + 2 * formula(y, 1.0))(x * 1.0)), objective="sum")
    np.testing.assert_allclose(shared(x), plain(x), 1e-13)


@pytest.mark.parametrize("length", [4, 40_000], ids=["short", "long"])
def test_in_compiled_programs(scaled, rank, length):
    x = np.linspace(0.1, 1.0, length) + rank
    check_jit(lambda x, k: anp.sqrt(scaled(anp.sin(x), k * 1.25) ** 2 + scaled(x, k)), x, 0.75, rounding=1e-11)
    check_jit(lambda x: scaled(scaled(x, 0.5), 2.0), x)


def test_two_outputs_in_fortrans_order_by_reference(functions):
    sums = functions.function(
        "sums", m=Input(dtype="int32"), n=Input(dtype="int32"), a=Input("m", "n", dtype="float32", order="F"),
        rows=Output("m", dtype="float32"), columns=Output("n", dtype="float32"),
    )  # fmt: skip
    sums.adjoint("sums_b", "m", "n", Cotangent("a"), Cotangent("rows"), Cotangent("columns"))
    a = np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4))
    rows, columns = sums(a)
    np.testing.assert_array_equal(rows, a.sum(1))
    np.testing.assert_array_equal(columns, a.sum(0))
    r, c = np.array([1, 2, 3], "f4"), np.array([1, 0, 2, 5], "f4")
    gradient = mpiad.grad(lambda a: anp.sum(r * sums(a)[0]) + anp.sum(c * sums(a)[1]), objective="sum")(a)
    np.testing.assert_array_equal(gradient, r[:, None] + c)
    assert gradient.dtype == np.float32
    check_jit(lambda a: sums(2 * a)[1], a, rounding=1e-5)
    with pytest.raises(
        TypeError, match=r"a must be a contiguous float32 array of shape \(m, n\) in F order.*np.asfortranarray\(a\)"
    ):
        sums(np.ascontiguousarray(a))
    with pytest.raises(TypeError, match="a must be a contiguous float32 array.*but got float64 of shape"):
        sums(a.astype(float))


def test_changed_argument_and_lengths_with_offsets(functions):
    diffuse = functions.function(
        "diffuse", n=Value("int32"), steps=Value("int32"), c=Value(), u=InOut("n + 2"), history=Output("steps", "n+2"),
    )  # fmt: skip
    diffuse.adjoint("diffuse_b", "n", "steps", "c", Cotangent("u"), Cotangent("history"))

    def formula(u, steps):
        history = []
        for _ in range(steps):
            history.append(u)
            u = anp.concatenate([u[:1], u[1:-1] + 0.2 * (u[:-2] - 2 * u[1:-1] + u[2:]), u[-1:]])
        return u, anp.stack(history)

    start = np.sin(np.arange(6.0))
    given = start.copy()
    for got, expected in zip(diffuse(3, 0.2, start), formula(start, 3)):
        np.testing.assert_allclose(got, expected, 1e-14)
    np.testing.assert_array_equal(start, given)
    u_weights, weights = np.cos(np.arange(6.0)), np.cos(np.arange(18.0)).reshape(3, 6)

    def loss(fun):
        return mpiad.grad(lambda u: anp.sum(u_weights * fun(u)[0] ** 2) + anp.sum(weights * fun(u)[1]), objective="sum")

    steps_given = mpiad.jit(lambda u, steps: diffuse(steps, 0.2, 1.0 * u)[1])
    for steps in (3, 3, np.int32(3), np.int32(2), np.int32(3)):
        np.testing.assert_allclose(steps_given(start, steps), formula(start, int(steps))[1], 1e-14)
    np.testing.assert_allclose(loss(lambda u: diffuse(3, 0.2, u))(start), loss(lambda u: formula(u, 3))(start), 1e-13)
    check_adjoint(lambda u: diffuse(3, 0.2, u)[0], start)


def test_communicators(functions, rank, size):
    half = MPI.COMM_WORLD.Split(rank % 2, -rank)
    for comm in (None, half):
        fun = functions.function(
            "rank_of", communicator=comm, comm=Communicator(by_value=False), x=Input(), y=Output()
        )  # fmt: skip
        assert fun(0.5) == (MPI.COMM_WORLD if comm is None else comm).rank + 0.5
    half.Free()
    fun = functions.function(
        "rank_of", communicator=MPI.COMM_SELF, comm=Communicator(by_value=False), x=Input(), y=Output()
    )
    assert fun(np.float64(1.0)) == 1.0
    check_jit(lambda x: fun(0.5) + fun(x[0]) + fun(2.0 * x[1]), np.arange(2.0), derivatives=False)
    with pytest.raises(TypeError, match="rank_of: comm must be an mpi4py intracommunicator or None, but got int"):
        functions.function("rank_of", communicator=MPI.COMM_WORLD.py2f(), comm=Communicator(), x=Input(), y=Output())


def test_arrays_are_passed_without_a_copy(functions):
    address = functions.function("address", n=Value("int32"), x=Input("n"), y=Output(dtype="int64"))
    x = np.ones(5)
    assert address(x) == x.ctypes.data
    assert address(x[1:3]) == x.ctypes.data + 8


def test_a_derivative_in_python_and_of_a_linear_function(functions, rank):
    shift = functions.function("shift", n=Value("int32"), by=Value(), x=Input("n"), y=Output("n"))
    defvjp(shift, lambda ans, by, x: lambda g: anp.sum(g), lambda ans, by, x: lambda g: g)
    by, x = mpiad.grad(lambda by, x: anp.sum(shift(by, x) ** 2), (0, 1), objective="sum")(0.5, np.arange(3.0))
    assert by == 2 * np.sum(np.arange(3.0) + 0.5)
    np.testing.assert_array_equal(x, 2 * (np.arange(3.0) + 0.5))


def test_second_derivatives(functions, scaled):
    """The adjoint is a function with an adjoint and a tangent of its own."""
    cube = functions.function("cube", n=Value("int32"), x=Input("n"), y=Output("n"))
    adjoint = cube.adjoint("cube_b", "n", "x", Cotangent("y"), Cotangent("x"))
    cube.tangent("cube_b", "n", "x", Tangent("x"), Tangent("y"))
    adjoint.tangent(
        "cube_bd", "n", "x", Tangent("x"), "Cotangent of y", Tangent("Cotangent of y"), Tangent("Cotangent of x")
    )  # fmt: skip
    adjoint.adjoint(
        "cube_bb", "n", "x", Cotangent("x"), "Cotangent of y", Cotangent("Cotangent of y"), Cotangent("Cotangent of x")
    )  # fmt: skip
    check_grads(lambda x: anp.sum(cube(anp.sin(x))), np.arange(1.0, 4.0), objective="sum")
    with pytest.raises(NotImplementedError, match="scaled_b has no tangent"):
        check_grads(lambda x: anp.sum(scaled(x, 1.0)), np.ones(3), modes=["fwd"], objective="sum")
    mpiad.reset()


def test_the_tape_keeps_only_what_the_adjoint_asks_for(functions):
    shift = functions.function("shift", n=Value("int32"), by=Value(), x=Input("n"), y=Output("n"))
    shift.adjoint("shift", "n", "by", Cotangent("y"), Cotangent("x"))
    held = []

    def fun(x):
        inner = x * 2.0
        held.append(weakref.ref(inner._value))
        y = shift(0.0, inner)
        del inner
        gc.collect()
        assert held[0]() is None
        return anp.sum(y)

    np.testing.assert_array_equal(mpiad.grad(fun, objective="sum")(np.ones(3)), np.full(3, 2.0))


def test_the_lock_of_the_interpreter_is_released(functions):
    rest = functions.function("rest", n=Value("int32"), x=Input("n"), y=Output())
    thread = threading.Thread(target=lambda: rest(np.ones(1)))
    start = time.perf_counter()
    thread.start()
    time.sleep(0.05)
    assert time.perf_counter() - start < 0.25
    thread.join()


def test_mistakes_in_calls(scaled):
    x = np.ones(4)
    for args, text in (
        ((x,), r"scaled takes the arguments \(x, k\), and each"),
        ((x, 1.0, 2.0), r"scaled takes the arguments \(x, k\), and each"),
        ((x.astype("f4"), 1.0), r"x must be a contiguous float64 array of shape \(n\) in C order, but got float32"),
        ((np.ones(8)[::2], 1.0), r"strides \(16,\)\. Pass np\.ascontiguousarray\(x\)"),
        ((np.ones((2, 2)), 1.0), r"x must be .*but got float64 of shape \(2, 2\)"),
        (([1.0, 2.0], 1.0), "x must be .*but got list"),
        ((x, 1j), "k must be a number of float64, but got complex"),
        ((x, "1"), "k must be a number of float64, but got str"),
        ((x, x), "k must be a number of float64, but got float64 of shape"),
    ):
        with pytest.raises(TypeError, match=text):
            scaled(*args)
    for wrong in ({"factor": 1.0}, {"x": x}, {"k": 1.0, "n": 4}):
        with pytest.raises(TypeError, match=r"scaled takes the arguments \(x, k\), and each"):
            scaled(x, **wrong)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint32"])
@pytest.mark.parametrize("kind", [Value, Input])
def test_integers_out_of_range_are_refused(functions, kind, dtype):
    """C would get other numbers; by value, by reference, and as the length of an array."""
    fun = functions.function("shift", n=Value("int32"), by=Value(), x=Input("n"), y=Output("n"), k=kind(dtype=dtype))
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    for wrong in (low - 1, high + 1, np.int64(high + 1), 2**70):
        for call in (fun, mpiad.jit(lambda by, x, k: fun(by, x, k))):
            with pytest.raises(TypeError, match=rf"k must be a number of {dtype} from {low} to {high}, but got"):
                call(0.0, np.ones(3), wrong)
    for right in (low, high, np.int64(high)):
        fun(0.0, np.ones(3), right)
    short = functions.function("shift", n=Value("int8"), by=Value(), x=Input("n"), y=Output("n"))
    with pytest.raises(TypeError, match="n must be a number of int8 from -128 to 127, but got int 200"):
        short(0.0, np.ones(200))


def test_lengths_that_differ(functions):
    fun = functions.function("shift", n=Value("int32"), by=Value(), x=Input("n"), z=Input("n"), y=Output("n"))
    with pytest.raises(ValueError, match="shift: axis 0 of z must have length n = 3 from x, but has 4"):
        fun(0.0, np.ones(3), np.ones(4))


def test_negative_lengths_are_refused(functions):
    """The results would overlap, and C would write outside of them; from the shape of an input, passed, and computed."""
    shift = lambda x, y: functions.function("shift", n=Value("int32"), by=Value(), x=x, y=y)  # noqa: E731
    halo, less, passed = (
        shift(Input("n + 2"), Output("n")),
        shift(Input("n"), Output("n - 2")),
        shift(Input(3), Output("n")),
    )
    changed = functions.function("diffuse", n=Value("int32"), steps=Value("int32"), c=Value(), u=InOut("n + 2"))
    for fun, args, text in (
        (halo, (0.0, np.ones(1)), r"axis 0 of x must have length n \+ 2 with n ≥ 0, but has 1"),
        (halo, (0.0, np.ones(0)), r"axis 0 of x must have length n \+ 2 with n ≥ 0, but has 0"),
        (changed, (1, 0.0, np.ones(1)), r"axis 0 of u must have length n \+ 2 with n ≥ 0, but has 1"),
        (less, (0.0, np.ones(1)), "the lengths of y must be zero or more, but one is n - 2 = -1 from x"),
        (passed, (-1, 0.0, np.ones(3)), "n is the length of an axis, and must be zero or more, but got -1"),
        (passed, (np.array(-1, "i4"), 0.0, np.ones(3)), "n is the length of an axis, and must be zero or more, but got -1"),
    ):
        for call in (fun, mpiad.jit(lambda *args, fun=fun: fun(*args))):
            with pytest.raises(ValueError, match=f"{fun.__name__}: {text}"):
                call(*args)
    assert halo(0.0, np.ones(2)).shape == less(0.0, np.ones(2)).shape == passed(0, 0.0, np.ones(3)).shape == (0,)


def test_lengths_are_integers_of_any_kind(functions):
    fun = functions.function("shift", n=Value("int32"), by=Value(), x=Input(3), y=Output("n"))
    for length in (2, np.int32(2), np.array(2, "i4")):
        np.testing.assert_array_equal(fun(length, 1.0, np.arange(3.0)), [1.0, 2.0])
    for wrong in (2.0, np.float32(2), np.array(2.0), np.array([2], "i4"), "2", None):
        with pytest.raises(TypeError, match="n must be a number of int32 from"):
            fun(wrong, 1.0, np.arange(3.0))


def test_a_length_that_the_function_changes_is_passed(functions):
    count = functions.function("count", n=InOut(dtype="int32"), x=Input("n", dtype="int32"))
    given, x = np.array(3, "i4"), np.array([4, 0, 5], "i4")
    for length in (3, given):
        assert count(length, x) == 2
    assert given == 3
    with pytest.raises(ValueError, match="axis 0 of x must have length n = 2, but has 3"):
        count(2, x)


def test_mistakes_in_descriptions(functions, scaled):
    n, x, y = Value("int32"), Input("n"), Output("n")
    with pytest.raises(ValueError, match="has no function 'missing'"):
        functions.function("missing", n=n, x=x, y=y)
    with pytest.raises(ValueError, match="has no function 'underscored'. It has 'underscored_'"):
        functions.function("underscored", n=n, x=x, y=y)
    with pytest.raises(ValueError, match=r"the lengths \['m'\] aren't integers"):
        functions.function("shift", n=n, by=Value(), x=x, y=Output("m"))
    with pytest.raises(ValueError, match="at least one output, and all outputs the same dtype"):
        functions.function("shift", n=n, by=Value(), x=x)
    with pytest.raises(ValueError, match="must be an integer, a name, or"):
        Input("2 * n")
    with pytest.raises(ValueError, match='order must be "C" or "F"'):
        Input("n", order="A")
    with pytest.raises(ValueError, match="must be real or an integer, but got 'complex128'"):
        Value("complex128")
    with pytest.raises(ValueError, match='language must be "Fortran" or "C"'):
        Communicator("python")
    with pytest.raises(ValueError, match="expected an argument among comm, n, x, k, y, or its Cotangent, but got 'z'"):
        scaled.adjoint("scaled_b", "comm", "n", "z")
    with pytest.raises(ValueError, match="must contain the Cotangent of each output; y has none"):
        scaled.adjoint("scaled_b", "comm", "n", "x", Cotangent("x"), "k", Cotangent("k"))


@pytest.mark.launches
def test_a_function_that_ends_the_process_ends_the_job(mpirun, path):
    program = f"""
import numpy as np, mpiad
from mpiad.extend import Input, Output, Value, library
leave = library({str(path)!r}).function("leave", n=Value("int32"), x=Input("n"), y=Output())
if mpiad.mpi_rank() == 1:
    leave(np.zeros(1))
mpiad.mpi_allreduce(1.0)
"""
    done = mpirun(2, program)
    assert done.returncode != 0
    assert f"mpiad: rank 1: leave of {path} ended the process, as by Fortran's stop" in done.stderr
