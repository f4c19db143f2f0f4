"""Checks of derivatives: the dot-product test and the Taylor test.

An adjoint is the transpose of a linear map if Σ⟨A x, y⟩ = Σ⟨x, Aᵀ y⟩ over all ranks. The remainder J(x + hv) − J(x) − h g·v
is O(h²) if g is the gradient of J, otherwise O(h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np

from mpiad._typing import Argnum, Array, Comm, Function, LocalArray, Rank, Rng, Scalar, Shared, Tree
from mpiad.device import to_host
from mpiad.differentiation import grad, hvp, jvp, make_vjp, value_and_grad
from mpiad.differentiation.trace import arguments_with, variables_of
from mpiad.primitives.cotangents import spec_like
from mpiad.pytrees import flatten, is_variable
from mpiad.transport import Channel, channel
from mpiad.transport.core.random_keys import generator_of, shared_key


class AdjointError(AssertionError):
    """Report an adjoint that isn't the transpose of its linear map.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defadjoint
    >>> wrong = custom_operator(lambda x: 2 * x)
    >>> _ = defadjoint(wrong, lambda y: 3 * y)
    >>> try:
    ...     mpiad.testing.check_adjoint(wrong, np.ones(2))
    ... except mpiad.testing.AdjointError as error:
    ...     print("caught")
    caught
    """


def check_adjoint(
    linear_map: Function,
    x: LocalArray,
    *,
    adjoint: Function | None = None,
    comm: Comm = None,
    ulps: float = 16.0,
    rng: Rng = 0,
) -> float:
    """Test over all ranks that the adjoint of a linear map is its transpose; not differentiable.

    Parameters
    ----------
    linear_map : callable
        A linear function ``A(x)`` of one array.
    x : array
        An array with the shape and dtype of this rank's argument; the test replaces the values by random numbers.
    adjoint : callable, optional
        ``Aᵀ(y)``; by default the vector-Jacobian product of `linear_map`.
    comm : mpi4py intracommunicator, optional
    ulps : float
        Tolerance of the difference, in units of the machine epsilon times the sum of absolute products.
    rng : Generator, SeedSequence or int, optional
        The source of the random values, the same on all ranks; None: other ones in each call.

    Returns
    -------
    float
        The absolute difference of the two inner products, in the units of `ulps`.

    Raises
    ------
    AdjointError
        On all ranks, if the two inner products differ by more than `ulps` or aren't finite, or the map isn't linear.

    Ranks
    -----
    All ranks of `comm` call it.

    Examples
    --------
    >>> _ = mpiad.testing.check_adjoint(mpiad.mpi_scan, np.zeros(3))  # raises if the adjoint isn't the transpose
    """
    group = channel(comm, "check_adjoint")
    # The random numbers differ between ranks, so that an adjoint that interchanges ranks fails the test.
    generator = generator_of(shared_key(rng, group, "check_adjoint"), group.rank, 1)
    x = noise_like(x, generator)
    vjp, y = make_vjp(linear_map)(x)
    # Doubling is exact in binary arithmetic, so A(2x) = 2 A(x) for a linear A.
    twice = linear_map(x + x)
    y_bar = noise_like(y, generator)
    x_bar = vjp(y_bar) if adjoint is None else adjoint(y_bar)
    sides, scale = _inner_products((x, y, y_bar, x_bar, twice), group)
    error = abs(sides[0] - sides[1]) / scale
    if error > ulps:
        raise AdjointError(
            f"check_adjoint: Σ⟨A x, y⟩ = {sides[0]!r}, but Σ⟨x, Aᵀ y⟩ = {sides[1]!r} over {group.size} ranks: "
            f"the two differ by {error:.3g} ulp, more than ulps={ulps:g}. The adjoint isn't the transpose."
        )
    return float(error)


def _inner_products(arrays: tuple[Array, ...], channel: Channel) -> tuple[list[complex], float]:
    """Return Σ⟨A x, ȳ⟩ and Σ⟨x, x̄⟩, and their ulp; raise an AdjointError if A(2x) differs from 2 A(x)."""
    x, y, y_bar, x_bar, twice = to_host(arrays)
    # If x or A x is real, the map is linear over the real numbers, and only the real parts are equal.
    real = not (np.iscomplexobj(x) and np.iscomplexobj(y))
    products = [np.multiply(a, b) for a, b in ((y, y_bar), (x, x_bar))]
    are_finite = zip(*channel.data.allgather([bool(np.isfinite(product).all()) for product in products]))
    for name, finite in zip(("A x", "Aᵀ y"), are_finite):
        if not all(finite):
            raise AdjointError(f"check_adjoint: {name} has entries that aren't finite on rank {finite.index(False)}.")
    every = [np.concatenate(channel.data.allgather(np.ravel(product.real if real else product))) for product in products]
    # The sums of all ranks, each rounded once.
    sides = [complex(math.fsum(np.real(terms)), math.fsum(np.imag(terms))) for terms in every]
    absolute_sum = max(float(np.sum(np.abs(terms))) for terms in every)
    facts = channel.data.allgather((np.max(np.abs(twice - y - y), initial=0.0), float(np.finfo(spec_like(x).dtype).eps)))
    nonlinearity, eps = (max(values) for values in zip(*facts))
    if nonlinearity > 1e3 * eps * max(1.0, absolute_sum):
        raise AdjointError(f"check_adjoint: the map isn't linear: A(2x) − 2 A(x) has an entry of {nonlinearity:.3e}.")
    return sides, eps * max(absolute_sum, np.finfo(float).tiny)


def noise_like(leaf: Array, rng: np.random.Generator) -> Array:
    """Return normally distributed numbers with the shape, dtype and device of an array or a number."""
    spec = spec_like(leaf)
    noise = rng.standard_normal(spec.shape)
    if spec.dtype.kind == "c":
        noise = noise + 1j * rng.standard_normal(spec.shape)
    noise = np.asarray(noise, dtype=spec.dtype)
    return noise[()] if spec.arrays is None else spec.arrays.to_device(noise)


_STEP_COUNT = 12
_RATE_TOLERANCE = 0.2


class GradientError(AssertionError):
    """Report a derivative whose Taylor remainder shrinks too slowly.

    Examples
    --------
    >>> from mpiad.extend import custom_operator, defvjp
    >>> wrong = custom_operator(lambda x: x**2)
    >>> defvjp(wrong, lambda ans, x: lambda g: 3 * x * g)  # it should be 2 x g
    >>> try:
    ...     mpiad.testing.check_grads(lambda x: mpiad.mpi_allreduce(wrong(x)), 1.0, order=1, modes=("rev",))
    ... except mpiad.testing.GradientError as error:
    ...     print("caught")
    caught
    """


class _Line:
    """The objective on a line through the arguments in a random direction."""

    def __init__(
        self, fun: Function, args: tuple, argnum: Argnum, shared: Shared, comm: Comm, rng: Rng, options: dict[str, Any]
    ):
        self.group, self.comm, self.shared = channel(comm, "check_grads"), comm, shared
        self.x = args[argnum] if isinstance(argnum, int) else tuple([args[i] for i in argnum])
        options = {**options, "shared": shared, "comm": comm}

        def fun_of_x(x: Array) -> Scalar:
            return fun(*arguments_with(args, argnum, x))

        self.value_and_grad, self.grad = value_and_grad(fun_of_x, **options), grad(fun_of_x, **options)
        self.hvp = hvp(fun_of_x, **options)
        variables = variables_of(args, argnum, "check_grads", shared)
        copies = {variables.places[k] for k in variables.shared}
        # A shared argument is one variable, so its direction is the same on all ranks.
        key = shared_key(rng, self.group, "check_grads")
        generators = [generator_of(key, rank) for rank in (self.group.rank, 0)]
        leaves = [noise_like(x, generators[k in copies]) if is_variable(x) else x for k, x in enumerate(variables.leaves)]
        self.v = variables.build(leaves)
        # In a sum over all ranks the copies of a shared variable count once.
        self.weights = [1.0 / self.group.size if k in copies else 1.0 for k in range(len(leaves))]

    def point(self, h: float) -> Tree:
        leaves, build = flatten(self.x)
        pairs = zip(leaves, flatten(self.v)[0])
        return build([x + np.asarray(h, spec_like(v).dtype)[()] * v if is_variable(x) else x for x, v in pairs])

    def inner_product(self, g: Array) -> float:
        """Return the inner product of a gradient with the direction, over all ranks."""
        parts = zip(flatten(g)[0], flatten(self.v)[0], self.weights)
        # In autograd's convention dJ = Re Σ g v, without conjugation.
        local_product = sum(np.real(to_host(np.sum(a * v))) * weight for a, v, weight in parts if is_variable(v))
        return sum(self.group.data.allgather(float(local_product)))


def check_grads(
    fun: Function,
    *args: object,
    order: int = 2,
    modes: Sequence[str] = ("rev", "fwd"),
    argnum: Argnum = 0,
    objective: str = "root",
    shared: Shared = False,
    root: Rank = 0,
    comm: Comm = None,
    step: float = 0.1,
    rng: Rng = 0,
) -> dict[str, float]:
    """Measure the convergence rate of the objective's Taylor remainders, and raise if it is too low; not differentiable.

    Parameters
    ----------
    fun : callable
        The objective function, as for `value_and_grad`; it returns a real number.
    *args : object
        This rank's arguments.
    order : {1, 2}
        The highest order of the derivatives to check.
    modes : sequence of {"rev", "fwd"}
        "rev" checks reverse mode, "fwd" forward mode. For the second order, "rev" is reverse over reverse, and "fwd"
        forward over reverse.
    argnum, objective, shared, root, comm
        As for `value_and_grad`.
    step : float
        The longest step along the random direction; the step is halved repeatedly.
    rng : Generator, SeedSequence or int, optional
        The source of the direction, the same on all ranks; None: another one in each call. The direction differs between
        ranks unless the argument is `shared`.

    Returns
    -------
    dict
        The measured rate of each check: about 2 for first derivatives, about 3 for second derivatives, and infinite if the
        remainders are at the level of rounding.

    Raises
    ------
    GradientError
        On all ranks, if a rate is more than 0.2 below the expected rate, or the objective or a derivative isn't finite.
    ValueError
        If `order` isn't 1 or 2, or a mode is unknown, or `modes` is empty.

    Ranks
    -----
    All ranks of `comm` call it.

    References
    ----------
    P. E. Farrell, D. A. Ham, S. W. Funke, M. E. Rognes, "Automated derivation of the adjoint of high-level transient
    finite element programs", SIAM J. Sci. Comput. 35 (2013), section 5.

    Examples
    --------
    >>> rates = mpiad.testing.check_grads(lambda x: mpiad.mpi_allreduce(np.sum(np.sin(x))), np.ones(2))
    >>> print(sorted(rates))
    ['fwd 1', 'fwd 2', 'rev 1', 'rev 2']
    """
    if order not in (1, 2) or not modes or any(mode not in ("rev", "fwd") for mode in modes):
        raise ValueError(
            "check_grads: order must be 1 or 2, and modes must contain 'rev', 'fwd' or both, but got "
            f"order={order!r}, modes={modes!r}."
        )
    line = _Line(fun, args, argnum, shared, comm, rng, {"objective": objective, "root": root})
    value, gradient = line.value_and_grad(line.x)
    steps = [step / 2**k for k in range(_STEP_COUNT)]
    values = [line.value_and_grad(line.point(h))[0] for h in steps]
    rates: dict[str, float] = {}
    for mode in modes:
        if mode == "rev":
            first = line.inner_product(gradient)
        else:
            first = float(jvp(lambda x: line.value_and_grad(x)[0], line.x, line.v)[1])
        remainders = [abs(shifted - value - h * first) for h, shifted in zip(steps, values)]
        rates[f"{mode} 1"] = _rate(first, remainders, values, line, 1, mode, step)
        if order == 2:
            second = _second(line, mode)
            remainders = [abs(shifted - value - h * first - h * h / 2 * second) for h, shifted in zip(steps, values)]
            rates[f"{mode} 2"] = _rate(second, remainders, values, line, 2, mode, step)
    return rates


def _second(line: _Line, mode: str) -> float:
    if mode == "fwd":
        return line.inner_product(line.hvp(line.x, line.v))

    # Reverse over reverse: the gradient of the sum of g·v over the ranks.
    def slope(x: Array) -> Scalar:
        parts = zip(flatten(line.grad(x))[0], flatten(line.v)[0], line.weights)
        return sum(anp.sum(anp.real(g * v)) * weight for g, v, weight in parts if is_variable(v))

    return line.inner_product(grad(slope, objective="sum", shared=line.shared, comm=line.comm)(line.x))


def _last_rate(remainders: list[float], floor: float) -> float:
    """Return the median of the last three rates of remainders above `floor`; infinity if there are none."""
    pairs = [(coarse, fine) for coarse, fine in zip(remainders, remainders[1:]) if coarse > floor and fine > floor]
    return float(np.median([math.log2(coarse / fine) for coarse, fine in pairs[-3:]])) if pairs else math.inf


def _noise(line: _Line, step: float) -> float:
    """Return the rounding of J: the largest difference from a straight line, of steps so small that J has no curvature."""
    places = np.sqrt(np.arange(10.0))  # uneven, since rounding may not show at even ones
    values = np.array([line.value_and_grad(line.point(place * step))[0] for place in places])
    return float(np.max(np.abs(values - np.polyval(np.polyfit(places, values, 1), places))))


def _rate(
    derivative: float, remainders: list[float], values: list[float], line: _Line, order: int, mode: str, step: float
) -> float:
    if not all(map(math.isfinite, values)):
        raise GradientError(f"check_grads: the objective isn't finite along the direction: {values}.")
    if not math.isfinite(derivative):
        raise GradientError(
            f"check_grads: the derivative of order {order} in mode {mode!r} along the direction is {derivative}, although "
            "the objective is finite. mpiad.testing.diagnose names the operation, often a division by zero in the branch "
            "that np.where discards."
        )
    leaves = [leaf for leaf in flatten(line.x)[0] if is_variable(leaf)]
    eps = max(line.group.data.allgather(max(float(np.finfo(spec_like(leaf).dtype).eps) for leaf in leaves)))
    # Remainders below `floor` are dominated by the rounding of J.
    floor = 200 * eps * max(max(map(abs, values)), np.finfo(float).tiny)
    rate, needed = _last_rate(remainders, floor), order + 1 - _RATE_TOLERANCE
    if rate < needed:
        # The rounding of J is larger if J is a difference of large terms.
        without_noise = _last_rate(remainders, max(floor, 10 * _noise(line, step * math.sqrt(eps))))
        rate = without_noise if math.isfinite(without_noise) else rate
    if rate < needed:
        listed = ", ".join(f"{remainder:.2e}" for remainder in remainders)
        raise GradientError(
            f"check_grads: the remainder of order {order} in mode {mode!r} shrinks at rate {rate:.2f}, but a correct "
            f"derivative gives {order + 1}. Remainders for successively halved steps: {listed}. If J has a kink or a jump "
            "within these steps, as where a label or a sign changes, pass a smaller step=, such as 1e-3; if it has kinks "
            "everywhere, as with limiters, also order=1."
        )
    return rate
