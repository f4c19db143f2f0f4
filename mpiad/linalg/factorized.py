"""`factorized`: a linear operator whose matrix is computed and factored once, for many solves.

The matrix comes from products with the operator: columns that have no row in common have the same color, and one product
yields all columns of a color. A solve is SuperLU's back-substitution, on several ranks with factors of the gathered
matrix. Larger systems on several ranks are solved by GMRES with SuperLU's factors in overlapping Schwarz.

The solution u of A(p) u = b is one operator of the tape. The cotangent of b is λ = A⁻ᵀ ū, from the same factors. The
cotangent of p is that of -λᵀ A(p) u, a reverse pass through the user's operator, which takes place if p is a variable.

If p isn't a variable, a solve is a step of compiled programs, which are also differentiated without p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Comm, Function, LocalArray, Tree
from mpiad.compiling.closure import Unknown, watch_of
from mpiad.compiling.watch import Watch, same_bits
from mpiad.differentiation import make_vjp
from mpiad.domain import Domain
from mpiad.extend import custom_operator, defjvp, defjvp_together, defvjp, defvjp_together
from mpiad.linalg.additive_schwarz import AdditiveSchwarz
from mpiad.linalg.distributed_matrix import DistributedMatrix, GatheredFactors, probed_matrix, require_complete
from mpiad.linalg.iteration import iterate
from mpiad.linalg.krylov import gmres
from mpiad.linalg.probing import kind_of, probing_of, require_pattern
from mpiad.linalg.solve import change_along, operator_product, require_functions
from mpiad.linalg.sparse_factors import SparseFactors
from mpiad.linalg.system import Settings, System
from mpiad.linalg.vectors import require_block, require_on_host
from mpiad.primitives import stop_gradient
from mpiad.primitives.cotangents import spec_like, tangent_of
from mpiad.primitives.operation import suspended
from mpiad.programs.function import Jitted, shared
from mpiad.programs.signature import form_of
from mpiad.pytrees import flatten
from mpiad.transport import MAX, Channel, channel
from mpiad.transport.core.agreement import agreed, alike_on_all, mark_left, raise_together
from mpiad.transport.core.calls import is_noting
from mpiad.transport.core.channels import on_any_rank
from mpiad.transport.core.tracing import opaque, restoring_state, tracing
from mpiad.transport.exits.recovery import recoverable

_CALL = "linalg.factorized"
_DTYPES = "fdFD"  # of right-hand sides
_METHODS = ("auto", "schwarz", "gathered")
_MOST_GATHERED = 20_000  # unknowns up to which rank 0 solves for all ranks, instead of an iteration on all ranks
_RTOL = 1e-12  # of this iteration


class _Operator(NamedTuple):
    """The user's operator A(p) for blocks of shape `shape`."""

    matvec: Function
    build: Callable[[list], Tree]  # assembles the params from their leaves
    leaves: list  # copies of the plain leaves of the params
    shape: tuple[int, ...]
    takes_batches: bool

    @property
    def form(self) -> Hashable:
        """The structure of the params."""
        return form_of(self.params((), ()))

    def params(self, variables: Sequence[Array], indices: tuple[int, ...]) -> tuple:
        """Return the params, in which `variables` replace the leaves at `indices`."""
        leaves = list(self.leaves)
        for k, x in zip(indices, variables):
            leaves[k] = x
        return tuple(self.build(leaves))

    def product(self, u: Array, variables: Sequence[Array], indices: tuple[int, ...], transposed: bool) -> Array:
        """Return A u or Aᵀ u for blocks (..., *shape); `variables` and `indices` as in `params`."""
        lanes = 0 if self.takes_batches else len(spec_like(u).shape) - len(self.shape)
        return operator_product(self.matvec, self.params(variables, indices), u, lanes, transposed)


class _Use(NamedTuple):
    """Factors, the indices of the traced leaves among those of the params, and whether to solve with the transpose."""

    factors: _Factors
    indices: tuple[int, ...]
    transposed: bool


@custom_operator
def back_substitution(b: LocalArray, *variables: Array, use: _Use) -> LocalArray:
    """Return the solution of A u = b or Aᵀ u = b; `variables`: the traced leaves of the params."""
    return use.factors.solved(b, use.transposed)


def _adjoint(ans: LocalArray, b: LocalArray, *variables: Array, use: _Use) -> Callable:
    def cotangents(multiplier: LocalArray) -> list:
        # In both cases, the function λᵀ A u of the params is differentiated. Right-hand sides aren't joined, since the
        # tape would record that, too.
        operator, pair = use.factors.operator, (ans, multiplier) if use.transposed else (multiplier, ans)
        count = math.prod(spec_like(ans).shape[: -len(operator.shape) or None])
        left, right = ([u] if operator.takes_batches else list(anp.reshape(u, (count, *operator.shape))) for u in pair)
        if left and isinstance(operator.matvec, Jitted) and tracing.tape is None:
            pulled = operator.matvec.derived((_CALL, use.indices), partial(_pulled, operator.matvec.fun, use.indices), True)
            params = operator.params(variables, use.indices)
            return [-sum(parts) for parts in zip(*[pulled(*of_one, params) for of_one in zip(left, right)])]
        pull, _ = make_vjp(lambda x: [operator.product(u, x, use.indices, False) for u in right])(list(variables))
        return [-part for part in pull(left)]

    def vjp(g: LocalArray) -> list:
        multiplier = back_substitution(g, *variables, use=use._replace(transposed=not use.transposed))
        lead = spec_like(g).shape[: -len(spec_like(ans).shape) or None]  # of several cotangents
        if not variables or not lead:
            return [multiplier, *(cotangents(multiplier) if variables else ())]
        return [multiplier, *[anp.stack(parts) for parts in zip(*[cotangents(multiplier[k]) for k in range(lead[0])])]]

    return vjp


def _tangent(gs: list, ans: LocalArray, b: LocalArray, *variables: Array, use: _Use) -> LocalArray:
    residual = tangent_of(b, gs[0])
    if variables:
        product = lambda x: use.factors.operator.product(x[0], x[1:], use.indices, use.transposed)  # noqa: E731
        residual = residual - change_along(product, ans, variables, gs[1:])
    return back_substitution(residual, *variables, use=use)


def _pulled(matvec: Function, indices: tuple[int, ...]) -> Function:
    def pulled(left: LocalArray, u: LocalArray, params: tuple) -> list[Array]:
        """Return the cotangents of the params' leaves at `indices`, if `left` is that of A u."""
        leaves, build = flatten(params)
        operator = _Operator(matvec, build, leaves, left.shape, False)
        return make_vjp(lambda x: operator.product(u, x, indices, False))([leaves[k] for k in indices])[0](left)

    return pulled


back_substitution.batched_adjoint = True
defvjp_together(back_substitution, _adjoint)
defjvp_together(back_substitution, _tangent)


# Steps of compiled programs: the first returns the number of the current factors, which are computed again if the params
# have changed in place. The reverse pass uses the factors of the forward pass.


@custom_operator
def _current_number(zero: np.ndarray, solve: Factorized, count: int, error: Exception | None) -> np.ndarray:
    return zero + solve._current(count, error).number


@custom_operator
def _with_factors(b: LocalArray, solve: Factorized, number: np.ndarray) -> LocalArray:
    return _numbered(solve, number).solved(b, solve._transposed)


def _numbered(solve: Factorized, number: np.ndarray) -> _Factors:
    for factors in solve._recent:
        if factors.number == number:
            return factors
    text = (  # on all ranks
        f"{_CALL}: the params have changed in place {_MOST_KEPT} times since the solve whose derivative this is. Call "
        "factorized again for other params."
    )
    raise agreed(solve._recent[-1].options.group, RuntimeError(text))


def _prepared(out: np.ndarray, b: np.ndarray, solve: Factorized, number: np.ndarray) -> Callable[[], None] | None:
    """Return a function that solves from a fixed array into another; see `CustomOperator.prepared`."""
    latest = solve._recent[-1]
    if (solves := latest.prepared(out, b, solve._transposed)) is None:
        return None
    known: WeakKeyDictionary[_Factors, Any] = WeakKeyDictionary({latest: solves})

    def run() -> None:
        factors = _numbered(solve, number)
        if factors not in known:
            known[factors] = factors.prepared(out, b, solve._transposed)
        try:
            known[factors]()
        except BaseException as error:
            mark_left([(factors.options.group, False)], error, "a solve")
            raise

    return run


_current_number.spec_of = _with_factors.spec_of = lambda x, *_: spec_like(x)
_with_factors.batched_adjoint = True
_with_factors.prepared = _prepared
defvjp(_current_number)
defjvp(_current_number)
defvjp(_with_factors, lambda ans, b, solve, number: lambda g: _with_factors(g, solve.T, number))
defjvp(_with_factors, lambda g, ans, b, solve, number: _with_factors(g, solve, number))


class _Factors:
    """The factors of an operator with fixed params.

    `user_leaves` are the leaves of the params, which the user may change later; None if nobody asks whether they changed.
    """

    def __init__(self, operator: _Operator, leaves: list | None, options: _Options, previous: _Factors | None = None):
        self.operator, self.user_leaves, self.options = operator, leaves, options
        self.number, self._probing = (0, None) if previous is None else (previous.number + 1, previous._probing)
        with restoring_state(), suspended():
            self.matrix = matrix = self._assembled(is_exact=leaves is not None or previous is None)
            if options.group.size == 1:
                name = f"{options.call}: the matrix {matrix.shape}"
                self._inverse: Any = SparseFactors(matrix.local_rows(), name)
            elif options.method == "gathered" or options.method == "auto" and matrix.shape[0] <= _MOST_GATHERED:
                self._inverse = GatheredFactors(matrix, options.call)
            else:
                self._inverse = AdditiveSchwarz(matrix, restricted=True)
        self._watch: Watch | None = None
        self._is_followed = True  # whether the watch includes the objects that the operator reads
        if leaves is not None:
            try:
                self._watch = watch_of(operator.matvec, (), leaves)
            except Unknown:
                self._is_followed = False
                self._watch = watch_of(lambda: None, (), [x for x in leaves if isinstance(x, np.ndarray)])

    def _assembled(self, is_exact: bool) -> DistributedMatrix:
        """Return the matrix; if `is_exact`, raise on all ranks if the pattern misses an entry."""
        matvec, build, leaves, shape, takes_batches = self.operator
        _, comm, pattern, _, matrix, call = self.options
        if matrix is not None:
            return matrix.with_values(leaves[0])
        params, self._probing = tuple(build(leaves)), self._probing or probing_of(pattern, math.prod(shape), comm, call)
        matrix = probed_matrix(matvec, params, shape, comm, call, takes_batches, self._probing)
        if is_exact:
            require_complete(matvec, params, shape, matrix, call)
        return matrix

    def is_current(self) -> bool:
        """Return whether the params, and the watched objects of the operator's closure, are unchanged on this rank."""
        return self._watch is None or self._watch.is_the_same()

    def is_for(self, operator: _Operator, options: _Options) -> bool:
        """Return whether these are the factors of an operator on this rank."""
        same = operator.shape == self.operator.shape and operator.form == self.operator.form
        same = same and all(x is y for x, y in zip(options, self.options))
        return self._is_followed and same and self._has_leaves(operator.leaves) and self.is_current()

    def _has_leaves(self, leaves: Sequence[object]) -> bool:
        return all(same_bits(np.asarray(x), np.asarray(y)) for x, y in zip(leaves, self.operator.leaves))

    def again(self) -> _Factors:
        """Factor the operator with the present params; raise a RuntimeError on all ranks if they are unchanged."""
        leaves = [np.array(x) for x in self.user_leaves or ()]
        if not on_any_rank(self.options.group.data, not self._has_leaves(leaves)):
            text = (
                f"{_CALL}: an object that the operator reads from its closure has changed since it was factored. Pass the "
                "object among the params, or call factorized again."
            )
            raise agreed(self.options.group, RuntimeError(text))
        return _Factors(self.operator._replace(leaves=leaves), self.user_leaves, self.options, self)

    def _rows(self, b: LocalArray) -> LocalArray:
        """Return blocks (..., *shape) as rows, in the dtype of the solution."""
        shape = self.operator.shape
        rows = math.prod(b.shape[: b.ndim - len(shape)]), math.prod(shape)
        return np.ascontiguousarray(b, np.result_type(b, self.matrix.values)).reshape(rows)

    def preconditioned(self, r: LocalArray, transposed: bool) -> LocalArray:
        """Return A⁻¹ r or A⁻ᵀ r; by the overlapping factors, an approximation."""
        rows = self._rows(r)
        if self.options.group.size == 1:
            return self._inverse.solve(rows, "T" if transposed else "N").reshape(r.shape)
        return (self._inverse.T if transposed else self._inverse)(rows).reshape(r.shape)

    def prepared(self, out: np.ndarray, b: np.ndarray, transposed: bool) -> Callable[[], None] | None:
        """Return a function that solves from a fixed array into another; None if that needs the method `solved`."""
        is_real = b.dtype == self.matrix.values.dtype == np.float64
        if isinstance(self._inverse, AdditiveSchwarz) or not is_real or b.shape != self.operator.shape:
            return None
        if self.options.group.size == 1:
            return self._inverse.prepared(b.reshape(1, -1), out.reshape(1, -1), "T" if transposed else "N")
        return (self._inverse.T if transposed else self._inverse).prepared(b, out)

    def solved(self, b: LocalArray, transposed: bool) -> LocalArray:
        """Return the solution of A u = b or Aᵀ u = b for blocks (..., *shape)."""
        if not isinstance(self._inverse, AdditiveSchwarz):
            return self.preconditioned(b, transposed)
        rows = self._rows(b)
        comm, inverse = self.options.comm, self._inverse.T if transposed else self._inverse
        settings = Settings("gmres", _RTOL, 0.0, None, comm, None, batch=1, call=_CALL, preconditioned=True, probe=False)
        matrix = self.matrix.T if transposed else self.matrix
        system = System(matrix.matvec, inverse, rows, settings, name="matrix")
        found = iterate(gmres, system, rows, None)
        system.settle()
        return found.reshape(b.shape)


class KeptFactors:
    """A preconditioner: the factors of an operator, which are computed again as its params change; for Newton's method."""

    takes_blocks = is_updated = True  # it takes arrays with leading axes

    def __init__(
        self, matvec: Function, build: Function, shape: tuple[int, ...], pattern: Any, comm: Comm, call: str, reuse: int
    ) -> None:
        self._operator = _Operator(matvec, build, [], shape, True)
        self._options = _Options(channel(comm, call), comm, pattern, "auto", None, call)
        self._reuse, self._uses_left, self._transposed = reuse, 0, False
        self.factors: Any = None

    def update(self, leaves: list) -> None:
        """Factor the operator with the leaves of the params, unless the factors may serve another step."""
        if self._uses_left:
            self._uses_left -= 1
            return
        # An entry that the pattern misses in later steps only makes the preconditioner less accurate.
        self.factors = _Factors(self._operator._replace(leaves=leaves), None, self._options, self.factors)
        self._uses_left = self._reuse

    @property
    def is_accurate(self) -> bool:
        """Whether the factors are those of the last operator, and not only approximate."""
        return self._uses_left == self._reuse and not isinstance(self.factors._inverse, AdditiveSchwarz)

    def __call__(self, r: LocalArray) -> LocalArray:
        """Return an approximation of A⁻¹ r."""
        return self.factors.preconditioned(r, self._transposed)

    @property
    def T(self) -> KeptFactors:
        """The factors of the transpose."""
        other = copy(self)
        other._transposed = not self._transposed
        return other


class Factorized:
    """The inverse of an operator, made by `factorized`: ``solve(b)`` solves A u = b, and ``solve.T(b)`` solves Aᵀ u = b.

    Attributes
    ----------
    shape : tuple of int
        Shape of the whole matrix.
    matrix : DistributedMatrix
        The matrix that was factored, untraced.
    T : Factorized
        The inverse of the transpose, with the same factors.
    comm : mpi4py intracommunicator or None
        The ranks that hold the operator; None for the default communicator.

    Examples
    --------
    >>> size = mpiad.mpi_size()
    >>> domain = mpiad.Domain(3 * size)
    >>> solve = mpiad.linalg.factorized(lambda u, k: k * u, np.ones(3), 2.0, pattern=domain)
    >>> print(solve.shape == (3 * size, 3 * size), solve.T(np.ones((2, 3))))
    True [[0.5 0.5 0.5]
     [0.5 0.5 0.5]]
    """

    def __init__(self, factors: _Factors, variables: list[Array], indices: tuple[int, ...]):
        self._variables, self._indices, self._transposed = variables, indices, False
        self._recent = [factors]  # the current ones are the last; the others are for reverse passes of compiled programs
        self.shape, self.comm = factors.matrix.shape, factors.options.comm

    @property
    def matrix(self) -> DistributedMatrix:
        """The matrix that was factored."""
        return self._recent[-1].matrix

    @cached_property
    def T(self) -> Factorized:
        """The inverse of the transpose."""
        other = copy(self)
        other._transposed, other.T = not self._transposed, self
        return other

    def __repr__(self) -> str:
        return f"<factorized operator of shape {self.shape}>"

    def __call__(self, b: LocalArray) -> LocalArray:
        """Solve A u = b, for one right-hand side or several.

        Parameters
        ----------
        b : array of the shape of `like`, or with additional leading axes
            This rank's block of the right-hand side, or of several right-hand sides.

        Returns
        -------
        array of the shape of `b`

        Raises
        ------
        TypeError, ValueError
            On all ranks, if `b` isn't an array of floats on the host, or doesn't end with the shape of `like`, or if the
            number of right-hand sides differs between ranks.
        RuntimeError
            On all ranks, if an object that the operator reads from its closure has changed since the factorization. If
            only the params have changed in place, the operator is factored again.

        Ranks
        -----
        All ranks of the operator call it.

        Adjoint
        -------
        One solve with the transpose, from the same factors. If the params are variables, also a reverse pass through the
        operator.
        """
        recorder, dtype = tracing.recorder, getattr(b, "dtype", None)
        if type(b) is np.ndarray and recorder is None and tracing.tape is None and not (self._variables or is_noting()):
            # Small systems are solved in less time than a call of an operator takes.
            return self._current(*self._checked(b)).solved(b, self._transposed)
        is_step = recorder is not None and not recorder.ended and not self._variables
        if not is_step or dtype is None or dtype.char not in "fdFD" or np.result_type(dtype, self.matrix.values) != dtype:
            return _solve(self, b, *self._variables)
        number = stop_gradient(_current_number(np.zeros(()), self, *self._counted(b)))
        return _with_factors(b, self, number)

    def _counted(self, b: Array) -> tuple[int, Exception | None]:
        """Return 4 n + k for n right-hand sides of the k-th dtype, and an error if `b` has another shape."""
        shape = self._recent[-1].operator.shape
        lead = max(b.ndim - len(shape), 0)
        if b.shape[lead:] == shape:
            return len(_DTYPES) * math.prod(b.shape[:lead]) + _DTYPES.index(b.dtype.char), None
        return 0, ValueError(f"{_CALL}: b must have shape {shape}, after any leading axes, but has {b.shape}.")

    def _checked(self, b: Array) -> tuple[int, Exception | None]:
        try:
            require_block(_CALL, "b", b)
            require_on_host(_CALL, "b", b)
        except TypeError as error:
            return 0, error
        return self._counted(b)

    def _current(self, count: int, error: Exception | None) -> _Factors:
        """Return the factors, computed again if the params have changed in place.

        Raise on all ranks an error of any, or if `count`, a result of `_counted`, differs between ranks.
        """
        factors = self._recent[-1]
        group, largest = factors.options.group, 2 if error is not None else int(not factors.is_current())
        if group.size > 1:
            found = np.empty(3, np.int64)
            group.data.Allreduce(np.array([largest, count, -count]), found, MAX)
            largest, most, least = found.tolist()
            if largest < 2 and most != -least:
                (fewest, one), (most, other) = divmod(-least, len(_DTYPES)), divmod(most, len(_DTYPES))
                text = f"from {fewest} to {most} right-hand sides, but all ranks must pass the same number"
                if fewest == most:
                    one, other = np.dtype(_DTYPES[one]), np.dtype(_DTYPES[other])
                    text = f"right-hand sides of dtype {one} and {other}, but all ranks must pass the same dtype"
                raise agreed(group, ValueError(f"{_CALL}: the ranks pass {text}."))
        if largest == 2:
            raise_together(group, error)
        if largest:
            factors = factors.again()
            self._recent[:] = [*self._recent, factors][-_MOST_KEPT:]
        return factors


@opaque
def _solve(solve: Factorized, b: LocalArray, *variables: Array) -> LocalArray:
    factors = solve._current(*solve._checked(stop_gradient(b)))
    return back_substitution(b, *variables, use=_Use(factors, solve._indices, solve._transposed))


class _Options(NamedTuple):
    """How an operator is factored; see `factorized`."""

    group: Channel
    comm: Comm
    pattern: Any
    method: str
    matrix: DistributedMatrix | None
    call: str = _CALL  # for messages


# The last operators with their factors, the newest first. A step of a time loop that calls `factorized` uses them again.
# Their number is limited, since factors refer to their operator, and would keep it and themselves alive.
_MOST_KEPT = 4
_kept: list[tuple[object, _Factors]] = []


@recoverable(_CALL)
def factorized(
    matvec: Function | DistributedMatrix,
    like: LocalArray | None = None,
    *params: Tree,
    pattern: Any = None,
    method: str = "auto",
    comm: Comm = None,
) -> Factorized:
    """Compute and factor the matrix of a linear operator once, for many solves; named after SciPy's `factorized`.

    Parameters
    ----------
    matvec : callable or DistributedMatrix
        ``matvec(u, *params)`` returns this rank's block of A u, linear in u, as in `solve`; or a square sparse matrix.
        Attributes of an object with a method ``__call__`` aren't watched: pass what changes among the params.
    like : array of floats
        An array of the shape of this rank's blocks; only its shape is used. None for a DistributedMatrix.
    *params : pytree of arrays
        Arguments of the operator, at which it is factored; derivatives flow to them (or to the matrix's values).
    pattern : Domain, SciPy sparse matrix or array, or pair of integer arrays, optional
        The nonzero entries of the matrix: the stencil of a Domain's halo, the stored entries of a sparse matrix of shape
        (n, N) with this rank's n rows, or their ``(rows, columns)``, as in `DistributedMatrix.from_pattern`. By default, on
        one rank, and for at most 2,000 unknowns, all entries are computed.
    method : {"auto", "schwarz", "gathered"}
        On one rank, SuperLU factors the matrix. On several ranks, "gathered" means that each rank factors the whole matrix:
        several right-hand sides are divided among the ranks. For more than 20,000 unknowns, only rank 0 factors it, and
        solves for all ranks. With "schwarz", a solve is GMRES to a relative residual of 1e-12, preconditioned by
        overlapping local factors. "auto" is "gathered" for at most 20,000 unknowns, and "schwarz" for more.
    comm : mpi4py intracommunicator, optional
        The ranks that hold the operator; by default those of the pattern or matrix.

    Returns
    -------
    Factorized
        A function ``solve(b)``, also for several right-hand sides along leading axes; ``solve.T`` solves with Aᵀ.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if an argument is invalid, `method` or the kind of `pattern` differs between ranks, the matrix is
        singular, `matvec` isn't linear, or `pattern` misses an entry (the message names its row and column).
    Exception
        On all ranks, if `matvec` raises it on any rank.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    Each solve is differentiable with respect to b and the params, to any order.

    Examples
    --------
    >>> import scipy.sparse
    >>> size = mpiad.mpi_size()
    >>> halves = mpiad.linalg.factorized(lambda u, k: k * u, np.ones(3), 2.0, pattern=mpiad.Domain(3 * size))
    >>> print(halves(np.array([2.0, 4.0, 6.0])))
    [1. 2. 3.]
    """
    matrix = matvec if isinstance(matvec, DistributedMatrix) else None
    comm = matrix.comm if matrix is not None else pattern.comm if isinstance(pattern, Domain) and comm is None else comm
    like = None if like is None else stop_gradient(like)
    group = channel(comm, _CALL)
    described = [f"method={method!r}, pattern={kind_of(pattern)}"]
    alike_on_all(group, lambda: _check(matvec, like, params, pattern, method, group), lambda _: described, _CALL)
    matvec = product = shared(matvec)
    if matrix is not None:
        params, like = (matrix.values,), np.empty(matrix.local_shape[1])
        product = matrix.operator()
    leaves, build = flatten(params)
    indices = tuple(k for k, leaf in enumerate(leaves) if isbox(leaf))
    plain = [stop_gradient(leaf) for leaf in leaves]
    options = _Options(group, comm, pattern, method, matrix)
    copies = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in plain]
    operator = _Operator(product, build, copies, getattr(like, "shape", ()), matrix is not None)
    known = [pair for pair in _kept if pair[0] is matvec]
    _kept[:] = [pair for pair in _kept if pair[0] is not matvec][: _MOST_KEPT - 1]
    factors: Any = known[0][1] if known and known[0][1].is_for(operator, options) else None
    if on_any_rank(group.data, factors is None):
        factors = _Factors(operator, plain, options)
    _kept.insert(0, (matvec, factors))
    return Factorized(factors, [leaves[k] for k in indices], indices)


def _check(
    matvec: Function | DistributedMatrix, like: Array, params: tuple, pattern: object, method: str, group: Channel
) -> None:
    if method not in _METHODS:
        raise ValueError(f"{_CALL}: method must be one of {', '.join(map(repr, _METHODS))}, but got {method!r}.")
    if isinstance(matvec, DistributedMatrix):
        if like is not None or params or pattern is not None:
            raise TypeError(f"{_CALL}: a DistributedMatrix takes no like, params or pattern.")
        matvec._require_square(_CALL)
    else:
        require_functions(_CALL, {"matvec": matvec})
        require_block(_CALL, "like", like)
        require_on_host(_CALL, "like", like)
        require_pattern(_CALL, "like", like.shape, pattern, group)
