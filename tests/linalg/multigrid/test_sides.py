"""Robin conditions, given values and fluxes, tensors and coefficients on faces, against a dense system.

In the dense system, the values of u on the sides are further unknowns with equations of their own.
"""

import itertools

import autograd.numpy as anp
import numpy as np
import pytest

import mpiad
from mpiad.domain import Domain
from mpiad.linalg import Elliptic, Multigrid, solve, solve_elliptic
from mpiad.testing import check_adjoint, check_grads

SHAPE, SPACING = (6, 5), (0.5, 0.8)
TIGHT = {"rtol": 1e-13}
NAMES = ("kappa", "c", "b", "alpha", "g", "q", "robin")


def means(kappa):
    """Return κ on all faces along each dimension of a scalar field, or of each component's dimension of a tensor."""
    ndim, faces = len(SHAPE), []
    for axis in range(ndim):
        field = kappa[axis] if kappa.ndim > ndim else kappa
        edge = np.concatenate([field.take([0], axis), field, field.take([-1], axis)], axis)
        faces.append((edge.take(range(1, SHAPE[axis] + 2), axis) + edge.take(range(SHAPE[axis] + 1), axis)) / 2)
    return faces


def dense(faces, c, b, alpha, g, q, robin, centred):
    """Solve with u = g below, flux q above in dimension 0, and a Robin condition below and no flux above in dimension 1."""
    number = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    kind = np.result_type(*faces, c, b, alpha, g, q, robin)
    sides = {}
    for axis, end in itertools.product(range(2), range(2)):
        for place in range(SHAPE[1 - axis]):
            sides[axis, end, place] = number.size + len(sides)
    a, rhs = np.zeros((number.size + len(sides),) * 2, kind), np.zeros(number.size + len(sides), kind)
    rhs[: number.size] = np.ravel(b)
    for point in np.ndindex(SHAPE):
        row = number[point]
        a[row, row] += c[point]
        for axis, end in itertools.product(range(2), range(2)):
            h, face, place = SPACING[axis], list(point), point[1 - axis]
            face[axis] += end
            kappa = faces[axis][tuple(face)]
            other = list(point)
            other[axis] += 2 * end - 1
            if 0 <= other[axis] < SHAPE[axis]:
                column, distance = number[tuple(other)], h
            else:
                column = sides[axis, end, place]
                distance = h / 2 if centred or (axis, end) != (0, 0) else h
                flux = kappa / distance
                if (axis, end) == (0, 0):
                    a[column, column], rhs[column] = 1, g[place]
                else:  # κ (v - u) / distance + α v = r
                    rate, given = 0, 0
                    if axis == 0:
                        given = q[place]
                    elif end == 0:
                        rate, given = alpha[place], robin[place]
                    a[column, column], a[column, row], rhs[column] = flux + rate, -flux, given
            a[row, row] += kappa / distance / h
            a[row, column] -= kappa / distance / h
    return np.linalg.solve(a, rhs)[: number.size].reshape(SHAPE)


def faces_of(kappa, form):
    return kappa if form == "faces" else means(kappa)


class Case:
    def __init__(self, form, centred, rng):
        self.form, self.centred, self.domain = form, centred, Domain(SHAPE)
        if form == "faces":
            shapes = [tuple(n + (k == axis) for k, n in enumerate(SHAPE)) for axis in range(2)]
            kappa = [np.exp(rng.standard_normal(shape)) for shape in shapes]
        else:
            kappa = np.exp(rng.standard_normal((2, *SHAPE) if form == "tensor" else SHAPE))
        n, m = SHAPE
        self.whole = {
            "kappa": kappa, "c": rng.random(SHAPE), "b": rng.standard_normal(SHAPE),
            "alpha": np.exp(rng.standard_normal(n)), "g": rng.standard_normal(m), "q": rng.standard_normal(m),
            "robin": rng.standard_normal(n),
        }  # fmt: skip
        self.w = rng.standard_normal(SHAPE)

    def direction(self, rng):
        return {
            name: [rng.standard_normal(x.shape) for x in value] if type(value) is list else rng.standard_normal(value.shape)
            for name, value in self.whole.items()
        }

    def local(self, whole):
        rows, columns = self.domain.owned
        kappa = whole["kappa"]
        if self.form == "faces":
            kappa = [kappa[0][rows.start : rows.stop + 1, columns], kappa[1][rows, columns.start : columns.stop + 1]]
        else:
            kappa = kappa[..., rows, columns]
        return {
            "kappa": kappa, "c": whole["c"][rows, columns], "b": whole["b"][rows, columns],
            "alpha": whole["alpha"][rows, None], "g": whole["g"][None, columns], "q": whole["q"][None, columns],
            "robin": whole["robin"][rows, None],
        }  # fmt: skip

    def settings(self, x):
        sides = ({"dirichlet": x["g"]}, {"neumann": x["q"]}), ({"robin": (x["alpha"], x["robin"])}, "neumann")
        return {"boundary": sides, "spacing": SPACING, "centred": self.centred}

    def solve(self, x):
        return solve_elliptic(self.domain, x["kappa"], x["b"], x["c"], **self.settings(x), **TIGHT)

    def reference(self, whole):
        x = {name: value for name, value in whole.items() if name != "kappa"}
        return dense(faces_of(whole["kappa"], self.form), centred=self.centred, **x)

    def loss(self, x):
        return self.domain.sum(self.w[self.domain.owned] * self.solve(x) ** 3)


@pytest.fixture(params=itertools.product(("points", "tensor", "faces"), (False, True)), ids=str)
def case(request, rank_rng):
    return Case(*request.param, rank_rng(100))


def test_several_given_values(rank_rng):
    """Right-hand sides along a first axis, with given values of their own."""
    case = Case("points", True, rank_rng(100))
    several = {name: rank_rng(101).standard_normal((3, *case.whole[name].shape)) for name in ("b", "g", "q", "robin")}
    rows, columns = case.domain.owned
    x = case.local(case.whole) | {
        "b": several["b"][:, rows, columns], "g": several["g"][:, None, columns], "q": several["q"][:, None, columns],
        "robin": several["robin"][:, rows, None],
    }  # fmt: skip
    u = case.solve(x)
    for k in range(3):
        expected = case.reference(case.whole | {name: value[k] for name, value in several.items()})
        np.testing.assert_allclose(u[k], expected.reshape(SHAPE)[case.domain.owned], rtol=1e-7, atol=1e-9)


def moved(whole, direction, step, names=NAMES):
    def at(x, d):
        return [a + step * b for a, b in zip(x, d)] if type(x) is list else x + step * d

    return {name: at(value, direction[name]) if name in names else value for name, value in whole.items()}


def dot(domain, gradient, direction, name):
    """Return the sum over this rank's part, as a sum over all ranks."""
    pairs = zip(gradient[name], direction[name]) if type(gradient[name]) is list else [(gradient[name], direction[name])]
    return mpiad.mpi_allreduce(sum(float(np.sum(a * b)) for a, b in pairs))


def test_solution(case):
    np.testing.assert_allclose(
        case.solve(case.local(case.whole)), case.reference(case.whole)[case.domain.owned], 1e-9, 1e-11
    )


def test_gradient_along_directions(case, rank_rng):
    """Faces between two ranks, and sides that several ranks pass, have copies; their cotangents are added."""
    direction, point = case.direction(rank_rng(101)), case.local(case.whole)
    value, gradient = mpiad.value_and_grad(case.loss)(point)
    np.testing.assert_allclose(value, np.sum(case.w * case.reference(case.whole) ** 3), 1e-9)
    for name in NAMES:
        u = case.reference(moved(case.whole, direction, 1e-30j, [name]))
        expected = np.imag(np.sum(case.w * u**3)) / 1e-30
        np.testing.assert_allclose(dot(case.domain, gradient, case.local(direction), name), expected, 1e-8, err_msg=name)


@pytest.mark.not_on(4)
def test_tangent_and_hessian(case, rank_rng):
    direction, other = case.direction(rank_rng(101)), case.direction(rank_rng(102))
    point, along = case.local(case.whole), case.local(direction)
    _, tangent = mpiad.jvp(case.solve, point, along)
    expected = np.imag(case.reference(moved(case.whole, direction, 1e-30j))) / 1e-30
    np.testing.assert_allclose(tangent, expected[case.domain.owned], 1e-8, 1e-10)
    product = mpiad.hvp(case.loss)(point, along)
    found = sum(dot(case.domain, product, case.local(other), name) for name in NAMES)

    def slope(t):
        u = case.reference(moved(moved(case.whole, direction, t), other, 1e-30j))
        return np.imag(np.sum(case.w * u**3)) / 1e-30

    h = 1e-3  # Richardson's extrapolation of central differences
    coarse, fine = ((slope(k * h) - slope(-k * h)) / (2 * k * h) for k in (2, 1))
    np.testing.assert_allclose(found, (4 * fine - coarse) / 3, 1e-6)


@pytest.mark.thorough
@pytest.mark.not_on(4)
@pytest.mark.parametrize("form", ["points", "tensor", "faces"])
def test_taylor_rates(rank_rng, form):
    """With respect to whole arrays, since faces between two ranks have copies on both."""
    case = Case(form, True, rank_rng(100))
    names = ("kappa", "c", "alpha")  # the coefficients that aren't negative

    def of_each(fun, x):
        return {name: [fun(part) for part in x[name]] if type(x[name]) is list else fun(x[name]) for name in names}

    check_grads(
        lambda x: case.loss(case.local({**x, **of_each(anp.exp, x)})),
        {**case.whole, **of_each(np.log, case.whole)},
        shared=True,
    )


def test_operator_and_source(case, rank_rng):
    """The solution satisfies A u = b + source, and A is symmetric."""
    x, u = case.local(case.whole), case.reference(case.whole)[case.domain.owned]
    operator = Elliptic(case.domain, **case.settings(x))
    np.testing.assert_allclose(operator(u, x["kappa"], x["c"]), x["b"] + operator.source(x["kappa"]), 1e-9, 1e-9)
    v = rank_rng(7).standard_normal(SHAPE)[case.domain.owned]
    levels = Multigrid(case.domain, x["kappa"], x["c"], **case.settings(x))
    np.testing.assert_allclose(levels.matvec(v), operator(v, x["kappa"], x["c"]), 1e-12, 1e-12)
    one, other = (case.domain.dot(a, levels.matvec(b)) for a, b in ((u, v), (v, u)))
    np.testing.assert_allclose(one, other, 1e-11)
    check_adjoint(lambda v: operator(v, x["kappa"], x["c"]), v)
    found = solve(lambda u: levels.matvec(u), x["b"] + operator.source(x["kappa"]), preconditioner=levels, rtol=1e-12)
    np.testing.assert_allclose(found, u, 1e-8, 1e-10)


def test_conditions_in_one_dimension():
    """-(2 u')' = 0 with u = 1 + 2 x / 5, which the scheme reproduces."""
    domain, h = Domain(8), 1 / 8
    (x,) = domain.coordinates(h, centred=True)
    zero = np.zeros(domain.local_shape)
    for boundary in (
        ({"dirichlet": 1.0}, {"robin": (3.0, 5.0)}),  # 2 · 2/5 + 3 · 7/5 = 5
        ({"neumann": -0.8}, {"dirichlet": 1.4}),
        ({"robin": (1e12, 1e12)}, {"neumann": 0.8}),  # a large α gives the value g / α
    ):
        u = solve_elliptic(domain, 2.0, zero, spacing=h, centred=True, boundary=(boundary,), **TIGHT)
        np.testing.assert_allclose(u, 1 + 0.4 * x, 1e-9)


@pytest.mark.not_on(4)
def test_second_order_convergence():
    """u = exp(x) cos(y) is harmonic; κ ∂u/∂n + α u is given on all sides."""
    errors = []
    for n in (16, 32):
        domain = Domain((n, n))
        x, y = domain.coordinates(1 / n, centred=True)
        u, alpha = np.exp(x) * np.cos(y), 1.5
        sides = (
            ({"robin": (alpha, (alpha - 1) * np.cos(y))}, {"robin": (alpha, (alpha + 1) * np.e * np.cos(y))}),
            ({"robin": (alpha, alpha * np.exp(x))}, {"robin": (alpha, np.exp(x) * (alpha * np.cos(1) - np.sin(1)))}),
        )
        found = solve_elliptic(domain, 1.0, 0 * u, spacing=1 / n, centred=True, boundary=sides, rtol=1e-11)
        errors.append(domain.max(abs(found - u)))
    assert 3.5 < errors[0] / errors[1] < 4.5


@pytest.mark.thorough
@pytest.mark.not_on(4)
def test_several_fluxes(rank_rng):
    """The load cases of a tomography: one right-hand side per pattern of fluxes."""
    domain = Domain(SHAPE)
    whole = rank_rng(5).standard_normal((3, 1, SHAPE[1]))
    part, zero = whole[:, :, domain.owned[1]], np.zeros(domain.local_shape)

    def cases(flux, kappa):
        b = np.zeros((*flux.shape[:-2], *domain.local_shape))
        return solve_elliptic(domain, kappa, b, boundary=(("dirichlet", {"neumann": flux}), "neumann"), **TIGHT)

    together = cases(part, 1.0 + zero)
    assert together.shape == (3, *domain.local_shape)
    np.testing.assert_allclose(together, [cases(flux, 1.0 + zero) for flux in part], 1e-9, 1e-11)
    check_grads(lambda k: domain.sum(cases(part, anp.exp(k)) ** 2), zero, order=1)


@pytest.mark.parametrize("condition", ["neumann", {"neumann": 1.0}, {"robin": (0.0, 1.0)}], ids=str)
def test_singular_conditions(condition):
    domain = Domain(SHAPE)
    one = np.ones(domain.local_shape)
    with pytest.raises(ValueError, match="singular: no side has boundary='dirichlet' or 'robin'"):
        solve_elliptic(domain, 1.0, one, boundary=condition)
    u = solve_elliptic(domain, 1.0, one, boundary=condition, mean_zero=True)
    assert abs(domain.sum(u)) < 1e-6


@pytest.mark.parametrize(
    ("boundary", "match"),
    [
        ({"robin": 1.0}, r"boundary must be .* but got {'robin': 1.0}"),
        ({"mixed": 1.0}, r"boundary must be .* but got {'mixed': 1.0}"),
        ({"dirichlet": 1.0, "neumann": 0.0}, r"boundary must be .*{\"robin\": \(alpha, g\)}"),
        ({"robin": (-1.0, 0.0)}, "alpha of a side must be finite .alpha: and zero or more., but got -1.0"),
        ({"robin": (np.ones((2, 1, 1)), 0.0)}, r"alpha of a side must be a real number or an array that broadcasts"),
        ({"dirichlet": np.nan}, "the given value of a side must be finite"),
        ({"dirichlet": 1j}, "the given value of a side must be a real number .* dtype complex128"),
        (({"neumann": np.ones((2, 1))}, "dirichlet"), "array that broadcasts to this rank's part of the side"),
    ],
    ids=str,
)
@pytest.mark.parametrize("last_only", [False, True])
def test_refused_conditions(rank, size, boundary, match, last_only):
    domain = Domain(SHAPE)
    bad = boundary if not last_only or rank == size - 1 else "dirichlet"
    with pytest.raises(ValueError, match=match):
        solve_elliptic(domain, 1.0, np.ones(domain.local_shape), boundary=bad)
    assert mpiad.mpi_allreduce(1) == size


def test_refused_coefficients(rank, size):
    domain = Domain(SHAPE)
    n, m = domain.local_shape
    good = [np.ones((n + 1, m)), np.ones((n, m + 1))]
    Multigrid(domain, good)
    with pytest.raises(ValueError, match=r"one array of faces per dimension, 2, but has 1"):
        Multigrid(domain, good[:1])
    with pytest.raises(ValueError, match=rf"kappa\[1\] must be .* of shape .*{m + 1}.* but has shape"):
        Multigrid(domain, [good[0], np.ones((n, m))])
    with pytest.raises(ValueError, match=r"kappa\[0\] must be positive and finite, but is -2.0 at point \(0, 0\)"):
        Multigrid(domain, [np.where((np.arange(n + 1)[:, None] == 0) & (rank == 0), -2.0, 1.0) * good[0], good[1]])
    with pytest.raises(ValueError, match=r"kappa must be positive and finite, but is 0.0 at point"):
        Multigrid(domain, np.stack([good[0][1:], 0.0 * good[1][:, 1:]]))
    if size > 1:
        with pytest.raises(ValueError, match=r"kappa\[\d\] on the faces after the last points of rank \d differs"):
            Multigrid(domain, [(1.0 + rank) * x for x in good])
    assert mpiad.mpi_allreduce(1) == size
