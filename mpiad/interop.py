"""Functions of JAX and PyTorch in mpiad's programs, and driven functions in programs of JAX and PyTorch.

A function of another framework becomes one step of the tape. An `_Operator` is such a function of a list of arrays. Its
adjoint and its tangent are functions of the same framework, so they are operators as well, with derivatives of their own. A
`_Call` is one call of an operator. PyTorch keeps intermediate values for the adjoint; JAX's compiled adjoint computes them
again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.differentiation.concatenation import Concatenation
from mpiad.optimize.drive import DrivenFunction
from mpiad.optional_packages import optional_package
from mpiad.primitives.cotangents import conform, conformed, spec_like
from mpiad.programs.signature import arguments_of
from mpiad.pytrees import flatten
from mpiad.transport.core.tracing import opaque

__all__ = ["from_jax", "from_torch", "to_jax", "to_torch"]
__dir__ = __all__.copy

_jax_waits = ContextVar("jax_waits", default=False)  # whether a program of JAX waits for a driven function


def from_jax(fun: Function) -> Function:
    """Turn a function of JAX into a function of NumPy arrays that mpiad differentiates.

    Parameters
    ----------
    fun : callable
        A function of pytrees (dicts, lists and tuples) of arrays and numbers, that JAX can compile (`jax.jit`) and
        differentiate. It returns a pytree of floating-point or complex arrays.

    Returns
    -------
    callable
        A function of pytrees of NumPy arrays and numbers with the same structure. The arrays of the result are read-only.

    Raises
    ------
    ImportError
        If JAX isn't installed.
    TypeError
        If an argument is a 64-bit number or array while JAX's 64-bit mode is off, an array on a device, or an object; if a
        result isn't a floating-point or complex array on the CPU.
    RuntimeError
        If the function is called while a program of JAX waits for a driven function (see `to_jax`).

    Ranks
    -----
    Each rank for itself: the function must not communicate.

    Adjoint
    -------
    `jax.vjp` of `fun`, and in forward mode `jax.jvp`, compiled, for derivatives of any order. Cotangents aren't conjugated,
    in JAX as in mpiad. In `mpiad.jit`, a call is one step, which isn't fused with others.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from mpiad.interop import from_jax
    >>> norm = from_jax(lambda x: jnp.sqrt(jnp.sum(x**2)))
    >>> print(mpiad.grad(norm)(np.array([3.0, 4.0], np.float32)))
    [0.6 0.8]
    """
    return _imported(_JAX, fun, "from_jax")


def from_torch(fun: Function) -> Function:
    """Turn a function of PyTorch into a function of NumPy arrays that mpiad differentiates.

    Parameters
    ----------
    fun : callable
        A function of pytrees (dicts, lists and tuples) of tensors and numbers that `torch.func` can differentiate. It
        returns a pytree of floating-point or complex tensors, and must not change its arguments in place. Parameters of a
        module are constants; to differentiate with respect to them, pass them as an argument, and call the module by
        `torch.func.functional_call`. A `torch.autograd.Function` needs the static method ``setup_context``.

    Returns
    -------
    callable
        A function of pytrees of NumPy arrays and numbers with the same structure. Arguments and results share the memory
        of the tensors, unless an argument is read-only or not contiguous.

    Raises
    ------
    ImportError
        If PyTorch isn't installed.
    TypeError
        If an argument is an array on a device or an object; if a result isn't a floating-point or complex tensor on the
        CPU.
    RuntimeError
        If `fun` changes an argument in place.

    Ranks
    -----
    Each rank for itself: the function must not communicate.

    Adjoint
    -------
    `torch.func.vjp` of `fun`, and in forward mode `torch.func.jvp`, for derivatives of any order that they support.
    PyTorch's cotangents are conjugated; mpiad's aren't. In `mpiad.jit`, a call is one step, which isn't fused with others.

    Examples
    --------
    >>> import torch
    >>> from mpiad.interop import from_torch
    >>> norm = from_torch(torch.linalg.norm)
    >>> print(mpiad.grad(norm)(np.array([3.0, 4.0])))
    [0.6 0.8]
    """
    return _imported(_Torch, fun, "from_torch")


def to_jax(f: DrivenFunction, shape: Shape = ()) -> Function:
    """Turn a driven function into a function of JAX with a derivative in reverse mode.

    Parameters
    ----------
    f : mpiad.optimize.DrivenFunction
        A function that `mpiad.drive` passes to its program.
    shape : tuple of int
        The shape of the values of f, () for numbers.

    Returns
    -------
    callable
        A function of a pytree of floating-point arrays, which `jax.jit`, `jax.grad`, `jax.vjp` and, one point after the
        other, `jax.vmap` transform. f computes with 64 bits; the result has the dtype of the first array.

    Raises
    ------
    TypeError
        If f isn't a driven function. All ranks would have to call a function that communicates the same number of times and
        in the same order, but JAX may drop, repeat or reorder calls.

    Ranks
    -----
    The root only, in the program of `mpiad.drive`. If an evaluation fails, JAX raises an error, which ends the program.

    Adjoint
    -------
    ``f.value_and_gradient``, or ``f.vjp`` for arrays; there is no derivative in forward mode or of second order.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> def program(f):
    ...     return jax.jit(jax.grad(mpiad.interop.to_jax(f)))(jnp.array([1.0, 2.0]))
    >>> print(mpiad.mpi_bcast(np.asarray(mpiad.drive(program, lambda x: np.sum(x**2)))))
    [2. 4.]
    """
    _check_driven(f, "to_jax")
    jax = optional_package("jax", "JAX", "jax", "mpiad.interop")
    tree_map = jax.tree_util.tree_map

    called = partial(_called_from_jax, jax)

    def value_of(x: Tree) -> object:
        return jax.ShapeDtypeStruct(shape, jax.tree_util.tree_leaves(x)[0].dtype)

    driven = jax.custom_vjp(lambda x: called(f, value_of(x), x))
    if shape:
        driven.defvjp(lambda x: (driven(x), x), lambda x, g: (called(f.vjp, x, x, g),))
    else:  # one call for value and gradient, which takes 0.7 times as long if f takes 0.3 ms
        forward = partial(called, f.value_and_gradient)
        driven.defvjp(lambda x: forward((value_of(x), x), x), lambda d, g: (tree_map(lambda part: g * part, d),))
    return driven


def _called_from_jax(jax: ModuleType, method: Function, specs: Tree, *args: Tree) -> Tree:
    """Call a driven function's method in a program of JAX, with results of the given specs."""
    tree_map = jax.tree_util.tree_map

    def run(*args: Tree) -> Tree:
        token = _jax_waits.set(True)
        try:
            results = method(*tree_map(lambda x: np.asarray(x, float), args))
        finally:
            _jax_waits.reset(token)
        return tree_map(lambda spec, x: np.asarray(x, spec.dtype), specs, results)

    return jax.pure_callback(run, specs, *args, vmap_method="sequential")


def to_torch(f: DrivenFunction) -> Function:
    """Turn a driven function into a function of PyTorch with a derivative in reverse mode.

    Parameters
    ----------
    f : mpiad.optimize.DrivenFunction
        A function that `mpiad.drive` passes to its program.

    Returns
    -------
    callable
        A function of a pytree (dicts, lists and tuples) of floating-point tensors, which `torch.autograd` differentiates. f
        computes with 64 bits on the CPU; the result has the dtype and the device of the first tensor.

    Raises
    ------
    TypeError
        If f isn't a driven function (see `to_jax`).

    Ranks
    -----
    The root only, in the program of `mpiad.drive`.

    Adjoint
    -------
    ``f.vjp``; there is no derivative in forward mode or of second order.

    Examples
    --------
    >>> import torch
    >>> def program(f):
    ...     x = torch.tensor([1.0, 2.0], requires_grad=True)
    ...     mpiad.interop.to_torch(f)(x).backward()
    ...     return x.grad.numpy()
    >>> print(mpiad.mpi_bcast(mpiad.drive(program, lambda x: np.sum(x**2))))
    [2. 4.]
    """
    _check_driven(f, "to_torch")
    torch = optional_package("torch", "PyTorch", "torch", "mpiad.interop")

    operator = _torch_operator(torch, f)

    def driven(x: Tree) -> Array:
        leaves, build = flatten(x)
        return operator(build, *leaves)

    return driven


def _torch_operator(torch: ModuleType, f: DrivenFunction) -> Function:
    """Return PyTorch's operator of a driven function."""

    def like(values: Array, x: Array) -> Array:
        return torch.as_tensor(np.asarray(values), dtype=x.dtype, device=x.device)

    class Driven(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, build: Function, *leaves: Array) -> Array:
            ctx.save_for_backward(*leaves)
            ctx.x = build([leaf.detach().double().cpu().numpy() for leaf in leaves])
            return like(f(ctx.x), leaves[0])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, g: Array) -> tuple[Array, ...]:
            cotangents = f.vjp(ctx.x, g.double().cpu().numpy())
            return None, *(like(part, x) for part, x in zip(flatten(cotangents)[0], ctx.saved_tensors))

    return Driven.apply


def _check_driven(f: object, call: str) -> None:
    if not isinstance(f, DrivenFunction):
        raise TypeError(
            f"{call}: expected a driven function, but got {type(f).__name__} {f!r:.60}. Other frameworks may drop, "
            "repeat or reorder calls, and then a function that communicates deadlocks. Pass the function to mpiad.drive, "
            "and convert the driven function that its program receives."
        )


def _imported(kind: type[_Framework], fun: Function, call: str) -> Function:
    if not callable(fun):
        raise TypeError(f"{call}: expected a function, but got {type(fun).__name__} {fun!r:.60}.")
    framework = kind(f"{call}({getattr(fun, '__name__', type(fun).__name__)})")
    operators: dict[Hashable, _Operator] = {}

    def called(*args: Tree, **kwargs: Tree) -> Tree:
        if isinstance(framework, _JAX) and _jax_waits.get():
            raise RuntimeError(
                f"{framework.name} was called in a driven function that a program of JAX waits for (see to_jax). JAX may "
                "wait forever for a function that it runs in such a call. Use a program of another framework, or call the "
                "driven function's own methods."
            )
        given = arguments_of(args, kwargs)
        if given.form not in operators:
            build = given.build

            def flat(natives: Sequence[object]) -> Tree:
                args, kwargs = build(natives)
                return fun(*args, **kwargs)

            operators[given.form] = _Operator(framework, flat)
        return operators[given.form](given.leaves)

    called.__name__ = framework.name
    return opaque(called)


class _Operator:
    """A function of a list of another framework's arrays; the result is a pytree."""

    def __init__(self, framework: _Framework, fun: Function):
        self.framework, self._fun, self.value = framework, fun, framework.compiled(fun)
        self.derivative = cache(self._derivative)

    def __call__(self, leaves: Sequence[Array]) -> Tree:
        """Return the result, a pytree of arrays, for arrays that may be traced."""
        call = _Call(self, tuple([place for place, leaf in enumerate(leaves) if isbox(leaf)]))
        found = call.parts(_evaluate(*leaves, call=call)) if call.places else call.values(leaves)
        return call.build(found)

    def natives(self, arrays: Sequence[Array]) -> list[object]:
        """Return the framework's arrays with the values of plain arrays and numbers."""
        found = []
        for given in arrays:
            x = np.asarray(given)
            if x.dtype.kind not in "fciub":
                kind = f"{type(given).__name__} of {x.dtype}"
                raise TypeError(f"{self.framework.name}: expected arrays of numbers on the host, but got {kind}.")
            found.append(self.framework.native(x))
        return found

    def arrays(self, leaves: Sequence[Array]) -> list[np.ndarray]:
        """Return plain arrays with the values of the leaves of a result."""
        found = []
        for y in leaves:
            array = self.framework.array(y)
            if array is None:
                got = f"an array of {y.dtype} on {y.device}" if hasattr(y, "device") else f"{type(y).__name__} {y!r:.60}"
                text = "the function must return floating-point or complex arrays on the CPU"
                raise TypeError(f"{self.framework.name}: {text}, but returned {got}.")
            found.append(array)
        return found

    def of_variables(self, places: tuple[int, ...], natives: Sequence[object]) -> tuple[Function, list[object]]:
        """Return the function of the arrays at `places`, and these arrays."""

        def fun(variables: Sequence[object]) -> Tree:
            return self._fun(list((dict(enumerate(natives)) | dict(zip(places, variables))).values()))

        return fun, [natives[place] for place in places]

    def _derivative(self, places: tuple[int, ...], count: int | None = None) -> _Operator:
        """Return the tangent with respect to the arrays at `places`, or the adjoint if the result has `count` leaves.

        An operator of the arrays, and of the tangents or of the cotangents of the leaves.
        """

        def fun(natives: Sequence[object]) -> Tree:
            n = len(natives) - (len(places) if count is None else count)
            of, variables = self.of_variables(places, natives[:n])
            if count is None:
                return self.framework.jvp(of, (variables,), (list(natives[n:]),))[1]
            result, pull = self.framework.vjp(of, variables)
            return pull(flatten(result)[1](list(natives[n:])))[0]

        return _Operator(self.framework, fun)


class _Call:
    """One call of an operator, traced at `places`; a traced result is one vector of all leaves, or the only leaf."""

    def __init__(self, operator: _Operator, places: tuple[int, ...]):
        self.operator, self.places = operator, places
        self._pull: Function | None = None  # the adjoint with its intermediate values

    def values(self, arrays: Sequence[Array]) -> list[np.ndarray]:
        """Return the leaves of the result for plain arrays."""
        operator, framework = self.operator, self.operator.framework
        natives = operator.natives(arrays)
        if self.places and framework.keeps:
            recorded = framework.compiled(lambda natives: framework.vjp(*operator.of_variables(self.places, natives)))
            tree, self._pull = recorded(natives)
        else:
            tree = operator.value(natives)
        leaves, self.build = flatten(tree)
        return operator.arrays(leaves)

    def joined(self, leaves: Sequence[Array]) -> Array:
        """Return the leaves as one array."""
        self._layout = None if len(leaves) == 1 else Concatenation(list(map(spec_like, leaves)))
        return leaves[0] if self._layout is None else self._layout.vector(leaves)

    def parts(self, result: Array) -> list[Array]:
        """Return the leaves of the result."""
        return [result] if self._layout is None else self._layout.parts(result)

    def pull(self, places: tuple[int, ...], args: Sequence[Array], g: Array) -> Sequence[Array]:
        """Return the cotangents of the arrays at `places`."""
        gs, operator = self.parts(g), self.operator
        if self._pull is None or isbox(g) or any(map(isbox, args)):
            return operator.derivative(places, len(gs))([*args, *gs])
        found = dict(zip(self.places, operator.arrays(self._pull(self.build(operator.natives(gs)))[0])))
        return [found[place] for place in places]


@primitive
def _evaluate(*arrays: Array, call: _Call) -> Array:
    return call.joined(call.values(arrays))


def _vjp(argnums: tuple[int, ...], ans: Array, args: tuple, kwargs: dict) -> Callable:
    call: _Call = kwargs["call"]
    like = spec_like(ans)

    def vjp(g: Array) -> list[Array]:
        found = call.pull(argnums, args, conform(g, *like))
        return [conform(part, *spec_like(args[k])) for k, part in zip(argnums, found)]

    return vjp


def _jvp(argnums: tuple[int, ...], gs: Sequence[Array], ans: Array, args: tuple, kwargs: dict) -> Array:
    call: _Call = kwargs["call"]
    tangents = [conformed(g, spec_like(args[k])) for k, g in zip(argnums, gs)]
    return call.joined(flatten(call.operator.derivative(argnums)([*args, *tangents]))[0])


defvjp_argnums(_evaluate, _vjp)
defjvp_argnums(_evaluate, _jvp)


class _JAX:
    """JAX: compiled functions of pytrees of arrays; `name`: of the function, for errors."""

    keeps = False

    def __init__(self, name: str):
        self.name, self.module = name, optional_package("jax", "JAX", "jax", "mpiad.interop")
        self.compiled, self.vjp, self.jvp = self.module.jit, self.module.vjp, self.module.jvp

    def native(self, x: np.ndarray) -> np.ndarray:
        """Return x, which JAX reads without a copy."""
        dtype = self.module.dtypes.canonicalize_dtype(x.dtype)
        if dtype != x.dtype and (x.dtype.kind in "fc" or not np.array_equal(x, x.astype(dtype))):
            raise TypeError(
                f"{self.name}: an argument is {x.dtype}, but JAX's 64-bit mode is off, and JAX would round it to 32 bits. "
                'Call jax.config.update("jax_enable_x64", True) at the start of the program, or pass 32-bit arrays.'
            )
        return x

    def array(self, y: Array) -> np.ndarray | None:
        """Return the values of a result; None if it isn't a floating-point or complex array on the CPU."""
        expected = isinstance(y, self.module.Array) and y.dtype.kind in "fc"
        return np.asarray(y) if expected and all(device.platform == "cpu" for device in y.devices()) else None


class _Torch:
    """PyTorch: functions of pytrees of tensors, called as they are; `keeps`: a call keeps what its adjoint needs."""

    keeps = True

    def __init__(self, name: str):
        self.name, self.module = name, optional_package("torch", "PyTorch", "torch", "mpiad.interop")
        self.jvp = self.module.func.jvp

    def compiled(self, fun: Function) -> Function:
        """Return the function without a graph of its own, as for parameters of a module; it must not change arguments."""

        def run(natives: Sequence[Array]) -> object:
            with self.module.no_grad():
                result = fun(natives)
            if any(native._version for native in natives):
                raise RuntimeError(f"{self.name}: the function changes an argument in place. Copy it first, by x.clone().")
            return result

        return run

    def vjp(self, fun: Function, variables: Sequence[object]) -> tuple[Tree, Function]:
        """Return the result of a function, and its adjoint for cotangents that aren't conjugated, as PyTorch's are."""
        conjugated = partial(self.module.utils._pytree.tree_map, self.module.conj)
        result, pull = self.module.func.vjp(fun, variables)
        return result, lambda g: conjugated(pull(conjugated(g)))

    def native(self, x: np.ndarray) -> object:
        """Return a tensor that shares the memory of x if possible."""
        return self.module.from_numpy(np.require(x, requirements=("C", "W")))

    def array(self, y: Array) -> np.ndarray | None:
        """Return the values of a result; None if it isn't a floating-point or complex tensor on the CPU."""
        if isinstance(y, self.module.Tensor) and y.device.type == "cpu" and (y.is_floating_point() or y.is_complex()):
            return y.detach().resolve_conj().resolve_neg().numpy()
        return None


_Framework: TypeAlias = _JAX | _Torch
