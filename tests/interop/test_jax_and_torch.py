"""`mpiad.interop`: functions of JAX and PyTorch in mpiad's programs, and driven functions in theirs."""

import runpy
import warnings
from functools import partial
from pathlib import Path

import autograd.numpy as anp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import torch

import mpiad
from mpiad.interop import from_jax, from_torch, to_jax, to_torch
from mpiad.testing import check_grads

jax.config.update("jax_enable_x64", True)

grad = partial(mpiad.grad, objective="sum")
RANK, SIZE = mpiad.mpi_rank(), mpiad.mpi_size()
ROOT = SIZE - 1
X, Y = np.array([0.3, -0.7, 1.1]) + RANK / 7, np.linspace(0.2, 0.9, 4) * (RANK + 1)

# The same function in three ways: of real arrays, of complex ones, of a pytree with results of several dtypes.
REAL = {
    "jax": from_jax(lambda x, y: jnp.sin(x) * jnp.sum(y**3)),
    "torch": from_torch(lambda x, y: torch.sin(x) * torch.sum(y**3)),
    "numpy": lambda x, y: anp.sin(x) * anp.sum(y**3),
}
COMPLEX = {
    "jax": from_jax(lambda z: z**2 * jnp.conj(z)[::-1] / jnp.abs(z)),
    "torch": from_torch(lambda z: z**2 * torch.conj(z).flip(0) / torch.abs(z)),
    "numpy": lambda z: z**2 * anp.conj(z)[::-1] / anp.abs(z),
}
TREE = {
    "jax": from_jax(lambda p, n: {"z": p["w"] * jnp.exp(1j * p["x"]), "s": (p["x"][n] ** 2, p["w"].astype(jnp.float32))}),
    "torch": from_torch(
        lambda p, n: {"z": p["w"] * torch.exp(1j * p["x"]), "s": (p["x"][n] ** 2, p["w"].to(torch.float32))}
    ),
    "numpy": lambda p, n: {"z": p["w"] * anp.exp(1j * p["x"]), "s": (p["x"][n] ** 2, p["w"].astype(np.float32))},
}
FRAMEWORKS = ["jax", "torch"]


def of_tree(fun):
    """Return a nonlinear loss of a pytree."""

    def loss(p):
        out = fun(p, 1)
        total = anp.sum(anp.abs(out["z"] * (1 + 2j) + out["s"][0]) ** 2 * (1 + anp.sum(anp.real(out["z"]))))
        return total + anp.sum(anp.cos(out["s"][1].astype(float)))

    return loss


def of_reals(fun):
    return lambda x, y=Y: anp.sum(fun(x, y) ** 2) + anp.sum(fun(x, y) * x)


def of_complex(fun):
    return lambda z: anp.real(anp.sum(fun(z) * np.array([1j, 2.0]))) ** 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "kinds, loss, x",
    [
        (REAL, of_reals, X),
        (COMPLEX, of_complex, np.array([1 + 2j, 3 - 1j]) * (RANK + 1)),
        (TREE, of_tree, {"w": X, "x": Y[:3]}),
    ],
    ids=["real", "complex", "tree"],
)
def test_derivatives_are_those_of_the_function_in_numpy(framework, kinds, loss, x):
    own, reference = loss(kinds[framework]), loss(kinds["numpy"])
    tree = isinstance(x, dict)
    direction = {"w": Y[:3], "x": X} if tree else np.conj(x)[::-1] ** 2
    tolerance = 1e-6 if tree else 1e-12  # the tree contains 32-bit results

    def compare(found, expected):
        for a, b in zip(found.values() if tree else [found], expected.values() if tree else [expected], strict=True):
            assert np.allclose(a, b, rtol=tolerance, atol=tolerance * np.max(np.abs(b)))
            assert a.dtype == b.dtype

    assert np.isclose(own(x), reference(x), rtol=tolerance)
    compare(grad(own)(x), grad(reference)(x))
    tangents = mpiad.make_jvp(own)(x)(direction)[1], mpiad.make_jvp(reference)(x)(direction)[1]
    assert np.isclose(*tangents, rtol=tolerance)
    products = [mpiad.make_hvp(fun, objective="sum")(x)[2](direction) for fun in (own, reference)]
    compare(*products)
    jitted = mpiad.jit(own)
    compare(grad(jitted)(x), grad(reference)(x))
    assert np.isclose(jitted(x), reference(x), rtol=tolerance)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_check_grads_passes_over_ranks(framework):
    fun = REAL[framework]
    rates = check_grads(lambda x, y: mpiad.mpi_allreduce(anp.sum(fun(mpiad.mpi_allreduce(x), y) ** 2)), X, Y)
    assert min(rates.values()) > 1.9


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_third_derivatives(framework):
    cubed = from_jax(lambda x: x**5) if framework == "jax" else from_torch(lambda x: x**5)
    third = grad(grad(grad(lambda x: anp.sum(cubed(x)))))
    assert np.isclose(third(1.5), 60 * 1.5**2, rtol=1e-13)


def test_single_precision_stays_single():
    for fun in (from_jax(lambda x: jnp.sum(x**3)), from_torch(lambda x: torch.sum(x**3))):
        value, gradient = mpiad.value_and_grad(fun, objective="sum")(X.astype(np.float32))
        assert gradient.dtype == np.float32
        assert np.allclose(gradient, 3 * X**2, rtol=1e-6)


def test_64_bits_are_refused_while_they_are_off_in_jax():
    fun = from_jax(lambda x, n: jnp.sum(x) * n)
    with jax.enable_x64(False):
        with pytest.raises(TypeError, match="an argument is float64, but JAX's 64-bit mode is off.*jax_enable_x64"):
            fun(X, 2)
        assert np.isclose(fun(X.astype(np.float32), 2), 2 * X.sum(), rtol=1e-6)
        with pytest.raises(TypeError, match="an argument is int64"):
            fun(X.astype(np.float32), 2**40)


def test_parameters_of_a_module_are_variables_by_functional_call():
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    parameters = {name: value.detach().numpy() for name, value in module.named_parameters()}
    network = from_torch(lambda p, x: torch.func.functional_call(module, p, (x,)).sum())
    gradient = grad(lambda p: network(p, X) ** 2)(parameters)
    (module(torch.from_numpy(X)).sum() ** 2).backward()
    for name, value in module.named_parameters():
        assert np.allclose(gradient[name], value.grad.numpy(), rtol=1e-13)
    constant = from_torch(lambda x: module(x).sum())
    assert np.allclose(grad(constant)(X), grad(lambda x: network(parameters, x))(X), rtol=1e-13)


def test_arrays_of_any_layout_without_a_warning():
    fun, x = from_torch(lambda x: torch.sum(torch.sin(x))), np.arange(12.0).reshape(3, 4)
    readonly = x.copy()
    readonly.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for view in (x.T, x[::-1], x[:, ::2], readonly, x[1, 2]):
            assert np.isclose(fun(view), np.sum(np.sin(view)))


class TestBadInput:
    @pytest.mark.parametrize(
        "fun, found",
        [
            (from_jax(lambda x: jnp.argmax(x)), "an array of int64 on cpu"),
            (from_torch(lambda x: torch.argmax(x)), "an array of torch.int64 on cpu"),
            (from_torch(lambda x: torch.ones(3, device="meta")), "an array of torch.float32 on meta"),
            (from_torch(lambda x: (x, None)), "returned NoneType None"),
            (from_torch(lambda x: 3.0), "returned float 3.0"),
        ],
    )
    def test_results_of_another_kind(self, fun, found):
        with pytest.raises(TypeError, match=f"must return floating-point or complex arrays on the CPU.*{found}"):
            fun(X)

    def test_results_that_numpy_does_not_have(self):
        with pytest.raises(TypeError, match="BFloat16"):  # PyTorch's own error
            from_torch(lambda x: torch.ones(3, dtype=torch.bfloat16))(X)

    @pytest.mark.parametrize("wrap", [from_jax, from_torch])
    def test_arguments_of_another_kind(self, wrap):
        with pytest.raises(TypeError, match="expected a function, but got float"):
            wrap(3.0)
        with pytest.raises(TypeError, match="on the host, but got object of object"):
            wrap(lambda x, y: x)(X, object())
        with pytest.raises(TypeError, match="arrays of numbers on the host, but got ndarray of <U1"):
            wrap(lambda x: x)(np.array(["a", "b"]))

    def test_a_change_in_place(self):
        def changes(x):
            x.mul_(2.0)
            return x.sum()

        with pytest.raises(RuntimeError, match="changes an argument in place"):
            from_torch(changes)(X.copy())
        with pytest.raises(RuntimeError, match="in-place operation"):  # PyTorch's own error
            grad(from_torch(changes))(X.copy())

    def test_the_error_of_the_function_is_raised(self):
        with pytest.raises(RuntimeError, match="size of tensor"):
            grad(from_torch(lambda x: torch.sum(x + torch.ones(7))))(X)


WEIGHTS = np.array([0.4, 1.3, -0.8]) * (RANK + 1)


def number(x):
    return mpiad.mpi_allreduce(anp.sum(anp.sin(x["a"] * WEIGHTS)) * x["b"] ** 2)


def array(x):
    return mpiad.mpi_allreduce(anp.sin(x * WEIGHTS))


def expected(a, b):
    """Value and gradients of `number` without communication."""
    every = [np.array([0.4, 1.3, -0.8]) * (rank + 1) for rank in range(SIZE)]
    value = sum(np.sum(np.sin(a * w)) for w in every)
    slope = sum(w * np.cos(a * w) for w in every)
    return value * b**2, slope * b**2, 2 * value * b, np.diag(slope)


A, B = np.array([0.1, 0.25, 0.3]), 2.0


def test_driven_functions_in_jax():
    def program(f, g):
        x = {"a": jnp.array(A), "b": jnp.array(B)}
        value, by_a, by_b, jacobian = expected(A, B)
        one, several = to_jax(f), to_jax(g, (3,))
        for transform in (lambda fun: fun, jax.jit):
            found, gradient = transform(jax.value_and_grad(one))(x)
            assert np.allclose(found, value, rtol=1e-13)
            assert np.allclose(gradient["a"], by_a, rtol=1e-13)
            assert np.allclose(gradient["b"], by_b, rtol=1e-13)
            assert np.allclose(transform(jax.jacrev(several))(x["a"]), jacobian, rtol=1e-13)
        points = jnp.stack([x["a"], 2 * x["a"]])
        assert np.allclose(jax.jit(jax.vmap(several))(points), [several(point) for point in points], rtol=1e-13)
        single = jax.grad(one)({"a": jnp.array(A, jnp.float32), "b": jnp.float32(B)})
        assert single["a"].dtype == jnp.float32
        assert np.allclose(single["a"], by_a, rtol=1e-6)
        return "done"

    assert mpiad.drive(program, number, array, root=ROOT) == ("done" if RANK == ROOT else None)


def test_driven_functions_in_torch():
    def program(f, g):
        value, by_a, by_b, jacobian = expected(A, B)
        x = {"a": torch.tensor(A, requires_grad=True), "b": torch.tensor(B, requires_grad=True, dtype=torch.float32)}
        found = to_torch(f)(x)
        (3 * found).backward()
        assert np.isclose(found.item(), value, rtol=1e-13)
        assert np.allclose(x["a"].grad, 3 * by_a, rtol=1e-13)
        assert x["b"].grad.dtype == torch.float32
        assert np.isclose(x["b"].grad.item(), 3 * by_b, rtol=1e-6)
        found = torch.autograd.functional.jacobian(to_torch(g), torch.tensor(A))
        assert np.allclose(found, jacobian, rtol=1e-13)
        return "done"

    assert mpiad.drive(program, number, array, root=ROOT) == ("done" if RANK == ROOT else None)


def test_functions_of_torch_inside_a_program_of_jax_and_the_reverse():
    squares = from_torch(lambda x: torch.sum(x**2)), from_jax(lambda x: jnp.sum(x**2))

    def program(f, g):
        assert np.allclose(jax.jit(jax.grad(to_jax(f)))(jnp.array(A)), 2 * SIZE * A, rtol=1e-13)
        x = torch.tensor(A, requires_grad=True)
        to_torch(g)(x).backward()
        assert np.allclose(x.grad, 2 * SIZE * A, rtol=1e-13)

    mpiad.drive(program, *(lambda x, fun=fun: mpiad.mpi_allreduce(fun(x)) for fun in squares), root=ROOT)


def test_a_function_of_jax_inside_a_program_of_jax_is_refused():
    square = from_jax(lambda x: jnp.sum(x**2))

    def program(f):
        return jax.jit(jax.grad(to_jax(f)))(jnp.array(A))

    with pytest.raises(mpiad.errors.WorkerError, match="called in a driven function that a program of JAX waits for"):
        mpiad.drive(program, lambda x: square(x) if RANK == ROOT else 0.0, root=ROOT)


def test_the_example_trains_like_the_same_program_in_torch_on_one_process():
    """Loss, gradient and parameters after ten iterations of SciPy's L-BFGS."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples/hybrid_model.py"))
    loss, start, network, n = (example[name] for name in ("loss", "start", "network", "N"))
    x = (torch.arange(n).double() + 0.5) / n
    factor = example["DIFFUSION"] * n**2

    def simulated(source):
        u, states = torch.exp(-100 * (x - 0.3) ** 2) + 0.5 * torch.exp(-80 * (x - 0.7) ** 2), []
        for _ in range(4):
            for _ in range(10):
                u = u + example["DT"] * (factor * (torch.roll(u, 1) - 2 * u + torch.roll(u, -1)) + source(u))
            states.append(u)
        return torch.stack(states)

    measured = simulated(lambda u: 8 * u * (1 - u))

    def in_torch(weights):
        states = simulated(lambda u: torch.func.functional_call(network, weights, (u[:, None],))[:, 0])
        return torch.mean((states - measured) ** 2)

    def flat(weights):
        return np.concatenate([np.ravel(weights[name]) for name in start])

    def of_flat(w):
        parts = np.split(w, np.cumsum([part.size for part in start.values()])[:-1])
        weights = {name: torch.from_numpy(part.reshape(start[name].shape)) for name, part in zip(start, parts)}
        gradient, value = torch.func.grad_and_value(in_torch)(weights)
        return value.item(), flat({name: part.numpy() for name, part in gradient.items()})

    value, gradient = mpiad.value_and_grad(loss, shared=True)(start)
    expected = of_flat(flat(start))
    assert np.isclose(value, expected[0], rtol=1e-12)
    assert np.allclose(flat(gradient), expected[1], rtol=1e-10, atol=1e-14)
    found = mpiad.minimize(loss, start, options={"maxiter": 10})
    reference = scipy.optimize.minimize(of_flat, flat(start), jac=True, method="L-BFGS-B", options={"maxiter": 10})
    assert found.nit == reference.nit == 10 and reference.fun < 0.5 * value
    assert np.allclose(flat(found.x), reference.x, rtol=1e-10, atol=1e-10)
