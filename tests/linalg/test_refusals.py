"""What `solve` refuses: on all ranks, with what was wrong and where, and the program can go on."""

import autograd.numpy as anp
import numpy as np
import pytest
import scipy.sparse
from mpi4py import MPI

import mpiad
from mpiad.domain import Domain
from mpiad.errors import ConvergenceError
from mpiad.linalg import AdditiveSchwarz, DistributedMatrix, Elliptic, Multigrid, newton, solve

SHAPE = (9, 8)
SMALL = (6, 5)  # where iterations go on until the last


@pytest.fixture
def domain():
    return Domain(SHAPE)


@pytest.fixture(autouse=True)
def all_ranks_go_on(size):
    yield
    assert mpiad.mpi_allreduce(1) == size


def laplacian(domain, boundary="zero"):
    def matvec(u, scale=1.0):
        v = domain.exchange(u, boundary)
        return scale * (4 * u - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:])

    return matvec


def right_hand_side(domain, rank_rng):
    return rank_rng(100).standard_normal(domain.shape)[domain.owned]


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (TypeError, "b must be an array .* but got list", {"b": [1.0]}),
        (TypeError, "dtype int64. Convert it", {"b": np.ones(3, int)}),
        (TypeError, r"dtype float16. Pass b.astype\('float64'\)", {"b": np.ones(3, "f2")}),
        (TypeError, r"dtype >f8. Its bytes .* b.astype\('float64'\)", {"b": np.ones(3, ">f8")}),
        (ValueError, r"x0 must have the shape of b, \(3,\), but has \(2,\)", {"x0": np.ones(2)}),
        (ValueError, "method must be one of 'cg', 'gmres', 'bicgstab', but got 'lu'", {"method": "lu"}),
        (ValueError, "side must be 'left' or 'right', but got 'both'", {"method": "gmres", "side": "both"}),
        (ValueError, "side must be None for 'cg', which is preconditioned symmetrically, but got 'left'", {"side": "left"}),
        (ValueError, "restart must be an integer above zero, but got 0", {"method": "gmres", "restart": 0}),
        (ValueError, "batch must count leading axes of b, which has 1, but got 2", {"batch": 2}),
        (TypeError, "preconditioner_transpose must be a function, but got str 'no'", {"preconditioner_transpose": "no"}),
        (ValueError, "one above zero, but got 0.0 and 0.0", {"rtol": 0.0}),
        (ValueError, "zero or more, and one above zero, but got nan", {"rtol": np.nan}),
        (ValueError, "maxiter must be None or an integer above zero, but got 0", {"maxiter": 0}),
        (TypeError, "matvec must be a function, but got ndarray", {"matvec": np.eye(3)}),
        (TypeError, "preconditioner must be a function, but got float", {"preconditioner": 0.5}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments(error, match, changes, rank, size):
    for wrong_on in {0, size - 1, "all"}:
        args = {"matvec": lambda u: 2 * u, "b": np.ones(3)}
        if wrong_on in (rank, "all"):
            args.update(changes)
        with pytest.raises(error, match=match):
            solve(args.pop("matvec"), args.pop("b"), **args)


def test_settings_that_differ_between_ranks(domain, rank, size):
    if size == 1:
        assert np.isfinite(solve(lambda u: 2 * u, np.ones(3), rtol=1e-5)).all()
        return
    different = {"rtol": (1e-8, 1e-5), "method": ("cg", "gmres"), "restart": (30, 20), "verify": (True, False)}
    for name, values in different.items():
        with pytest.raises(ValueError, match=f"ranks must give the same arguments, but rank 0 gave .*{name}={values[0]!r}"):
            solve(lambda u: 2 * u, np.ones(3), **{name: values[rank == size - 1]})
    with pytest.raises(ValueError, match="ranks must give the same arguments, .*with_x0="):
        solve(lambda u: 2 * u, np.ones(3), x0=np.ones(3) if rank else None)
    assert np.isfinite(solve(lambda u: 2 * u, np.ones(3), callback=print if rank < 0 else None)).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("derived", [False, True], ids=["solved", "derived"])
@pytest.mark.parametrize(
    "method", ["cg", "gmres", "factorized", "factorized-schwarz", "matrix", "matrix-direct", "compiled"]
)
def test_right_hand_sides_that_differ_between_ranks(rank, size, method, derived):
    """Their number is compared before the first message; with "compiled", in a compiled program."""
    matrix = DistributedMatrix(scipy.sparse.diags_array(np.full(3, 2.0), offsets=3 * rank, shape=(3, 3 * size)).tocsr())
    name, _, kind = method.partition("-")
    kept = mpiad.linalg.factorized(matrix, method="schwarz" if kind == "schwarz" else "auto")
    fun = {
        "matrix": lambda b: matrix.solve(b, method=kind or "gmres"),
        "factorized": kept,
        "compiled": mpiad.jit(lambda b: kept(b) ** 2),
    }.get(name, lambda b: solve(lambda u: 2 * u, b, method=method, batch=1))
    total = mpiad.grad(lambda b: anp.sum(fun(b)), objective="sum") if derived else fun
    for _ in range(2):  # the second call is compiled
        total(np.ones((2, 3)))
    with pytest.raises(
        ValueError, match="from 2 to 4 right-hand sides" if name in ("factorized", "compiled") else r"\(4,\)"
    ):
        total(np.ones((2 + 2 * (rank == size - 1), 3)))
    assert mpiad.mpi_bcast(rank, 1) == 1


@pytest.mark.parametrize("name", ["matvec", "preconditioner"])
def test_functions_that_return_something_else(domain, rank, size, name):
    b = np.ones(domain.local_shape)
    wrong_results = [
        (ValueError, rf"{name} must return an array of the shape of b, .* but returned \(3,\)", np.ones(3)),
        (TypeError, f"{name} must return an array, but returned list", [1.0]),
        (TypeError, f"{name} must return real floats, as b is float64, but returned dtype complex128", b + 0j),
    ]
    for error, match, wrong in wrong_results:
        functions = {"matvec": laplacian(domain), "preconditioner": lambda r: r / 4}
        right = functions[name]
        functions[name] = lambda u: (right(u), wrong)[rank == size - 1]  # noqa: B023
        with pytest.raises(error, match=match):
            solve(functions["matvec"], b, preconditioner=functions["preconditioner"])


@pytest.mark.parametrize("kind", ["multigrid", "schwarz"])
def test_preconditioners_made_for_other_blocks(rank, size, kind):
    # One row more on rank 0 alone: the other ranks would find nothing wrong, and wait in the first cycle.
    other, domain = Domain((3 * size + 1, 8), dims=(size, 1)), Domain((3 * size, 8), dims=(size, 1))
    if kind == "multigrid":
        b, made = np.ones(domain.local_shape), Multigrid(other, 1.0)
        match = r"expected an array of shape .* \(4, 8\), but got \(3, 8\) on rank 0"
    else:
        n = 3 * size + 1
        rows = scipy.sparse.eye_array(n, format="csr")[other.owned[0]]
        b, made = np.ones(domain.local_shape[0]), AdditiveSchwarz(DistributedMatrix(rows))
        match = r"has 4 rows on rank 0, but the residual has shape \(3,\)"
    for method in ("cg", "gmres"):
        with pytest.raises(ValueError, match=match):
            solve(lambda u: 2 * u, b, method=method, preconditioner=made)
    with pytest.raises(ValueError, match=match):
        solve(lambda u: 2 * u, b, method="gmres", preconditioner=lambda r: r / 2, preconditioner_transpose=made)
    with pytest.raises(ValueError, match=match):
        newton(lambda u: u**2 - 2, b, preconditioner=made)
    if rank == 0:
        with pytest.raises(ValueError, match=match):
            made(b)


def test_nan(domain, rank, size, rank_rng):
    b, last = right_hand_side(domain, rank_rng), size - 1
    bad = b.copy()
    if rank == last:
        bad[0, 1] = np.nan
    with pytest.raises(ValueError, match=rf"right-hand side .* is not finite: 1 entries on rank {last}"):
        solve(laplacian(domain), bad)
    with pytest.raises(ValueError, match="right-hand side .* is not finite") as caught:
        solve(laplacian(domain), np.full(domain.local_shape, np.inf))
    assert "infinite" in str(caught.value)
    scale = np.nan if rank == last else 1.0
    with pytest.raises(ValueError, match=rf"the result of matvec is not finite: .* on rank {last}"):
        solve(laplacian(domain), b, scale)
    with pytest.raises(ValueError, match=rf"the result of preconditioner is not finite: .* on rank {last}"):
        solve(laplacian(domain), b, preconditioner=lambda r: r * scale)
    # Finite, although its square isn't.
    assert np.isfinite(solve(laplacian(domain), np.full(domain.local_shape, 1e300))).all()


def test_too_few_iterations(domain, rank_rng):
    with pytest.raises(ConvergenceError, match="within maxiter=3 iterations. After 3 iterations the norm") as caught:
        solve(laplacian(domain), right_hand_side(domain, rank_rng), maxiter=3)
    history = caught.value.history
    assert len(history) == 4 and 0 < history[-1] < history[0]
    np.testing.assert_allclose(history[0], np.linalg.norm(rank_rng(100).standard_normal(SHAPE)), 1e-12)


def test_operators_that_are_not_positive_definite(domain, rank_rng):
    b, matvec = right_hand_side(domain, rank_rng), laplacian(domain)
    with pytest.raises(ConvergenceError, match=r"positive definite operator, but p·Ap = -\d.*Is its sign right"):
        solve(lambda u: -matvec(u), b)
    with pytest.raises(ConvergenceError, match="positive definite operator") as caught:
        solve(lambda u: matvec(u) - 3 * u, b)
    assert caught.value.history
    with pytest.raises(ConvergenceError, match="it is singular: the operator maps a constant .* Fix the value of one cell"):
        solve(laplacian(domain, "edge"), np.ones(domain.local_shape))
    with pytest.raises(ConvergenceError, match="positive definite preconditioner, but r·z = -"):
        solve(matvec, b, preconditioner=lambda r: -r)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    "method", ["cg", *(pytest.param(method, marks=pytest.mark.thorough) for method in ("gmres", "bicgstab"))]
)
def test_extreme_contrast_is_called_that(method):
    """κ is 1e-17 within a frame of four cells, and 1 inside: a constant's image is rounding beside the others."""
    domain = Domain((24, 20))
    y, x = domain.coordinates()
    kappa = np.where((abs(y - 11.5) < 8) & (abs(x - 9.5) < 6), 1.0, 1e-17)
    by_kappa = Elliptic(domain)
    with pytest.raises(ConvergenceError, match=r"rows differ by a factor of \de\+1[678] .*extreme contrast") as caught:
        solve(lambda u: by_kappa(u, kappa), np.ones(domain.local_shape), method=method)
    assert "singular" not in str(caught.value) and "sign" not in str(caught.value)


def test_few_small_rows_are_no_extreme_contrast():
    """One row in eight is small: too few on any number of ranks, whose numbers of rows don't count."""
    domain = Domain(40)
    (k,) = domain.coordinates()
    diagonal = np.where(k % 8 == 0, 1e-12, 1.0 + k)
    with pytest.raises(ConvergenceError, match="within maxiter=2 iterations") as caught:
        solve(lambda u: diagonal * u, np.ones(domain.local_shape), maxiter=2)
    assert "extreme contrast" not in str(caught.value)


def test_operator_that_is_not_symmetric(domain, rank_rng):
    # Conjugate gradients may still arrive; the derivative, which takes A for Aᵀ, would be wrong.
    b = right_hand_side(domain, rank_rng)

    def matvec(u, wind):
        v = domain.exchange(u)
        return laplacian(domain)(u) + wind * (v[2:, 1:-1] - v[:-2, 1:-1])

    def loss(wind):
        return domain.sum(b * solve(matvec, b, wind))

    assert np.isfinite(mpiad.grad(loss)(0.0))
    with pytest.raises(ValueError, match="needs a symmetric operator, but in the derivative"):
        mpiad.grad(loss)(0.01)


def test_traced_value_from_around_the_operator(domain, rank_rng):
    b, matvec = right_hand_side(domain, rank_rng), laplacian(domain)

    def around_matvec(scale):
        return domain.sum(solve(lambda u: matvec(u, scale), b))

    def around_preconditioner(scale):
        return domain.sum(solve(matvec, b, preconditioner=lambda r: r * scale))

    with pytest.raises(TypeError, match="matvec uses a traced variable of an enclosing function .* among the params"):
        mpiad.grad(around_matvec)(2.0)

    def around_exchange(scale):
        field = scale * np.ones(domain.local_shape)
        return domain.sum(solve(lambda u: domain.exchange(field, "edge")[1:-1, 1:-1] * matvec(u), b))

    def around_reduction(scale):
        return domain.sum(solve(lambda u: mpiad.mpi_allreduce(scale) * matvec(u), b))

    for fun in (around_exchange, around_reduction):
        with pytest.raises(TypeError, match="traced value inside the body of an operator"):
            mpiad.grad(fun)(2.0)
        with pytest.raises(TypeError, match="traced value inside the body of an operator"):
            mpiad.jvp(fun, 2.0, 1.0)
    with pytest.raises(TypeError, match="preconditioner uses a traced variable of an enclosing function"):
        mpiad.grad(around_preconditioner)(0.25)
    with pytest.raises(TypeError, match="matvec uses a traced variable of an enclosing function"):
        mpiad.jvp(around_matvec, 2.0, 1.0)

    def stopped(scale):
        return domain.sum(solve(matvec, b, scale, preconditioner=lambda r: r * mpiad.stop_gradient(scale)))

    assert np.isfinite(mpiad.grad(stopped)(2.0))


def test_mistakes_in_the_middle_of_a_trace(domain, rank_rng):
    # All ranks raise the same, so the next gradient on the same communicator is right.
    b, matvec = right_hand_side(domain, rank_rng), laplacian(domain)

    def loss(scale, sign):
        return domain.sum(b * solve(lambda u, s: sign * matvec(u, s), b, scale))

    with pytest.raises(ConvergenceError):
        mpiad.grad(loss)(1.0, -1.0)
    value, slope = mpiad.value_and_grad(loss, objective="root")(2.0, 1.0)
    total = mpiad.mpi_allreduce(slope)
    np.testing.assert_allclose(total, -value / 2, 1e-7)
    np.testing.assert_allclose(anp.sqrt(value**2), value)


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_solution_that_is_one_of_many(rank_rng, method):
    # The right-hand side has no constant, so there are solutions; which one comes would be chance.
    domain = Domain(SMALL)
    whole = rank_rng(100).standard_normal(SMALL)
    b = (whole - whole.mean())[domain.owned]
    matvec = laplacian(domain, "edge")
    with pytest.raises(ConvergenceError, match="it is singular: the operator maps a constant .* Fix the value of one cell"):
        solve(matvec, b, method=method)
    with pytest.raises(ConvergenceError, match="it is singular|singular to working precision|stalls"):
        solve(matvec, b + 1.0, method=method)
    # A small multiple of u makes it determined, and a loose tolerance doesn't make a good operator bad.
    assert np.isfinite(solve(lambda u: matvec(u) + 1e-6 * u, b, method=method)).all()
    assert np.isfinite(solve(laplacian(domain), b, method=method, rtol=0.3)).all()


@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_operator_that_is_not_linear(domain, rank_rng, method):
    b, matvec = right_hand_side(domain, rank_rng), laplacian(domain)
    for wrong in (lambda u: matvec(u) + 1.0, lambda u: matvec(u) + 0.5 * u**3):
        with pytest.raises(ConvergenceError, match="matvec isn't linear in u|symmetric positive definite"):
            solve(wrong, b, method=method)


def test_iteration_that_stalls(domain, size):
    # A cyclic shift: GMRES gets nowhere before the space is the whole one.
    b = np.zeros(domain.local_shape)
    if domain.owned[0].start == domain.owned[1].start == 0:
        b[0, 0] = 1.0
    ring = Domain(SHAPE, periodic=True, dims=domain.dims)

    def shift(u):
        return ring.exchange(u)[1:-1, :-2]

    with pytest.raises(ConvergenceError, match="gmres: it stalls: the residual stays at .* larger restart") as caught:
        solve(shift, b, method="gmres", restart=4)
    assert len(caught.value.history) == 1 + 3 * 4
    with pytest.raises(ConvergenceError, match=r"within maxiter=6 iterations. After 6 iterations"):
        solve(shift, b, method="gmres", maxiter=6)


def test_residual_of_the_recurrence_is_not_believed(domain, rank_rng):
    b, matvec, calls = right_hand_side(domain, rank_rng), laplacian(domain), []

    def wrong_once(u):
        calls.append(1)
        return matvec(u) + (1e-3 * b if len(calls) == 5 else 0.0)

    # The recurrence goes on from a residual that isn't one; the true one at the end gives it a new start.
    u = solve(wrong_once, b)
    assert domain.norm(b - matvec(u)) <= 1e-7 * domain.norm(b)

    def noisy(u):
        calls.append(1)
        return matvec(u) * (1.0 + 1e-4 * np.sin(len(calls) * np.arange(1.0, u.shape[1] + 1)))

    with pytest.raises(ConvergenceError, match="the recurrence met the tolerance, but the true residual has norm"):
        solve(noisy, b)
    # Where nobody looks, it is believed.
    assert domain.norm(b - matvec(solve(noisy, b, verify=False))) > 1e-6 * domain.norm(b)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["cg", "gmres", "bicgstab"])
def test_operators_that_communicate_outside_of_comm(method, rank):
    """The solves would take different numbers of iterations, and wait for each other."""

    def product(u):
        return 4.0 * u + (rank + 1) * mpiad.mpi_allreduce(anp.sum(u))

    with pytest.raises(ValueError, match="matvec communicates with ranks that don't belong to comm='MPI_COMM_SELF'"):
        solve(product, np.arange(3.0) + rank, method=method, comm=MPI.COMM_SELF)
    mpiad.reset()
    # A part of the ranks is enough for messages within it.
    part = MPI.COMM_WORLD.Split(rank % 2)
    u = solve(lambda u: 4.0 * u + mpiad.mpi_allreduce(anp.sum(u), comm=part), np.ones(3), method=method, comm=part)
    np.testing.assert_allclose(u, 1 / (4 + 3 * part.size), rtol=1e-7)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("solver", ["newton", "gmres"])
def test_solves_of_a_part_in_an_operator_that_communicates_with_all(solver, rank):
    """What all ranks communicate before the solve isn't its operator's; beside a closed form, up to second derivatives."""

    def root(b):  # of u³ + u = b, or u = b / 4
        if solver == "newton":
            return newton(lambda u, b: u**3 + u - b, 0 * mpiad.stop_gradient(b), b, comm=MPI.COMM_SELF, rtol=1e-13)
        return solve(lambda u: 4.0 * u, b, method="gmres", comm=MPI.COMM_SELF, rtol=1e-13)

    def loss(b):
        total = mpiad.mpi_allreduce(anp.sum(b))
        return mpiad.mpi_allreduce(anp.sum(root(b) ** 2)) + 0.5 * total**2

    b = np.arange(1.0, 4.0) + rank
    u = b / 4
    for _ in range(40 if solver == "newton" else 0):
        u = u - (u**3 + u - b) / (3 * u**2 + 1)
    slope = 1 / (3 * u**2 + 1) if solver == "newton" else 0.25
    bend = -6 * u * slope**3 if solver == "newton" else 0.0
    v = np.cos(b)
    expected = 2 * u * slope + mpiad.mpi_allreduce(np.sum(b))
    np.testing.assert_allclose(mpiad.grad(loss)(b), expected, rtol=1e-10)
    second = 2 * (slope**2 + u * bend) * v + mpiad.mpi_allreduce(np.sum(v))
    for product in (lambda: mpiad.hvp(loss)(b, v), lambda: mpiad.make_hvp(loss)(b).product(v)):
        np.testing.assert_allclose(product(), second, rtol=1e-8)
